"""The recording process: real vLLM behind a line protocol, in whichever Python has vLLM.

It reads one JSON command a line on stdin and answers in JSON lines on what was its stdout; vLLM's own
output goes to stderr. Commands (`calibrate/worker.py` is the other end):

    {"do": "start", "engine_args": {...}, "temperature": 0.0, "yardstick": {"reference_ns": n or null} or null}
    {"do": "scene", "decodes": [ctx, ...], "decode_steps": n, "prefills": [[new, ctx], ...], "injections": m}
    {"do": "serve", "requests": [[arrival_ns, prompt_tokens, output_tokens, priority], ...],
     "prefix": [[id, ...], ...], "prefix_block_tokens": n, "clock": "wall" | "cpu", "limit_s": seconds}
    {"do": "kernels", "rows": [1, 2, ...], "repeats": n}

Answers: {"hello": ...}, {"started": ...}, {"step": ...} for each engine step, {"kernels": ...}, {"rejected": ...},
{"done": ...}, {"error": ...}. When stdin ends, so does the process.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

Answer = Callable[[dict[str, Any]], None]


def main() -> None:
    """Serve commands until stdin ends."""
    answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints must not end up between the answers

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message, separators=(",", ":")) + "\n")
        answers.flush()

    try:
        answer({"hello": hello()})
        engine = None
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "start":
                from vsim.calibrate.record_engine import RecordedEngine
                from vsim.calibrate.record_yardstick import Yardstick

                wanted = command.get("yardstick")
                engine = RecordedEngine(
                    command["engine_args"],
                    command.get("temperature", 0.0),
                    None if wanted is None else Yardstick(wanted.get("reference_ns")),
                )
                engine.learn_yardstick()
                gc.collect()
                gc.freeze()
                answer({"started": about(engine)})
            elif engine is None:
                answer({"error": "no engine was started"})
            elif command["do"] == "scene":
                scene(engine, command, answer)
            elif command["do"] == "kernels":
                answer({"kernels": engine.kernel_seconds(command["rows"], command["repeats"])})
            elif command["do"] == "serve":
                serve(engine, command, answer)
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {str(error).strip()[:2000]}"})
        os._exit(1)
    # vLLM's own teardown may wait for threads; there is nothing left to save.
    os._exit(0)


def hello() -> dict[str, Any]:
    """Where this process runs: found before any model is loaded."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    cuda = bool(current_platform.is_cuda_alike())
    return {
        "vllm_version": str(vllm.__version__),
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
        "platform": "cuda" if cuda else "cpu",
        "device": torch.cuda.get_device_name(0) if cuda else cpu_name(),
        "device_count": torch.cuda.device_count() if cuda else 1,
        "driver": str(getattr(torch.version, "cuda", "") or "") if cuda else "",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def cpu_name() -> str:
    """The CPU's own name, as Linux gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def about(engine: Any) -> dict[str, Any]:
    """What vLLM made of the engine arguments."""
    config = engine.config
    scheduler = config.scheduler_config
    return {
        "start_s": round(engine.start_s, 3),
        "block_size": engine.block_size,
        "num_gpu_blocks": engine.usable_blocks + 1,
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "max_num_seqs": int(scheduler.max_num_seqs),
        "max_model_len": int(config.model_config.max_model_len),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization,
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "async_scheduling": bool(scheduler.async_scheduling),
        "scheduler_reserve_full_isl": bool(getattr(scheduler, "scheduler_reserve_full_isl", False)),
        "watermark": float(getattr(scheduler, "watermark", 0.0) or 0.0),
        "policy": str(scheduler.policy),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "tensor_parallel_size": int(config.parallel_config.tensor_parallel_size),
        "v2_model_runner": bool(getattr(config, "use_v2_model_runner", False)),
        "vocab_size": engine.vocab_size,
        "yardstick_ns": None if engine.yardstick is None else engine.yardstick.reference_ns,
    }


def scene(engine: Any, command: dict[str, Any], answer: Answer) -> None:
    """Decodes at given contexts, then prefill chunks thrown in beside them; every step is told.

    Contexts are whole blocks and are not computed but declared cached. The first step only admits the
    decodes; between two injections there is one step of decodes alone.
    """
    decodes: list[int] = command["decodes"]
    prefills: list[list[int]] = command["prefills"]
    injections = command.get("injections", 1) if prefills else 0
    before = command["decode_steps"] if decodes else 0
    lifetime = before + 2 * injections + 1
    engine.forget()
    gc.collect()
    gc.disable()
    try:
        if engine.yardstick is not None:
            engine.yardstick.begin()
        count = 0
        for context in decodes:
            engine.add(count, context + 1, lifetime)
            engine.pretend_computed(count, context)
            count += 1
        index = 0
        for _ in range(before):
            index = _tell(engine, index, answer, warmup=index == 0)
        for _ in range(injections):
            for new, context in prefills:
                engine.add(count, context + new, 1)
                engine.pretend_computed(count, context)
                count += 1
            index = _tell(engine, index, answer, warmup=False)
            while len(engine.scheduler.running) > len(decodes) or engine._num_waiting():
                index = _tell(engine, index, answer, warmup=False)
            if decodes:
                index = _tell(engine, index, answer, warmup=False)
        while engine.has_requests:
            # All decodes end in one of these steps, which no real run has: not for fitting.
            index = _tell(engine, index, answer, warmup=True)
    finally:
        gc.enable()
    answer({"done": {"steps": index}})


def _tell(engine: Any, index: int, answer: Answer, warmup: bool) -> int:
    for step in engine.step():
        if step.requests:
            answer({"step": {**asdict(step), "index": index, "warmup": warmup}})
            index += 1
    return index


def serve(engine: Any, command: dict[str, Any], answer: Answer) -> None:
    """Replay requests on a virtual clock: it advances by each step's duration and skips idle time.

    Arrivals therefore meet the engine exactly as often as its own speed makes them, whatever this process
    does between two steps. With a yardstick it is the undisturbed machine's clock: each step counts with the
    time it takes there. `clock` "cpu" takes the process's CPU time for a step's duration: on a host that
    others use too, it leaves out the moments in which they had the CPU. After `limit_s` seconds of wall time
    what is unfinished is aborted.
    """
    requests: list[list[int]] = command["requests"]
    prompts = _Prompts(engine, command.get("prefix"), command.get("prefix_block_tokens", 0))
    by_cpu = command.get("clock") == "cpu"
    engine.forget()
    gc.collect()
    gc.disable()
    now = sent = index = 0
    starts: list[int] = []
    limit_ns = round(command.get("limit_s", 1e9) * 1e9)
    began = time.monotonic_ns()
    if engine.yardstick is not None:
        engine.yardstick.begin()
    try:
        while sent < len(requests) or engine.has_requests:
            if time.monotonic_ns() - began > limit_ns:
                engine.abort()
                break
            while sent < len(requests) and requests[sent][0] <= now:
                _, prompt, output, priority = requests[sent]
                refusal = engine.add(sent, prompts.of(sent, prompt), output, priority)
                if refusal is not None:
                    answer({"rejected": {"request": sent, "reason": refusal, "at_ns": now}})
                sent += 1
            if not engine.has_requests:
                if sent < len(requests):
                    now = max(now, requests[sent][0])
                continue
            starts.append(now)
            for step in engine.step():
                start = starts.pop(0)
                now += step.cpu_ns if by_cpu else step.total_ns
                answer({"step": {**asdict(step), "index": index, "start_ns": start, "end_ns": now}})
                index += 1
    finally:
        gc.enable()
    answer({"done": {"steps": index, "end_ns": now}})


class _Prompts:
    """Token ids of a trace's prompts: equal prefix ids give equal tokens, the rest is private."""

    def __init__(self, engine: Any, prefix: list[list[int]] | None, block_tokens: int) -> None:
        self._engine = engine
        self._prefix = prefix
        self._block_tokens = block_tokens
        self._seen: dict[int, list[int]] = {}

    def of(self, index: int, length: int) -> list[int] | int:
        if not self._prefix or not self._prefix[index]:
            return length
        tokens: list[int] = []
        for block in self._prefix[index]:
            if block not in self._seen:
                self._seen[block] = self._engine.random_tokens(self._block_tokens)
            tokens += self._seen[block]
        if len(tokens) < length:
            tokens += self._engine.random_tokens(length - len(tokens))
        return tokens[:length]


if __name__ == "__main__":
    main()
