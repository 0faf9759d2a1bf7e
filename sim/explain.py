"""Where a request's time went: parts that add up to its latency, exactly, and who was in the way.

Everything is read off a `Run`; nothing is simulated again. Time is cut at engine steps, and each stretch
gets one label from the state right after that step's `schedule()`:

- Before its first admission a request waits for the step in progress to end (nobody looks at the queue
  until then), and after that for the reason the scheduler had. vLLM V1's scheduler stops admitting for one
  of four reasons (vLLM 0.32 v1/core/sched/scheduler.py, the waiting loop): all seats taken, token budget
  used up, a preemption in this very step, or no room in the KV cache for the whole next prompt. The first
  three are seen in the step; the fourth is what is left.
- From admission to first token it is prefilled; then it decodes, in steps that only decode or in steps that
  also carry prompt chunks of others: that is where a long prompt stalls the rest.
- Between a preemption and its return it is out of the engine.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.sim.run import FINISHED, STATUS_NAMES, Run
from vsim.sim.summary import setting
from vsim.sim.text import percent, plain, reason

Int64Array = npt.NDArray[np.int64]

STEP_IN_PROGRESS, SEATS, BUDGET, PREEMPTING, KV_CACHE = range(5)
DECODE_ONLY, MIXED, BETWEEN = range(3)

# Parts in the order in which a request lives through them: key, words.
PARTS: tuple[tuple[str, str], ...] = (
    ("wait_step", "waiting for the step in progress"),
    ("wait_seats", "waiting: all seats taken (max_num_seqs)"),
    ("wait_budget", "waiting: token budget used up (max_num_batched_tokens)"),
    ("wait_preempting", "waiting: a preemption ended the step's admissions"),
    ("wait_kv", "waiting: no room in the KV cache for the next prompt"),
    ("prefill", "prefill"),
    ("decode", "decode, in steps that only decode"),
    ("decode_stalled", "decode, in steps that carry prompt chunks too"),
    ("decode_host", "between steps"),
    ("preempted", "preempted: out of the engine"),
    ("fleet", "network, router, failed attempts"),
)
KEYS = tuple(key for key, _ in PARTS)
KNOBS = {
    "wait_seats": "raise --max-num-seqs, if the KV cache has room",
    "wait_budget": "raise --max-num-batched-tokens (longer steps: ITL suffers), or add a replica",
    "wait_preempting": "give the KV cache more blocks: preemptions stop admissions",
    "wait_kv": "give the KV cache more blocks: --gpu-memory-utilization, --kv-cache-dtype fp8, more GPUs",
    "prefill": "a faster GPU, more tensor parallelism, or a longer shared prefix",
    "decode": "a faster GPU or fewer sequences at once (--max-num-seqs)",
    "decode_stalled": "lower --max-num-batched-tokens or --long-prefill-token-threshold: shorter chunks",
    "fleet": "more replicas, or looser limits in the fleet file",
    "preempted": "give the KV cache more blocks, or admit less: --max-num-seqs, --watermark",
}


def breakdown(run: Run, by: str = "e2el") -> Int64Array:
    """ns of each part for each request, shape (n, len(PARTS)).

    Each finished row sums to finish − send exactly; with `by` "ttft" to first token − send. Rows of requests that did not finish are 0. Raises UserError for a run without steps.
    """
    columns = run.requests
    if not len(run.steps["start_ns"]):
        raise UserError("this run has no engine steps: nothing is known of where its time went")
    done = (columns["status"] == FINISHED) & (columns["first_scheduled_ns"] >= 0)
    parts = np.zeros((run.num_requests, len(PARTS)), dtype=np.int64)
    until = "first_token_ns" if by == "ttft" else "finish_ns"
    for rows, steps in _replicas(run, done):
        parts[rows] = _of_replica(run, rows, steps, until)
        if "prefill_replica" in run.requests:
            # Until the first token it was another replica's, whose steps are below.
            parts[rows] -= _of_replica(run, rows, steps, "first_token_ns")
    if "prefill_replica" in run.requests:
        for rows, steps in _replicas(run, done, "prefill_replica"):
            parts[rows] += _of_replica(run, rows, steps, "first_token_ns")
    return parts


def _replicas(
    run: Run, done: npt.NDArray[np.bool_], column: str = "replica"
) -> list[tuple[Int64Array, Int64Array]]:
    """(finished requests, steps) of each replica, as row numbers; `column` says whose a request is."""
    replica = run.steps.get("replica")
    if replica is None or "replica" not in run.requests:
        return [(np.flatnonzero(done), np.arange(len(run.steps["start_ns"])))]
    return [
        (
            np.flatnonzero(done & (run.requests[column] == which)),
            np.flatnonzero(replica == which),
        )
        for which in np.unique(replica)
    ]


def _of_replica(run: Run, rows: Int64Array, steps: Int64Array, until: str) -> Int64Array:
    columns = {name: column[rows] for name, column in run.requests.items()}
    start, end = run.steps["start_ns"][steps], run.steps["end_ns"][steps]
    sent, finish, first = columns["sent_ns"], columns[until], columns["first_token_ns"]
    parts = np.zeros((len(rows), len(PARTS)), dtype=np.int64)
    if "routed_ns" in columns:
        # What the fleet around the replica took, there and back.
        back = columns.get("network_ns", np.int64(0))
        parts[:, KEYS.index("fleet")] = columns["routed_ns"] - sent + back
        sent, finish, first = columns["routed_ns"], finish - back, first - back
    # Marks in order, whatever clock a measured run took each from.
    scheduled = np.clip(columns["first_scheduled_ns"], sent, finish)
    first = np.clip(first, scheduled, finish)

    # Before anyone looks at the queue: up to the first step that starts after the send.
    following = np.append(start, np.iinfo(np.int64).max)[np.searchsorted(start, sent, side="left")]
    looked = np.minimum(following, scheduled)
    parts[:, 0] = looked - sent
    waits = _Labels(start, _wait_labels(run, steps), PREEMPTING + 2)
    parts[:, 0:5] += waits.between(looked, scheduled)

    out = _Spans(run, rows)
    parts[:, KEYS.index("preempted")] = out.total(scheduled, finish)
    parts[:, KEYS.index("prefill")] = (first - scheduled) - out.total(scheduled, first)

    chunks = run.steps["prefill_tokens"][steps] > 0
    edges, labels = _busy(start, end, np.where(chunks, MIXED, DECODE_ONLY))
    decode = _Labels(edges, labels, 3)
    spent = decode.between(first, finish)
    row, a, b = out.within(first, finish)
    np.subtract.at(spent, row, decode.between(a, b))
    at = KEYS.index("decode")
    parts[:, at : at + 3] = spent
    return parts


def _wait_labels(run: Run, steps: Int64Array) -> Int64Array:
    """Why nobody more was admitted in each step."""
    seats, active = (setting(run.config, n) for n in ("max_num_seqs", "max_num_active_seqs"))
    limits = [n for n in (seats, active) if isinstance(n, int)]
    budgets = [
        setting(run.config, n) for n in ("max_num_scheduled_tokens", "max_num_batched_tokens")
    ]
    budget = next((n for n in budgets if isinstance(n, int)), None)
    label = np.full(len(steps), KV_CACHE, dtype=np.int64)
    label[run.steps["preempted"][steps] > 0] = PREEMPTING
    if budget is not None:
        label[run.steps["tokens"][steps] >= budget] = BUDGET
    if limits:
        label[run.steps["running"][steps] >= min(limits)] = SEATS
    return label


def _busy(start: Int64Array, end: Int64Array, label: Int64Array) -> tuple[Int64Array, Int64Array]:
    """(edges, labels): a step's label while it runs, BETWEEN where none does."""
    following = np.append(start[1:], np.iinfo(np.int64).max)
    gap = np.flatnonzero(end < following)
    edges = np.concatenate([start, end[gap]])
    labels = np.concatenate([label, np.full(len(gap), BETWEEN)])
    order = np.lexsort((np.concatenate([np.ones(len(start)), np.zeros(len(gap))]), edges))
    return edges[order], labels[order]


class _Labels:
    """Labels over time: `labels[i]` holds from `edges[i]` on; before the first edge, the last label."""

    def __init__(self, edges: Int64Array, labels: Int64Array, count: int) -> None:
        self._edges = edges
        self._labels = labels
        self._count = count

    def between(self, start: Int64Array, end: Int64Array) -> Int64Array:
        """ns of each label from `start` to `end`, shape (k, count); rows sum to end − start exactly."""
        end = np.maximum(start, end)
        result = np.empty((len(start), self._count), dtype=np.int64)
        places = [np.searchsorted(self._edges, when, side="right") - 1 for when in (start, end)]
        width = np.diff(self._edges)
        for label in range(self._count):  # one at a time: a run may have millions of steps
            total = np.concatenate([[0], np.cumsum(np.where(self._labels[:-1] == label, width, 0))])
            low, high = (
                self._until(label, total, when, place)
                for when, place in zip((start, end), places, strict=True)
            )
            result[:, label] = high - low
        return result

    def _until(
        self, label: int, total: Int64Array, when: Int64Array, segment: Int64Array
    ) -> Int64Array:
        """ns of `label` from the first edge (negative: before it) until each of `when`."""
        known = np.maximum(segment, 0)
        current = np.where(segment < 0, self._count - 1, self._labels[known])
        inside = np.where(current == label, when - self._edges[known], 0)
        return np.asarray(total[known] + inside, dtype=np.int64)


class _Spans:
    """The preemptions of some requests (rows of the run, ascending)."""

    def __init__(self, run: Run, rows: Int64Array) -> None:
        spans = run.preemption_spans
        if spans is None:
            spans = np.empty((0, 3), dtype=np.int64)
        spans = spans[np.isin(spans[:, 0], rows)]
        place = np.searchsorted(rows, spans[:, 0])
        self._row, self._out, self._back = place, spans[:, 1], spans[:, 2]

    def within(
        self, start: Int64Array, end: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(row, from, to) of each span, cut to [start, end] of its row."""
        low = np.clip(self._out, start[self._row], end[self._row])
        high = np.clip(self._back, start[self._row], end[self._row])
        return self._row, low, high

    def total(self, start: Int64Array, end: Int64Array) -> Int64Array:
        """ns out of the engine within [start, end], by row."""
        row, low, high = self.within(start, end)
        result = np.zeros(len(start), dtype=np.int64)
        np.add.at(result, row, high - low)
        return result


@dataclass(frozen=True, slots=True)
class Culprit:
    """A prompt that was prefilled while others waited or decoded."""

    request: int
    computed_tokens: int  # prompt tokens not found in the prefix cache
    tenant: str
    overlapped: int  # how many of the requests explained it met


@dataclass(frozen=True, slots=True)
class Explanation:
    """Mean ns of each part over the requests explained, and over all finished ones for comparison."""

    title: str
    latency: str  # what the parts add up to
    rows: Int64Array
    parts_ns: dict[str, float]
    usual_ns: dict[str, float]
    culprits: tuple[Culprit, ...]
    burst: tuple[str, ...] = ()  # a tenant that sent far more than usual meanwhile, in words

    @property
    def total_ns(self) -> float:
        return sum(self.parts_ns.values())

    @property
    def most(self) -> str:
        """The part that exceeds its usual size most; of a single request, the largest part."""
        usual = self.usual_ns if len(self.rows) > 1 else dict.fromkeys(KEYS, 0.0)
        return max(self.parts_ns, key=lambda key: self.parts_ns[key] - usual[key])


def explain_request(run: Run, request: int) -> Explanation:
    """Where the time of one request went. Raises UserError if there is none such or it did not finish."""
    found = np.flatnonzero(run.requests["request"] == request)
    if not len(found):
        raise UserError(
            f"--request {request}: the run has no such request (0 to {run.num_requests - 1})"
        )
    row = int(found[0])
    status = int(run.requests["status"][row])
    if status != FINISHED:
        code = int(run.requests["reason"][row])
        why = f": {reason(run.reasons[code])}" if 0 <= code < len(run.reasons) else ""
        raise UserError(f"request {request} did not finish; it was {STATUS_NAMES[status]}{why}")
    tokens = (int(run.requests[f"{side}_tokens"][row]) for side in ("prompt", "output"))
    title = "request {}, {:,} prompt and {:,} output tokens".format(request, *tokens)
    return _explain(run, np.array([row]), title, "e2el")


def explain_tail(run: Run, percentile: float, by: str = "e2el") -> Explanation:
    """Where the time of the slowest requests went: those at or above a percentile of TTFT or E2EL."""
    columns = run.requests
    done = np.flatnonzero((columns["status"] == FINISHED) & (columns["first_scheduled_ns"] >= 0))
    if not len(done):
        raise UserError("no request of this run finished: there is no tail to explain")
    end = columns["first_token_ns" if by == "ttft" else "finish_ns"]
    latency = end[done] - columns["sent_ns"][done]
    limit = np.percentile(latency, percentile)
    rows = done[latency >= limit]
    name = "TTFT" if by == "ttft" else "E2EL"
    title = (
        f"the {len(rows):,} requests with {name} of {limit / 1e6:,.1f} ms or more (p{percentile:g})"
    )
    return _explain(run, rows, title, by)


def _explain(run: Run, rows: Int64Array, title: str, by: str) -> Explanation:
    parts = breakdown(run, by)
    finished = parts[run.requests["status"] == FINISHED]
    return Explanation(
        title=title,
        latency="time to first token" if by == "ttft" else "end-to-end latency",
        rows=rows,
        parts_ns=dict(zip(KEYS, parts[rows].mean(axis=0).tolist(), strict=True)),
        usual_ns=dict(zip(KEYS, finished.mean(axis=0).tolist(), strict=True)),
        culprits=_culprits(run, rows),
        burst=tuple(dominant_tenant(run, _meanwhile(run, rows))),
    )


def _meanwhile(run: Run, rows: Int64Array) -> npt.NDArray[np.bool_]:
    """Requests sent while, or shortly before, the explained ones were sent. Shape (n,)."""
    sent, arrival = run.requests["sent_ns"], run.requests["arrival_ns"]
    lead = max(1, int(arrival.max() - arrival.min()) // 50)
    inside: npt.NDArray[np.bool_] = (sent >= sent[rows].min() - lead) & (sent <= sent[rows].max())
    return inside


def dominant_tenant(run: Run, inside: npt.NDArray[np.bool_]) -> list[str]:
    """A sentence if one tenant sent at least half of these requests, and far more than it usually does."""
    tenant = run.requests["tenant"]
    if not inside.any() or not (tenant != tenant[0]).any():
        return []
    codes, now = np.unique(tenant[inside], return_counts=True)
    top = int(now.argmax())
    share, usual = float(now[top] / inside.sum()), float((tenant == codes[top]).mean())
    if share < 0.5 or share < 1.5 * usual:
        return []
    code = int(codes[top])
    name = run.tenant_names[code] if 0 <= code < len(run.tenant_names) else f"{code}"
    return [f"tenant {name} sent {percent(share, 0)} of the requests (usually {percent(usual, 0)})"]


def _culprits(run: Run, rows: Int64Array, most: int = 5) -> tuple[Culprit, ...]:
    """The largest prompts prefilled while the explained requests were in flight, themselves excepted.

    Ranked by prompt tokens computed times explained requests met; only prompts of at least eight times the
    median count as being in the way.
    """
    columns = run.requests
    began, ended = columns["first_scheduled_ns"], columns["first_token_ns"]
    tokens = columns["prompt_tokens"] - columns["cached_tokens"]
    known = (began >= 0) & (ended >= 0)
    if not known.any():
        return ()
    large = np.flatnonzero(known & (tokens >= 8 * max(1.0, float(np.median(tokens[known])))))
    # Who was sent before the prefill ended, less who had finished before it began.
    sent, finish = np.sort(columns["sent_ns"][rows]), np.sort(columns["finish_ns"][rows])
    met = np.searchsorted(sent, ended[large], side="left") - np.searchsorted(
        finish, began[large], side="right"
    )
    met = met - np.isin(large, rows)
    if "replica" in columns and len(rows) == 1:
        met = np.where(columns["replica"][large] == columns["replica"][rows[0]], met, 0)
    order = np.lexsort((large, -(met * tokens[large])))
    return tuple(
        Culprit(
            request=int(columns["request"][large[i]]),
            computed_tokens=int(tokens[large[i]]),
            tenant=_tenant(run, int(large[i])),
            overlapped=int(met[i]),
        )
        for i in order[:most].tolist()
        if met[i] > 0
    )


def _tenant(run: Run, row: int) -> str:
    code = int(run.requests["tenant"][row])
    return run.tenant_names[code] if 0 <= code < len(run.tenant_names) else ""


def render_explanation(found: Explanation, advised: bool = False) -> str:
    """As plain text in 80 columns; `advised`: what helps was simulated and is told elsewhere."""
    tail = len(found.rows) > 1
    lines = [f"Where the time went: {plain(found.title)}", ""]
    head = f"{'':<54}{'ms':>9}{'share':>8}"
    lines.append(head + (f"{'all, ms':>9}" if tail else ""))
    total = found.total_ns
    for key, words in PARTS:
        value = found.parts_ns[key]
        if not value and not (tail and found.usual_ns[key]):
            continue
        share = f"{value / total * 100:.1f} %" if total else "–"
        row = f"{words:<54}{_ms(value):>9}{share:>8}"
        lines.append(row + (f"{_ms(found.usual_ns[key]):>9}" if tail else ""))
    usual = sum(found.usual_ns.values())
    last = f"{found.latency + (', mean' if tail else ''):<54}{_ms(total):>9}{'':>8}"
    lines.append(last + (f"{_ms(usual):>9}" if tail else ""))
    if found.culprits:
        lines += ["", "Long prompts prefilled meanwhile:"]
        for one in found.culprits:
            of = f" of {plain(one.tenant)}" if one.tenant else ""
            met = f", met {one.overlapped:,} of them" if tail else ""
            lines.append(f"  request {one.request}{of}: {one.computed_tokens:,} tokens{met}")
    if found.burst:
        lines += ["", *(f"Meanwhile {plain(words)}." for words in found.burst)]
    most = found.most
    if most in KNOBS and found.parts_ns[most] > 0 and not advised:
        which = "Largest excess over all requests" if tail else "Largest part"
        advice = (
            f"{which}: {dict(PARTS)[most]}. What is known to help: {KNOBS[most]}. Replay it to see."
        )
        lines += ["", *textwrap.wrap(advice, 80, break_on_hyphens=False)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _ms(ns: float) -> str:
    value = ns / 1e6
    return f"{value:,.1f}" if value < 99_999 else f"{value:,.0f}"


def explanation_data(found: Explanation) -> dict[str, object]:
    """As JSON-ready data."""
    return {
        "schema": "vsim/explanation/1",
        "title": plain(found.title),
        "requests": len(found.rows),
        "parts_ms": {key: value / 1e6 for key, value in found.parts_ns.items()},
        "usual_ms": {key: value / 1e6 for key, value in found.usual_ns.items()},
        "total_ms": found.total_ns / 1e6,
        "largest_excess": found.most,
        "burst": [plain(words) for words in found.burst],
        "culprits": [
            {
                "request": one.request,
                "computed_tokens": one.computed_tokens,
                "tenant": plain(one.tenant),
                "met": one.overlapped,
            }
            for one in found.culprits
        ],
    }


def parse_tail(text: str) -> float:
    """`p99` or `99` -> 99.0. Raises UserError for anything else."""
    try:
        value = float(text.lower().removeprefix("p"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise UserError(f"--tail {text}: give a percentile such as p99")
    return value
