"""Compiled or step by step? The runs are equal; only the time differs, so small ones spare the start-up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from vsim.errors import UserError
from vsim.sim.fast.compiled import is_loaded, kept_file
from vsim.traces.trace import Trace

if TYPE_CHECKING:
    from vsim.sim.cluster import ReplicaSpec

Engine = Literal["fast", "reference"]
ENGINES = ("fast", "reference")
VARIABLE = "VSIM_ENGINE"
# Loading the compiled kernel takes about a tenth of a second, compiling it once per machine and version some
# twenty; the step-by-step path makes some 200,000 tokens a second. Below these it is done sooner.
TOKENS_WORTH_LOADING = 30_000
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
    if is_loaded():
        return True
    if tokens < TOKENS_WORTH_LOADING:
        return False
    return tokens >= TOKENS_WORTH_COMPILING or kept_file() is not None
