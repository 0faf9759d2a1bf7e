"""V0's decisions: who runs, who waits, who gives way (spec 12.6-12.17).

Follows vllm/core/scheduler.py of 0.8.5 for one sequence per request, without LoRA, speculation, multi-step,
delay factor and the async output processor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vsim.sim.block_manager_v0 import BlockManagerV0
from vsim.sim.budget_v0 import Budget, PartialPrefills
from vsim.sim.config import SchedulerConfig
from vsim.sim.preemption import PreemptionRule, Victim, VictimRule
from vsim.sim.prefix_cache_v0 import PrefixCachingStack
from vsim.sim.request_v0 import IGNORED, RUNNING, SWAPPED, WAITING, RequestV0
from vsim.sim.step_v0 import BlockPairs, StepV0, die

# Why the head of the waiting queue did not get in (Step.blocked_by); the first three are V1's words too.
TOKEN_BUDGET, MAX_NUM_SEQS, KV_FULL = "token_budget", "max_num_seqs", "kv_full"
SWAPPED_QUEUE, LONG_PREFILLS = "swapped_queue", "max_long_partial_prefills"

Chunk = tuple[RequestV0, int, int]  # request, tokens, of these prefix hits


@dataclass(slots=True)
class _Scheduled:
    """What one pass over a queue chose."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    preempted: list[RequestV0] = field(default_factory=list)
    swapped_out: list[RequestV0] = field(default_factory=list)


class QueuesV0:
    """The waiting, running and swapped queues, and the two policies that move requests between them.

    `blocked_by` says after each step why the head of the waiting queue stayed there, None if nobody waits or
    nobody asked. `num_kv_tokens` counts computed tokens of requests on the GPU, a shared block once a request.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManagerV0,
        cache: PrefixCachingStack | None,
        preemption_rule: PreemptionRule,
        victim_rule: VictimRule,
    ) -> None:
        self.waiting: deque[RequestV0] = deque()
        self.running: deque[RequestV0] = deque()
        self.swapped: deque[RequestV0] = deque()
        self.blocked_by: str | None = None
        self.num_kv_tokens = 0
        self.num_cumulative_preemption = 0
        self.fruitless_preemptions = 0  # since a request last got further than it had ever been
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self._config = config
        self._blocks = blocks
        self._cache = cache
        self._preemption_rule = preemption_rule
        self._victim_rule = victim_rule
        self._prompt_limit = config.max_model_len
        if not config.enable_chunked_prefill:
            self._prompt_limit = min(config.max_model_len, config.max_num_batched_tokens)
        self._long_threshold = config.long_prefill_token_threshold
        if config.max_num_partial_prefills > 1 and not self._long_threshold:
            self._long_threshold = int(config.max_model_len * 0.04)

    def choose(self, step: StepV0) -> list[Chunk]:
        """The next batch, in the order 0.8.5 lists it; what it cost the others is noted in `step`."""
        chunked = self._config.enable_chunked_prefill
        batch, budget = self._chunked(step) if chunked else self._prefills_first(step)
        if budget.tokens > budget.max_tokens or budget.seqs > budget.max_seqs:
            die("AssertionError: ", "the step exceeds max_num_batched_tokens or max_num_seqs")
        step.num_batched_tokens = budget.tokens + budget.cached_tokens
        return batch

    def drop_finished(self, finished: int) -> None:
        self.running = deque(r for r in self.running if r.status != finished)

    # --- the two policies ----------------------------------------------------------------------------

    def _prefills_first(self, step: StepV0) -> tuple[list[Chunk], Budget]:
        """Prefills if any can start, else decodes, else swap-ins too (12.6)."""
        budget = self._new_budget(len(self.running))
        prefills: list[Chunk] = []
        running, swapped_in = _Scheduled(), _Scheduled()
        if self.swapped:
            self.blocked_by = SWAPPED_QUEUE if self.waiting else None
        else:
            prefills = self._schedule_prefills(budget, step, None)
        if not prefills:
            if self._config.policy == "priority":
                self._force_preemption(budget, step)
            running = self._schedule_running(budget, step, None)
            if not running.preempted and not running.swapped_out:
                swapped_in = self._schedule_swapped(budget, step)
        self.waiting.extendleft(running.preempted)
        for request, _, _ in (*prefills, *running.decodes, *swapped_in.decodes):
            self.running.append(request)
        self.swapped.extend(running.swapped_out)
        if running.prefills or swapped_in.prefills:
            die("AssertionError: ", "a prefill was scheduled as a decode")
        step.num_preempted = len(running.preempted) + len(running.swapped_out)
        return [*prefills, *running.decodes, *swapped_in.decodes], budget

    def _chunked(self, step: StepV0) -> tuple[list[Chunk], Budget]:
        """Running requests, then swap-ins, then new prefills, all in one step (12.7, 12.11)."""
        budget = self._new_budget(0)
        partial = PartialPrefills(self._config, self._long_threshold, self.running, self.waiting)
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
        self, budget: Budget, step: StepV0, partial: PartialPrefills | None
    ) -> _Scheduled:
        chosen = _Scheduled()
        running, blocks = self.running, self._blocks
        chunked = partial is not None
        while running:
            request = running[0]
            tokens = 1
            if chunked or request.is_prefill:
                tokens, _ = self._new_tokens(request, RUNNING, budget, partial)
                if not tokens:
                    break
            running.popleft()
            counted = not chunked  # the default policy counted all running sequences beforehand
            while not blocks.try_append(request):
                # The one in need leaves the count, not its victim; and only once.
                budget.seqs -= counted
                counted = False
                victim = request
                if running:
                    victim = self._victim_rule(running)
                    if victim is running[-1]:
                        running.pop()
                    else:
                        running.remove(victim)
                if self._preempt(victim, step, step.swap_out):
                    chosen.swapped_out.append(victim)
                else:
                    chosen.preempted.append(victim)
                if victim is request:
                    break
            else:
                budget.tokens += tokens
                budget.seqs += chunked
                queue = chosen.prefills if request.is_prefill else chosen.decodes
                queue.append((request, tokens, 0))
        return chosen

    def _schedule_swapped(self, budget: Budget, step: StepV0) -> _Scheduled:
        """Swap-ins, head first (12.14)."""
        chosen = _Scheduled()
        while self.swapped:
            request = self.swapped[0]
            fit = self._blocks.can_swap_in(request)
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
            pairs = self._blocks.swap_in(request)
            request.status = RUNNING
            self.num_kv_tokens += request.num_computed_tokens
            step.swap_in += pairs
            step.swapped_in[request.index] = len(pairs)
            step.swapped_in_requests.append(request.index)
            self.swapped_in_blocks += len(pairs)
            self._blocks.append(request)
            queue = chosen.prefills if request.is_prefill else chosen.decodes
            queue.append((request, tokens + hits, hits) if request.is_prefill else (request, 1, 0))
            budget.tokens += tokens
            budget.cached_tokens += hits
            budget.seqs += 1
        return chosen

    def _schedule_prefills(
        self, budget: Budget, step: StepV0, partial: PartialPrefills | None
    ) -> list[Chunk]:
        """Admissions from the waiting queue, head first (12.8)."""
        chosen: list[Chunk] = []
        waiting = self.waiting
        self.blocked_by = None
        if budget.tokens == budget.max_tokens:
            self.blocked_by = TOKEN_BUDGET if waiting else None
            return chosen
        passed_over: deque[RequestV0] = deque()
        while waiting:
            request = waiting[0]
            if request.status != WAITING:
                die(
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
            fit = self._blocks.can_allocate(request)
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
            self._blocks.allocate(request)
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

    def _force_preemption(self, budget: Budget, step: StepV0) -> None:
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
                    die(
                        "IndexError: list index out of range",
                        "a request that priority preemption swapped out heads the waiting queue",
                    )
                if tokens and self._blocks.can_allocate(head) == "ok" and budget.fits(tokens):
                    break
                victim = running.pop()
                budget.seqs -= 1
                # The copies of a forced swap get lost: 0.8.5 drops the list of pairs.
                self._preempt(victim, step, [], forced=True)
                waiting.appendleft(victim)
            waiting.appendleft(head)
        self.waiting = deque(sorted(waiting, key=rank))
        self.running = running

    # --- one request at a time -----------------------------------------------------------------------

    def _new_budget(self, seqs: int) -> Budget:
        return Budget(self._config.max_num_batched_tokens, self._config.max_num_seqs, seqs)

    def _new_tokens(
        self,
        request: RequestV0,
        status: int,
        budget: Budget,
        partial: PartialPrefills | None,
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
                    status != RUNNING or not self._config.enable_chunked_prefill
                ):
                    die(
                        "AssertionError: Number of cached tokens should not be less than the number of"
                        " computed tokens for a sequence that's still in prefill. But there are"
                        f" {cached} cached tokens and {computed} computed tokens for sequence"
                        f" {request.index}.",
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
            share = self._config.max_num_batched_tokens // max(1, partial.sharing)
            if self._cache is not None:
                # Whole blocks only, also for the one token of a decode.
                left = min(left, share) // self._config.block_size * self._config.block_size
            tokens = min(tokens, left, share)
        return tokens, hits

    def _preempt(
        self, victim: RequestV0, step: StepV0, pairs: BlockPairs, forced: bool = False
    ) -> bool:
        """Take the victim's blocks. Returns whether it was swapped out (else it will be recomputed)."""
        mode = self._preemption_rule(
            Victim(
                num_tokens=victim.num_tokens,
                num_computed_tokens=victim.num_computed_tokens,
                num_blocks=len(victim.table),
                num_preemptions=victim.num_preemptions,
                is_prefill=victim.is_prefill,
                can_swap_out=self._blocks.can_swap_out(victim),
                forced=forced,
            )
        )
        self.num_cumulative_preemption += 1
        self.fruitless_preemptions += 1
        victim.num_preemptions += 1
        if mode == "swap":
            if not self._blocks.can_swap_out(victim):
                die(
                    "RuntimeError: Aborted due to the lack of CPU swap space. Please increase the swap"
                    " space to avoid this error.",
                    f"{len(victim.table)} blocks to swap out,"
                    f" {self._blocks.cpu.num_free} of {self._blocks.cpu.num_blocks} CPU blocks free",
                )
            self.num_kv_tokens -= victim.num_computed_tokens
            moved = self._blocks.swap_out(victim)
            victim.status = SWAPPED
            pairs += moved
            step.swapped_out_requests.append(victim.index)
            if not forced:
                step.swapped_out[victim.index] = len(moved)
                self.swapped_out_blocks += len(moved)
        else:
            self.num_kv_tokens -= victim.num_computed_tokens
            victim.high_water = max(victim.high_water, victim.num_computed_tokens)
            self._blocks.free(victim)
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
