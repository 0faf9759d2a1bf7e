"""Many simulations in one process: the compiled kernel is loaded once, for all of them."""

from __future__ import annotations

import sys

from vsim.sim.fast.dispatch import (
    TOKENS_WORTH_COMPILING,
    TOKENS_WORTH_LOADING,
    chosen,
    is_compiled,
)
from vsim.traces.trace import Trace


def load_for(trace: Trace, runs: int) -> None:
    """Load the kernel now if `runs` simulations of `trace` in this process are sooner done with it.

    From then on every run of this process uses it (`dispatch.worthwhile`), however small.
    """
    if "vsim.sim.fast.kernel" in sys.modules or chosen(None) == "reference" or not len(trace):
        return
    tokens = (int(trace.output_tokens.sum()) + 20 * len(trace)) * runs
    if tokens >= TOKENS_WORTH_COMPILING or (tokens >= TOKENS_WORTH_LOADING and is_compiled()):
        import vsim.sim.fast.kernel  # noqa: F401
