"""A run: what happened to every request and in every step, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]

# How a request ended. Codes are stored in the `status` column of Run.requests.
FINISHED, REJECTED, UNFINISHED, ABORTED = 0, 1, 2, 3
STATUS_NAMES = ("finished", "rejected", "unfinished", "aborted")

# Column -> dtype. Times are integer ns on the client's clock, from the run's first arrival; -1: never.
REQUEST_COLUMNS: dict[str, str] = {
    "request": "int64",  # row in the trace
    "arrival_ns": "int64",  # when the trace (or the arrival process) wanted it sent
    "sent_ns": "int64",  # when the client sent it; later than arrival only under --max-concurrency
    "first_scheduled_ns": "int64",  # first admission by the scheduler
    "first_token_ns": "int64",
    "finish_ns": "int64",  # last token, or the moment of rejection
    "prompt_tokens": "int64",
    "output_tokens": "int64",  # tokens generated
    "cached_tokens": "int64",  # prefix-cache hit at first admission
    "preemptions": "int32",
    "recomputed_tokens": "int64",  # tokens computed again after preemptions (hits on own blocks excluded)
    "status": "int8",
    "reason": "int16",  # index into Run.reasons, -1: none
    "tenant": "int32",
    "priority": "int32",
}

STEP_COLUMNS: dict[str, str] = {
    "start_ns": "int64",  # device start
    "end_ns": "int64",  # outputs processed
    "tokens": "int32",
    "prefill_tokens": "int32",  # tokens in chunks longer than one
    "prefill_seqs": "int32",
    "decodes": "int32",
    "decode_context": "int64",  # sum over decodes of tokens in KV before the step
    "running": "int32",  # right after schedule()
    "waiting": "int32",
    "kv_blocks_used": "int32",  # right after schedule(), of all groups
    "kv_tokens_used": "int64",  # slots holding (or about to hold) a token: used <= blocks * block_size
    "preempted": "int32",
    "swapped_blocks": "int32",  # V0: in + out
}

# Columns that a run may have beside those: where it has them, metrics are exact instead of derived.
OPTIONAL_REQUEST_COLUMNS: dict[str, str] = {
    "replica": "int32",  # which replica served the request, -1: none
    "routed_ns": "int64",  # when the replica got it: after network, router, failed attempts; -1: never
    "network_ns": "int64",  # one way between client and fleet
    "prefill_replica": "int32",  # which replica computed the prompt, where pools share the work
    "handed_over_ns": "int64",  # when it had, and the request went to `replica`; -1: it stayed
    "attempts": "int32",  # times a replica was asked; the marks are the last attempt's
}
OPTIONAL_STEP_COLUMNS: dict[str, str] = {
    "emitted": "int32",  # output tokens handed to clients at end_ns
    "replica": "int32",  # which replica ran the step; without it there is one
}


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened to the fleet, not to a request: `kind` is e.g. "replica_down"."""

    at_ns: int
    kind: str
    replica: int = -1  # -1: none in particular
    text: str = ""  # more of it, in words


@dataclass(frozen=True, slots=True)
class Run:
    """Requests, steps and pooled inter-token gaps, with what produced them.

    `itl_ns`, `itl_count`: the multiset of all gaps between successive tokens of a request, as distinct
    values (ascending) and how often each occurred; exact, and small even for a million requests.
    `config` is JSON-ready: deployment, resolved flags with their origin. `provenance` likewise: version,
    trace source and hash, profile, seed, command line without paths. `assumptions` are sentences.
    """

    origin: Literal["simulated", "measured"]
    requests: dict[str, Column]
    steps: dict[str, Column]
    itl_ns: npt.NDArray[np.int64]
    itl_count: npt.NDArray[np.int64]
    block_size: int
    num_gpu_blocks: int  # usable blocks
    reasons: tuple[str, ...] = ()
    tenant_names: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    # Totals that no column carries: "prefix_cache_queries_tokens", "prefix_cache_hits_tokens", "swap_bytes", ...
    counters: dict[str, int] = field(default_factory=dict)
    # Request (its row), when it was preempted, when it ran again, ns: shape (k, 3). None: not recorded.
    preemption_spans: npt.NDArray[np.int64] | None = None
    end_ns: int = 0
    # None: ran to its end. Otherwise one sentence: stalled, unstable, engine died, simulated-time limit.
    ended_early: str | None = None
    events: tuple[RunEvent, ...] = ()  # in order of time

    @property
    def num_requests(self) -> int:
        return len(self.requests["request"])
