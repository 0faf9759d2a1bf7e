"""Runs in the environment of the real vLLM: `calculate_metrics` of `vllm bench serve` on given outputs.

Input (JSON on stdin): {"requests": [{"success", "prompt_len", "output_tokens", "start_time", "ttft",
"itl", "latency"}], "duration": s, "percentiles": [...], "goodput": {...}}; times in seconds.
Output: the fields of BenchmarkMetrics as JSON, on the last line of stdout.
"""

import dataclasses
import json
import sys

from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics


def main() -> None:
    given = json.load(sys.stdin)
    outputs = [RequestFuncOutput(generated_text="", **row) for row in given["requests"]]
    metrics, _ = calculate_metrics(
        input_requests=[],
        outputs=outputs,
        dur_s=given["duration"],
        tokenizer=None,
        selected_percentiles=given["percentiles"],
        goodput_config_dict=given["goodput"],
    )
    print(json.dumps(dataclasses.asdict(metrics)))


if __name__ == "__main__":
    main()
