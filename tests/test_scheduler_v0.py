"""vLLM 0.8.5's V0 scheduler in scenes (spec 12), and what must hold in any of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.sim import preemption
from vsim.sim.block_manager_v0 import NoFreeBlocksError
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import make_scheduler
from vsim.sim.preemption import Victim
from vsim.sim.prefix_cache_v0 import Evictor
from vsim.sim.scheduler_v0 import SchedulerV0
from vsim.sim.step_v0 import EngineDiedV0Error, LivelockError, StepV0
from vsim.sim.traps_v0 import warnings_for
from vsim.traces.trace import TraceRequest

PLAIN = SchedulerConfig(
    engine="v0",
    engine_version="0.8.5",
    block_size=4,
    num_gpu_blocks=10,
    num_cpu_blocks=40,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    enable_prefix_caching=False,
    enable_chunked_prefill=False,
)
CHUNKED = replace(PLAIN, enable_chunked_prefill=True, max_num_batched_tokens=8)
CACHING = replace(PLAIN, enable_prefix_caching=True)


def asking(index: int, prompt: int, output: int = 8, **more: Any) -> TraceRequest:
    return TraceRequest(index, index, prompt, output, **more)


def serving(config: SchedulerConfig, *requests: TraceRequest, **rules: Any) -> SchedulerV0:
    scheduler = SchedulerV0(config, **rules)
    for request in requests:
        assert scheduler.add(request) is None
    return scheduler


def next_step(scheduler: SchedulerV0) -> StepV0:
    step = scheduler.schedule()
    scheduler.complete(step)
    return step


def batches(scheduler: SchedulerV0, steps: int) -> list[dict[int, int]]:
    seen = []
    for _ in range(steps):
        step = next_step(scheduler)
        seen.append(dict(zip(step.requests, step.num_tokens, strict=True)))
    return seen


# --- the default policy ----------------------------------------------------------------------------------


def test_a_prefill_pauses_all_decodes() -> None:
    scheduler = serving(PLAIN, asking(0, 5))
    assert batches(scheduler, 2) == [{0: 5}, {0: 1}]
    scheduler.add(asking(1, 6))
    assert batches(scheduler, 2) == [{1: 6}, {0: 1, 1: 1}]


def test_a_decode_counts_a_block_even_where_its_last_one_has_room() -> None:
    # 5 + 15 tokens in 7 blocks of 4; nothing is free, although both have room for their next token.
    scheduler = serving(replace(PLAIN, num_gpu_blocks=6), asking(0, 5), asking(1, 15))
    assert batches(scheduler, 1) == [{0: 5, 1: 15}]
    step = next_step(scheduler)
    assert (step.requests, step.recomputed) == ([0], [1])


def test_recomputed_requests_return_to_the_head_in_their_old_order() -> None:
    scheduler = serving(replace(PLAIN, num_gpu_blocks=4), *(asking(k, 4, 30) for k in range(5)))
    assert batches(scheduler, 1) == [{0: 4, 1: 4, 2: 4, 3: 4}]
    step = next_step(scheduler)
    assert step.recomputed == [3, 2]
    assert [request.index for request in scheduler.queues.waiting] == [2, 3, 4]


def test_a_prompt_above_the_pool_less_its_watermark_is_given_up() -> None:
    config = replace(PLAIN, num_gpu_blocks=200, max_model_len=2000, max_num_batched_tokens=2000)
    scheduler = serving(config, asking(0, 4 * 198 + 1), asking(1, 4 * 198))
    step = next_step(scheduler)
    assert (step.ignored, step.requests) == ([0], [1])
    assert scheduler.blocked_by is None


def test_the_watermark_stays_free_at_admission() -> None:
    config = replace(PLAIN, num_gpu_blocks=200, max_model_len=2000, max_num_batched_tokens=2000)
    scheduler = serving(config, asking(0, 4 * 100), asking(1, 4 * 99))
    assert next_step(scheduler).requests == [0]
    assert scheduler.blocked_by == "kv_full"


def test_outputs_run_one_token_past_max_model_len() -> None:
    scheduler = serving(replace(PLAIN, max_model_len=10), asking(0, 8, 50))
    emitted = 0
    while scheduler.has_requests():
        emitted += len(scheduler.complete(scheduler.schedule()).emitted)
    assert emitted == 3


@pytest.mark.parametrize(
    ("prompt", "reason"), [(0, "empty"), (65, "longer than max_model_len=64"), (64, None)]
)
def test_the_front_end_refuses_empty_and_overlong_prompts(prompt: int, reason: str | None) -> None:
    refusal = SchedulerV0(PLAIN).add(asking(0, prompt))
    assert refusal is None if reason is None else reason in str(refusal)


def test_the_head_of_the_queue_says_what_it_waits_for() -> None:
    scheduler = serving(replace(PLAIN, max_num_seqs=1), asking(0, 3), asking(1, 3))
    assert next_step(scheduler).blocked_by == "max_num_seqs"
    scheduler = serving(PLAIN, asking(0, 33), asking(1, 33), asking(2, 3))
    next_step(scheduler)
    assert scheduler.blocked_by == "kv_full"
    scheduler = serving(CHUNKED, asking(0, 12), asking(1, 3))
    next_step(scheduler)
    assert scheduler.blocked_by == "token_budget"
    next_step(scheduler)
    assert scheduler.blocked_by is None


# --- swapping --------------------------------------------------------------------------------------------

SWAP = replace(PLAIN, preemption_mode="swap", num_gpu_blocks=4, num_cpu_blocks=8)


def test_blocks_go_to_the_cpu_and_come_back_and_the_youngest_victim_comes_first() -> None:
    scheduler = serving(SWAP, *(asking(k, 4, 2 if k < 2 else 4) for k in range(4)))
    next_step(scheduler)
    step = next_step(scheduler)
    assert step.swapped_out_requests == [3, 2]
    assert step.swap_out == [(3, 0), (2, 1)]  # (GPU block, CPU block)
    assert step.swapped_out == {3: 1, 2: 1}
    assert scheduler.num_free_cpu_blocks == 6
    scheduler.add(asking(4, 3))
    step = next_step(scheduler)
    assert scheduler.blocked_by == "swapped_queue"
    assert step.swapped_in_requests == [3, 2]
    assert step.resumed == [3, 2]
    assert [cpu for cpu, _ in step.swap_in] == [0, 1]
    # A swapped-in request decodes in the same step; nothing of it is computed again.
    assert step.num_tokens == [1, 1]
    assert scheduler.counters["recomputed_tokens"] == 0
    assert scheduler.counters["swapped_out_blocks"] == scheduler.counters["swapped_in_blocks"]


def test_the_engine_dies_where_the_swap_space_is_full() -> None:
    scheduler = serving(replace(SWAP, num_cpu_blocks=0), *(asking(k, 3, 4) for k in range(4)))
    next_step(scheduler)
    with pytest.raises(EngineDiedV0Error, match=r"lack of CPU swap space.*0 of 0 CPU blocks"):
        scheduler.schedule()


def test_a_request_swapped_out_in_mid_prefill_stalls_the_queue_for_good() -> None:
    config = replace(CHUNKED, preemption_mode="swap", num_gpu_blocks=8)
    scheduler = serving(config, asking(0, 5, 4), asking(1, 23, 4))
    seen = [next_step(scheduler) for _ in range(40)]
    assert [step.swapped_out_requests for step in seen if step.swapped_out_requests] == [[1]]
    # 20 tokens left, 8 at most in a step, and swap-in asks for all of them at once.
    assert not any(step.swapped_in_requests for step in seen)
    assert [request.index for request in scheduler.queues.swapped] == [1]


def test_swapping_under_the_priority_policy_kills_the_engine() -> None:
    config = replace(SWAP, policy="priority")
    scheduler = serving(config, *(asking(k, 3, 9, priority=5) for k in range(3)))
    next_step(scheduler)
    scheduler.add(asking(3, 7, priority=0))
    assert next_step(scheduler).swapped_out_requests == [2]
    with pytest.raises(EngineDiedV0Error, match="only one prompt sequence"):
        for _ in range(9):
            next_step(scheduler)


def test_priority_makes_room_for_the_most_urgent() -> None:
    config = replace(PLAIN, policy="priority", num_gpu_blocks=4)
    scheduler = serving(config, *(asking(k, 3, 9, priority=k) for k in range(3)))
    next_step(scheduler)
    scheduler.add(asking(3, 7, priority=0))
    step = next_step(scheduler)
    assert step.preempted == [2]
    # Forced victims are no preemptions in the engine's own count of the step, but in its total.
    assert (step.num_preempted, scheduler.num_cumulative_preemption) == (0, 1)
    assert batches(scheduler, 1) == [{3: 7}]


def test_a_livelock_is_named_not_looped_in() -> None:
    # 15 tokens need all four blocks, and the second chunk asks for one more than it takes.
    scheduler = serving(replace(CHUNKED, num_gpu_blocks=4), asking(0, 15, 4), livelock_after=50)
    with pytest.raises(LivelockError, match="51 preemptions in a row"):
        for _ in range(200):
            next_step(scheduler)


# --- chunked prefill -------------------------------------------------------------------------------------


def test_chunks_share_the_budget_with_decodes_and_new_prefills_come_first_in_the_batch() -> None:
    scheduler = serving(CHUNKED, asking(0, 5), asking(1, 9), asking(2, 2))
    assert batches(scheduler, 3) == [{0: 5, 1: 3}, {2: 1, 1: 6, 0: 1}, {2: 1, 0: 1, 1: 1}]


def test_partial_prefills_split_the_budget_and_long_ones_are_passed_over() -> None:
    config = replace(
        CHUNKED,
        num_gpu_blocks=40,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=10,
    )
    scheduler = serving(config, asking(0, 30), asking(1, 30), asking(2, 4))
    assert batches(scheduler, 1) == [{0: 4, 2: 4}]
    assert scheduler.blocked_by == "max_long_partial_prefills"


# --- prefix caching --------------------------------------------------------------------------------------


def sharing(index: int, blocks: int, tail: int = 0) -> TraceRequest:
    """A prompt of `blocks` shared blocks of 4 tokens and `tail` tokens of its own."""
    ids = tuple(range(blocks))
    return asking(index, 4 * blocks + tail, 4, prefix_ids=ids, prefix_block_tokens=4)


def test_a_fully_cached_prompt_computes_its_last_token_only() -> None:
    scheduler = serving(CACHING, sharing(0, 3))
    next_step(scheduler)
    scheduler.add(sharing(1, 3))
    step = next_step(scheduler)
    assert (step.requests, step.num_tokens, step.num_computed) == ([1], [1], [11])
    assert step.num_batched_tokens == 12
    assert scheduler.counters["prefix_cache_hits_tokens"] == 11


def test_prompts_of_one_step_share_blocks_but_compute_them_both() -> None:
    scheduler = serving(CACHING, sharing(0, 3), sharing(1, 3, tail=1))
    step = next_step(scheduler)
    assert step.num_tokens == [12, 13]
    assert scheduler.num_free_blocks == 10 - 4
    # Shared slots count once: 12 of both, one of request 1.
    assert scheduler.num_kv_tokens == 13


def test_freed_blocks_are_hit_again_until_something_needs_them() -> None:
    scheduler = serving(CACHING, sharing(0, 3))
    while scheduler.has_requests():
        next_step(scheduler)
    assert scheduler.num_free_blocks == 10
    assert scheduler.num_cached_free_blocks == 3
    scheduler.add(asking(1, 32, 1))
    while scheduler.has_requests():
        next_step(scheduler)
    scheduler.add(sharing(2, 3))
    assert next_step(scheduler).hits == [8]  # the deepest of the three went first


# --- rules -----------------------------------------------------------------------------------------------

LONG = Victim(300, 299, 19, 0, is_prefill=False, can_swap_out=True)


def test_the_length_rule_swaps_long_victims_and_recomputes_short_ones() -> None:
    rule = preemption.swap_above_tokens(100)
    assert rule(LONG) == "swap"
    assert rule(replace(LONG, num_computed_tokens=100)) == "recompute"
    # It keeps out of V0's traps.
    assert rule(replace(LONG, is_prefill=True)) == "recompute"
    assert rule(replace(LONG, can_swap_out=False)) == "recompute"
    assert rule(replace(LONG, forced=True)) == "recompute"
    with pytest.raises(UserError, match="swap-above-tokens=-1"):
        preemption.swap_above_tokens(-1)


def test_v0_recomputes_unless_told_to_swap() -> None:
    assert preemption.preemption_rule(None)(LONG) == "recompute"
    assert preemption.preemption_rule("recompute")(LONG) == "recompute"
    assert preemption.preemption_rule("swap")(LONG) == "swap"
    assert preemption.preemption_rule("swap", swap_above=1000)(LONG) == "recompute"


def test_the_configuration_chooses_the_rule() -> None:
    requests = [asking(0, 3, 9), asking(1, 3, 9), asking(2, 8, 9)]
    config = replace(SWAP, preemption_mode=None, swap_above_tokens=6)
    scheduler = make_scheduler(config)
    assert isinstance(scheduler, SchedulerV0)
    for request in requests:
        scheduler.add(request)
    next_step(scheduler)
    assert next_step(scheduler).swapped_out_requests == [2]


@pytest.mark.parametrize(
    ("rule", "victim"),
    [
        (preemption.last_in_queue, 2),
        (preemption.most_blocks, 1),
        (preemption.fewest_computed, 2),
        (preemption.least_preempted, 2),
    ],
)
def test_a_victim_rule_picks_among_those_not_yet_in_the_step(rule: Any, victim: int) -> None:
    requests = [asking(0, 4), asking(1, 8), asking(2, 4)]
    scheduler = serving(replace(PLAIN, num_gpu_blocks=4), *requests, victim_rule=rule)
    next_step(scheduler)
    assert next_step(scheduler).preempted[0] == victim


# --- warnings --------------------------------------------------------------------------------------------


def test_sound_configurations_are_not_warned_about() -> None:
    sound = replace(PLAIN, num_gpu_blocks=1000)
    assert warnings_for(sound) == []
    assert warnings_for(replace(sound, preemption_mode="swap", num_cpu_blocks=7 * 16)) == []
    assert warnings_for(replace(sound, engine="v1")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preemption_mode": "swap", "num_cpu_blocks": 5}, "swap space is full"),
        ({"preemption_mode": "swap", "policy": "priority"}, "priority preemption swaps"),
        (
            {
                "preemption_mode": "swap",
                "enable_chunked_prefill": True,
                "max_num_batched_tokens": 32,
            },
            "never brings back",
        ),
        (
            {
                "preemption_mode": "swap",
                "enable_chunked_prefill": True,
                "enable_prefix_caching": True,
            },
            "under prefix caching",
        ),
        ({"swap_above_tokens": 100, "enable_prefix_caching": True}, "swapped out before"),
        ({"policy": "priority", "enable_chunked_prefill": True}, "ignores"),
        (
            {
                "enable_chunked_prefill": True,
                "enable_prefix_caching": True,
                "max_num_batched_tokens": 3,
            },
            "schedules nothing",
        ),
        (
            {
                "enable_chunked_prefill": True,
                "enable_prefix_caching": True,
                "max_num_batched_tokens": 8,
            },
            "at most 5 of max_num_seqs=8",
        ),
        ({"num_gpu_blocks": 16}, "no watermark"),
        ({"num_gpu_blocks": 10}, "prompts above 40 tokens"),
    ],
)
def test_traps_are_named_before_the_run(changes: dict[str, Any], words: str) -> None:
    said = warnings_for(replace(PLAIN, **{"num_gpu_blocks": 1000, **changes}))
    assert any(words in sentence for sentence in said), said


# --- in any of them --------------------------------------------------------------------------------------


@st.composite
def deployments(draw: Any) -> tuple[SchedulerConfig, list[TraceRequest]]:
    chunked = draw(st.booleans())
    size = draw(st.sampled_from([1, 3, 4, 16]))
    budget = draw(st.sampled_from([8, 16, 64])) if chunked else 64
    config = replace(
        PLAIN,
        block_size=size,
        num_gpu_blocks=draw(st.integers(max(2, 24 // size), 120)),
        num_cpu_blocks=draw(st.sampled_from([0, 10, 400])),
        max_num_seqs=draw(st.sampled_from([1, 3, 8])),
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        preemption_mode=draw(st.sampled_from([None, "recompute", "swap"])),
        swap_above_tokens=draw(st.sampled_from([None, None, 10])),
    )
    requests = []
    for index in range(draw(st.integers(1, 8))):
        ids = tuple(draw(st.lists(st.integers(0, 2), max_size=3)))
        requests.append(
            asking(
                index,
                draw(st.integers(1, 40)),
                draw(st.integers(1, 30)),
                priority=draw(st.integers(0, 2)),
                prefix_ids=ids,
                prefix_block_tokens=draw(st.sampled_from([4, 16])),
            )
        )
    return config, requests


def check_blocks(scheduler: SchedulerV0, leaked: set[int]) -> None:
    config, queues = scheduler.config, scheduler.queues
    on_cpu = list(queues.swapped)
    on_cpu += [request for request in queues.waiting if request.table]  # forced swaps (12.16)
    gpu = {block for request in queues.running for block in request.table}
    cpu = leaked | {block for request in on_cpu for block in request.table}
    assert scheduler.num_free_blocks + len(gpu) == config.num_gpu_blocks
    assert scheduler.num_free_cpu_blocks + len(cpu) == config.num_cpu_blocks
    assert all(block < config.num_gpu_blocks <= other for block in gpu for other in cpu)
    for request in (*queues.running, *on_cpu):
        assert len(request.table) == -(-request.num_placed_tokens // config.block_size)
    # Slots with a token, never more than slots allocated.
    assert 0 <= scheduler.num_kv_tokens <= len(gpu) * config.block_size
    if not config.enable_chunked_prefill:
        slots: dict[int, int] = {}
        for request in queues.running:
            for position, block in enumerate(request.table):
                filled = request.num_placed_tokens - position * config.block_size
                slots[block] = min(config.block_size, filled)
        assert scheduler.num_kv_tokens == sum(slots.values())


@given(deployments(), st.data())
@settings(max_examples=100, deadline=None)
def test_blocks_are_conserved_and_every_request_is_served_once(
    deployment: tuple[SchedulerConfig, list[TraceRequest]], data: st.DataObject
) -> None:
    config, requests = deployment
    scheduler = SchedulerV0(config, livelock_after=100)
    to_come = list(requests)
    tokens: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    leaked: set[int] = set()  # CPU blocks of requests that outgrew the GPU: V0 forgets them
    idle = 0
    while (scheduler.has_requests() or to_come) and idle < 3:
        while to_come and (not scheduler.has_requests() or data.draw(st.booleans())):
            scheduler.add(to_come.pop(0))
        swapped = {request.index: request.table for request in scheduler.queues.swapped}
        try:
            step = scheduler.schedule()
        except LivelockError:
            assert scheduler.num_cumulative_preemption > 100
            return
        except EngineDiedV0Error:
            assert warnings_for(config)
            return
        for index in step.ignored:
            leaked.update(swapped.get(index, ()))
        check_blocks(scheduler, leaked)
        assert step.total_tokens <= config.max_num_batched_tokens
        assert len(set(step.requests)) == len(step.requests) <= config.max_num_seqs
        assert not set(step.requests) & set(step.preempted)
        assert scheduler.blocked_by is None or scheduler.num_waiting
        output = scheduler.complete(step)
        if not config.enable_chunked_prefill:
            check_blocks(scheduler, leaked)
        tokens.update(output.emitted)
        ended.update((*output.finished, *step.ignored))
        queues = scheduler.queues
        live = [r.index for r in (*queues.waiting, *queues.running, *queues.swapped)]
        assert len(set(live)) == len(live)
        assert sorted((*live, *ended, *(r.index for r in to_come))) == list(range(len(requests)))
        idle = 0 if step.requests or step.preempted or step.ignored or step.swapped_in else idle + 1
    if scheduler.has_requests():
        assert warnings_for(config)  # stalled
        return
    assert set(ended.values()) == {1}
    assert scheduler.num_free_blocks == config.num_gpu_blocks
    assert scheduler.num_kv_tokens == 0
    for request in requests:
        most = config.max_model_len + 1 - request.prompt_tokens
        assert tokens[request.index] <= min(request.output_tokens, most)


# --- the evictor -----------------------------------------------------------------------------------------


def test_eviction_goes_by_oldest_use_then_longest_prefix_then_lowest_id() -> None:
    evictor = Evictor()
    for block, tokens, used in ((1, 4, 2.0), (2, 8, 2.0), (3, 8, 2.0), (4, 4, 1.0)):
        evictor.add(block, key=block, prefix_tokens=tokens, last_access=used)
    assert [evictor.evict()[0] for _ in range(4)] == [4, 2, 3, 1]
    with pytest.raises(NoFreeBlocksError):
        evictor.evict()


def test_a_block_taken_back_is_passed_over() -> None:
    evictor = Evictor()
    evictor.add(1, key=10, prefix_tokens=4, last_access=1.0)
    evictor.add(2, key=20, prefix_tokens=4, last_access=2.0)
    evictor.remove(1)
    evictor.add(1, key=10, prefix_tokens=4, last_access=3.0)
    assert [evictor.evict() for _ in range(2)] == [(2, 20), (1, 10)]


def test_an_outdated_entry_of_the_same_time_is_taken_for_the_new_one() -> None:
    # A swapped-out block has no time of last use; 0.8.5 then evicts it under its former content and dies.
    evictor = Evictor()
    evictor.add(1, key=10, prefix_tokens=8, last_access=-1.0)
    evictor.remove(1)
    evictor.add(1, key=11, prefix_tokens=4, last_access=-1.0)
    assert evictor.evict() == (1, 10)


def test_what_0_8_5_leaves_to_the_hash_seed_is_counted() -> None:
    evictor = Evictor()
    evictor.add(1, key=10, prefix_tokens=4, last_access=-1.0)
    evictor.remove(1)
    evictor.add(1, key=11, prefix_tokens=4, last_access=-1.0)
    assert evictor.evict() == (1, 11)
    assert evictor.coin_flips == 1
