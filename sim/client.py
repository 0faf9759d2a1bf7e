"""The client: who sends what when, open or closed loop, and what it saw of each request."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import simpy

from vsim.traces.trace import Trace

NEVER = -1


class Client:
    """Sends the trace's requests and stamps them, as `vllm bench serve` does.

    Open loop: a request goes out at its arrival. With `max_concurrency` it first takes a place at a FIFO
    gate (vLLM 0.32 benchmarks/serve.py: an asyncio semaphore), and TTFT starts once it is through. A turn
    that waits for another one (`Trace.sessions`) goes out `think_ns` after that one ended.
    `send(index)` is the way to the engine (or the router); `finished` must be told of every end.
    Times are integer ns. `sent_ns` has shape (n,), -1 where a request never went out.
    """

    def __init__(
        self,
        env: simpy.Environment,
        trace: Trace,
        send: Callable[[int], None],
        max_concurrency: int | None = None,
    ) -> None:
        self.env = env
        self.trace = trace
        self._send = send
        self._max_concurrency = max_concurrency
        self._in_flight = 0
        self._gate: deque[int] = deque()
        self._followers: dict[int, list[int]] = defaultdict(list)
        if trace.sessions is not None:
            for index, after in enumerate(trace.sessions.after.tolist()):
                if after >= 0:
                    self._followers[after].append(index)
        self.arrival_ns: list[int] = trace.arrival_ns.tolist()
        self.sent_ns: list[int] = [NEVER] * len(trace)
        self.num_ended = 0

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The SimPy process that lets the trace's own arrivals happen."""
        after = None if self.trace.sessions is None else self.trace.sessions.after
        for index in range(len(self.trace)):
            if after is not None and after[index] >= 0:
                continue  # sent when its predecessor ends
            wait = self.arrival_ns[index] - self.env.now
            if wait > 0:
                yield self.env.timeout(wait)
            self._arrive(index)

    def _arrive(self, index: int) -> None:
        if self._max_concurrency is not None and self._in_flight >= self._max_concurrency:
            self._gate.append(index)
        else:
            self._go(index)

    def _go(self, index: int) -> None:
        self._in_flight += 1
        self.sent_ns[index] = int(self.env.now)
        self._send(index)

    def finished(self, index: int) -> None:
        """Request `index` ended (served, rejected or failed): the next in line may go."""
        self.num_ended += 1
        self._in_flight -= 1
        for follower in self._followers.pop(index, ()):
            self.env.process(self._follow(follower))
        if self._gate and (
            self._max_concurrency is None or self._in_flight < self._max_concurrency
        ):
            self._go(self._gate.popleft())

    def _follow(self, index: int) -> Generator[simpy.Event, Any, None]:
        assert self.trace.sessions is not None
        yield self.env.timeout(int(self.trace.sessions.think_ns[index]))
        self.arrival_ns[index] = int(self.env.now)
        self._arrive(index)

    def columns(self) -> dict[str, np.ndarray]:
        """`arrival_ns` and `sent_ns` as they came about, each of shape (n,)."""
        return {
            "arrival_ns": np.asarray(self.arrival_ns, dtype=np.int64),
            "sent_ns": np.asarray(self.sent_ns, dtype=np.int64),
        }
