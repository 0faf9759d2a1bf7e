"""What vLLM's API server refuses before its engine sees it: requests longer than the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vsim.traces.trace import Trace, TraceRequest

Overlong = Literal["reject", "clip", "error"]
TOO_LONG = "rejected_too_long"


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Called with a request it gives the reason to refuse it, or None; `refused` asks of a whole trace.

    A prompt of `max_model_len` tokens or more is HTTP 400 in every release. Prompt plus requested output
    beyond it was HTTP 400 too, until recent releases (0.32 renderers/params.py) began to cut the output
    short: "clip" is that.
    """

    max_model_len: int
    overlong: Overlong

    def __call__(self, request: TraceRequest) -> str | None:
        wanted = request.output_tokens if request.max_tokens is None else request.max_tokens
        if request.prompt_tokens >= self.max_model_len:
            return TOO_LONG
        if self.overlong == "reject" and request.prompt_tokens + wanted > self.max_model_len:
            return TOO_LONG
        return None

    def refused(self, trace: Trace) -> npt.NDArray[np.bool_]:
        """Which rows would be refused, shape (n,): the same answers, a column at a time."""
        prompt_too_long, sum_too_long = self.too_long(trace)
        return prompt_too_long | sum_too_long if self.overlong == "reject" else prompt_too_long

    def too_long(self, trace: Trace) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """(rows whose prompt alone is too long, other rows whose prompt and output together are)."""
        wanted = trace.output_tokens if trace.max_tokens is None else trace.max_tokens
        prompt_too_long = trace.prompt_tokens >= self.max_model_len
        return prompt_too_long, ~prompt_too_long & (
            trace.prompt_tokens + wanted > self.max_model_len
        )
