"""What one V0 step may still hold: tokens, sequences, and how partial prefills share them (spec 12.8, 12.9)."""

from __future__ import annotations

from collections import deque

from vsim.sim.config import SchedulerConfig
from vsim.sim.request_v0 import RequestV0


class Budget:
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


class PartialPrefills:
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
