"""Compiled or step by step? The runs are equal; only the time differs, so small ones spare the start-up."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from vsim.errors import UserError
from vsim.traces.trace import Trace

if TYPE_CHECKING:
    from vsim.sim.cluster import ReplicaSpec

Engine = Literal["fast", "reference"]
ENGINES = ("fast", "reference")
VARIABLE = "VSIM_ENGINE"
# Loading numba and the compiled kernel takes about a second, compiling it once per machine and version some
# twenty; the step-by-step path makes some 300,000 tokens a second. Below these it is done sooner.
TOKENS_WORTH_LOADING = 400_000
TOKENS_WORTH_COMPILING = 3_000_000


def chosen(engine: Engine | None) -> Engine | None:
    """`engine`, or the environment's VSIM_ENGINE; None: whichever is sooner. Raises UserError."""
    asked = engine or os.environ.get(VARIABLE) or None
    if asked is not None and asked not in ENGINES:
        raise UserError(f"{VARIABLE}={asked} is not one of {', '.join(ENGINES)}")
    return asked  # type: ignore[return-value]


def worthwhile(trace: Trace, replicas: Sequence[ReplicaSpec]) -> bool:
    """Is the compiled path sooner done, its start included?"""
    if not len(trace) or replicas[0].config.engine != "v1":
        return False
    output = trace.output_tokens if trace.max_tokens is None else trace.max_tokens
    longest = replicas[0].config.max_model_len
    tokens = int(np.minimum(output, longest).sum()) + 20 * len(trace)
    if "vsim.sim.fast.kernel" in sys.modules or tokens >= TOKENS_WORTH_COMPILING:
        return True
    return tokens >= TOKENS_WORTH_LOADING and is_compiled()


def is_compiled() -> bool:
    """Has numba kept the kernel on disk, beside the package or, where that is read-only, in the user's cache?"""
    here = Path(__file__).parent
    places = [here / "__pycache__"]
    if os.environ.get("NUMBA_CACHE_DIR"):
        places.insert(0, Path(os.environ["NUMBA_CACHE_DIR"]))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places.append(cache / "numba")
    written = (here / "kernel.py").stat().st_mtime
    return any(
        index.stat().st_mtime >= written
        for place in places
        if place.is_dir()
        for index in place.rglob("kernel.advance_at-*.nbi")
    )
