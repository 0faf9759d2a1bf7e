"""vLLM's start-up log: the lines a sizing would print, and the figures in a real log or /metrics text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from vsim.models.capacity import Capacity
from vsim.models.memory import GIB
from vsim.models.releases import (
    Version,
    capacity_in_one_line,
    logs_consumed_memory,
    parse_version,
    short_gib,
    subtracts_cuda_graphs,
)

MAX_LINE = 20_000  # a log line longer than this is no start-up line


def _gib(count: float, version: Version) -> str:
    return f"{round(count / GIB, 2)}" if short_gib(version) else f"{count / GIB:.2f}"


def startup_lines(
    fit: Capacity,
    engine: str,
    release: str,
    gpu_memory_utilization: float,
    total_bytes: int,
    platform: str = "cuda",
) -> list[str]:
    """The lines about memory that this release prints at INFO, in its order, without time and pid.

    Durations and what only the device knows (free memory, the graphs' real size) are left out, so some lines
    end early.
    """
    version = parse_version(release)
    terms = {term.name: term.bytes for term in fit.terms}
    loaded = sum(terms.get(name, 0) for name in ("weights", "RoPE tables", "draft weights"))
    profiled = "weights" in terms
    lines: list[str] = []
    if engine == "v0":
        if profiled:
            lines += [
                f"Model loading took {loaded / GIB:.4f} GiB",
                f"the current vLLM instance can use total_gpu_memory ({total_bytes / GIB:.2f}GiB) x "
                f"gpu_memory_utilization ({gpu_memory_utilization:.2f}) = "
                f"{total_bytes * gpu_memory_utilization / GIB:.2f}GiB",
                f"model weights take {loaded / GIB:.2f}GiB; non_torch_memory takes "
                f"{terms['non-torch memory'] / GIB:.2f}GiB; PyTorch activation peak memory takes "
                f"{terms['activation peak'] / GIB:.2f}GiB; the rest of the memory reserved for KV Cache is "
                f"{fit.available_bytes / GIB:.2f}GiB.",
            ]
        lines += [
            f"# {platform} blocks: {fit.num_gpu_blocks}, # CPU blocks: {fit.num_cpu_blocks}",
            f"Maximum concurrency for {fit.max_model_len} tokens per request: "
            f"{fit.num_gpu_blocks * fit.block_size / fit.max_model_len:.2f}x",
        ]
        return lines
    if profiled:
        lines.append(f"Model loading took {_gib(loaded, version)} GiB memory")
    graphs = terms.get("CUDA graph estimate", 0)
    if graphs and subtracts_cuda_graphs(version):
        lines.append(f"Estimated CUDA graph memory: {graphs / GIB:.2f} GiB total")
    if profiled or "available KV cache memory" in terms:
        lines.append(f"Available KV cache memory: {_gib(fit.available_bytes, version)} GiB")
    if graphs and subtracts_cuda_graphs(version) and total_bytes:
        share = graphs / total_bytes
        lines.append(
            "CUDA graph memory profiling is enabled (default since v0.21.0). The current "
            f"--gpu-memory-utilization={gpu_memory_utilization:.4f} is equivalent to "
            f"--gpu-memory-utilization={round(gpu_memory_utilization - share, 4):.4f} without CUDA graph memory "
            "profiling."
        )
    device = {"cuda": "GPU"}.get(platform, platform.upper())
    size = f"{device} KV cache size: {fit.kv_cache_size_tokens:,} tokens"
    concurrency = f"Maximum concurrency for {fit.max_model_len:,} tokens per request: {fit.max_concurrency:.2f}x"
    lines += [f"{size}, {concurrency}"] if capacity_in_one_line(version) else [size, concurrency]
    if profiled and logs_consumed_memory(version):
        used = loaded + terms["non-torch memory"]
        lines.append(
            f"Desired GPU memory utilization is ({gpu_memory_utilization}, {_gib(fit.requested_bytes, version)} "
            f"GiB). Actual usage is {_gib(used, version)} GiB for consumed memory (weights + non-torch), "
            f"{_gib(terms['activation peak'] + graphs, version)} GiB for peak activation. Current kv cache "
            f"memory in use is {_gib(fit.available_bytes, version)} GiB."
        )
    return lines


# --- reading a real one ----------------------------------------------------------------------------------

# Bounded: with any length, a line of thousands of digits would be tried in all its cuts.
_NUMBER = r"(-?[\d,]{0,24}\.?\d{1,24})"

# Field -> patterns; the first group is the figure. GiB fields are per rank: the poorest rank's is kept.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "weights_gib": (
        rf"Model loading took {_NUMBER} ?G[i]?B",
        rf"Loading model weights took {_NUMBER} ?G[i]?B",
        rf"model weights take {_NUMBER} ?GiB",
        rf"{_NUMBER} GiB for weight\b",
        rf"weights memory: {_NUMBER} ?GiB",
    ),
    "total_gib": (
        rf"total_gpu_memory \({_NUMBER} ?GiB\)",
        rf"Free memory on device(?: \S+)? \(-?[\d.]+/{_NUMBER} GiB\)",
        rf"total_gpu_memory={_NUMBER} ?GiB",
    ),
    "peak_torch_gib": (rf"peak_torch_memory={_NUMBER} ?GiB",),
    "gpu_memory_utilization": (
        rf"gpu_memory_utilization \({_NUMBER}\)",
        rf"Desired GPU memory utilization is \({_NUMBER},",
        rf"current --gpu-memory-utilization={_NUMBER} is",
        rf"Requested memory: {_NUMBER} \(util\)",
        rf"gpu_memory_utilization={_NUMBER}$",
    ),
    "requested_gib": (
        rf"gpu_memory_utilization \([\d.]+\) = {_NUMBER} ?GiB",
        rf"Desired GPU memory utilization is \([\d.]+, {_NUMBER} GiB\)",
        rf"Requested memory: [\d.]+ \(util\), {_NUMBER} GiB",
    ),
    "activation_gib": (
        rf"PyTorch activation peak memory takes {_NUMBER} ?GiB",
        rf"{_NUMBER} GiB for peak activation",
        rf"torch peak memory increase: {_NUMBER} ?GiB",
    ),
    "non_torch_gib": (
        rf"non_torch_memory takes {_NUMBER} ?GiB",
        rf"{_NUMBER} GiB for non-torch memory",
        rf"non-torch forward increase memory: {_NUMBER} ?GiB",
        rf"non_torch_memory={_NUMBER} ?GiB",
    ),
    "consumed_gib": (
        rf"{_NUMBER} GiB for consumed memory",
        rf"total consumed \(from mem_get_info\): {_NUMBER} ?GiB",
    ),
    "cuda_graph_estimate_gib": (
        rf"Estimated CUDA graph memory: {_NUMBER} GiB",
        rf"CUDA graph pool memory: [\d.]+ GiB \(actual\), {_NUMBER} GiB \(estimated\)",
    ),
    "cuda_graph_gib": (
        rf"Graph capturing finished in \d+ secs?, took {_NUMBER} GiB",
        rf"{_NUMBER} GiB for CUDAGraph memory",
    ),
    "available_gib": (
        rf"Available KV cache memory: {_NUMBER} GiB",
        rf"reserved for KV Cache is {_NUMBER} ?GiB",
        rf"Current kv cache memory in use is {_NUMBER} GiB",
        rf"kv_cache_size={_NUMBER} ?GiB",
        rf"(?:Explicitly|Auto) set \({_NUMBER}/[\d.]+\) GiB for KV cache",
        rf"reserved {_NUMBER} GiB memory for KV Cache",
    ),
    "swap_space_bytes": (rf'swap_space_bytes="{_NUMBER}"',),
    "needed_gib": (rf"\({_NUMBER} GiB KV cache is needed",),
    "kv_cache_size_tokens": (
        rf"KV cache size: {_NUMBER} tokens",
        rf'kv_cache_size_tokens="{_NUMBER}"',
    ),
    "max_model_len": (
        rf"Maximum concurrency for {_NUMBER} tokens per request",
        rf"max seq len \({_NUMBER}\)",
        rf"max_seq_len={_NUMBER}",
    ),
    "max_concurrency": (
        rf"tokens per request: {_NUMBER}x",
        rf'kv_cache_max_concurrency="{_NUMBER}"',
    ),
    "num_gpu_blocks": (
        rf"# (?:GPU|cuda|CUDA) blocks: {_NUMBER}",
        rf'num_gpu_blocks="{_NUMBER}"',
        rf"num_gpu_blocks is: {_NUMBER}",
    ),
    "num_cpu_blocks": (rf"# CPU blocks: {_NUMBER}", rf'num_cpu_blocks="{_NUMBER}"'),
    "block_size": (rf'\bblock_size="{_NUMBER}"', rf"Setting kv cache block size to {_NUMBER} for"),
    "estimated_max_len": (rf"estimated maximum model length is {_NUMBER}",),
    "max_num_batched_tokens": (rf"max_num_batched_tokens={_NUMBER}",),
    "tensor_parallel_size": (rf"tensor_parallel_size={_NUMBER}",),
    "pipeline_parallel_size": (rf"pipeline_parallel_size={_NUMBER}",),
}
_TEXT_PATTERNS: dict[str, tuple[str, ...]] = {
    "model": (r"with config: (?:.*?)\bmodel='([^']+)'",),
    "version": (
        r"LLM engine \(v?(\d[\w.+]*)\)",
        r"vLLM API server version v?(\d[\w.+]*)",
        r"vllm/vllm-openai:v?(\d[\w.]*)",
    ),
    "dtype": (r"\bdtype=torch\.(\w+)",),
    "quantization": (r"\bquantization=(\w[\w-]*)",),
    "kv_cache_dtype": (r"\bkv_cache_dtype=(\w+)", r'\bcache_dtype="(\w+)"'),
    "enforce_eager": (r"\benforce_eager=(True|False)",),
    "metrics_utilization": (r'gpu_memory_utilization="([\d.]+)"',),
}
_COMPILED = {name: tuple(re.compile(p) for p in patterns) for name, patterns in _PATTERNS.items()}
_TEXT_COMPILED = {
    name: tuple(re.compile(p) for p in patterns) for name, patterns in _TEXT_PATTERNS.items()
}
_LARGEST_RANK = {
    "weights_gib",
    "activation_gib",
    "non_torch_gib",
    "consumed_gib",
    "cuda_graph_estimate_gib",
}


@dataclass(frozen=True, slots=True)
class StartupLog:
    """What a log says. `figures` by the names above; `texts` likewise. Absent: the log has no such line."""

    figures: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    engine: str | None = None  # "v0" or "v1", where the lines tell

    def integer(self, name: str) -> int | None:
        return round(self.figures[name]) if name in self.figures else None


def parse_startup_log(text: str) -> StartupLog:
    """Read the figures off a start-up log, a refusal, or /metrics text (`vllm:cache_config_info`).

    Of several ranks the largest consumption and the smallest KV memory are kept: the poorest rank decides.
    A later start in the same file overwrites an earlier one.
    """
    figures: dict[str, float] = {}
    texts: dict[str, str] = {}
    rank: dict[
        str, int
    ] = {}  # which pattern a figure came from: the first patterns are the finer ones
    engine: str | None = None
    for line in text.splitlines():
        if len(line) > MAX_LINE:
            continue
        if "Initializing a V1 LLM engine" in line or "Initializing a V0 LLM engine" in line:
            figures, rank = {}, {}
        if "V1 LLM engine" in line or "v1/" in line or "KV cache size:" in line:
            engine = "v1"
        elif "V0 LLM engine" in line or "blocks: " in line or "total_gpu_memory" in line:
            engine = engine or "v0"
        for name, patterns in _COMPILED.items():
            for place, pattern in enumerate(patterns):
                match = pattern.search(line)
                if match is None:
                    continue
                value = _float(match.group(1))
                if value is None or place > rank.get(name, place):
                    break
                if name in figures and place == rank.get(name):
                    if name in _LARGEST_RANK:
                        value = max(value, figures[name])
                    elif name == "available_gib":
                        value = min(value, figures[name])
                figures[name], rank[name] = value, place
                break
        for name, patterns in _TEXT_COMPILED.items():
            for pattern in patterns:
                match = pattern.search(line)
                if match is not None:
                    texts.setdefault(name, match.group(1))
                    break
    if "metrics_utilization" in texts:
        value = _float(texts.pop("metrics_utilization"))
        if value is not None:
            figures.setdefault("gpu_memory_utilization", value)
    if "peak_torch_gib" in figures and "weights_gib" in figures:
        # Up to 0.6.4 the peak of PyTorch's memory was logged, weights included.
        figures.setdefault("activation_gib", figures["peak_torch_gib"] - figures["weights_gib"])
    if texts.get("quantization") == "None":
        del texts["quantization"]
    return StartupLog(figures, texts, engine)


def _float(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < 1e15 else None
