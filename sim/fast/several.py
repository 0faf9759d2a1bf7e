"""Many simulations in one process: together they may be worth compiling the kernel for."""

from __future__ import annotations

import contextlib

from vsim.sim.fast.dispatch import TOKENS_WORTH_COMPILING, chosen
from vsim.traces.trace import Trace


def load_for(trace: Trace, runs: int) -> None:
    """Compile the kernel now if `runs` simulations of `trace` are sooner done with it than without.

    What is compiled is kept on disk, and every later run takes it (`dispatch.worthwhile`). A machine that
    cannot compile goes step by step.
    """
    if chosen(None) == "reference" or not len(trace):
        return
    tokens = (int(trace.output_tokens.sum()) + 20 * len(trace)) * runs
    if tokens >= TOKENS_WORTH_COMPILING:
        from vsim.sim.fast.compiled import CompileError, entry

        with contextlib.suppress(CompileError):
            entry()
