"""A request trace in columns: what was asked, when, and what it shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One row of a `Trace`, as the engine takes it in.

    `prefix_ids` are content ids of successive `prefix_block_tokens`-token pieces of the prompt (Mooncake's
    `hash_ids`): equal ids mean equal tokens, and the last piece is cut to the prompt's length. Where a
    prompt has fewer ids than pieces, the rest of it is private to this request.
    """

    index: int  # row in the trace; also the request's identity everywhere in vsim
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int  # tokens that will really be generated; the control plane never reads it
    max_tokens: int | None = None  # the client's cap; None: output_tokens, EOS ignored
    priority: int = 0  # smaller is more urgent, as in vLLM
    tenant: int = 0  # index into Trace.tenant_names
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = 0
    session: int = -1  # index into Trace.session_names; -1: belongs to none
    aborted: bool = False  # load until output_tokens are out, then freed: not a completion


@dataclass(frozen=True, slots=True)
class Sessions:
    """Which row waits for which: a turn is sent `think_ns` after the row `after` has ended.

    Both arrays have shape (n,); `after` is -1 where the row is sent at its own `arrival_ns`.
    """

    after: Int64Array
    think_ns: Int64Array


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where a trace came from: enough to say so in a report and to tell two files apart."""

    name: str  # file name without its folder: results must not depend on where the file lay
    format: str  # "azure", "mooncake", "vsim-jsonl", ...
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival (ties keep file order: they are vLLM's FCFS order).

    All columns have shape (n,). Times are integer nanoseconds from the trace's first arrival.
    Optional columns are None where the file says nothing. `prefix_offsets` has shape (n + 1,) and cuts
    `prefix_ids` into rows; ids cover `prefix_block_tokens` tokens each.
    `assumptions` are sentences: everything that was guessed or dropped while reading, to be shown to the
    user and stored in the run.
    """

    arrival_ns: Int64Array
    prompt_tokens: Int64Array
    output_tokens: Int64Array
    source: TraceSource
    max_tokens: Int64Array | None = None
    priority: Int32Array | None = None
    tenant: Int32Array | None = None
    tenant_names: tuple[str, ...] = ()
    sessions: Sessions | None = None
    prefix_offsets: Int64Array | None = None
    prefix_ids: Int64Array | None = None
    prefix_block_tokens: int = 0
    session: Int32Array | None = (
        None  # which conversation or task; index into session_names, -1: none
    )
    session_names: tuple[str, ...] = ()
    # Ended before its natural end (client gone, time-out): occupies the engine for output_tokens, then
    # frees it; counts as load, never as a completion or in a latency percentile.
    aborted: npt.NDArray[np.bool_] | None = None
    # What the file's own clock read at the first arrival, ns; since 1970 where the file has dates.
    origin_ns: int = 0
    assumptions: tuple[str, ...] = ()
    # Counts of rows that the file had but the trace has not, by reason ("failed_in_trace": 12).
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def request(self, index: int) -> TraceRequest:
        """Row `index` as a `TraceRequest`."""
        ids: tuple[int, ...] = ()
        if self.prefix_offsets is not None and self.prefix_ids is not None:
            low, high = int(self.prefix_offsets[index]), int(self.prefix_offsets[index + 1])
            ids = tuple(self.prefix_ids[low:high].tolist())
        return TraceRequest(
            index=index,
            arrival_ns=int(self.arrival_ns[index]),
            prompt_tokens=int(self.prompt_tokens[index]),
            output_tokens=int(self.output_tokens[index]),
            max_tokens=None if self.max_tokens is None else int(self.max_tokens[index]),
            priority=0 if self.priority is None else int(self.priority[index]),
            tenant=0 if self.tenant is None else int(self.tenant[index]),
            prefix_ids=ids,
            prefix_block_tokens=self.prefix_block_tokens,
            session=-1 if self.session is None else int(self.session[index]),
            aborted=self.aborted is not None and bool(self.aborted[index]),
        )

    def __iter__(self) -> Iterator[TraceRequest]:
        return (self.request(index) for index in range(len(self)))

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last; 0.0 for fewer than two requests."""
        return 0.0 if len(self) < 2 else float(self.arrival_ns[-1] - self.arrival_ns[0]) / 1e9

    @classmethod
    def of(
        cls,
        arrival_s: Sequence[float],
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        name: str = "inline",
    ) -> Trace:
        """A small trace written down in code: tests and examples."""
        return cls(
            arrival_ns=np.round(np.asarray(arrival_s, dtype=float) * 1e9).astype(np.int64),
            prompt_tokens=np.asarray(prompt_tokens, dtype=np.int64),
            output_tokens=np.asarray(output_tokens, dtype=np.int64),
            source=TraceSource(name=name, format="inline"),
        )
