"""A run in one dictionary: `vllm bench serve --save-result`'s keys, and vsim's own beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.sim import metrics, timeline
from vsim.sim.run import FINISHED, REJECTED, STATUS_NAMES, Run
from vsim.sim.state_totals import StateTotal, in_one_pass, state_totals

SCHEMA = "vsim/summary/1"
DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def summarize(
    run: Run,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Every metric of `run` as JSON-ready numbers; None where there is nothing to measure, never NaN.

    `percentiles` in (0, 100]; `goodput`: limits in ms by "ttft", "tpot", "e2el" (`metrics.parse_goodput`).
    Latencies are of finished requests, in ms, from the client's clock. docs/metrics.md defines each key.
    Raises UserError for a percentile or a limit that makes no sense.
    """
    asked = _checked_percentiles(percentiles)
    slo = dict(goodput or {})
    metrics.check_goodput(slo)
    done = metrics.finished(run)
    status = run.requests["status"]
    span_ns = metrics.duration_ns(run) if run.num_requests else 0
    span_s = span_ns / 1e9
    input_tokens = int(run.requests["prompt_tokens"][done].sum())
    output_tokens = int(run.requests["output_tokens"][done].sum())
    completed = int((status == FINISHED).sum())
    good = metrics.good_requests(metrics.latencies(run), slo) if slo else 0

    def per_second(amount: float) -> float | None:
        return amount / span_s if span_s > 0 else None

    summary: dict[str, Any] = {
        # What `vllm bench serve` states about its client; a simulation has no wall-clock date.
        "backend": "vsim" if run.origin == "simulated" else "vllm",
        "endpoint_type": "vsim" if run.origin == "simulated" else "vllm",
        "date": None,
        "label": None,
        "model_id": setting(run.config, "model"),
        "tokenizer_id": None,
        "num_prompts": run.num_requests,
        "request_rate": _rate(setting(run.config, "request_rate")),
        "burstiness": _rate(setting(run.config, "burstiness")),
        "max_concurrency": setting(run.config, "max_concurrency"),
        # Results
        "duration": span_s,
        "completed": completed,
        "failed": run.num_requests - completed,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": per_second(completed),
        "request_goodput": per_second(good) if slo else None,
        "output_throughput": per_second(output_tokens),
        "total_token_throughput": per_second(input_tokens + output_tokens),
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s(run),
        "max_concurrent_requests": metrics.max_concurrent_requests(run),
        "rtfx": 0.0,
        # One latency at a time: each is a column as long as the run.
        **metrics.stats(metrics.ttft_ns(run, done), asked).flat("ttft"),
        **metrics.stats(_tpot(run, done), asked).flat("tpot"),
        **metrics.weighted_stats(run.itl_ns, run.itl_count, asked).flat("itl"),
        **metrics.stats(metrics.e2el_ns(run, done), asked).flat("e2el"),
        **metrics.stats(metrics.queue_ns(run, done), asked).flat("queue_time"),
        # vsim's own
        "schema": SCHEMA,
        "origin": run.origin,
        "ended_early": run.ended_early,
        "assumptions": list(run.assumptions),
        "percentiles": list(asked),
        "goodput_slo_ms": slo or None,
        "goodput_fraction": (good / run.num_requests if slo and run.num_requests else None),
        "status_counts": {
            name: int((status == code).sum()) for code, name in enumerate(STATUS_NAMES)
        },
        "rejected_reasons": rejected_reasons(run),
        "preemptions": int(run.requests["preemptions"].sum()),
        "preempted_requests": int((run.requests["preemptions"] > 0).sum()),
        "recomputed_tokens": int(run.requests["recomputed_tokens"].sum()),
        "block_size": run.block_size,
        "num_gpu_blocks": run.num_gpu_blocks,
        "num_steps": len(run.steps["start_ns"]),
        **_swaps(run),
        **_prefix_cache(run),
        **_over_time(run, span_ns),
    }
    client_queue = metrics.client_queue_ns(run, done)
    if summary["max_concurrency"] is not None or bool((client_queue > 0).any()):
        summary |= metrics.stats(client_queue, asked).flat("client_queue_time")
        whole = metrics.e2el_ns(run, done) + client_queue
        summary |= metrics.stats(whole, asked).flat("e2el_including_client_queue")
    return summary


def _tpot(run: Run, done: metrics.Rows) -> metrics.FloatArray:
    """TPOT of the requests that have one: those of several tokens."""
    tpot = metrics.tpot_ns(run, done)
    several = run.requests["output_tokens"][done] > 1
    return tpot if several.all() else tpot[several]


def with_intervals(
    summary: Mapping[str, Any],
    bounds: Mapping[str, tuple[float, float]],
    level: float,
    source: str,
) -> dict[str, Any]:
    """`summary` with error bars: table and report show them wherever `bounds` has a summary key.

    `level`: e.g. 0.9; `source`: one sentence on what the intervals cover. Raises ValueError for a key that
    the summary has not, or bounds out of order.
    """
    for key, (low, high) in bounds.items():
        if key not in summary or not low <= high:
            raise ValueError(f"interval {key}: ({low}, {high})")
    return {
        **summary,
        "intervals": {
            "level": level,
            "source": source,
            "bounds": {key: [float(low), float(high)] for key, (low, high) in bounds.items()},
        },
    }


def interval(summary: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """The error bar of a key, if the summary has one."""
    found = (summary.get("intervals") or {}).get("bounds", {}).get(key)
    return (found[0], found[1]) if found else None


def summary_json(summary: Mapping[str, Any]) -> str:
    """`summary` as text: sorted keys, one key a line, the same bytes for the same run; NaN is refused."""
    return json.dumps(summary, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def rejected_reasons(run: Run) -> dict[str, int]:
    """How many requests were rejected, by reason, most frequent first."""
    rejected = run.requests["status"] == REJECTED
    codes, counts = np.unique(run.requests["reason"][rejected], return_counts=True)
    found = {
        (run.reasons[code] if 0 <= code < len(run.reasons) else "no reason recorded"): int(count)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def setting(config: Mapping[str, Any], name: str) -> Any:
    """The value of `name` anywhere in a run's `config`: {"value": v, "origin": o} or the bare value."""
    for key, value in config.items():
        if str(key).lstrip("-").replace("-", "_") == name:
            if isinstance(value, Mapping):
                if "value" in value:
                    return value["value"]
                if "name" in value:
                    return value["name"]
            else:
                return value
    for value in config.values():
        if isinstance(value, Mapping):
            found = setting(value, name)
            if found is not None:
                return found
    return None


def _checked_percentiles(percentiles: Sequence[float]) -> tuple[float, ...]:
    for value in percentiles:
        if not 0 <= value <= 100:
            raise UserError(f"percentile {value:g} is not between 0 and 100")
    return tuple(sorted({float(value) for value in percentiles}))


def _rate(value: Any) -> Any:
    # vLLM writes "inf" for all at once (JSON has no infinity); null here means the trace's own timing.
    return "inf" if value == float("inf") else value


def _swaps(run: Run) -> dict[str, Any]:
    """V0: blocks moved to the CPU and back, and bytes over the host link of each GPU. V1 has no swapping."""
    if "swapped_out_blocks" not in run.counters:
        return {}
    moved_out, moved_in = (run.counters[f"swapped_{way}_blocks"] for way in ("out", "in"))
    block_bytes = run.config.get("kv_cache", {}).get("bytes_per_block")
    return {
        "swapped_out_blocks": moved_out,
        "swapped_in_blocks": moved_in,
        "swapped_bytes": None if block_bytes is None else (moved_out + moved_in) * block_bytes,
    }


def _prefix_cache(run: Run) -> dict[str, Any]:
    queries = run.counters.get("prefix_cache_queries_tokens")
    hits = run.counters.get("prefix_cache_hits_tokens")
    rate = hits / queries if queries and hits is not None else None
    return {
        "prefix_cache_queries_tokens": queries,
        "prefix_cache_hits_tokens": hits,
        "prefix_cache_hit_rate": rate,
    }


def _over_time(run: Run, span_ns: int) -> dict[str, Any]:
    """Time-weighted state: KV usage, internal fragmentation, running and waiting."""
    names = (
        "kv_usage_mean",
        "kv_usage_peak",
        "kv_blocks_used_peak",
        "kv_fragmentation_mean",
        "kv_fragmentation_peak",
        "kv_wasted_slots_mean",
        "kv_wasted_slots_peak",
        "running_mean",
        "running_peak",
        "waiting_mean",
        "waiting_peak",
    )
    steps = run.steps
    if not len(steps["start_ns"]) or span_ns <= 0:
        return dict.fromkeys(names)
    start = int(run.requests["arrival_ns"].min())
    end = start + span_ns
    if in_one_pass(run):
        state, largest_share = state_totals(run, start, end)
    else:
        state, largest_share = _summed(run, start, end)
    usable = run.num_gpu_blocks * num_replicas(run)
    blocks_mean = state["blocks"].mean or 0.0
    wasted_mean = state["wasted"].mean
    peak = state["blocks"].peak
    held = blocks_mean * run.block_size
    return dict(
        zip(
            names,
            (
                blocks_mean / usable if usable > 0 else None,
                peak / usable if usable > 0 else None,
                int(peak),
                # Slots x seconds wasted of slots x seconds allocated: idle time doesn't dilute it.
                wasted_mean / held if held > 0 and wasted_mean is not None else None,
                largest_share if held > 0 else None,
                wasted_mean,
                int(state["wasted"].peak),
                state["running"].mean,
                int(state["running"].peak),
                state["waiting"].mean,
                int(state["waiting"].peak),
            ),
            strict=True,
        )
    )


def _summed(run: Run, start: int, end: int) -> tuple[Mapping[str, StateTotal], float]:
    """`state_totals` of several replicas: their states added up at every moment."""
    steps, clock = run.steps, timeline.StepClock(run)
    slots = steps["kv_blocks_used"].astype(np.int64) * run.block_size
    states = {
        "blocks": clock.state(steps["kv_blocks_used"]),
        "wasted": clock.state(slots - steps["kv_tokens_used"]),
        "running": clock.state(steps["running"]),
        "waiting": clock.state(steps["waiting"]),
    }
    totals = {name: StateTotal(start, end) for name in states}
    for name, state in states.items():
        totals[name].add(state.at_ns, state.value)
    wasted, blocks = states["wasted"].value, states["blocks"].value
    return totals, float((wasted / np.maximum(blocks * run.block_size, 1)).max())


def num_replicas(run: Run) -> int:
    """Replicas behind the run's steps: 1 unless there is a `replica` column; idle ones count where told."""
    replica = run.steps.get("replica")
    if replica is None:
        return 1
    told = run.config.get("replicas")
    if isinstance(told, int) and told > 0:
        return told
    return len(np.unique(replica)) or 1
