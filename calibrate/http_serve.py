"""A trace served by a running vLLM server over HTTP with streaming, in real time -> `Run`."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from vsim.errors import UserError
from vsim.sim.run import FINISHED, REJECTED, REQUEST_COLUMNS, STEP_COLUMNS, UNFINISHED, Run
from vsim.traces.trace import Trace

TIMEOUT_S = 600.0
_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class _Seen:
    """What the client saw of one request; ns on its own clock, -1: never."""

    sent_ns: int = -1
    first_ns: int = -1
    last_ns: int = -1
    chunks: int = 0
    tokens: int | None = None
    gaps: list[int] = field(default_factory=list)
    refusal: str = ""


def server_facts(url: str) -> dict[str, Any]:
    """Model and KV cache of the server at `url`, as it tells them: /version, /v1/models and /metrics.

    Keys: model, max_model_len, vllm_version, block_size, num_gpu_blocks, enable_prefix_caching; what it does
    not tell is None. Raises UserError if nobody answers there.
    """
    try:
        models = json.loads(_get(url, "/v1/models"))["data"][0]
        name = str(models["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"--url {url}: /v1/models does not answer as a vLLM server does") from None
    labels: dict[str, str] = {}
    version = None
    try:
        found = _INFO.search(_get(url, "/metrics"))
        labels = dict(_LABEL.findall(found.group(1))) if found else {}
        version = json.loads(_get(url, "/version")).get("version")
    except (UserError, ValueError):
        pass

    def number(name: str) -> int | None:
        return int(labels[name]) if labels.get(name, "").isdigit() else None

    caching = labels.get("enable_prefix_caching")
    return {
        "model": name,
        "max_model_len": models.get("max_model_len"),
        "vllm_version": version,
        "block_size": number("block_size"),
        "num_gpu_blocks": number("num_gpu_blocks_override") or number("num_gpu_blocks"),
        "enable_prefix_caching": None if caching is None else caching == "True",
    }


def _connect(url: str) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        raise UserError(
            f"--url {url} is no address of a server, e.g. http://localhost:8000"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--url {url} is no address of a server, e.g. http://localhost:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, port, timeout=TIMEOUT_S), parts.path.rstrip("/")


def _get(url: str, path: str) -> str:
    connection, prefix = _connect(url)
    try:
        connection.request("GET", prefix + path)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"--url {url}: no vLLM server answers {path} ({error})") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise UserError(f"--url {url}: {path} answers HTTP {answer.status}")
    return text


def serve_over_http(
    url: str,
    model: str,
    trace: Trace,
    vocab_size: int,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> Run:
    """Send `trace` at its own times and read every stream to its end; a `Run` without steps.

    Prompts are random token ids (equal prefix ids give equal tokens), outputs exactly as long as the trace
    says. TTFT ends with the first chunk that holds choices, E2E with the last; gaps are between chunks, as
    `vllm bench serve` measures them (vLLM 0.32 benchmarks/lib/endpoint_request_func.py).
    """
    prompts = _prompts(trace, vocab_size, seed)
    seen = [_Seen() for _ in range(len(trace))]
    began = time.perf_counter_ns()
    threads = []
    for index, arrival in enumerate(trace.arrival_ns.tolist()):
        wait = (began + arrival - time.perf_counter_ns()) / 1e9
        if wait > 0:
            time.sleep(wait)
        body = {
            "model": model,
            "prompt": prompts[index],
            "max_tokens": int(trace.output_tokens[index]),
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        thread = threading.Thread(target=_stream, args=(url, body, began, seen[index]), daemon=True)
        thread.start()
        threads.append(thread)
        if index % 50 == 0:
            say(f"sent {index + 1} of {len(trace)} requests")
    for thread in threads:
        thread.join(TIMEOUT_S)
    return _run(trace, seen)


def _stream(url: str, body: dict[str, Any], began: int, seen: _Seen) -> None:
    try:
        connection, prefix = _connect(url)
        payload = json.dumps(body)
        seen.sent_ns = time.perf_counter_ns() - began
        connection.request(
            "POST", f"{prefix}/v1/completions", payload, {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            seen.refusal = f"HTTP {answer.status}"
            seen.last_ns = time.perf_counter_ns() - began
            return
        for line in answer:
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter_ns() - began
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = json.loads(data)
            if chunk.get("usage"):
                seen.tokens = int(chunk["usage"]["completion_tokens"])
            if not chunk.get("choices"):
                continue
            seen.chunks += 1
            if seen.first_ns < 0:
                seen.first_ns = now
            else:
                seen.gaps.append(now - seen.last_ns)
            seen.last_ns = now
        connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        seen.refusal = f"the connection failed: {type(error).__name__}"


def _prompts(trace: Trace, vocab_size: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng([86028121, seed])
    blocks: dict[int, list[int]] = {}
    found = []
    for request in trace:
        tokens: list[int] = []
        for block in request.prefix_ids:
            if block not in blocks:
                blocks[block] = rng.integers(5, vocab_size, request.prefix_block_tokens).tolist()
            tokens += blocks[block]
        if len(tokens) < request.prompt_tokens:
            tokens += rng.integers(5, vocab_size, request.prompt_tokens - len(tokens)).tolist()
        found.append(tokens[: request.prompt_tokens])
    return found


def _run(trace: Trace, seen: list[_Seen]) -> Run:
    n = len(trace)
    reasons = tuple(dict.fromkeys(one.refusal for one in seen if one.refusal))
    status = [REJECTED if one.refusal else FINISHED if one.chunks else UNFINISHED for one in seen]
    columns: dict[str, Any] = {
        "request": np.arange(n),
        "arrival_ns": trace.arrival_ns,
        "sent_ns": [one.sent_ns for one in seen],
        "first_scheduled_ns": [-1] * n,  # the client can't see it
        "first_token_ns": [one.first_ns for one in seen],
        "finish_ns": [one.last_ns for one in seen],
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": [one.chunks if one.tokens is None else one.tokens for one in seen],
        "status": status,
        "reason": [reasons.index(one.refusal) if one.refusal else -1 for one in seen],
    }
    zeros = np.zeros(n)
    gaps = Counter(gap for one in seen for gap in one.gaps)
    values = np.array(sorted(gaps), dtype=np.int64)
    return Run(
        origin="measured",
        requests={
            name: np.asarray(columns.get(name, zeros), dtype=kind)
            for name, kind in REQUEST_COLUMNS.items()
        },
        steps={name: np.empty(0, dtype=kind) for name, kind in STEP_COLUMNS.items()},
        itl_ns=values,
        itl_count=np.array([gaps[int(v)] for v in values], dtype=np.int64),
        block_size=0,
        num_gpu_blocks=0,
        reasons=reasons,
        tenant_names=trace.tenant_names,
        end_ns=max((one.last_ns for one in seen), default=0),
    )
