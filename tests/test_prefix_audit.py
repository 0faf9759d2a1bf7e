"""The prefix-cache auditor: what it says of every cache size is what the scheduler's own cache does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vsim.commands.cache import cache as command
from vsim.errors import UserError
from vsim.sim.advice import Setup
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.sim.prefix_audit import audit, audit_data, render_audit, reuse
from vsim.sim.replay import Load, replay, step_model_for
from vsim.tests.fixed_step import Fixed
from vsim.traces.readers import read_trace
from vsim.traces.sharing import sharing
from vsim.traces.trace import Trace
from vsim.traces.write import write_trace


def with_ids(rows: list[list[int]], piece: int, extra: list[int], outputs: list[int]) -> Trace:
    """Requests far apart; row i has whole pieces of content and `extra[i]` tokens of its own."""
    trace = Trace.of(
        [10_000.0 * i for i in range(len(rows))],
        [piece * len(ids) + more for ids, more in zip(rows, extra, strict=True)],
        outputs,
    )
    return dataclasses.replace(
        trace,
        prefix_ids=np.array([i for ids in rows for i in ids], dtype=np.int64),
        prefix_offsets=np.cumsum([0, *map(len, rows)]),
        prefix_block_tokens=piece,
    )


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(16, 50), st.integers(1, 20)),
    min_size=1,
    max_size=30,
)


@given(requests, st.sampled_from([16, 24, 40]), st.sampled_from([8, 16]), st.integers(30, 90))
@settings(max_examples=100, deadline=None)
def test_hits_of_any_cache_size_are_the_schedulers_own_where_requests_do_not_overlap(
    rows: list[tuple[list[int], int, int]], piece: int, block: int, blocks: int
) -> None:
    # Content ids name a piece at its depth, as hash ids do.
    ids = [[depth * 10 + i for depth, i in enumerate(row)] for row, _, _ in rows]
    trace = with_ids(ids, piece, [more for _, more, _ in rows], [out for _, _, out in rows])
    assume(max(trace.prompt_tokens + trace.output_tokens) <= blocks * block)
    found = reuse(trace, block)
    for cache_blocks in (blocks, 4000):
        config = SchedulerConfig(
            block_size=block,
            num_gpu_blocks=cache_blocks + 1,  # V1 keeps one as the null block
            max_model_len=blocks * block,
            async_scheduling=False,
        )
        run = simulate(trace, config, Fixed(0.01))
        assert (run.requests["status"] == 0).all()
        assert found.hit_tokens(cache_blocks) == int(run.requests["cached_tokens"].sum())
    shared = sharing(trace)
    assert shared is not None
    assert found.hit_tokens() == int(shared.hit_tokens(block).sum())


@pytest.mark.parametrize("block", [16, 128, 512])
def test_the_ceiling_is_what_a_replay_with_room_for_everything_finds(block: int) -> None:
    # At the trace's own times, under load: a prompt's blocks can be found as soon as they are computed.
    file = Path(__file__).parent / "data/traces/mooncake_conversation_head.jsonl"
    trace = read_trace(file)
    flags = {"block_size": block, "num_gpu_blocks_override": 2_000_000 // block}
    deployment = Setup("meta-llama/Llama-3.1-8B-Instruct", "h100", flags).deployment()
    run = replay(trace, deployment, step_model_for(deployment), Load())
    hits = int(run.requests["cached_tokens"].sum())
    assert hits == reuse(trace, block).hit_tokens() > 0


@given(requests, st.sampled_from([1, 7, 16]))
@settings(max_examples=40, deadline=None)
def test_a_larger_cache_never_finds_less_and_an_infinite_one_most(
    rows: list[tuple[list[int], int, int]], block: int
) -> None:
    trace = with_ids([row for row, _, _ in rows], 16, [m for _, m, _ in rows], [1] * len(rows))
    found = reuse(trace, block)
    hits = [found.hit_tokens(size) for size in range(found.touched_blocks + 1)]
    assert hits == sorted(hits) and hits[0] == 0 and hits[-1] == found.hit_tokens()
    enough = found.blocks_for(0.95)
    assert found.hit_tokens(enough) >= 0.95 * found.hit_tokens()
    assert enough == 0 or found.hit_tokens(enough - 1) < 0.95 * found.hit_tokens()


def two_families(n: int = 40) -> Trace:
    """Two shared prefixes of 100 tokens, in turn, a request in between that pushes 300 others through."""
    rows = [[1 + i % 2] for i in range(n)]
    return with_ids(rows, 100, [300] * n, [1] * n)


def test_tokens_shared_but_shorter_than_a_block_are_counted() -> None:
    found = audit(two_families(), block_size=16)
    by_size = {size: (rate, lost) for size, rate, lost in found.by_block_size}
    assert by_size[16][1] == 38 * (100 - 96)
    assert by_size[128] == (0.0, 38 * 100)
    assert found.shared_tokens == 38 * 100


def test_what_a_small_cache_evicts_and_then_needs_is_counted() -> None:
    # The other family's 25 blocks were touched since; the prefix itself has 6.
    for blocks, found in ((25, 0), (30, 5), (31, 6)):
        told = audit(two_families(), block_size=16, cache_blocks=blocks)
        rows = {size: (rate, lost) for size, rate, lost in told.by_cache}
        assert rows[blocks] == (38 * found * 16 / 16_000, 38 * (6 - found) * 16)


def test_affinity_keeps_together_what_round_robin_spreads() -> None:
    n = 64
    rng = np.random.default_rng(0)
    rows = [[int(i)] for i in rng.integers(0, 8, n)]
    found = audit(with_ids(rows, 160, [10] * n, [1] * n), replicas=(1, 2, 4))
    told = {(route, count): ceiling for route, count, ceiling, _, _ in found.by_route}
    assert told["prefix-affinity", 4] == pytest.approx(told["–", 1])
    assert told["round-robin", 4] < told["round-robin", 2] < told["–", 1]
    busiest = {(route, count): share for route, count, _, _, share in found.by_route}
    assert busiest["round-robin", 4] == pytest.approx(0.25)
    assert busiest["prefix-affinity", 4] > 0.25


def test_a_trace_that_says_nothing_of_sharing_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="no hash ids"):
        audit(Trace.of([0.0], [10], [1]))
    with pytest.raises(UserError, match="block_size=0"):
        audit(two_families(), block_size=0)
    with pytest.raises(UserError, match="replicas=0"):
        audit(two_families(), replicas=(0,))


def test_the_command_prints_tables_of_80_columns_and_json(tmp_path: Path) -> None:
    write_trace(two_families(), tmp_path / "t.jsonl")
    shown = CliRunner().invoke(command, [str(tmp_path / "t.jsonl"), "--cache-blocks", "100"])
    assert shown.exit_code == 0, shown.output
    assert shown.output == render_audit(audit(two_families(), cache_blocks=100))
    assert max(map(len, shown.output.splitlines())) <= 80
    data = CliRunner().invoke(command, [str(tmp_path / "t.jsonl"), "--json"])
    assert json.loads(data.output) == json.loads(json.dumps(audit_data(audit(two_families()))))
    bad = CliRunner().invoke(command, [str(tmp_path / "t.jsonl"), "--replicas", "x"])
    assert isinstance(bad.exception, UserError)
