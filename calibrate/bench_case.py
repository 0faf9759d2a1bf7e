"""A `vllm bench serve --save-detailed` result and the trace that caused it -> a `Case` with measured latencies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.calibrate.case import Case, Measured
from vsim.errors import UserError
from vsim.sim.bench_json import bench_run, load_bench
from vsim.sim.deployment import Deployment
from vsim.sim.run import FINISHED, Run
from vsim.traces.arrivals import select, select_any
from vsim.traces.readers import read_trace
from vsim.traces.trace import Int64Array, Trace

# A tokenizer that encodes a prompt again may give a few tokens more or less; beyond this it is another prompt.
NEAR_TOKENS = 32
NEAR_SHARE = 0.05
MOST_FAILED = 0.1  # of the requests: their load on the engine is not known
LEAST_REQUESTS = 12


@dataclass(frozen=True, slots=True)
class Bench:
    """A result, read: `about` is what it says of itself, `rows` the lists' rows in order of sending."""

    case: Case
    about: dict[str, Any]
    sha256: str


def read_bench(
    result: Path, trace: Path | None, deployment: Deployment, reading: Mapping[str, Any]
) -> Bench:
    """The result with its trace, on `deployment`. `trace` None: the requests as the result itself tells them.

    Requests arrive when the client really sent them, with the output lengths that the server gave; what they
    share comes from the trace. Latencies are the client's, so HTTP and the front end are in them.
    Raises UserError if the result carries no requests, too many failed, or the trace is another's.
    """
    found = load_bench(result)
    run = bench_run(found, result.name)
    if run is None:
        raise UserError(
            f"{result.name} has only aggregates, no requests: run `vllm bench serve` with --save-detailed"
        )
    said = []
    if trace is None:
        asked = _own_trace(run, result.name)
        said.append("no --trace was given: that no two prompts share a beginning is assumed")
    else:
        asked, matched = _matched(read_trace(trace, **reading), run, trace.name, result.name)
        said += matched
    done = run.requests["status"] == FINISHED
    rows = np.flatnonzero(done)
    rows = rows[np.argsort(run.requests["sent_ns"][rows], kind="stable")]
    failed = len(done) - len(rows)
    if failed > MOST_FAILED * len(done):
        raise UserError(
            f"{result.name}: {failed} of {len(done)} requests failed; what they cost the engine is not in the "
            "file, so nothing can be fitted on the others"
        )
    if len(rows) < LEAST_REQUESTS:
        raise UserError(
            f"{result.name} has {len(rows)} finished requests; at least {LEAST_REQUESTS} are needed"
        )
    if failed:
        said.append(
            f"{failed} of {len(done)} requests failed: they are left out, and so is the load they were"
        )
    if found.get("max_concurrency") is not None:
        said.append(
            f"the client kept to {found['max_concurrency']} requests at once: each is sent again when it "
            "really was sent"
        )
    served = _as_sent(asked, run, rows)
    measured = _measured(run, rows)
    case = Case(
        name=result.name,
        folder=result.parent,
        engine={"frontend": "http", "enforce_eager": deployment.enforce_eager},
        trace=served,
        measured=measured,
        model=deployment.model,
        gpu=deployment.gpu,
        scheduler=deployment.scheduler,
        assumptions=(*asked.assumptions, *said, *deployment.assumptions),
        ranks=deployment.data_parallel_size,
        expert_parallel=deployment.enable_expert_parallel,
        tensor_parallel_size=deployment.tensor_parallel_size,
    )
    about = {
        key: found[key]
        for key in (
            "date",
            "backend",
            "endpoint_type",
            "model_id",
            "request_rate",
            "burstiness",
            "max_concurrency",
            "completed",
        )
        if isinstance(found.get(key), str | int | float)
    }
    return Bench(case, about, hashlib.sha256(result.read_bytes()).hexdigest())


def _own_trace(run: Run, name: str) -> Trace:
    """The requests as the result lists them, without contents."""
    columns = run.requests
    n = len(columns["request"])
    trace = Trace.of(
        [0.0] * n, columns["prompt_tokens"].tolist(), columns["output_tokens"].tolist(), name
    )
    return replace(trace, source=replace(trace.source, format="vllm-bench-serve"))


def _matched(trace: Trace, run: Run, name: str, result: str) -> tuple[Trace, list[str]]:
    """(the trace's rows that are in the result, sentences). Raises UserError if they are not the same requests."""
    prompt = run.requests["prompt_tokens"]
    n = len(prompt)
    if len(trace) < n:
        raise UserError(
            f"{result} has {n} requests and {name} only {len(trace)}: that trace did not cause this result"
        )
    said = []
    if len(trace) > n:
        trace = select(trace, np.arange(n), f"Only the first {n} requests were sent.")
    if trace.sessions is not None:
        trace = replace(trace, sessions=None)  # each turn was sent when it was sent
    away = np.abs(trace.prompt_tokens - prompt)
    other = away > np.maximum(NEAR_TOKENS, NEAR_SHARE * prompt)
    if other.any():
        row = int(other.argmax())
        raise UserError(
            f"request {row} has {int(trace.prompt_tokens[row])} prompt tokens in {name} and {int(prompt[row])} "
            f"in {result} ({int(other.sum())} of {n} requests differ): that trace did not cause this result"
        )
    if away.any():
        said.append(
            f"{int((away > 0).sum())} prompts have up to {int(away.max())} tokens more or less than in the "
            "trace: the result's own count is taken"
        )
    done = run.requests["status"] == FINISHED
    changed = int((trace.output_tokens != run.requests["output_tokens"])[done].sum())
    if changed:
        said.append(
            f"{changed} requests gave another number of tokens than the trace has: the result's is taken"
        )
    return trace, said


def _as_sent(trace: Trace, run: Run, rows: Int64Array) -> Trace:
    """`rows` of the trace at the result's send times and lengths."""
    columns = run.requests
    picked = select_any(trace, rows)
    sent = columns["sent_ns"][rows]
    prompt = columns["prompt_tokens"][rows].astype(np.int64)
    offsets, ids = picked.prefix_offsets, picked.prefix_ids
    if offsets is not None and ids is not None and picked.prefix_block_tokens:
        # A prompt that came out shorter than the trace has it holds fewer whole pieces.
        most = -(-prompt // picked.prefix_block_tokens)
        kept = [
            ids[low : low + min(high - low, limit)]
            for low, high, limit in zip(
                offsets[:-1].tolist(), offsets[1:].tolist(), most.tolist(), strict=True
            )
        ]
        offsets = np.concatenate(([0], np.cumsum([len(piece) for piece in kept]))).astype(np.int64)
        ids = np.concatenate(kept) if kept else ids
    return replace(
        picked,
        arrival_ns=(sent - sent.min()).astype(np.int64),
        prompt_tokens=prompt,
        output_tokens=columns["output_tokens"][rows].astype(np.int64),
        max_tokens=None,
        aborted=None,
        prefix_offsets=offsets,
        prefix_ids=ids,
        assumptions=(),
    )


def _measured(run: Run, rows: Int64Array) -> Measured:
    """The client's stamps in seconds from the first send."""
    columns = run.requests

    def seconds(name: str) -> npt.NDArray[np.float64]:
        ns: npt.NDArray[np.float64] = columns[name][rows] / 1e9
        return ns

    sent, first, last = seconds("sent_ns"), seconds("first_token_ns"), seconds("finish_ns")
    start = float(sent.min())
    gaps = columns["output_tokens"][rows] - 1
    tpot = np.full(len(rows), np.nan)
    np.divide(last - first, gaps, out=tpot, where=gaps > 0)
    return Measured(
        arrival_s=sent - start,
        queued_s=np.full(len(rows), np.nan),
        first_token_s=first - start,
        last_token_s=last - start,
        ttft_s=first - sent,
        tpot_s=tpot,
        e2e_s=last - sent,
    )
