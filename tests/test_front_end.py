"""Requests longer than the context: one at a time and a column at a time, the same answer."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vsim.sim.front_end import TOO_LONG, FrontEnd, Overlong
from vsim.traces.trace import Trace

lengths = st.integers(1, 12)


@given(
    rows=st.lists(st.tuples(lengths, lengths, lengths), min_size=1, max_size=20),
    capped=st.booleans(),
    overlong=st.sampled_from(["reject", "clip"]),
)
def test_the_column_of_refusals_is_what_each_request_is_told(
    rows: list[tuple[int, int, int]], capped: bool, overlong: Overlong
) -> None:
    prompt, output, cap = zip(*rows, strict=True)
    trace = Trace.of([0.0] * len(rows), prompt, output)
    if capped:
        trace = dataclasses.replace(trace, max_tokens=np.asarray(cap, dtype=np.int64))
    front_end = FrontEnd(10, overlong)
    told = [front_end(request) for request in trace]
    assert front_end.refused(trace).tolist() == [reason == TOO_LONG for reason in told]


def test_a_prompt_that_fills_the_context_is_refused_and_an_output_beyond_it_may_be_cut() -> None:
    trace = Trace.of([0, 0, 0], [10, 9, 9], [1, 1, 2])
    assert FrontEnd(10, "reject").refused(trace).tolist() == [True, False, True]
    assert FrontEnd(10, "clip").refused(trace).tolist() == [True, False, False]
