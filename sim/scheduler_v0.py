"""vLLM 0.8.5's V0 scheduler: prefills first or chunked, SWAP and RECOMPUTE, exact.

Follows vllm/core/scheduler.py of 0.8.5 for one sequence per request, without LoRA, speculation, multi-step,
delay factor and the async output processor. Rules are numbered in docs/exactness.md as 12.1 to 12.22.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NoReturn

from vsim.sim import preemption
from vsim.sim.block_keys import BlockKeys, KeyTable
from vsim.sim.block_manager_v0 import BlockManagerV0, BlockStack, NoFreeBlocksError
from vsim.sim.config import SchedulerConfig
from vsim.sim.content import STREAM_TOKENS, joined, output_run, trace_prompt
from vsim.sim.preemption import PreemptionRule, Victim, VictimRule
from vsim.sim.prefix_cache_v0 import EvictionError, PrefixCachingStack
from vsim.sim.request_v0 import FINISHED, IGNORED, RUNNING, SWAPPED, WAITING, RequestV0
from vsim.sim.scheduler import EngineDiedError
from vsim.sim.step import Step, StepOutput
from vsim.traces.trace import TraceRequest

# Why the head of the waiting queue did not get in.
TOKEN_BUDGET, MAX_NUM_SEQS, KV_FULL = "token_budget", "max_num_seqs", "kv_full"
SWAPPED_QUEUE, LONG_PREFILLS = "swapped_queue", "max_long_partial_prefills"

BlockPairs = list[tuple[int, int]]


class EngineDiedV0Error(EngineDiedError):
    """0.8.5 would have crashed. `said`: exception and message of its log; `why`: in words."""

    def __init__(self, said: str, why: str) -> None:
        super().__init__(f"{said.rstrip(': ')} ({why})")
        self.said = said
        self.why = why


@dataclass(slots=True)
class StepV0(Step):
    """A step with what only V0 has. `num_tokens` and `num_computed` count prefix hits as computed."""

    is_prefill: list[bool] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)  # prefix-cache hit tokens in this chunk
    num_batched_tokens: int = 0  # against max_num_batched_tokens, hits included
    # Victims in the order chosen, forced ones (priority policy) included, and swapped-in requests.
    recomputed: list[int] = field(default_factory=list)
    swapped_out_requests: list[int] = field(default_factory=list)
    swapped_in_requests: list[int] = field(default_factory=list)
    swap_in: BlockPairs = field(default_factory=list)  # (CPU block, GPU block)
    swap_out: BlockPairs = field(default_factory=list)  # (GPU block, CPU block)
    num_preempted: int = 0  # the engine's own count: without forced ones


class _Budget:
    """What one step may still hold (vLLM `SchedulingBudget`; each request enters it at most once)."""

    __slots__ = ("cached_tokens", "max_seqs", "max_tokens", "seqs", "tokens")

    def __init__(self, max_tokens: int, max_seqs: int, seqs: int) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.tokens = 0
        self.cached_tokens = 0
        self.seqs = seqs

    def fits(self, tokens: int) -> bool:
        """Is there room for one more sequence with `tokens` tokens?"""
        return self.tokens + tokens <= self.max_tokens and self.seqs < self.max_seqs


class _PartialPrefills:
    """Concurrent partial prefills (vLLM `PartialPrefillMetadata`): how many share the token budget."""

    __slots__ = ("_config", "_threshold", "long", "sharing")

    def __init__(
        self,
        config: SchedulerConfig,
        threshold: int,
        running: deque[RequestV0],
        waiting: deque[RequestV0],
    ) -> None:
        self._config = config
        self._threshold = threshold
        self.long = prefills = waiting_long = 0
        for request in running:
            if request.is_prefill:
                prefills += 1
                self.long += self._is_long(request)
        limit = config.max_num_partial_prefills
        for request in waiting:
            if prefills >= limit:
                break
            if self._is_long(request):
                if self.long + waiting_long >= config.max_long_partial_prefills:
                    continue
                waiting_long += 1
            prefills += 1
        self.sharing = min(prefills, limit)

    def passes_over(self, request: RequestV0) -> bool:
        return (
            self._config.max_num_partial_prefills > 1
            and self.long >= self._config.max_long_partial_prefills
            and self._is_long(request)
        )

    def admit(self, request: RequestV0) -> None:
        self.long += self._is_long(request)

    def _is_long(self, request: RequestV0) -> bool:
        left = request.num_tokens - request.num_computed_tokens if request.is_prefill else 1
        return left > self._threshold


@dataclass(slots=True)
class _Scheduled:
    """What one pass over a queue chose: (request, chunk of tokens, hits within it)."""

    decodes: list[tuple[RequestV0, int, int]] = field(default_factory=list)
    prefills: list[tuple[RequestV0, int, int]] = field(default_factory=list)
    preempted: list[RequestV0] = field(default_factory=list)
    swapped_out: list[RequestV0] = field(default_factory=list)


class SchedulerV0:
    """The `Scheduler` protocol for vLLM 0.8.5.

    `preemption_rule` and `victim_rule` default to vLLM's own (`config.preemption_mode`, tail of the queue).
    `schedule` and `complete` raise `EngineDiedV0Error` where the real engine would have crashed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        preemption_rule: PreemptionRule | None = None,
        victim_rule: VictimRule = preemption.last_in_queue,
    ) -> None:
        self.config = config
        self.waiting: deque[RequestV0] = deque()
        self.running: deque[RequestV0] = deque()
        self.swapped: deque[RequestV0] = deque()
        self.num_cumulative_preemption = 0
        self.blocked_by: str | None = None
        self._rule = preemption_rule or preemption.preemption_rule(config.preemption_mode)
        self._victim = victim_rule
        self._requests: dict[int, RequestV0] = {}
        self._prompt_limit = config.max_model_len
        if not config.enable_chunked_prefill:
            self._prompt_limit = min(config.max_model_len, config.max_num_batched_tokens)
        self._long_threshold = config.long_prefill_token_threshold
        if config.max_num_partial_prefills > 1 and not self._long_threshold:
            self._long_threshold = int(config.max_model_len * 0.04)
        gpu, cpu, size = config.num_gpu_blocks, config.num_cpu_blocks, config.block_size
        self._cache: PrefixCachingStack | None = None
        if config.enable_prefix_caching:
            self._cache = PrefixCachingStack(gpu, size)
            self._cpu_cache = PrefixCachingStack(cpu, size, first_id=gpu)
            self.blocks = BlockManagerV0(self._cache, self._cpu_cache, size)
            self._key_table = KeyTable(size)
        else:
            self.blocks = BlockManagerV0(BlockStack(gpu, size), BlockStack(cpu, size, gpu), size)
        self._kv_tokens = 0
        self._num_schedules = 0
        self._counters = dict.fromkeys(
            (
                "preemptions",
                "recomputed_tokens",
                "swapped_out_blocks",
                "swapped_in_blocks",
                "prefix_cache_queries_tokens",
                "prefix_cache_hits_tokens",
            ),
            0,
        )

    # --- the protocol --------------------------------------------------------------------------------

    def add(self, request: TraceRequest) -> str | None:
        """Queue a request. 0.8.5's front end refuses empty prompts and those longer than max_model_len."""
        if request.prompt_tokens <= 0:
            return "the prompt is empty"
        if request.prompt_tokens > self.config.max_model_len:
            return f"the prompt is longer than max_model_len={self.config.max_model_len}"
        ends_after = request.output_tokens
        if request.max_tokens is not None:
            ends_after = min(ends_after, request.max_tokens)
        keys = None
        if self._cache is not None:
            runs = getattr(request, "runs", None)
            prompt = trace_prompt(request) if runs is None else runs
            output = output_run(request.index, STREAM_TOKENS)
            keys = BlockKeys(self._key_table, joined((*prompt, output)))
        arrival = getattr(request, "arrival_s", None)
        tracked = RequestV0(
            index=request.index,
            arrival=request.arrival_ns if arrival is None else arrival,
            prompt_tokens=request.prompt_tokens,
            ends_after=ends_after,
            priority=request.priority,
            keys=keys,
        )
        self._requests[request.index] = tracked
        self.waiting.append(tracked)
        return None

    def schedule(self, now: float | None = None) -> StepV0:
        """Choose the next step. `now` orders uses of cached blocks; None: every call is later than the last."""
        self._num_schedules += 1
        if now is None:
            now = float(self._num_schedules)
        step = StepV0([], [], [], [], [], [], [])
        try:
            if self.config.enable_chunked_prefill:
                batch, budget = self._schedule_chunked(step)
            else:
                batch, budget = self._schedule_default(step)
        except EvictionError:
            _die("AssertionError: ", "the prefix cache evicted a block by an outdated entry")
        except NoFreeBlocksError:
            _die("NoFreeBlocksError: ", "a KV block was needed and none was free")
        if budget.tokens > budget.max_tokens or budget.seqs > budget.max_seqs:
            _die("AssertionError: ", "the step exceeds max_num_batched_tokens or max_num_seqs")
        step.num_batched_tokens = budget.tokens + budget.cached_tokens
        self._describe(step, batch, now)
        return step

    def complete(self, step: Step) -> StepOutput:
        """The step ran: tokens appear, and requests that are through give their blocks back at once."""
        assert isinstance(step, StepV0)
        emitted: list[int] = []
        finished: list[int] = []
        max_model_len = self.config.max_model_len
        for index, new, hits, emits in zip(
            step.requests, step.num_tokens, step.hits, step.emits, strict=True
        ):
            request = self._requests[index]
            request.num_computed_tokens += new + hits
            if request.num_computed_tokens > request.num_tokens:
                said = f"AssertionError: ({request.num_computed_tokens}, {request.num_tokens})"
                _die(said, f"request {index} computed more tokens than it has")
            if request.num_computed_tokens == request.num_tokens:
                request.is_prefill = False
            if not emits:
                continue
            request.num_tokens += 1
            request.num_output_tokens += 1
            emitted.append(index)
            # Longer than max_model_len, not as long: one token later than V1 (12.19).
            if (
                request.num_output_tokens >= request.ends_after
                or request.num_tokens > max_model_len
            ):
                request.status = FINISHED
                self._kv_tokens -= request.num_computed_tokens
                self.blocks.free(request)
                finished.append(index)
                del self._requests[index]
        if finished:
            self.running = deque(r for r in self.running if r.status != FINISHED)
        return StepOutput(emitted, finished)

    def has_requests(self) -> bool:
        return self.has_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Waiting and swapped out."""
        return len(self.waiting) + len(self.swapped)

    @property
    def num_free_blocks(self) -> int:
        """Free GPU blocks; with prefix caching those that hold reusable content count as free."""
        return self.blocks.gpu.num_free

    @property
    def num_free_cpu_blocks(self) -> int:
        return self.blocks.cpu.num_free

    @property
    def num_cached_free_blocks(self) -> int:
        """Of the free GPU blocks, those whose content can still be hit."""
        return 0 if self._cache is None else self._cache.num_cached_free

    @property
    def num_usable_blocks(self) -> int:
        return self.config.num_gpu_blocks

    @property
    def num_kv_tokens(self) -> int:
        """GPU slots that hold a token or are scheduled to; blocks in several tables count once."""
        if self._cache is None:
            return self._kv_tokens
        # Shared blocks are full ones. Two prompts that compute the same block side by side, chunk by
        # chunk, are the one case where that takes off too much.
        shared = self._cache.num_extra_references * self.config.block_size
        return max(0, self._kv_tokens - shared)

    @property
    def counters(self) -> dict[str, int]:
        return {**self._counters, "preemptions": self.num_cumulative_preemption}

    # --- the two policies ----------------------------------------------------------------------------

    def _schedule_default(self, step: StepV0) -> tuple[list[tuple[RequestV0, int, int]], _Budget]:
        """Prefills if any can start, else decodes, else swap-ins too (12.6)."""
        budget = self._new_budget(len(self.running))
        prefills: list[tuple[RequestV0, int, int]] = []
        running, swapped_in = _Scheduled(), _Scheduled()
        if self.swapped:
            self.blocked_by = SWAPPED_QUEUE if self.waiting else None
        else:
            prefills = self._schedule_prefills(budget, step, None)
        if not prefills:
            if self.config.policy == "priority":
                self._force_preemption(budget, step)
            running = self._schedule_running(budget, step, None)
            if not running.preempted and not running.swapped_out:
                swapped_in = self._schedule_swapped(budget, step)
        self.waiting.extendleft(running.preempted)
        for request, _, _ in (*prefills, *running.decodes, *swapped_in.decodes):
            self.running.append(request)
        self.swapped.extend(running.swapped_out)
        if running.prefills or swapped_in.prefills:
            _die("AssertionError: ", "a prefill was scheduled as a decode")
        step.num_preempted = len(running.preempted) + len(running.swapped_out)
        return [*prefills, *running.decodes, *swapped_in.decodes], budget

    def _schedule_chunked(self, step: StepV0) -> tuple[list[tuple[RequestV0, int, int]], _Budget]:
        """Running requests, then swap-ins, then new prefills, all in one step (12.7, 12.11)."""
        budget = self._new_budget(0)
        partial = _PartialPrefills(self.config, self._long_threshold, self.running, self.waiting)
        running = self._schedule_running(budget, step, partial)
        swapped_in = _Scheduled()
        if not running.preempted and not running.swapped_out:
            swapped_in = self._schedule_swapped(budget, step)
        prefills = self._schedule_prefills(budget, step, partial)
        self.waiting.extendleft(running.preempted)
        # Prefills that end with this step are decodes in the next one: before those that do not.
        ending = [p for p in running.prefills if p[0].num_computed_tokens + p[1] == p[0].num_tokens]
        going_on = [
            p for p in running.prefills if p[0].num_computed_tokens + p[1] != p[0].num_tokens
        ]
        for queue in (
            swapped_in.decodes,
            swapped_in.prefills,
            running.decodes,
            ending,
            going_on,
            prefills,
        ):
            self.running.extend(request for request, _, _ in queue)
        self.swapped.extend(running.swapped_out)
        step.num_preempted = len(running.preempted) + len(running.swapped_out)
        batch = [
            *prefills,
            *running.prefills,
            *swapped_in.prefills,
            *running.decodes,
            *swapped_in.decodes,
        ]
        return batch, budget

    # --- one queue at a time -------------------------------------------------------------------------

    def _schedule_running(
        self, budget: _Budget, step: StepV0, partial: _PartialPrefills | None
    ) -> _Scheduled:
        chosen = _Scheduled()
        running, blocks = self.running, self.blocks
        chunked = partial is not None
        while running:
            request = running[0]
            tokens, _ = self._new_tokens(request, RUNNING, budget, partial)
            if not tokens:
                break
            running.popleft()
            counted = not chunked  # the default policy counted all running sequences beforehand
            while not blocks.can_append(request):
                # The one in need leaves the count, not its victim; and only once.
                budget.seqs -= counted
                counted = False
                victim = request
                if running:
                    position = self._victim(running)
                    victim = running[position]
                    del running[position]
                if self._preempt(victim, step, step.swap_out):
                    chosen.swapped_out.append(victim)
                else:
                    chosen.preempted.append(victim)
                if victim is request:
                    break
            else:
                blocks.append(request)
                budget.tokens += tokens
                budget.seqs += chunked
                queue = chosen.prefills if request.is_prefill else chosen.decodes
                queue.append((request, tokens, 0))
        return chosen

    def _schedule_swapped(self, budget: _Budget, step: StepV0) -> _Scheduled:
        """Swap-ins, head first (12.14)."""
        chosen = _Scheduled()
        while self.swapped:
            request = self.swapped[0]
            fit = self.blocks.can_swap_in(request)
            if fit == "later":
                break
            if fit == "never":
                # Its CPU blocks are never freed: 0.8.5 forgets them.
                self._ignore(self.swapped.popleft(), step)
                continue
            tokens, hits = self._new_tokens(request, SWAPPED, budget, None, chunk=False)
            if not tokens or not budget.fits(tokens):
                break
            self.swapped.popleft()
            pairs = self.blocks.swap_in(request)
            request.status = RUNNING
            self._kv_tokens += request.num_computed_tokens
            step.swap_in += pairs
            step.swapped_in[request.index] = len(pairs)
            step.swapped_in_requests.append(request.index)
            self._counters["swapped_in_blocks"] += len(pairs)
            self.blocks.append(request)
            queue = chosen.prefills if request.is_prefill else chosen.decodes
            queue.append((request, tokens + hits, hits) if request.is_prefill else (request, 1, 0))
            budget.tokens += tokens
            budget.cached_tokens += hits
            budget.seqs += 1
        return chosen

    def _schedule_prefills(
        self, budget: _Budget, step: StepV0, partial: _PartialPrefills | None
    ) -> list[tuple[RequestV0, int, int]]:
        """Admissions from the waiting queue, head first (12.8)."""
        chosen: list[tuple[RequestV0, int, int]] = []
        waiting = self.waiting
        self.blocked_by = None
        if budget.tokens == budget.max_tokens:
            self.blocked_by = TOKEN_BUDGET if waiting else None
            return chosen
        passed_over: deque[RequestV0] = deque()
        while waiting:
            request = waiting[0]
            if request.status != WAITING:
                _die(
                    "AssertionError: Waiting sequence group should have only one prompt sequence.",
                    "a request that priority preemption swapped out stands in the waiting queue",
                )
            if partial is not None and partial.passes_over(request):
                passed_over.appendleft(waiting.popleft())
                continue
            tokens, hits = self._new_tokens(request, WAITING, budget, partial)
            if tokens + hits > self._prompt_limit:
                self._ignore(waiting.popleft(), step)
                continue
            fit = self.blocks.can_allocate(request)
            if fit == "later":
                self.blocked_by = KV_FULL
                break
            if fit == "never":
                self._ignore(waiting.popleft(), step)
                continue
            if budget.tokens >= budget.max_tokens or not tokens:
                self.blocked_by = TOKEN_BUDGET
                break
            if not budget.fits(tokens):
                self.blocked_by = MAX_NUM_SEQS if budget.seqs >= budget.max_seqs else TOKEN_BUDGET
                break
            waiting.popleft()
            self.blocks.allocate(request)
            request.status = RUNNING
            if partial is not None:
                partial.admit(request)
            chosen.append((request, tokens + hits, hits))
            budget.tokens += tokens
            budget.cached_tokens += hits
            budget.seqs += 1
        if passed_over:
            self.blocked_by = LONG_PREFILLS
        waiting.extendleft(passed_over)
        return chosen

    def _force_preemption(self, budget: _Budget, step: StepV0) -> None:
        """Priority policy: less urgent running requests make room for the most urgent waiting one (12.16)."""

        def rank(request: RequestV0) -> tuple[int, float]:
            return request.priority, request.arrival

        running = deque(sorted(self.running, key=rank))
        waiting = self.waiting
        if waiting:
            head = waiting.popleft()
            tokens, _ = self._new_tokens(head, WAITING, budget, None)
            while running and rank(running[-1]) > rank(head):
                if head.status != WAITING:
                    _die(
                        "IndexError: list index out of range",
                        "a request that priority preemption swapped out heads the waiting queue",
                    )
                if tokens and self.blocks.can_allocate(head) == "ok" and budget.fits(tokens):
                    break
                victim = running.pop()
                budget.seqs -= 1
                # The copies of a forced swap get lost: 0.8.5 drops the list of pairs.
                self._preempt(victim, step, [])
                waiting.appendleft(victim)
            waiting.appendleft(head)
        self.waiting = deque(sorted(waiting, key=rank))
        self.running = running

    # --- one request at a time -----------------------------------------------------------------------

    def _new_budget(self, seqs: int) -> _Budget:
        return _Budget(self.config.max_num_batched_tokens, self.config.max_num_seqs, seqs)

    def _new_tokens(
        self,
        request: RequestV0,
        status: int,
        budget: _Budget,
        partial: _PartialPrefills | None,
        chunk: bool = True,
    ) -> tuple[int, int]:
        """Tokens to compute next and hit tokens that come with them; (0, 0): no budget (12.9, 12.21)."""
        if request.status != status:
            return 0, 0
        hits = 0
        if request.is_prefill:
            computed = request.num_computed_tokens
            tokens = request.num_tokens - computed
            if self._cache is not None:
                cached = self._cache.cached_prefix_tokens(request)
                if cached < computed and (
                    status != RUNNING or not self.config.enable_chunked_prefill
                ):
                    _die(
                        "AssertionError: Number of cached tokens should not be less than the number of"
                        " computed tokens for a sequence that's still in prefill.",
                        "a request swapped out in mid-prefill comes back under prefix caching",
                    )
                hits = max(0, cached - computed)
                tokens -= hits
                if not tokens and hits:
                    tokens, hits = 1, hits - 1
        else:
            tokens = 1
        if partial is not None:
            left = budget.max_tokens - budget.tokens
            share = self.config.max_num_batched_tokens // max(1, partial.sharing)
            if self._cache is not None:
                # Whole blocks only, also for the one token of a decode.
                left = min(left, share) // self.config.block_size * self.config.block_size
            tokens = min(tokens, left, share)
        return tokens, hits

    def _preempt(self, victim: RequestV0, step: StepV0, pairs: BlockPairs) -> bool:
        """Take the victim's blocks. Returns whether it was swapped out (else it will be recomputed)."""
        mode = self._rule(
            Victim(
                num_tokens=victim.num_tokens,
                num_computed_tokens=victim.num_computed_tokens,
                num_blocks=len(victim.table),
                num_preemptions=victim.num_preemptions,
                is_prefill=victim.is_prefill,
                can_swap_out=self.blocks.can_swap_out(victim),
            )
        )
        self.num_cumulative_preemption += 1
        victim.num_preemptions += 1
        if mode == "swap":
            if not self.blocks.can_swap_out(victim):
                _die(
                    "RuntimeError: Aborted due to the lack of CPU swap space. Please increase the swap"
                    " space to avoid this error.",
                    f"{len(victim.table)} blocks to swap out,"
                    f" {self.blocks.cpu.num_free} of {self.blocks.cpu.num_blocks} CPU blocks free",
                )
            self._kv_tokens -= victim.num_computed_tokens
            moved = self.blocks.swap_out(victim)
            victim.status = SWAPPED
            pairs += moved
            step.swapped_out_requests.append(victim.index)
            if pairs is step.swap_out:
                step.swapped_out[victim.index] = len(moved)
                self._counters["swapped_out_blocks"] += len(moved)
        else:
            self._kv_tokens -= victim.num_computed_tokens
            victim.high_water = max(victim.high_water, victim.num_computed_tokens)
            self.blocks.free(victim)
            victim.status = WAITING
            victim.is_prefill = True
            victim.num_computed_tokens = 0
            step.recomputed.append(victim.index)
        step.preempted.append(victim.index)
        return mode == "swap"

    def _ignore(self, request: RequestV0, step: StepV0) -> None:
        """Give up on a request that can never fit; 0.8.5 ends it without output."""
        request.status = IGNORED
        step.ignored.append(request.index)
        del self._requests[request.index]

    def _describe(self, step: StepV0, batch: list[tuple[RequestV0, int, int]], now: float) -> None:
        """Fill in who runs how much, and note what the step will have done to the KV cache."""
        counters = self._counters
        for request, chunk, _ in batch:
            index, computed = request.index, request.num_computed_tokens
            hits = 0
            if request.is_prefill and request.num_cached_tokens is not None:
                hits = max(0, request.num_cached_tokens - computed)
                if hits >= chunk > 0:
                    # Even where all of a chunk is cached, its last token is computed.
                    hits = chunk - 1
            request.last_access = now
            step.requests.append(index)
            step.num_tokens.append(chunk - hits)
            step.num_computed.append(computed + hits)
            step.hits.append(hits)
            step.is_prefill.append(request.is_prefill)
            step.emits.append(not request.is_prefill or computed + chunk >= request.num_tokens)
            if not request.scheduled_once:
                request.scheduled_once = True
                step.new.append(index)
                if self._cache is not None:
                    counters["prefix_cache_queries_tokens"] += request.num_prompt_tokens
                    counters["prefix_cache_hits_tokens"] += hits
            elif index in step.swapped_in or (not computed and request.high_water):
                step.resumed.append(index)
            if request.high_water > computed + hits:
                again = min(request.high_water, computed + chunk) - computed - hits
                counters["recomputed_tokens"] += max(0, again)
            self._kv_tokens += chunk
        if self._cache is not None and batch:
            self._cache.mark_touched_as_computed()
            self._cpu_cache.mark_touched_as_computed()


def _die(said: str, why: str) -> NoReturn:
    raise EngineDiedV0Error(said, why)
