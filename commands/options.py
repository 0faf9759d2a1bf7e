"""vLLM's engine flags as click options, the same on every command that takes a deployment."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

# (declarations, attributes). None means "not given": the default is vLLM's, resolved for GPU and model.
_FLAGS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (
        ("--model",),
        {"help": "Bundled name (vsim catalog) or a folder with a Hugging Face config.json."},
    ),
    (("--gpu",), {"help": "GPU by name, e.g. a100, h100, rtx4090 (vsim catalog)."}),
    (
        ("--tensor-parallel-size", "-tp"),
        {"type": click.IntRange(min=1), "help": "GPUs that share each layer's work."},
    ),
    (
        ("--pipeline-parallel-size", "-pp"),
        {"type": click.IntRange(min=1), "help": "Stages that the layers are split into."},
    ),
    (
        ("--data-parallel-size", "-dp"),
        {"type": click.IntRange(min=1), "help": "Copies of the model behind one endpoint."},
    ),
    (
        ("--enable-expert-parallel/--no-enable-expert-parallel",),
        {
            "default": None,
            "help": "MoE: whole experts on each rank instead of slices of every expert.",
        },
    ),
    (("--dtype",), {"help": "Weights and activations: auto, bfloat16, float16, float32."}),
    (("--quantization", "-q"), {"help": "Of the weights: fp8, awq, gptq, ... as vLLM names them."}),
    (
        ("--kv-cache-dtype",),
        {"help": "Of the KV cache: auto, fp8, fp8_e4m3, fp8_e5m2, bfloat16."},
    ),
    (
        ("--max-model-len",),
        {"type": int, "help": "Most tokens of one request, prompt and output together."},
    ),
    (
        ("--gpu-memory-utilization",),
        {"type": float, "help": "Share of device memory that vLLM may use, 0 to 1."},
    ),
    (
        ("--kv-cache-memory-bytes",),
        {
            "type": int,
            "help": "Size of the KV cache per GPU, instead of what the memory account leaves.",
        },
    ),
    (
        ("--num-gpu-blocks-override",),
        {"type": int, "help": "Number of KV blocks, instead of what fits."},
    ),
    (("--block-size",), {"type": int, "help": "Tokens in one KV block."}),
    (
        ("--enable-prefix-caching/--no-enable-prefix-caching",),
        {"default": None, "help": "Reuse KV blocks of a prompt's beginning seen before."},
    ),
    (
        ("--enable-chunked-prefill/--no-enable-chunked-prefill",),
        {"default": None, "help": "Split a prompt over several steps, beside decodes."},
    ),
    (("--max-num-seqs",), {"type": int, "help": "Most requests in one engine step."}),
    (
        ("--max-num-active-seqs",),
        {
            "type": int,
            "help": "Most requests running at once, below --max-num-seqs; leaves memory and graphs alone.",
        },
    ),
    (("--max-num-batched-tokens",), {"type": int, "help": "Token budget of one engine step."}),
    (
        ("--max-num-scheduled-tokens",),
        {
            "type": int,
            "help": "Tokens the scheduler hands out a step, where fewer than --max-num-batched-tokens.",
        },
    ),
    (
        ("--long-prefill-token-threshold",),
        {"type": int, "help": "Most prompt tokens of one request in one step; 0: no such cap."},
    ),
    (
        ("--long-prefill-token-threshold-adaptive/--no-long-prefill-token-threshold-adaptive",),
        {
            "default": None,
            "help": "That cap never below the token budget's even share among all requests.",
        },
    ),
    (
        ("--scheduling-policy",),
        {
            "type": click.Choice(["fcfs", "priority"]),
            "help": "Who goes first: arrival order, or the request's priority.",
        },
    ),
    (
        ("--scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl",),
        {
            "default": None,
            "help": "Admit a request only when its whole prompt fits the KV cache, not just a chunk.",
        },
    ),
    (
        ("--watermark",),
        {"type": float, "help": "Share of KV blocks kept free when admitting requests."},
    ),
    (
        ("--async-scheduling/--no-async-scheduling",),
        {"default": None, "help": "Schedule the next step while the device runs this one."},
    ),
    (
        ("--enforce-eager/--no-enforce-eager",),
        {"default": None, "help": "No CUDA graphs: no padding, no memory for them."},
    ),
    (
        ("--kv-offloading-size",),
        {"type": float, "help": "GiB of CPU memory for V1's offload tier, over all TP ranks."},
    ),
    (("--swap-space",), {"type": float, "help": "V0: GiB of CPU memory for swapped KV blocks."}),
    (
        ("--preemption-mode",),
        {
            "type": click.Choice(["recompute", "swap"]),
            "help": "V0: what happens to a victim's KV blocks.",
        },
    ),
    (
        ("--engine",),
        {"type": click.Choice(["v1", "v0"]), "help": "v1: vLLM 0.32 (default); v0: vLLM 0.8.5."},
    ),
    (
        ("--engine-version",),
        {"help": "A vLLM release whose defaults and decisions to use, e.g. 0.19.0."},
    ),
    (
        ("--usage",),
        {
            "type": click.Choice(["server", "llm"]),
            "help": "Whose defaults: `vllm serve` (default) or the offline `LLM` class.",
        },
    ),
]

NAMES = tuple(
    next(d for d in declarations if d.startswith("--")).split("/")[0][2:].replace("-", "_")
    for declarations, _ in _FLAGS
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add vLLM's engine flags to a command; they arrive together as the dict `engine_flags`."""

    @functools.wraps(command)
    def gathered(*args: Any, **values: Any) -> Any:
        engine_flags = {name: values.pop(name) for name in NAMES}
        return command(*args, engine_flags=engine_flags, **values)

    for declarations, attributes in reversed(_FLAGS):
        gathered = click.option(*declarations, **attributes)(gathered)
    return gathered
