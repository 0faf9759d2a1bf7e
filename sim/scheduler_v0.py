"""vLLM 0.8.5's V0 scheduler behind the `Scheduler` protocol: decisions in queues_v0.py, blocks in block_manager_v0.py."""

from __future__ import annotations

from collections.abc import Sequence

from vsim.sim import preemption
from vsim.sim.block_keys import BlockKeys, KeyTable
from vsim.sim.block_manager_v0 import BlockManagerV0, BlockStack, NoFreeBlocksError
from vsim.sim.config import SchedulerConfig
from vsim.sim.content import STREAM_TOKENS, joined, output_run, trace_prompt
from vsim.sim.preemption import PreemptionRule, VictimRule
from vsim.sim.prefix_cache_v0 import EvictionError, PrefixCachingStack
from vsim.sim.queues_v0 import Chunk, QueuesV0
from vsim.sim.request_v0 import FINISHED, RequestV0
from vsim.sim.step import Step, StepOutput
from vsim.sim.step_v0 import LivelockError, StepV0, die
from vsim.traces.trace import TraceRequest

# Preemptions in a row, none of which let any request get further than it had been, that are called a livelock.
LIVELOCK_AFTER = 1000


class SchedulerV0:
    """vLLM 0.8.5's decisions.

    `preemption_rule` and `victim_rule` default to what `config` names, and that to vLLM's own.
    `schedule` and `complete` raise `EngineDiedV0Error` where the real engine would have crashed, and
    `LivelockError` where it would preempt for ever (after `livelock_after` preemptions; None: never).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        preemption_rule: PreemptionRule | None = None,
        victim_rule: VictimRule | None = None,
        livelock_after: int | None = LIVELOCK_AFTER,
    ) -> None:
        self.config = config
        gpu, cpu, size = config.num_gpu_blocks, config.num_cpu_blocks, config.block_size
        self._cache: PrefixCachingStack | None = None
        if config.enable_prefix_caching:
            self._cache = PrefixCachingStack(gpu, size)
            self._cpu_cache = PrefixCachingStack(cpu, size, first_id=gpu)
            self.blocks = BlockManagerV0(self._cache, self._cpu_cache, size)
            self._key_table = KeyTable(size)
        else:
            self.blocks = BlockManagerV0(BlockStack(gpu, size), BlockStack(cpu, size, gpu), size)
        rule = preemption_rule or preemption.preemption_rule(
            config.preemption_mode, config.swap_above_tokens
        )
        victim = victim_rule or preemption.VICTIM_RULES[config.victim_rule]
        self.queues = QueuesV0(config, self.blocks, self._cache, rule, victim)
        self._requests: dict[int, RequestV0] = {}
        self._livelock_after = livelock_after
        self._num_schedules = 0
        self._recomputed_tokens = 0
        self._query_tokens = 0
        self._hit_tokens = 0

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
        self.queues.waiting.append(tracked)
        return None

    def schedule(self, now: float | None = None) -> StepV0:
        """Choose the next step. `now` orders uses of cached blocks; None: every call is later than the last."""
        self._num_schedules += 1
        if now is None:
            now = float(self._num_schedules)
        step = StepV0([], [], [], [], [], [], [])
        try:
            batch = self.queues.choose(step)
        except EvictionError:
            die("AssertionError: ", "the prefix cache evicted a block by an outdated entry")
        except NoFreeBlocksError:
            die("NoFreeBlocksError: ", "a KV block was needed and none was free")
        step.blocked_by = self.queues.blocked_by
        for index in step.ignored:
            del self._requests[index]
        self._describe(step, batch, now)
        fruitless = self.queues.fruitless_preemptions
        if self._livelock_after is not None and fruitless > self._livelock_after:
            raise LivelockError(fruitless, step.preempted)
        return step

    def complete(self, step: Step, ended_transfers: Sequence[int] = ()) -> StepOutput:
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
                die(said, f"request {index} computed more tokens than it has")
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
                self.queues.num_kv_tokens -= request.num_computed_tokens
                self.blocks.free(request)
                finished.append(index)
                del self._requests[index]
        if finished:
            self.queues.drop_finished(FINISHED)
        if emitted:
            self.queues.fruitless_preemptions = 0
        return StepOutput(emitted, finished)

    def has_requests(self) -> bool:
        return self.has_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self.queues.running)

    @property
    def num_waiting(self) -> int:
        """Waiting and swapped out."""
        return len(self.queues.waiting) + len(self.queues.swapped)

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
            return self.queues.num_kv_tokens
        # Shared blocks are full ones. Two prompts that compute the same block side by side, chunk by
        # chunk, are the one case where that takes off too much.
        shared = self._cache.num_extra_references * self.config.block_size
        return max(0, self.queues.num_kv_tokens - shared)

    @property
    def num_cumulative_preemption(self) -> int:
        """Preemptions so far, of either kind, forced ones included (12.18)."""
        return self.queues.num_cumulative_preemption

    @property
    def blocked_by(self) -> str | None:
        """Why the head of the waiting queue did not get in at the last `schedule()`, None if it did.

        "token_budget", "max_num_seqs", "kv_full", "swapped_queue" or "max_long_partial_prefills".
        """
        return self.queues.blocked_by

    @property
    def coin_flips(self) -> int:
        """Decisions so far that 0.8.5 leaves to chance (prefix_cache_v0.py `Evictor`): it may have died there."""
        return 0 if self._cache is None else self._cache.coin_flips + self._cpu_cache.coin_flips

    @property
    def counters(self) -> dict[str, int]:
        return {
            "preemptions": self.queues.num_cumulative_preemption,
            "recomputed_tokens": self._recomputed_tokens,
            "swapped_out_blocks": self.queues.swapped_out_blocks,
            "swapped_in_blocks": self.queues.swapped_in_blocks,
            "prefix_cache_queries_tokens": self._query_tokens,
            "prefix_cache_hits_tokens": self._hit_tokens,
        }

    def _describe(self, step: StepV0, batch: list[Chunk], now: float) -> None:
        """Fill in who runs how much, and note what the step will have done to the KV cache."""
        queues = self.queues
        requests, num_tokens, num_computed = step.requests, step.num_tokens, step.num_computed
        all_hits, is_prefill, emits = step.hits, step.is_prefill, step.emits
        for request, chunk, _ in batch:
            index, computed = request.index, request.num_computed_tokens
            prefill = request.is_prefill
            hits = 0
            if prefill and request.num_cached_tokens is not None:
                hits = max(0, request.num_cached_tokens - computed)
                if hits >= chunk > 0:
                    # Even where all of a chunk is cached, its last token is computed.
                    hits = chunk - 1
            request.last_access = now
            requests.append(index)
            num_tokens.append(chunk - hits)
            num_computed.append(computed + hits)
            all_hits.append(hits)
            is_prefill.append(prefill)
            emits.append(not prefill or computed + chunk >= request.num_tokens)
            queues.num_kv_tokens += chunk
            if prefill or step.swapped_in:
                self._note_admission(step, request, chunk, hits)
            if computed + chunk > request.high_water:
                queues.fruitless_preemptions = 0
        if self._cache is not None and batch:
            self._cache.mark_touched_as_computed()
            self._cpu_cache.mark_touched_as_computed()

    def _note_admission(self, step: StepV0, request: RequestV0, chunk: int, hits: int) -> None:
        """Is it new or back, and how much of its chunk had been computed before?"""
        index, before = request.index, request.num_computed_tokens + hits
        if not request.scheduled_once:
            request.scheduled_once = True
            step.new.append(index)
            if self._cache is not None:
                self._query_tokens += request.num_prompt_tokens
                self._hit_tokens += hits
        elif index in step.swapped_in or (not request.num_computed_tokens and request.high_water):
            step.resumed.append(index)
        if request.high_water > before:
            again = min(request.high_water, request.num_computed_tokens + chunk) - before
            self._recomputed_tokens += max(0, again)
