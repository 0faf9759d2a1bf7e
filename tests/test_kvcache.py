"""KV blocks: who gets them, who shares them, who loses them; and that none is ever lost."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.sim.block_pool import BlockPool
from vsim.sim.case import Case, parse_case
from vsim.sim.config import KVGroup, SchedulerConfig
from vsim.sim.scheduler_v1 import SchedulerV1
from vsim.sim.step import Step
from vsim.sim.steplog import run_case
from vsim.sim.versions import assumed_rules
from vsim.traces.trace import TraceRequest


def asked(
    index: int, prompt: int, output: int = 4, ids: tuple[int, ...] = (), **more: Any
) -> TraceRequest:
    """Content ids stand for 16 tokens each."""
    return TraceRequest(
        index, 0, prompt, output, prefix_ids=ids, prefix_block_tokens=16 if ids else 0, **more
    )


def engine(*requests: TraceRequest, **config: Any) -> SchedulerV1:
    scheduler = SchedulerV1(
        SchedulerConfig(**{"num_gpu_blocks": 11, "max_model_len": 4096, **config})
    )
    for request in requests:
        assert scheduler.add(request) is None
    return scheduler


def step(scheduler: SchedulerV1) -> Step:
    """One step, run to its end."""
    done = scheduler.schedule()
    scheduler.complete(done)
    return done


def batch(done: Step) -> dict[int, int]:
    return dict(zip(done.requests, done.num_tokens, strict=True))


# --- the pool ----------------------------------------------------------------------------------------


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert (pool.num_usable, pool.num_free) == (4, 4)
    assert pool.take(4) == [1, 2, 3, 4]


def test_blocks_that_can_be_hit_are_reused_last() -> None:
    pool = BlockPool(7)
    one, two = pool.take(3), pool.take(2)
    for key, block in enumerate(one[:2], start=100):
        pool.register(0, key, block)
    pool.release(reversed(one))  # last block first: 3 has no key, 2 and 1 have
    assert pool.free_list() == [3, 6, 2, 1]
    pool.release(reversed(two))
    assert pool.free_list() == [5, 4, 3, 6, 2, 1]


def test_a_key_is_lost_on_reuse_not_on_free() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.register(0, 100, block)
    pool.release([block])
    assert pool.find(0, 100) == block
    pool.take(2)
    assert pool.find(0, 100) == 0
    assert pool.num_cached_keys == 0


def test_of_equal_blocks_the_one_registered_first_is_found_while_it_lasts() -> None:
    pool = BlockPool(4)
    first, second, third = pool.take(3)
    pool.register(0, 100, first)
    pool.register(0, 100, second)
    assert (pool.find(0, 100), pool.num_cached_keys) == (first, 1)
    pool.release([first])
    pool.take(1)
    assert pool.find(0, 100) == second
    pool.release([second, third])
    assert pool.touch([second]) == 0
    assert pool.free_list() == [third]
    assert pool.touch([second]) == 1


# --- prefix caching ----------------------------------------------------------------------------------


def test_the_second_of_two_equal_prompts_hits_in_the_same_step() -> None:
    scheduler = engine(asked(0, 48, ids=(1, 2, 3)), asked(1, 48, ids=(1, 2, 3)))
    done = step(scheduler)
    assert batch(done) == {
        0: 48,
        1: 16,
    }  # its last block is computed again: somebody has to say a token
    assert done.num_computed == [0, 32]
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (96, 32)


def test_a_prompt_of_512_tokens_hits_496() -> None:
    ids = tuple(range(32))
    scheduler = engine(asked(0, 512, 1, ids), num_gpu_blocks=100)
    step(scheduler)
    scheduler.add(asked(1, 512, 1, ids))
    assert step(scheduler).num_computed == [496]


def test_without_prefix_caching_nothing_is_hit() -> None:
    scheduler = engine(
        asked(0, 48, ids=(1, 2, 3)), asked(1, 48, ids=(1, 2, 3)), enable_prefix_caching=False
    )
    assert batch(step(scheduler)) == {0: 48, 1: 48}


def test_slots_in_use_count_shared_blocks_once() -> None:
    scheduler = engine(asked(0, 40, ids=(1, 2, 3)), asked(1, 40, ids=(1, 2, 3)))
    step(scheduler)
    assert scheduler.num_usable_blocks - scheduler.num_free_blocks == 4  # 2 shared, 2 of their own
    assert scheduler.num_kv_tokens == 32 + 8 + 8
    while scheduler.has_unfinished_requests():
        step(scheduler)
    assert (scheduler.num_kv_tokens, scheduler.num_free_blocks) == (0, 10)


# --- admission and preemption ------------------------------------------------------------------------


def test_the_head_of_the_queue_says_what_it_waits_for() -> None:
    assert step(engine(asked(0, 20), asked(1, 20), max_num_seqs=1)).blocked_by == "max_num_seqs"
    tight = engine(asked(0, 20), asked(1, 20), max_num_batched_tokens=10, max_num_seqs=8)
    assert step(tight).blocked_by == "token_budget"
    full = engine(asked(0, 150), asked(1, 20))
    assert step(full).blocked_by == "kv_full"
    long = engine(asked(0, 60), asked(1, 150), max_num_batched_tokens=80, max_num_seqs=8)
    assert step(long).blocked_by == "full_prompt"
    assert step(engine(asked(0, 20))).blocked_by is None


def test_whoever_was_admitted_last_gives_way_and_resumes_from_its_own_blocks() -> None:
    scheduler = engine(asked(0, 60, 40), asked(1, 60, 40))
    victims: list[int] = []
    resumed: list[tuple[int, int]] = []
    while scheduler.has_unfinished_requests():
        done = step(scheduler)
        victims += done.preempted
        resumed += [
            (i, c)
            for i, c in zip(done.requests, done.num_computed, strict=True)
            if i in done.resumed
        ]
        if done.preempted:
            assert done.blocked_by == "preempted_step"
    assert victims == [1]
    assert len(resumed) == 1
    assert scheduler.num_preemptions == 1
    # It had 80 tokens computed and hits what nobody reused; the rest is computed a second time.
    assert scheduler.recomputed_tokens == 80 - resumed[0][1]


def test_the_least_urgent_gives_way_under_priority() -> None:
    scheduler = engine(asked(0, 60, 40, priority=5), asked(1, 60, 40), policy="priority")
    victims = []
    while scheduler.has_unfinished_requests():
        victims += step(scheduler).preempted
    assert victims == [0]


def test_a_victim_rule_can_be_passed_in() -> None:
    config = SchedulerConfig(num_gpu_blocks=11, max_model_len=4096)
    scheduler = SchedulerV1(config, victim=lambda running: running[0])
    scheduler.add(asked(0, 60, 40))
    scheduler.add(asked(1, 60, 40))
    victims = []
    while scheduler.has_unfinished_requests():
        victims += step(scheduler).preempted
    assert victims[0] == 0


def test_the_front_end_refuses_what_cannot_be_served() -> None:
    scheduler = engine(max_model_len=100)
    assert scheduler.add(asked(0, 0)) == "prompt is empty"
    assert scheduler.add(asked(1, 100)) == "prompt is not below max_model_len=100"
    assert scheduler.add(asked(2, 99, 50)) is None
    assert step(scheduler).emits == [True]  # room for a single token
    assert not scheduler.has_unfinished_requests()


def test_a_sliding_window_gives_back_what_it_no_longer_sees() -> None:
    scheduler = engine(asked(0, 64, 100), kv_groups=(KVGroup("swa", window=32),), num_gpu_blocks=20)
    most = 0
    while scheduler.has_unfinished_requests():
        step(scheduler)
        most = max(most, scheduler.num_usable_blocks - scheduler.num_free_blocks)
        assert scheduler.num_kv_tokens <= 16 * (
            scheduler.num_usable_blocks - scheduler.num_free_blocks
        )
    assert most == 4  # the prompt's own; afterwards 3 are enough for 164 tokens
    assert scheduler.num_free_blocks == 19


def test_releases_differ_in_what_they_know() -> None:
    with pytest.raises(UserError, match=r"watermark=0\.1: not in vLLM"):
        engine(engine_version="0.19.0", watermark=0.1)
    with pytest.raises(UserError, match="policy=priority"):
        engine(engine_version="0.8.5", policy="priority")
    with pytest.raises(UserError, match=r"choose a release from 0\.8\.5 on"):
        engine(engine_version="0.7.0")
    assert assumed_rules("0.32.0") is None
    assert "0.19.0" in str(assumed_rules("0.25.1"))


# --- invariants --------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small engines under all kinds of pressure."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    batched = draw(st.integers(4, 40))
    config: dict[str, Any] = {
        "block_size": block_size,
        # One request of at most 47 tokens always fits: else vLLM itself would stall, or loop for ever.
        "num_gpu_blocks": -(-draw(st.integers(47, 80)) // block_size) + 1,
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": batched,
        "max_model_len": draw(st.sampled_from([24, 64])),
        "enable_prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 3])),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
        "pipeline_parallel_size": draw(st.sampled_from([1, 1, 2, 3])),
    }
    kind = draw(st.sampled_from(["plain", "plain", "windows", "offload"]))
    if kind == "windows":
        config["kv_groups"] = [
            {"type": "full"},
            {"type": "swa", "window": draw(st.integers(1, 12))},
        ]
        config["num_gpu_blocks"] *= 2
    if kind == "offload":
        # With several batches in flight the recorder's clock, which this one equals, gives up while a load
        # that has ended is still to be reported; vLLM's engine goes on.
        config["async_scheduling"] = False
        # A prompt of one token that is one block: vLLM loads it for ever, since its last token is dropped again.
        config["block_size"] = max(2, block_size)
        config["pipeline_parallel_size"] = 1
        time = {"base": 0.01, "per_block": 0.001}
        config["idle_sleep"] = 0.001
        config["kv_offload"] = {"cpu_blocks": draw(st.integers(1, 20)), "load": time, "store": time}
    requests = []
    for index in range(draw(st.integers(1, 7))):
        shared = draw(st.integers(0, 12))
        requests.append(
            {
                "id": f"r{index}",
                "arrival": draw(st.integers(0, 20)) / 10,
                "segments": [
                    [draw(st.integers(0, 1)), shared],
                    [100 + index, draw(st.integers(0, 15))],
                ],
                "output_tokens": draw(st.integers(1, 20)),
                "finish": draw(st.sampled_from(["length", "stop"])),
                "priority": draw(st.integers(0, 2)),
            }
        )
    return parse_case({"config": config, "requests": requests}, "drawn.json")


def check_blocks(scheduler: SchedulerV1) -> None:
    """Every block is either free or held as often as tables name it; slots in use are what tables hold."""
    pool = scheduler.cache.pool
    held: Counter[int] = Counter()
    filled: dict[int, int] = {}
    for request in scheduler._requests.values():
        for group, table in zip(scheduler.cache.groups, request.tables, strict=True):
            for position, block in enumerate(table):
                if block:
                    held[block] += 1
                    tokens = request.num_computed_tokens - position * group.block_size
                    tokens = min(max(tokens, 0), group.block_size)
                    filled[block] = max(filled.get(block, 0), tokens)
    for _, blocks in scheduler._deferred:
        held.update(blocks)
    free = pool.free_list()
    assert len(set(free)) == len(free) == pool.num_free
    assert not held.keys() & set(free)
    assert len(held) + len(free) == pool.num_usable
    # Blocks that nobody ever took have no entry.
    assert all(count == held[block] for block, count in enumerate(pool.refs) if block)
    assert max(held, default=0) < len(pool.refs)
    if not scheduler._deferred:
        assert scheduler.num_kv_tokens == sum(filled.values())


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_block_and_no_request_is_lost(case: Case) -> None:
    scheduler = SchedulerV1(case.config)
    complete = scheduler.complete
    emitted: Counter[int] = Counter()
    finished: Counter[int] = Counter()

    def watched(done: Step, ended: Any = ()) -> Any:
        output = complete(done, ended)
        check_blocks(scheduler)
        emitted.update(output.emitted)
        finished.update(output.finished)
        assert len(set(output.emitted)) == len(output.emitted)
        return output

    scheduler.complete = watched  # type: ignore[method-assign]
    records = list(run_case(case, max_steps=1000, scheduler=scheduler))
    summary = records.pop()["summary"]
    assert len(records) < 1000
    now = 0.0
    for record in records:
        assert now <= record["t_sched"] <= record["t_start"] <= record["t_end"]
        now = record["t_sched"]
    admitted = [r for r in case.requests if r.id not in summary["rejected"]]
    assert not summary["stalled"]
    for request in admitted:
        room = case.config.max_model_len - request.prompt_tokens
        assert emitted[request.index] == min(request.output_tokens, room)
        assert finished[request.index] == 1
    pool = scheduler.cache.pool
    assert (pool.num_free, scheduler.num_kv_tokens) == (pool.num_usable, 0)
    assert not scheduler.has_requests()
