"""`vllm bench serve` results: read as a run where they carry requests, written from a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.sim.run import ABORTED, FINISHED, REQUEST_COLUMNS, STEP_COLUMNS, Run
from vsim.sim.summary import summary_json
from vsim.traces.draft import MAX_TOKENS

MAX_BYTES = 2 << 30
MAX_S = 3e9  # a century: beyond it, and sums of three, ns would leave int64
DETAIL = ("input_lens", "output_lens", "ttfts", "itls", "start_times")


def load_bench(path: Path) -> dict[str, Any]:
    """A result of `vllm bench serve --save-result`; of `--append-result`, the last one.

    Raises UserError if it is none.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: larger than {MAX_BYTES >> 30} GiB")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text, so no result of `vllm bench serve`") from None
    try:
        found = json.loads(text)
    except RecursionError:
        raise UserError(f"{path}: nested too deeply to be a bench result") from None
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            found = json.loads(lines[-1]) if lines else None
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict) or "completed" not in found or "duration" not in found:
        raise UserError(f"{path}: not a result of `vllm bench serve` (no `completed`, `duration`)")
    return found


def bench_run(result: Mapping[str, Any], name: str) -> Run | None:
    """The run behind a `--save-detailed` result; None where the result carries no requests.

    Times count from the first send. A request without a first chunk (`ttft` 0) failed. Steps are unknown,
    and so is everything of the engine's. Raises UserError for lists that don't fit together.
    """
    if any(not isinstance(result.get(key), list) for key in DETAIL):
        return None
    n = len(result["input_lens"])
    if any(len(result[key]) != n for key in DETAIL):
        raise UserError(f"{name}: the per-request lists differ in length")
    try:
        start = _ns(result["start_times"])
        ttft, output = _ns(result["ttfts"]), _tokens(result["output_lens"])
        gaps = [_ns(own) for own in result["itls"]]
        prompt = _tokens(result["input_lens"])
        given, queue = result.get("latencies"), result.get("queue_times")
        told = _ns(given) if isinstance(given, list) and len(given) == n else None
        waited = (
            _ns(queue) if isinstance(queue, list) and len(queue) == n else np.zeros(n, np.int64)
        )
        if any(own.sum(dtype=float) > MAX_S * 1e9 for own in gaps):
            raise ValueError("a request of more than a century")
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{name}: the per-request lists hold something else than times and token counts"
        ) from error
    sent = start - (start.min() if n else 0)
    failed = (ttft <= 0) | (output < 1)
    latency = ttft + np.array([int(own.sum()) for own in gaps], dtype=np.int64)
    if told is not None:
        latency = np.where(failed, latency, told)
    good = [own for own, bad in zip(gaps, failed, strict=True) if not bad]
    pooled = np.concatenate([np.empty(0, np.int64), *good])
    values, counts = np.unique(pooled, return_counts=True)
    columns: dict[str, Any] = {
        "request": np.arange(n),
        "arrival_ns": sent - waited,
        "sent_ns": sent,
        "first_scheduled_ns": np.full(n, -1),
        "first_token_ns": np.where(failed, -1, sent + ttft),
        "finish_ns": np.where(failed, -1, sent + latency),
        "prompt_tokens": prompt,
        "output_tokens": np.where(failed, 0, output),
        "status": np.where(failed, ABORTED, FINISHED),
        "reason": np.full(n, -1),
    }
    return Run(
        origin="measured",
        requests={
            column: np.asarray(columns.get(column, np.zeros(n)), dtype=kind)
            for column, kind in REQUEST_COLUMNS.items()
        },
        steps={column: np.empty(0, dtype=kind) for column, kind in STEP_COLUMNS.items()},
        itl_ns=values.astype(np.int64),
        itl_count=counts.astype(np.int64),
        block_size=0,
        num_gpu_blocks=0,
        config={
            key: result[key]
            for key in ("request_rate", "burstiness", "max_concurrency")
            if key in result
        }
        | {"model": result.get("model_id")},
        provenance={"file": name, "backend": result.get("backend")},
        assumptions=("From `vllm bench serve`: nothing is known of the engine's steps.",),
    )


def _ns(seconds: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = np.asarray(seconds, dtype=float)
    # NaN and infinity compare false as well.
    if array.ndim != 1 or not (np.abs(array) <= MAX_S).all():
        raise ValueError("not a list of times in seconds")
    return np.round(array * 1e9).astype(np.int64)


def _tokens(counts: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = np.asarray(counts, dtype=float)
    if array.ndim != 1 or not ((array >= 0) & (array <= MAX_TOKENS)).all():
        raise ValueError("not a list of token counts")
    return array.astype(np.int64)


def render_bench(run: Run, summary: Mapping[str, Any]) -> str:
    """The run in `vllm bench serve --save-result --save-detailed`'s schema.

    Beside the summary's keys: `input_lens`, `output_lens`, `ttfts`, `latencies`, `start_times`,
    `queue_times` (seconds, one entry a request, in the trace's order) and `errors`. There is no `itls`: a
    run keeps the gaps of all requests pooled, and making up gaps for each would be untrue.
    """
    columns = run.requests
    done = columns["status"] == FINISHED
    went = columns["sent_ns"] >= 0

    def seconds(ns: Any, where: Any) -> list[float]:
        values: list[float] = np.where(where, np.asarray(ns, dtype=float) / 1e9, 0.0).tolist()
        return values

    reasons = [
        "" if ok else (run.reasons[code] if 0 <= code < len(run.reasons) else "not finished")
        for ok, code in zip(done.tolist(), columns["reason"].tolist(), strict=True)
    ]
    detail = {
        "input_lens": columns["prompt_tokens"].tolist(),
        "output_lens": np.where(done, columns["output_tokens"], 0).tolist(),
        "ttfts": seconds(columns["first_token_ns"] - columns["sent_ns"], done),
        "latencies": seconds(columns["finish_ns"] - columns["sent_ns"], done),
        "start_times": seconds(columns["sent_ns"], went),
        "queue_times": seconds(columns["sent_ns"] - columns["arrival_ns"], went),
        "errors": reasons,
    }
    plain = {
        key: value for key, value in summary.items() if value is None or _is_number_or_text(value)
    }
    return summary_json({**plain, **detail})


def _is_number_or_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))
