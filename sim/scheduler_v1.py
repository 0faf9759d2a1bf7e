"""vLLM's V1 scheduler: running requests first, then the waiting queue's head; preemption by recompute.

Decides what vLLM 0.32.0's v1/core/sched/scheduler.py and async_scheduler.py decide, step for step (spec
sections 2, 3, 6, 7). No clock and no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vsim.sim.block_keys import BlockKeys, KeyTable
from vsim.sim.config import SchedulerConfig
from vsim.sim.content import joined, output_run, trace_prompt
from vsim.sim.kvcache import Hit, KVCache
from vsim.sim.offload import OffloadTier
from vsim.sim.request import FINISHED, LOADING, PREEMPTED, RUNNING, WAITING, Request
from vsim.sim.step import Step, StepOutput
from vsim.sim.versions import v1_rules
from vsim.sim.victims import VictimRule, last_admitted, least_urgent
from vsim.sim.waiting import ArrivalQueue, PriorityQueue, WaitingQueue
from vsim.traces.trace import TraceRequest

if TYPE_CHECKING:
    from vsim.sim.case import CaseRequest

# Why the head of the waiting queue was not admitted (Step.blocked_by):
BLOCKED_BY = (
    "token_budget",  # the step's tokens are given out, or too few are left for an unchunked prompt
    "max_num_seqs",  # no running slot
    "kv_full",  # no blocks for its next chunk
    "full_prompt",  # blocks for its next chunk, but not for the whole prompt (scheduler_reserve_full_isl)
    "preempted_step",  # a step that preempted admits nobody
)


class _Draft:
    """A step while it is being put together."""

    __slots__ = (
        "blocked_by",
        "input_budget",
        "new",
        "preempted",
        "resumed",
        "token_budget",
        "tokens",
    )

    def __init__(self, token_budget: int, input_budget: int) -> None:
        self.tokens: dict[Request, int] = {}  # in schedule order
        self.token_budget = token_budget
        self.input_budget = input_budget
        self.preempted: list[Request] = []
        self.new: list[int] = []
        self.resumed: list[int] = []
        self.blocked_by: str | None = None

    def give(self, request: Request, num_tokens: int) -> None:
        self.tokens[request] = num_tokens
        self.token_budget -= num_tokens
        self.input_budget -= num_tokens

    def take_back(self, request: Request) -> bool:
        """Undo `give`. Returns whether there was anything to undo."""
        num_tokens = self.tokens.pop(request, 0)
        self.token_budget += num_tokens
        self.input_budget += num_tokens
        return num_tokens > 0


class SchedulerV1:
    """vLLM V1's decisions behind `vsim.sim.scheduler.Scheduler`.

    `victim` is the preemption rule; None takes the one of `config.policy`.
    Raises UserError for a configuration that the release does not know.
    """

    def __init__(self, config: SchedulerConfig, victim: VictimRule | None = None) -> None:
        rules = v1_rules(config)
        self.config = config
        self.cache = KVCache(config, rules)
        self.running: list[Request] = []
        new_queue = PriorityQueue if config.policy == "priority" else ArrivalQueue
        self.waiting: WaitingQueue = new_queue()
        # Requests that hold blocks while they wait (CPU offload only): always looked at first, so that none
        # of them sits behind a request that its blocks would let in.
        self.waiting_with_blocks: WaitingQueue = new_queue()
        self.offload = OffloadTier(config, self.cache) if config.kv_offload is not None else None
        self.num_preemptions = 0
        self.recomputed_tokens = 0
        self.prefix_queries = self.prefix_hits = 0  # tokens, first admissions
        self.prefix_queries_again = self.prefix_hits_again = 0  # tokens, after preemptions
        self._rules = rules
        self._victim = victim or (least_urgent if config.policy == "priority" else last_admitted)
        self._requests: dict[int, Request] = {}
        self._key_table = KeyTable(self.cache.key_block_size)
        self._token_budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        self._max_running = config.max_num_active_seqs or config.max_num_seqs
        self._reserve_full_isl = config.scheduler_reserve_full_isl and rules.reserves_full_isl
        self._chunks_prompts = config.enable_chunked_prefill or not rules.can_keep_prompts_whole
        self._step_number = 0
        self._finished: list[int] = []  # since the last schedule(), to be announced to the workers
        # CPU offload only:
        self._loaded: set[int] = set()  # requests whose load was reported
        self._prefilling: set[Request] = set()  # admitted, prompt or load not through yet
        # A copy to the CPU may still read, or a load write, what a batch in flight uses: with several
        # batches in flight freed blocks return to the pool only when these batches have completed.
        self._defers_frees = self.offload is not None and config.max_concurrent_batches > 1
        self._deferred: deque[tuple[int, list[int]]] = (
            deque()
        )  # (last batch that may use them, blocks)
        self._num_batches = 0
        self._num_completed_batches = 0

    # --- arrivals --------------------------------------------------------------------------------------

    def add(self, request: TraceRequest | CaseRequest) -> str | None:
        """Queue a request, or say why vLLM's front end refuses it (v1/engine/input_processor.py)."""
        limit = self.config.max_model_len
        prompt = request.prompt_tokens
        if not 0 < prompt < limit:
            return (
                "prompt is empty" if prompt == 0 else f"prompt is not below max_model_len={limit}"
            )
        room = limit - prompt
        if isinstance(request, TraceRequest):
            arrival: float = request.arrival_ns
            name: str | int = request.index
            max_tokens = request.output_tokens if request.max_tokens is None else request.max_tokens
        else:
            arrival = request.arrival_s
            name = request.id
            max_tokens = request.output_tokens if request.finish == "length" else room
        tracked = Request(
            index=request.index,
            arrival=arrival,
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            ends_after=max(1, min(request.output_tokens, max_tokens, room)),
            priority=request.priority,
            name=name,
            num_groups=len(self.cache.groups),
        )
        if self.cache.caching or self.config.kv_offload is not None:
            if isinstance(request, TraceRequest):
                prompt_runs = trace_prompt(request)
            else:
                prompt_runs = request.runs
            # The blocks of the answer have keys too: a preempted request may find its own again.
            runs = joined((*prompt_runs, output_run(request.index, request.output_tokens)))
            tracked.keys = BlockKeys(self._key_table, runs)
        self._requests[request.index] = tracked
        self.waiting.push(tracked)
        if self.offload is not None:
            self.offload.add(tracked)
        return None

    # --- scheduling ------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Put the next step together and take it as scheduled."""
        self._step_number += 1
        draft = _Draft(self._token_budget, self.config.max_num_batched_tokens)
        prefill_cap = self._prefill_cap()
        self._schedule_running(draft, prefill_cap)
        if draft.preempted:
            # It would hand back the blocks that were just taken.
            draft.blocked_by = "preempted_step" if self.num_waiting else None
        else:
            self._schedule_waiting(draft, prefill_cap)
        return self._commit(draft)

    def _prefill_cap(self) -> int:
        """Most tokens for one request in this step; 0: no such cap (spec 2.4)."""
        config = self.config
        cap = config.long_prefill_token_threshold
        if cap <= 0:
            return 0
        num_requests = self.num_running + self.num_waiting
        if num_requests <= 1 and self._rules.uncaps_lone_request:
            return 0
        if config.long_prefill_token_threshold_adaptive:
            cap = max(cap, config.max_num_batched_tokens // max(num_requests, 1))
        return cap

    def _schedule_running(self, draft: _Draft, prefill_cap: int) -> None:
        """Everyone who runs gets tokens in order of admission; blocks come from the victims if need be."""
        running, grow = self.running, self.cache.grow
        longest = self.config.max_model_len - self._rules.length_margin
        step_number = self._step_number
        position = 0
        while position < len(running) and draft.token_budget > 0 and draft.input_budget > 0:
            request = running[position]
            computed = request.num_computed_tokens
            in_flight = request.num_placeholders
            last = request.num_prompt_tokens + request.max_tokens
            if in_flight and computed + 2 - in_flight >= last:
                position += 1  # what is in flight brings its last allowed token
                continue
            if step_number < request.next_decode_step:
                position += 1
                continue
            num_new = request.num_tokens + in_flight - computed
            if 0 < prefill_cap < num_new:
                num_new = prefill_cap
            num_new = min(num_new, draft.token_budget, draft.input_budget, longest - computed)
            if num_new == 0:
                position += 1  # waits for a token in flight; those behind it may go on
                continue
            while not grow(request, num_new):
                victim = self._victim(running)
                if not self._can_free(victim):
                    return  # its blocks would not come back before a batch in flight has completed
                place = len(running) - 1 if running[-1] is victim else running.index(victim)
                del running[place]
                was_scheduled = draft.take_back(victim)
                if place < position and (was_scheduled or self._rules.keeps_place_after_any_victim):
                    position -= 1
                self._preempt(victim)
                draft.preempted.append(victim)
                if victim is request:
                    return
            draft.give(request, num_new)
            position += 1

    def _schedule_waiting(self, draft: _Draft, prefill_cap: int) -> None:
        """Admit from the head of the queue until something refuses (spec section 3)."""
        skipped: list[Request] = []
        while True:
            queue = self.waiting_with_blocks or self.waiting
            if not queue:
                break
            if draft.token_budget <= 0 or draft.input_budget <= 0:
                draft.blocked_by = "token_budget"
                break
            if len(self.running) >= self._max_running:
                draft.blocked_by = "max_num_seqs"
                break
            request = queue.head()
            if not self._is_ready(request):
                skipped.append(queue.pop())
                continue
            hit, external = self._cached_prefix(request)
            if external is None:
                skipped.append(queue.pop())
                continue
            if external:
                draft.blocked_by = self._start_load(request, hit, external)
                if draft.blocked_by:
                    break
                skipped.append(queue.pop())
                continue
            num_new = request.num_tokens - hit.tokens - request.num_computed_tokens
            if 0 < prefill_cap < num_new:
                num_new = prefill_cap
            budget = min(draft.token_budget, draft.input_budget)
            if num_new > budget and not self._chunks_prompts:
                draft.blocked_by = "token_budget"
                break
            num_new = min(num_new, budget)
            draft.blocked_by = self._allocate_first(request, hit, num_new)
            if draft.blocked_by:
                break
            queue.pop()
            self._admit(draft, request, hit, num_new)
        self.waiting_with_blocks.put_back([r for r in skipped if _holds_blocks(r)])
        self.waiting.put_back([r for r in skipped if not _holds_blocks(r)])

    def _is_ready(self, request: Request) -> bool:
        """Can a waiting request be looked at, or must it wait for something that others need not await?"""
        if request.status == LOADING:
            if request.index not in self._loaded:
                return False
            self._loaded.remove(request.index)
            self.cache.register(request, request.num_computed_tokens)
            # The last token is computed again: somebody has to say the next one.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            request.status = PREEMPTED if request.num_preemptions else WAITING
        # Output from before its preemption must arrive first.
        return not request.num_stale_tokens

    def _cached_prefix(self, request: Request) -> tuple[Hit, int | None]:
        """What the GPU holds of a request, and the tokens that the CPU could add (None: not known yet)."""
        if request.num_computed_tokens:
            return self.cache.no_hit, 0  # it comes from a load, with its blocks
        hit = self.cache.lookup(request)
        return hit, 0 if self.offload is None else self.offload.lookup(request, hit.tokens)

    def _allocate_first(
        self, request: Request, hit: Hit, num_new: int, external: int = 0
    ) -> str | None:
        """Blocks for a waiting request's first chunk, or what stands against it (spec 3.6)."""
        cache = self.cache
        watermark = cache.watermark_blocks if self.running else 0
        if self._reserve_full_isl and not cache.fits_whole(request, hit, watermark, external):
            fits = not external and cache.fits_chunk(request, hit, num_new, watermark)
            return "full_prompt" if fits else "kv_full"
        # A load makes no progress while it holds blocks: it must not take those that others count on.
        reserved = sum(map(cache.blocks_to_finish_prefill, self._prefilling)) if external else 0
        fits = cache.allocate(
            request,
            num_new,
            hit,
            external_tokens=external,
            watermark=watermark,
            reserved=reserved,
            register=not external,
        )
        return None if fits else "kv_full"

    def _admit(self, draft: _Draft, request: Request, hit: Hit, num_new: int) -> None:
        if not request.num_computed_tokens:
            self._count_lookup(request, hit)
            request.num_computed_tokens = hit.tokens
        (draft.resumed if request.scheduled_once else draft.new).append(request.index)
        request.scheduled_once = True
        request.status = RUNNING
        self.running.append(request)
        draft.give(request, num_new)
        if self.offload is not None and request.num_computed_tokens + num_new < request.num_tokens:
            self._prefilling.add(request)

    def _start_load(self, request: Request, hit: Hit, external: int) -> str | None:
        """Blocks for what the CPU holds of a request, which then waits for the copy (spec 9.2)."""
        assert self.offload is not None
        blocked_by = self._allocate_first(request, hit, 0, external)
        if blocked_by is None:
            self.offload.start_load(request, external)
            self._count_lookup(request, hit)
            request.status = LOADING
            request.num_computed_tokens = hit.tokens + external
            self._prefilling.add(request)
        return blocked_by

    def _count_lookup(self, request: Request, hit: Hit) -> None:
        if not self.cache.caching:
            return
        if request.num_preemptions:
            self.prefix_queries_again += request.num_tokens
            self.prefix_hits_again += hit.tokens
        else:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += hit.tokens

    def _preempt(self, request: Request) -> None:
        """Throw away a running request's KV; it starts over from the waiting queue (spec 6.4)."""
        self._free(request)
        self._prefilling.discard(request)
        request.high_water = max(request.high_water, request.num_computed_tokens)
        request.status = PREEMPTED
        request.num_computed_tokens = 0
        if self._rules.tracks_stale_output:
            # Output of batches in flight still arrives and counts, but not for the counters reset here.
            request.num_placeholders = 0
            request.num_stale_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push_back(request)

    def _commit(self, draft: _Draft) -> Step:
        """Take the step as scheduled: from here on its tokens count as computed."""
        num_computed: list[int] = []
        emits: list[bool] = []
        transfers = None
        if self.offload is not None:
            transfers = self.offload.transfers(draft.tokens, draft.preempted, self._finished)
        if draft.tokens:
            self._num_batches += 1
        next_decode_step = 0
        if self.config.async_scheduling and self.config.v2_model_runner:
            next_decode_step = self._step_number + self.config.pipeline_parallel_size
        for request, num_tokens in draft.tokens.items():
            before = request.num_computed_tokens
            num_computed.append(before)
            if before < request.high_water:
                self.recomputed_tokens += min(before + num_tokens, request.high_water) - before
            after = request.num_computed_tokens = before + num_tokens
            request.num_in_flight_tokens += num_tokens
            request.last_batch = self._num_batches
            # The last known token (or the one in flight) is computed: the model says the next one.
            says_a_token = after >= request.num_tokens + request.num_placeholders
            emits.append(says_a_token)
            if says_a_token and self.config.async_scheduling:
                request.num_placeholders += 1
                request.next_decode_step = next_decode_step
        if self._prefilling:
            self._prefilling.difference_update(
                request for request, emit in zip(draft.tokens, emits, strict=True) if emit
            )
        self._finished = []
        return Step(
            requests=[request.index for request in draft.tokens],
            num_tokens=list(draft.tokens.values()),
            num_computed=num_computed,
            preempted=[request.index for request in draft.preempted],
            new=draft.new,
            resumed=draft.resumed,
            emits=emits,
            blocked_by=draft.blocked_by,
            transfers=transfers,
        )

    # --- output ----------------------------------------------------------------------------------------

    def complete(self, step: Step, ended_transfers: Sequence[int] = ()) -> StepOutput:
        """Take in the tokens of a step that ran; steps complete in the order they were scheduled.

        `ended_transfers`: jobs of `Step.transfers` that the worker reports with this step.
        """
        if step.requests:
            self._num_completed_batches += 1
            self._free_deferred()
        output = StepOutput(emitted=[], finished=[])
        requests = self._requests
        is_async = self.config.async_scheduling
        drops_output = self._rules.drops_output_of_preempted
        finished: list[Request] = []
        for index, num_tokens, emits in zip(
            step.requests, step.num_tokens, step.emits, strict=True
        ):
            request = requests.get(index)
            if request is None:
                output.wasted.append(index)  # said EOS while this step was already scheduled
                continue
            request.num_in_flight_tokens -= num_tokens
            stale = request.num_stale_tokens > 0
            if stale:
                request.num_stale_tokens -= num_tokens
            if not emits or (drops_output and request.status != RUNNING):
                continue
            request.num_tokens += 1
            request.num_output_tokens += 1
            output.emitted.append(index)
            if is_async:
                if not stale:
                    request.num_placeholders -= 1
                if request.status == RUNNING:
                    self.cache.register(
                        request, request.num_computed_tokens - request.num_placeholders
                    )
            if request.num_output_tokens >= request.ends_after:
                output.finished.append(index)
                finished.append(request)
                self._finish(request)
        if len(output.finished) == 1 and finished[0] in self.running:
            self.running.remove(finished[0])
        elif finished:
            self.running = [request for request in self.running if request.status != FINISHED]
        if self.offload is not None and ended_transfers:
            self._loaded.update(self.offload.complete(ended_transfers))
        return output

    def _finish(self, request: Request) -> None:
        was_running = request.status == RUNNING
        request.status = FINISHED
        if not was_running:
            self.waiting.remove(request)
        self._prefilling.discard(request)
        if self.offload is not None:
            self.offload.request_finished(request)
        self._free(request)
        del self._requests[request.index]
        self._finished.append(request.index)

    def _can_free(self, request: Request) -> bool:
        return not self._defers_frees or request.last_batch <= self._num_completed_batches

    def _free(self, request: Request) -> None:
        """Give back a request's blocks: now, or once no batch in flight can touch them (spec 9.5)."""
        if self._can_free(request):
            self.cache.free(request)
            return
        blocks = self.cache.detach(request)
        if blocks:
            self._deferred.append((self._num_batches, blocks))

    def _free_deferred(self) -> None:
        while self._deferred and self._deferred[0][0] <= self._num_completed_batches:
            self.cache.free_detached(self._deferred.popleft()[1])

    # --- state -----------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        """Also true when a finish is still to be announced to the workers, or a copy is under way (1.5)."""
        return (
            bool(self._finished)
            or self.has_unfinished_requests()
            or (self.offload is not None and self.offload.has_jobs)
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    @property
    def has_finish_to_announce(self) -> bool:
        """Will the next step tell the workers of finishes?"""
        return bool(self._finished)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.waiting_with_blocks)

    @property
    def num_free_blocks(self) -> int:
        return self.cache.pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self.cache.pool.num_usable

    @property
    def num_kv_tokens(self) -> int:
        """KV slots (of all groups) that hold, or are scheduled to hold, a token; shared blocks once."""
        return self.cache.slots_used

    @property
    def counters(self) -> dict[str, int]:
        return {
            "prefix_cache_queries_tokens": self.prefix_queries,
            "prefix_cache_hits_tokens": self.prefix_hits,
            "preempted_prefix_cache_queries_tokens": self.prefix_queries_again,
            "preempted_prefix_cache_hits_tokens": self.prefix_hits_again,
            "preemptions": self.num_preemptions,
            "recomputed_tokens": self.recomputed_tokens,
        }


def _holds_blocks(request: Request) -> bool:
    """Does a request that is not running have blocks?"""
    return request.status == LOADING or request.num_computed_tokens > 0
