"""Queues of requests that wait: first come first served, or by priority.

vLLM 0.32.0's v1/core/sched/request_queue.py (spec 3.2).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from vsim.sim.request import Request


class WaitingQueue(Protocol):
    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """A request that arrives."""
        ...

    def push_back(self, request: Request) -> None:
        """A request that ran and had to give way."""
        ...

    def head(self) -> Request: ...

    def pop(self) -> Request: ...

    def put_back(self, skipped: Sequence[Request]) -> None:
        """Requests that were popped, in that order, and only passed over."""
        ...

    def remove(self, request: Request) -> None: ...


class ArrivalQueue:
    """First come, first served; who had to give way comes first of all."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def push_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def head(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def put_back(self, skipped: Sequence[Request]) -> None:
        self._queue.extendleft(reversed(skipped))

    def remove(self, request: Request) -> None:
        self._queue.remove(request)


class PriorityQueue:
    """Most urgent first: (priority, arrival, name), smaller is sooner. Nobody has a place by history."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str | int], int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request.index, request))

    def push_back(self, request: Request) -> None:
        self.push(request)

    def head(self) -> Request:
        return self._heap[0][2]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def put_back(self, skipped: Sequence[Request]) -> None:
        for request in skipped:
            self.push(request)

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        heapq.heapify(self._heap)
