"""Traces from traces: a part, several as one, more or less load, and without what could identify anyone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.traces.arrivals import select, select_any
from vsim.traces.trace import Int32Array, Int64Array, Sessions, Trace, TraceSource


def slice_trace(
    trace: Trace,
    *,
    from_s: float = 0.0,
    to_s: float | None = None,
    tenant: str | None = None,
    session: str | None = None,
    min_prompt_tokens: int = 0,
    max_prompt_tokens: int | None = None,
) -> Trace:
    """The requests that fit all conditions; times count from the trace's first arrival, `to_s` excluded.

    Raises UserError for an unknown tenant or session, or if nothing is left.
    """
    for name, value in (("from_s", from_s), ("to_s", to_s)):
        if value is not None and not math.isfinite(value):
            raise UserError(f"{name}={value} must be a finite number of seconds")
    seconds = trace.arrival_ns / 1e9
    keep = seconds >= from_s
    if to_s is not None:
        keep &= seconds < to_s
    if tenant is not None:
        keep &= _named(trace.tenant, trace.tenant_names, tenant, "tenant")
    if session is not None:
        keep &= _named(trace.session, trace.session_names, session, "session")
    keep &= trace.prompt_tokens >= min_prompt_tokens
    if max_prompt_tokens is not None:
        keep &= trace.prompt_tokens <= max_prompt_tokens
    rows = np.flatnonzero(keep)
    if not len(rows):
        raise UserError(
            f"{trace.source.name}: no request fits the conditions (the trace lasts {trace.span_s:g} s)"
        )
    return select(trace, rows, f"A part of the trace: {len(rows)} of {len(trace)} requests.")


def _named(
    column: Int32Array | None, names: tuple[str, ...], name: str, what: str
) -> npt.NDArray[np.bool_]:
    if column is None or name not in names:
        raise UserError(f"no {what} {name!r}; there are {', '.join(names[:20]) or 'none'}")
    return np.asarray(column == names.index(name))


def merge(traces: Sequence[Trace]) -> Trace:
    """Several traces played together, each from its own first arrival; ties keep the order given.

    Content of different traces is taken as different; a trace without tenants becomes one, called after it.
    Raises UserError for no trace, or prefix ids of different block sizes.
    """
    if not traces:
        raise UserError("nothing to merge")
    sizes = {trace.prefix_block_tokens for trace in traces if trace.prefix_ids is not None}
    if len(sizes) > 1:
        raise UserError(
            f"can't merge prefix ids of {', '.join(map(str, sorted(sizes)))} tokens in one trace"
        )
    n = sum(map(len, traces))
    order = np.argsort(np.concatenate([trace.arrival_ns for trace in traces]), kind="stable")
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    tenants, tenant_names = _merged_names([_tenants_of(trace) for trace in traces])
    sessions, session_names = _merged_names(
        [
            (
                trace.session if trace.session is not None else np.full(len(trace), -1, np.int32),
                tuple(f"{at}:{name}" for name in trace.session_names),
            )
            for at, trace in enumerate(traces)
        ]
    )
    offsets, ids = _merged_ids(traces, order)
    dropped: dict[str, int] = {}
    for trace in traces:
        for reason, count in trace.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count

    def column(name: str, default: Int64Array | int) -> npt.NDArray[np.generic] | None:
        values = [getattr(trace, name) for trace in traces]
        if all(value is None for value in values):
            return None
        parts = []
        for trace, value in zip(traces, values, strict=True):
            missing = trace.output_tokens if name == "max_tokens" else np.full(len(trace), default)
            parts.append(missing if value is None else value)
        present = next(value for value in values if value is not None)
        return np.concatenate(parts)[order].astype(present.dtype)

    return Trace(
        arrival_ns=np.concatenate([trace.arrival_ns for trace in traces])[order],
        prompt_tokens=np.concatenate([trace.prompt_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        source=TraceSource("+".join(trace.source.name for trace in traces), "merged"),
        max_tokens=column("max_tokens", 0),  # type: ignore[arg-type]
        priority=column("priority", 0),  # type: ignore[arg-type]
        tenant=tenants[order],
        tenant_names=tenant_names,
        sessions=_merged_sessions(traces, order, place),
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=sizes.pop() if sizes else 0,
        session=sessions[order] if session_names else None,
        session_names=session_names,
        aborted=column("aborted", 0),  # type: ignore[arg-type]
        assumptions=(
            *dict.fromkeys(sentence for trace in traces for sentence in trace.assumptions),
            f"{len(traces)} traces are played together, each from its own first arrival; they share no content.",
        ),
        dropped=dropped,
    )


def _tenants_of(trace: Trace) -> tuple[Int32Array, tuple[str, ...]]:
    if trace.tenant is not None:
        return trace.tenant, trace.tenant_names
    return np.zeros(len(trace), dtype=np.int32), (trace.source.name,)


def _merged_names(
    columns: Sequence[tuple[Int32Array, tuple[str, ...]]],
) -> tuple[Int32Array, tuple[str, ...]]:
    code: dict[str, int] = {}
    parts = []
    for column, names in columns:
        # The extra last entry answers for -1: none.
        table = np.asarray(
            [*(code.setdefault(name, len(code)) for name in names), -1], dtype=np.int32
        )
        parts.append(table[column])
    return np.concatenate(parts), tuple(code)


def _merged_sessions(
    traces: Sequence[Trace], order: Int64Array, place: Int64Array
) -> Sessions | None:
    if all(trace.sessions is None for trace in traces):
        return None
    afters, thinks, base = [], [], 0
    for trace in traces:
        if trace.sessions is None:
            afters.append(np.full(len(trace), -1, dtype=np.int64))
            thinks.append(np.zeros(len(trace), dtype=np.int64))
        else:
            before = trace.sessions.after
            afters.append(np.where(before >= 0, place[np.maximum(before, 0) + base], -1))
            thinks.append(trace.sessions.think_ns)
        base += len(trace)
    return Sessions(np.concatenate(afters)[order], np.concatenate(thinks)[order])


def _merged_ids(
    traces: Sequence[Trace], order: Int64Array
) -> tuple[Int64Array | None, Int64Array | None]:
    """Ids renumbered, so that no two traces share one."""
    if all(trace.prefix_ids is None for trace in traces):
        return None, None
    lengths, parts, base = [], [], 0
    for trace in traces:
        if trace.prefix_ids is None or trace.prefix_offsets is None:
            lengths.append(np.zeros(len(trace), dtype=np.int64))
            continue
        distinct, renumbered = np.unique(trace.prefix_ids, return_inverse=True)
        lengths.append(np.diff(trace.prefix_offsets))
        parts.append(renumbered.astype(np.int64) + base)
        base += len(distinct)
    length, ids = np.concatenate(lengths), np.concatenate(parts)
    starts = np.cumsum(length) - length
    length, starts = length[order], starts[order]
    offsets = np.concatenate(([0], np.cumsum(length))).astype(np.int64)
    at = np.arange(len(ids)) + np.repeat(starts - offsets[:-1], length)
    return offsets, ids[at]


def scale_load(trace: Trace, factor: float, seed: int = 0, jitter_s: float | None = None) -> Trace:
    """More or less traffic over the same time: each request is there `factor` times on average.

    A copy comes up to `jitter_s` later (default: ten mean gaps), with content of its own; sessions are
    kept or copied whole. Raises UserError unless 0 < factor <= 1000.
    """
    if not 0 < factor <= 1000:
        raise UserError(f"load factor {factor} must be above 0 and at most 1000")
    if jitter_s is None:
        jitter_s = 10 * trace.span_s / max(1, len(trace) - 1)
    if not (jitter_s >= 0 and math.isfinite(jitter_s)):
        raise UserError(f"jitter_s={jitter_s} must be finite and not negative")
    rng = np.random.default_rng(seed)
    unit = np.arange(len(trace)) if trace.session is None else _units(trace)
    copies: list[Trace] = []
    whole = math.floor(factor)
    for at in range(math.ceil(factor)):
        share = 1.0 if at < whole else factor - whole
        chosen = rng.random(int(unit.max()) + 1) < share
        rows = np.flatnonzero(chosen[unit])
        if not len(rows):
            continue
        part = select(trace, rows, "")
        shift = trace.arrival_ns[rows[0]]
        moved = part.arrival_ns + shift
        if at:
            late = rng.random(len(chosen)) * jitter_s
            moved = moved + np.round(late[unit[rows]] * 1e9).astype(np.int64)
        copies.append(dataclasses.replace(_resorted(part, moved), assumptions=(), dropped={}))
    if not copies:
        raise UserError(f"load factor {factor} leaves no request of {len(trace)}")
    merged = merge(copies)
    return dataclasses.replace(
        merged,
        arrival_ns=merged.arrival_ns - merged.arrival_ns[0],
        source=trace.source,
        tenant=merged.tenant if trace.tenant is not None else None,
        tenant_names=merged.tenant_names if trace.tenant is not None else (),
        origin_ns=trace.origin_ns,
        assumptions=(
            *trace.assumptions,
            f"Load is multiplied by {factor:g}: copies come up to {jitter_s:.3g} s later (seed {seed}) and share no "
            "content with their originals.",
        ),
        dropped=dict(trace.dropped),
    )


def _units(trace: Trace) -> Int64Array:
    """What is kept or copied together: a session, or a request that belongs to none."""
    assert trace.session is not None
    alone = len(trace.session_names) + np.arange(len(trace))
    return np.where(trace.session >= 0, trace.session, alone).astype(np.int64)


def _resorted(trace: Trace, arrival_ns: Int64Array) -> Trace:
    """The trace with new times, rows put in their order. Its first arrival need not be at 0."""
    order = np.argsort(arrival_ns, kind="stable")
    sorted_trace = dataclasses.replace(select_any(trace, order), arrival_ns=arrival_ns[order])
    return sorted_trace


def anonymize(trace: Trace, round_tokens: int = 1) -> Trace:
    """Without names, dates, hashes or the original ids; there is no key, so there is no way back.

    Tenants and sessions are numbered by first appearance, content ids likewise. `round_tokens` rounds
    lengths up to a multiple. What remains are times, lengths and who shares with whom.
    """
    if round_tokens < 1:
        raise UserError(f"round_tokens={round_tokens} must be at least 1")

    def rounded(column: Int64Array) -> Int64Array:
        return -(-column // round_tokens) * round_tokens

    ids = trace.prefix_ids
    if ids is not None:
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        rank = np.empty(len(first), dtype=np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        ids = rank[inverse]
    said = ["Names, dates and ids of the original are removed."]
    if round_tokens > 1:
        said.append(f"Lengths are rounded up to multiples of {round_tokens} tokens.")
    return dataclasses.replace(
        trace,
        prompt_tokens=rounded(trace.prompt_tokens),
        output_tokens=rounded(trace.output_tokens),
        max_tokens=None if trace.max_tokens is None else rounded(trace.max_tokens),
        source=TraceSource("anonymized", "anonymized"),
        tenant_names=tuple(f"t{at}" for at in range(len(trace.tenant_names))),
        session_names=tuple(f"s{at}" for at in range(len(trace.session_names))),
        prefix_ids=ids,
        origin_ns=0,
        assumptions=tuple(said),
    )
