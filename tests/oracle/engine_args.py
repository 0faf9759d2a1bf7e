"""vLLM's own batch defaults and scheduler checks: a JSON case per line on stdin, its answer on stdout.

    <python of the vLLM environment> engine_args.py

in   {"memory_bytes", "device_name", "cpu", "usage", "tp", "pp", "max_num_seqs", "max_num_batched_tokens",
      "enable_chunked_prefill", "max_model_len", "long_prefill_token_threshold", "max_num_active_seqs"}
out  {"max_num_seqs", "max_num_batched_tokens"} or {"refused": text}

It calls `EngineArgs._set_default_max_num_seqs_and_batched_tokens_args` and `SchedulerConfig` of vLLM 0.32.0 with
a platform that answers for the named device.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from types import SimpleNamespace


def resolve(case):
    from vllm.config import SchedulerConfig
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    arg_utils.current_platform = SimpleNamespace(
        get_device_total_memory=lambda: case["memory_bytes"],
        get_device_name=lambda: case["device_name"],
        is_tpu=lambda: False,
        is_cpu=lambda: case["cpu"],
    )
    args = object.__new__(arg_utils.EngineArgs)
    args.max_num_seqs = case["max_num_seqs"]
    args.max_num_batched_tokens = case["max_num_batched_tokens"]
    args.enable_chunked_prefill = case["enable_chunked_prefill"]
    args.tensor_parallel_size, args.pipeline_parallel_size = case["tp"], case["pp"]
    args.performance_mode = "balanced"
    model = SimpleNamespace(
        max_model_len=case["max_model_len"], is_multimodal_model=False, is_mm_prefix_lm=False
    )
    usage = {"llm": UsageContext.LLM_CLASS, "server": UsageContext.OPENAI_API_SERVER}[case["usage"]]
    args._set_default_max_num_seqs_and_batched_tokens_args(
        usage, model, SimpleNamespace(use_batched_dp_moe=False)
    )
    try:
        SchedulerConfig(
            max_model_len=case["max_model_len"],
            is_encoder_decoder=False,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            enable_chunked_prefill=args.enable_chunked_prefill,
            long_prefill_token_threshold=case["long_prefill_token_threshold"],
            max_num_active_seqs=case["max_num_active_seqs"],
        )
    except ValueError as error:
        return {"refused": str(error)}
    return {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        answers.write(json.dumps(resolve(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
