"""Logs of engine steps, written by vLLM or by a recorder -> step samples.

Three kinds are known by their content:
- step samples (`NAME.samples.parquet` or `.jsonl`, schema vsim/step-samples/1), as `vsim calibrate` writes;
- JSON lines with tokens by request (docs/exactness.md: `scheduled`, `computed` and `dt`), or the recorder's own
  messages (`{"step": {"num_tokens": …, "num_computed": …, "total_ns": …}}`);
- vLLM's server log with `--enable-logging-iteration-details` (v1/metrics/loggers.py, 0.32.0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vsim.calibrate.samples import Samples, StepSample, read_samples
from vsim.errors import UserError
from vsim.models.startup_log import parse_startup_log
from vsim.models.step import StepShape
from vsim.traces.files import TraceFile, decode_line, open_trace_file

MAX_STEPS = 2_000_000
MAX_REQUESTS = 1 << 16  # in a step
MAX_S = 3600.0
STARTUP_LINES = 20_000  # among which a server says how large its KV cache is
HELD_OUT_SHARE = 1 / 3
WARM_UP = 3  # an engine's first steps: kernels are compiled and memory is touched

ITERATION = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: (\d+(?:\.\d+)?) ms( \(dummy\))?"
    r"(?:, .{0,80}?KV cache usage: (\d+(?:\.\d+)?)%)?"
)


@dataclass(slots=True)
class StepLog:
    """What a log tells. `samples` has sessions only where the file names the engine that was measured.

    `exact`: each sequence's tokens and context are known; else contexts were spread evenly.
    """

    samples: Samples
    kind: str  # "samples", "steps" or "vllm"
    exact: bool = True
    notes: list[str] = field(default_factory=list)


def read_step_log(path: Path, block_size: int, kv_cache_tokens: int | None = None) -> StepLog:
    """Read a step log; the last third of its steps is marked as held out (phase "serve").

    `block_size` is the engine's, where the log does not say; `kv_cache_tokens` the size of its KV cache, for
    vLLM's log, where that lacks the start-up line. Raises UserError for a file that is none of the three.
    """
    if path.name.endswith((".samples.parquet", ".samples.jsonl")):
        samples = read_samples(path)
        if not samples.rows:
            raise UserError(f"--from-steps {path}: no such file, or no samples in it")
        return StepLog(samples, "samples")
    file = open_trace_file(path)
    if file.kind == "parquet":
        raise UserError(
            f"{file.name}: a Parquet file of steps must be named NAME.samples.parquet, as `vsim calibrate` writes it"
        )
    if file.head.lstrip().startswith(b"{"):
        steps = list(_json_steps(file))
        return StepLog(Samples(samples_of(steps, block_size)), "steps")
    return _vllm_log(file, block_size, kv_cache_tokens)


@dataclass(slots=True)
class Logged:
    """One step: `total_s` is what the engine was busy with it, `device_s` the device's part."""

    shape: StepShape
    device_s: float
    total_s: float


def samples_of(steps: list[Logged], block_size: int) -> list[StepSample]:
    """As samples of one session: two thirds to fit, the last third held out."""
    fitted = len(steps) - round(len(steps) * HELD_OUT_SHARE)
    rows = []
    for seq, step in enumerate(steps):
        shape = step.shape
        rows.append(
            StepSample(
                session="log",
                seq=seq,
                phase="train" if seq < fitted else "serve",
                point="log",
                repeat=0,
                index=seq,
                prefill_new=tuple(new for new, _ in shape.prefills),
                prefill_context=tuple(context for _, context in shape.prefills),
                num_decodes=shape.num_decodes,
                decode_context_sum=shape.decode_context_sum,
                decode_context_max=shape.decode_context_max,
                decode_context_sumsq=0.0,
                block_size=block_size,
                kv_blocks_used=0,
                running=shape.num_seqs,
                waiting=0,
                admitted=0,
                finished=0,
                preempted=0,
                schedule_s=0.0,
                device_s=step.device_s,
                update_s=max(0.0, step.total_s - step.device_s),
                total_s=step.total_s,
                cpu_s=step.total_s,
                warmup=seq < WARM_UP,
            )
        )
    return rows


def _json_steps(file: TraceFile) -> Iterator[Logged]:
    """Steps of JSON lines; the closing `summary` of a golden log and steps without tokens are passed over."""
    found = False
    for number, raw, last in file.lines():
        where = f"{file.name}:{number}"
        try:
            row = json.loads(decode_line(raw, file.name, number))
        except (ValueError, RecursionError):
            if last and found:
                return  # a kill tore it
            raise UserError(f"{where}: not JSON") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: not a JSON object")
        if "summary" in row or not set(row).isdisjoint(
            {"hello", "started", "done", "rejected", "kernels"}
        ):
            continue
        inner = row.get("step")
        step = _recorded(inner, where) if isinstance(inner, dict) else _scheduled(row, where)
        if step is not None:
            found = True
            yield step
        if number > MAX_STEPS:
            raise UserError(f"{file.name}: more than {MAX_STEPS:,} steps; cut the log")


def _recorded(told: dict[str, Any], where: str) -> Logged | None:
    """A message of the recorder (record_engine.py's EngineStep)."""
    shape = _shape(told.get("num_tokens"), told.get("num_computed"), where)
    if shape is None:
        return None
    total_s = _seconds(told.get("total_ns"), "total_ns", where, 1e9)
    device = told.get("device_ns")
    device_s = total_s if device is None else _seconds(device, "device_ns", where, 1e9)
    return Logged(shape, min(device_s, total_s), total_s)


def _scheduled(row: dict[str, Any], where: str) -> Logged | None:
    """A line with tokens by request."""
    scheduled, computed = row.get("scheduled"), row.get("computed")
    if not isinstance(scheduled, dict) or not isinstance(computed, dict):
        raise UserError(
            f"{where}: not a step: `scheduled` and `computed` must hold tokens by request (docs/exactness.md)"
        )
    if set(scheduled) - set(computed):
        raise UserError(f"{where}: a request is in `scheduled` and not in `computed`")
    shape = _shape(list(scheduled.values()), [computed[name] for name in scheduled], where)
    if shape is None:
        return None
    if row.get("dt") is None and "t_start" in row and "t_end" in row:
        begin = _seconds(row["t_start"], "t_start", where, 1.0, most=1e12)
        end = _seconds(row["t_end"], "t_end", where, 1.0, most=1e12)
        seconds = _seconds(end - begin, "t_end - t_start", where, 1.0)
    else:
        seconds = _seconds(row.get("dt"), "dt", where, 1.0)
    return Logged(shape, seconds, seconds)


def _shape(tokens: Any, computed: Any, where: str) -> StepShape | None:
    """The composition; None: no request was in the step."""
    if (
        not isinstance(tokens, list)
        or not isinstance(computed, list)
        or len(tokens) != len(computed)
    ):
        raise UserError(f"{where}: tokens and contexts of a step must be two lists of equal length")
    if len(tokens) > MAX_REQUESTS:
        raise UserError(f"{where}: more than {MAX_REQUESTS} requests in a step")
    prefills, contexts = [], []
    for new, context in zip(tokens, computed, strict=True):
        for value in (new, context):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
                raise UserError(f"{where}: {str(value)[:40]} is no number of tokens")
        if new == 1:
            contexts.append(context)
        elif new:
            prefills.append((new, context))
    if not prefills and not contexts:
        return None
    return StepShape(tuple(prefills), len(contexts), sum(contexts), max(contexts, default=0))


def _seconds(value: Any, name: str, where: str, per_second: float, most: float = MAX_S) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where}: {name}={str(value)[:40]} must be a time: no step without one")
    if not 0 <= value / per_second < most or (most == MAX_S and value == 0):
        raise UserError(f"{where}: {name}={value} is no duration of a step")
    return float(value) / per_second


def _vllm_log(file: TraceFile, block_size: int, kv_cache_tokens: int | None) -> StepLog:
    """`Iteration(…)` lines. Contexts are not in them: the KV cache's use tells their sum."""
    head: list[str] = []
    found: list[tuple[int, ...]] = []
    milliseconds: list[float] = []
    usage: list[float | None] = []
    dummies = speculative = 0
    for number, raw, _ in file.lines():
        line = raw[:2000].decode("utf-8", "replace")
        match = ITERATION.search(line)
        if match is None:
            if len(head) < STARTUP_LINES:
                head.append(line)
            continue
        if match[7]:
            dummies += 1
            continue
        counts = tuple(int(match[n][:12]) for n in range(2, 6))
        if counts[2] != counts[3]:
            speculative += 1
            continue
        if max(counts) >= 1 << 31 or counts[0] > MAX_REQUESTS or counts[1] < counts[0]:
            raise UserError(f"{file.name}:{number}: no composition of a step: {match[0][:120]}")
        if not 0 < float(match[6]) < MAX_S * 1e3:
            continue  # rounded to nothing, or a stop of the machine
        if len(found) >= MAX_STEPS:
            raise UserError(f"{file.name}: more than {MAX_STEPS:,} steps; cut the log")
        found.append(counts)
        milliseconds.append(float(match[6]))
        usage.append(None if match[8] is None else float(match[8]) / 100)
    if not found:
        raise UserError(
            f"{file.name}: no engine steps in it: neither JSON lines of steps (docs/exactness.md) nor a log of "
            "`vllm serve --enable-logging-iteration-details`"
        )
    told = parse_startup_log("\n".join(head)).figures.get("kv_cache_size_tokens")
    pool = kv_cache_tokens or (int(told) if told else None)
    if pool is None or any(use is None for use in usage):
        raise UserError(
            f"{file.name}: how much the KV cache holds is not in the log (`KV cache size: N tokens`), so the "
            "decodes' contexts are unknown: give --num-gpu-blocks-override as the server had it"
        )
    steps = [
        Logged(_spread(counts, (use or 0.0) * pool), ms / 1e3, ms / 1e3)
        for counts, ms, use in zip(found, milliseconds, usage, strict=True)
    ]
    notes = [
        "vLLM's `iteration elapsed time` is how long the engine waited for the model: what the CPU does before "
        "that is not in it",
        "the log has no contexts: their sum is taken from the KV cache's use, evenly among the decodes, and "
        "prompts count as not begun",
    ]
    if dummies:
        notes.append(f"{dummies} dummy steps of data-parallel ranks are left out")
    if speculative:
        notes.append(
            f"{speculative} steps with more than one token a decode (speculative decoding) are left out"
        )
    return StepLog(Samples(samples_of(steps, block_size)), "vllm", exact=False, notes=notes)


def _spread(counts: tuple[int, ...], kv_tokens: float) -> StepShape:
    """Context and generation counts as a shape: chunks of equal size, decodes of equal context."""
    chunks, chunk_tokens, decodes, _ = counts
    share, rest = divmod(chunk_tokens, chunks) if chunks else (0, 0)
    sizes = [share + (n < rest) for n in range(chunks)]
    lone = sum(size == 1 for size in sizes)  # a chunk of one token is a decode to the kernels
    decodes += lone
    context = max(0, round(kv_tokens) - chunk_tokens) if decodes else 0
    mean = -(-context // decodes) if decodes else 0
    return StepShape(tuple((size, 0) for size in sizes if size > 1), decodes, context, mean)
