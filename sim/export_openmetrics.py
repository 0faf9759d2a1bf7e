"""A run as OpenMetrics text with vLLM's own metric names and timestamps, for promtool and Grafana.

Names, types and bucket bounds are vLLM 0.32's (v1/metrics/loggers.py, v1/metrics/buckets.py). Times of
events are the client's, as everywhere in vsim: vLLM's own histograms start when its front end has the
request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.sim import metrics
from vsim.sim.run import FINISHED, Run
from vsim.sim.summary import setting
from vsim.sim.text import plain
from vsim.sim.timeline import StepClock

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
INTERVALS_S = (1, 5, 15, 60, 300, 900, 3600)
MAX_SAMPLES = 1000  # of a series, unless an interval is asked for
HARD_LIMIT = 200_000


@dataclass(slots=True)
class Family:
    """A metric family: its samples are (suffix, labels, values at the sample times)."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, str, FloatArray]] = field(default_factory=list)


def render_openmetrics(
    run: Run, interval_s: float | None = None, start_time: float = 0.0
) -> Iterator[str]:
    """Lines of the exposition, each with its newline, ending in `# EOF`.

    Sampled every `interval_s` of simulated time; None takes the shortest of 1 s, 5 s, 15 s, 1 min, … with
    at most 1,000 samples. `start_time`: Unix time in s of the run's first arrival. The inter-token
    histogram is known for the whole run only and has a single sample, at the end. Raises UserError for an
    interval that is not positive or gives too many samples.
    """
    span_s = metrics.duration_ns(run) / 1e9 if run.num_requests else 0.0
    if interval_s is None:
        interval_s = next(
            (s for s in INTERVALS_S if span_s / s <= MAX_SAMPLES), float(INTERVALS_S[-1])
        )
    if not interval_s > 0 or span_s / interval_s > HARD_LIMIT:
        raise UserError(
            f"--interval {interval_s:g}: a run of {span_s:.0f} s must give at most {HARD_LIMIT:,} samples"
        )
    origin = int(run.requests["arrival_ns"].min()) if run.num_requests else 0
    offsets_s = np.append(np.arange(0.0, span_s, interval_s), span_s)
    at_ns = origin + np.round(offsets_s * 1e9).astype(np.int64)
    stamps = [f"{start_time + offset:.3f}" for offset in offsets_s.tolist()]
    for family in _families(run, at_ns):
        yield f"# TYPE {family.name} {family.kind}\n"
        yield f"# HELP {family.name} {family.help}\n"
        if family.kind == "histogram":
            yield from _histogram_lines(family, stamps)
            continue
        for suffix, labels, values in family.samples:
            for value, stamp in zip(values.tolist(), stamps, strict=True):
                yield f"{family.name}{suffix}{{{labels}}} {_number(value)} {stamp}\n"
    yield "# EOF\n"


def _histogram_lines(family: Family, stamps: list[str]) -> Iterator[str]:
    """Grouped by label set, then by time: buckets, count and sum of one moment stand together."""
    groups: dict[str, list[tuple[str, str, FloatArray]]] = {}
    for suffix, labels, values in family.samples:
        own = ",".join(part for part in _split(labels) if not part.startswith('le="'))
        groups.setdefault(own, []).append((suffix, labels, values))
    for rows in groups.values():
        first = len(stamps) - len(rows[0][2])
        for i, stamp in enumerate(stamps[first:]):
            for suffix, labels, values in rows:
                yield f"{family.name}{suffix}{{{labels}}} {_number(values[i])} {stamp}\n"


def _families(run: Run, at_ns: Int64Array) -> list[Family]:
    model = _escaped(setting(run.config, "model") or "unknown")
    families: dict[str, Family] = {}
    for engine, part in _replicas(run):
        _engine(part, at_ns, f'model_name="{model}",engine="{engine}"', families)
    return list(families.values())


def _engine(run: Run, at_ns: Int64Array, labels: str, families: dict[str, Family]) -> None:
    columns, steps = run.requests, run.steps
    done = columns["status"] == FINISHED
    sent, first, finish = (columns[f"{c}_ns"] for c in ("sent", "first_token", "finish"))
    scheduled = columns["first_scheduled_ns"]
    prompt, output = columns["prompt_tokens"], columns["output_tokens"]

    def add(name: str, kind: str, text: str) -> Family:
        return families.setdefault(name, Family(f"vllm:{name}", kind, text))

    clock = StepClock(run)

    def gauge(name: str, values: npt.NDArray[Any], text: str) -> None:
        sampled = clock.state(values).at(at_ns)
        add(name, "gauge", text).samples.append(("", labels, sampled))

    def counter(name: str, when: Int64Array, amount: Any, text: str, more: str = "") -> None:
        total = _cumulative(when, np.asarray(amount, dtype=float), at_ns)
        add(name, "counter", text).samples.append(("_total", labels + more, total))

    def histogram(
        name: str, when: Int64Array, values: npt.NDArray[Any], bounds: Any, text: str
    ) -> None:
        add(name, "histogram", text).samples.extend(
            _histogram(when, np.asarray(values, dtype=float), bounds, at_ns, labels)
        )

    if len(steps["start_ns"]):
        usable = max(1, run.num_gpu_blocks)
        gauge(
            "num_requests_running",
            steps["running"],
            "Number of requests in model execution batches.",
        )
        gauge(
            "num_requests_waiting", steps["waiting"], "Number of requests waiting to be processed."
        )
        gauge("kv_cache_usage_perc", steps["kv_blocks_used"] / usable, "KV-cache usage. 1 means 100 percent usage.")  # fmt: skip
    info = f'{labels},block_size="{run.block_size}",num_gpu_blocks="{run.num_gpu_blocks}"'
    add("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig").samples.append(
        ("", info, np.ones(len(at_ns)))
    )
    if len(steps["start_ns"]):
        counter("num_preemptions", steps["start_ns"], steps["preempted"], "Cumulative number of preemption from the engine.")  # fmt: skip
    began, answered = first >= 0, scheduled >= 0
    counter("prompt_tokens", first[began], prompt[began], "Number of prefill tokens processed.")
    counter("prompt_tokens_cached", first[began], columns["cached_tokens"][began], "Number of cached prompt tokens.")  # fmt: skip
    counter("prefix_cache_queries", scheduled[answered], prompt[answered], "Prefix cache queries, in terms of number of queried tokens.")  # fmt: skip
    counter("prefix_cache_hits", scheduled[answered], columns["cached_tokens"][answered], "Prefix cache hits, in terms of number of cached tokens.")  # fmt: skip
    if len(steps["start_ns"]) and "emitted" in steps:
        counter("generation_tokens", steps["end_ns"], steps["emitted"], "Number of generation tokens processed.")  # fmt: skip
    else:
        counter("generation_tokens", finish[done], output[done], "Number of generation tokens processed.")  # fmt: skip
    counter("request_success", finish[done], np.ones(int(done.sum())), "Count of successfully processed requests.", ',finished_reason="length"')  # fmt: skip

    histogram("time_to_first_token_seconds", first[began], (first - sent)[began] / 1e9, TTFT_S, "Histogram of time to first token in seconds.")  # fmt: skip
    several = done & (output > 1)
    tpot = (finish - first)[several] / np.maximum(output[several] - 1, 1) / 1e9
    histogram("request_time_per_output_token_seconds", finish[several], tpot, ITL_S, "Histogram of time_per_output_token_seconds per request.")  # fmt: skip
    for name, values, text in (
        ("e2e_request_latency_seconds", finish - sent, "Histogram of e2e request latency in seconds."),
        ("request_queue_time_seconds", scheduled - sent, "Histogram of time spent in WAITING phase for request."),
        ("request_prefill_time_seconds", first - scheduled, "Histogram of time spent in PREFILL phase for request."),
        ("request_decode_time_seconds", finish - first, "Histogram of time spent in DECODE phase for request."),
        ("request_inference_time_seconds", finish - scheduled, "Histogram of time spent in RUNNING phase for request."),
    ):  # fmt: skip
        known = done & (scheduled >= 0)
        histogram(name, finish[known], values[known] / 1e9, LATENCY_S, text)
    top = _one_two_five(int(max(prompt.max(initial=1), output.max(initial=1), _max_len(run))))
    histogram("request_prompt_tokens", finish[done], prompt[done], top, "Number of prefill tokens processed.")  # fmt: skip
    histogram("request_generation_tokens", finish[done], output[done], top, "Number of generation tokens processed.")  # fmt: skip
    histogram("request_num_preemptions", finish[done], columns["preemptions"][done], PREEMPTIONS, "Number of preemptions per request.")  # fmt: skip
    if len(steps["start_ns"]):
        histogram("iteration_tokens_total", steps["end_ns"], steps["tokens"], STEP_TOKENS, "Histogram of number of tokens per engine_step.")  # fmt: skip
    if len(run.itl_ns):
        add("inter_token_latency_seconds", "histogram", "Histogram of inter-token latency in seconds.").samples.extend(
            _whole_run(run.itl_ns / 1e9, run.itl_count, ITL_S, labels)
        )  # fmt: skip


def _cumulative(when: Int64Array, amount: FloatArray, at_ns: Int64Array) -> FloatArray:
    """How much had come together by each of `at_ns`."""
    place = np.searchsorted(at_ns, when, side="left")
    summed = np.cumsum(np.bincount(place, weights=amount, minlength=len(at_ns) + 1))
    return summed.astype(float)[: len(at_ns)]


def _histogram(
    when: Int64Array, values: FloatArray, bounds: Any, at_ns: Int64Array, labels: str
) -> list[tuple[str, str, FloatArray]]:
    place = np.searchsorted(at_ns, when, side="left")
    bucket = np.searchsorted(np.asarray(bounds, dtype=float), values, side="left")
    shape = (len(at_ns) + 1, len(bounds) + 1)
    flat = np.bincount(place * shape[1] + bucket, minlength=shape[0] * shape[1])
    counts = flat.reshape(shape).cumsum(axis=0).cumsum(axis=1)[: len(at_ns)].astype(float)
    total = _cumulative(when, values, at_ns)
    return _rows(counts.T, bounds, total, labels)


def _whole_run(
    values: FloatArray, counts: Int64Array, bounds: Any, labels: str
) -> list[tuple[str, str, FloatArray]]:
    bucket = np.searchsorted(np.asarray(bounds, dtype=float), values, side="left")
    summed = np.cumsum(np.bincount(bucket, weights=counts, minlength=len(bounds) + 1))
    return _rows(
        summed.astype(float)[:, None], bounds, np.array([float((values * counts).sum())]), labels
    )


def _rows(
    counts: FloatArray, bounds: Any, total: FloatArray, labels: str
) -> list[tuple[str, str, FloatArray]]:
    edges = [f"{float(bound)}" for bound in bounds] + ["+Inf"]
    buckets = [
        ("_bucket", f'{labels},le="{edge}"', row) for edge, row in zip(edges, counts, strict=True)
    ]
    return [*buckets, ("_count", labels, counts[-1]), ("_sum", labels, total)]


def _replicas(run: Run) -> list[tuple[int, Run]]:
    """(engine, its part of the run); one engine 0 unless the run tells replicas apart."""
    if "replica" not in run.steps or "replica" not in run.requests:
        return [(0, run)]
    parts = []
    for engine in np.unique(run.steps["replica"]).tolist():
        mine = run.requests["replica"] == engine
        theirs = run.steps["replica"] == engine
        part = Run(
            origin=run.origin,
            requests={k: v[mine] for k, v in run.requests.items()},
            steps={k: v[theirs] for k, v in run.steps.items() if k != "replica"},
            itl_ns=run.itl_ns[:0],  # pooled over replicas: nobody's own
            itl_count=run.itl_count[:0],
            block_size=run.block_size,
            num_gpu_blocks=run.num_gpu_blocks,
            config=run.config,
        )
        parts.append((engine, part))
    return parts


def _one_two_five(high: int) -> list[float]:
    bounds: list[float] = []
    scale = 1
    while scale <= high:
        bounds += [float(m * scale) for m in (1, 2, 5) if m * scale <= high]
        scale *= 10
    return bounds


def _max_len(run: Run) -> int:
    found = setting(run.config, "max_model_len")
    return found if isinstance(found, int) else 1


def _escaped(value: Any) -> str:
    return plain(value).replace("\\", "\\\\").replace('"', '\\"')


def _split(labels: str) -> list[str]:
    """`a="x",b="y"` -> its parts; commas inside quotes don't cut."""
    parts, start, quoted, i = [], 0, False, 0
    while i < len(labels):
        if labels[i] == "\\":
            i += 1
        elif labels[i] == '"':
            quoted = not quoted
        elif labels[i] == "," and not quoted:
            parts.append(labels[start:i])
            start = i + 1
        i += 1
    return [*parts, labels[start:]]


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
