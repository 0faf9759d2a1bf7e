"""What each tenant may have at once and per second, and who of its requests waits for that. No SimPy here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vsim.sim.fleet.spec import TENANT_IN_FLIGHT, TENANT_TOKENS, TenantLimit, Tenants

NS = 1_000_000_000


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's: requests in the fleet, tokens left, requests that wait."""

    limit: TenantLimit
    in_fleet: int = 0
    tokens: float = 0.0  # may be negative: an answer's length is known once it is there
    at_ns: int = 0
    waiting: deque[int] = field(default_factory=deque)
    letting_in: bool = False

    def __post_init__(self) -> None:
        self.tokens = self.limit.burst

    def refusal(self, now: int) -> str | None:
        """What stands against one more request now."""
        limit = self.limit
        if limit.max_in_flight is not None and self.in_fleet >= limit.max_in_flight:
            return TENANT_IN_FLIGHT
        self._refill(now)
        return TENANT_TOKENS if limit.tokens_per_s is not None and self.tokens <= 0 else None

    def take(self, now: int, tokens: int) -> None:
        """A request goes in; its prompt is paid for."""
        self.in_fleet += 1
        self.pay(now, tokens)

    def pay(self, now: int, tokens: int) -> None:
        self._refill(now)
        self.tokens -= tokens

    def ns_until_tokens(self, now: int) -> int:
        """ns until there are tokens again."""
        self._refill(now)
        assert self.limit.tokens_per_s is not None
        return max(1, math.floor(-self.tokens / self.limit.tokens_per_s * NS) + 1)

    def _refill(self, now: int) -> None:
        rate = self.limit.tokens_per_s
        if rate is not None:
            more = rate * (now - self.at_ns) / NS
            self.tokens = min(self.limit.burst, self.tokens + more)
        self.at_ns = now


class Accounts:
    """Every tenant's account, by its code in the trace; None where nothing limits it."""

    def __init__(self, tenants: Tenants, names: Sequence[str]) -> None:
        self._tenants, self._names = tenants, names
        self._by_code: dict[int, Account | None] = {}

    def of(self, code: int) -> Account | None:
        if code not in self._by_code:
            name = self._names[code] if 0 <= code < len(self._names) else ""
            limit = self._tenants.named.get(name, self._tenants.each)
            self._by_code[code] = None if limit is None else Account(limit)
        return self._by_code[code]

    @property
    def num_waiting(self) -> int:
        return sum(len(account.waiting) for account in self._by_code.values() if account)
