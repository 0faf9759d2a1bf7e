"""What changed between vLLM releases, as far as memory and defaults are concerned.

Each rule was read off the released sources on both sides of the change (0.8.5, 0.9.2, 0.10.2, 0.11.2, 0.13.0,
0.15.0, 0.17.0, 0.19.0, 0.20.0, 0.20.1, 0.20.2, 0.21.0, 0.23.0, 0.25.1, 0.27.0, 0.28.0, 0.29.0, 0.30.0, 0.32.0); a change
between two of them is dated to the later one. An empty version means the newest.
"""

from __future__ import annotations

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """ "0.21.1rc2" -> (0, 21, 1); anything unreadable -> ()."""
    numbers: list[int] = []
    for part in text.strip().lstrip("vV~ ").split("."):
        digits = ""
        for ch in part:
            if not ("0" <= ch <= "9"):
                break
            digits += ch
        if not digits or len(digits) > 9:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _since(version: Version, release: Version) -> bool:
    return not version or version >= release


def gpu_memory_utilization(engine: str, version: Version) -> float:
    """`config/cache.py`: 0.9 up to 0.19.0, 0.92 in 0.20.0."""
    return 0.92 if engine == "v1" and _since(version, (0, 20)) else 0.9


def subtracts_cuda_graphs(version: Version) -> bool:
    """VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is on by default ("default since v0.21.0")."""
    return _since(version, (0, 21))


def tokens_from_concurrency(version: Version) -> bool:
    """ "GPU KV cache size" is int(max_concurrency x max_model_len); before, blocks // groups x block size (0.20.1)."""
    return _since(version, (0, 20, 1))


def reserves_null_block(version: Version) -> bool:
    """The start-up check leaves one block out, because V1 never hands out its null block (0.29.0)."""
    return _since(version, (0, 29))


def counts_batches_in_flight(version: Version) -> bool:
    """A sliding-window group keeps the tokens of every batch in flight, not of one (0.27.0)."""
    return _since(version, (0, 27))


def hybrid_allocator(engine: str, version: Version) -> bool:
    """Sliding-window layers get their own groups, which free blocks behind the window (V1; 0.9.2)."""
    return engine == "v1" and _since(version, (0, 9))


def group_size_ratio(version: Version) -> float:
    """Up to this ratio of layer counts the larger is the group size: none in 0.11, 1.25 in 0.13, 1.5 in 0.19."""
    if _since(version, (0, 18)):
        return 1.5
    return 1.25 if version >= (0, 12) else 1.0


def b200_server_tokens(version: Version) -> bool:
    """GPUs with 160 GiB and more start a server with 16,384 batched tokens (0.28.0; before, 8,192)."""
    return _since(version, (0, 28))


def spares_a100(version: Version) -> bool:
    """The A100 gets the small GPUs' batch defaults (in 0.9.2, not in 0.8.5; vllm#17885)."""
    return _since(version, (0, 9))


def reserves_full_prompt(version: Version) -> bool:
    """`scheduler_reserve_full_isl` exists and is on (in 0.19.0, not in 0.17.0)."""
    return _since(version, (0, 18))


def async_by_default(version: Version) -> bool:
    """`async_scheduling` is off by default in 0.13.0 and decided by the engine in 0.15.0."""
    return _since(version, (0, 14))


def v0_chunk_tokens(version: Version) -> int:
    """V0's token budget under chunked prefill: 512 in 0.6.4 (vllm#10517), 2,048 in 0.7.2 and 0.8.5."""
    return 512 if version and version < (0, 7) else 2048


def capacity_in_one_line(version: Version) -> bool:
    """Cache size and maximum concurrency are logged in one line (0.28.0)."""
    return _since(version, (0, 28))


def logs_consumed_memory(version: Version) -> bool:
    """The usage line adds weights and non-torch up as "consumed memory", at INFO (0.27.0)."""
    return _since(version, (0, 27))


def short_gib(version: Version) -> bool:
    """GiB are logged rounded, without trailing zeros (0.15.0; "%.2f" in 0.13.0)."""
    return _since(version, (0, 14))
