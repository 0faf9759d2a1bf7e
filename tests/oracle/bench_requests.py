"""Runs in the environment of the real vLLM: when `vllm bench serve` sends, and what its TimedTrace reads.

Input (JSON on stdin): {"spacing": [{"count", "rate", "burstiness", "seed"}], "timed_trace": path}; rates and
burstiness may be "inf". Output, on the last line of stdout: {"offsets_s": [[...]], "requests": [{"timestamp",
"prompt": token ids, "output_tokens"}]}.
"""

import asyncio
import json
import sys

import numpy as np
from vllm.benchmarks import serve
from vllm.benchmarks.datasets.datasets import TimedTrace


class Clock:
    """Stands in for the wall clock: sleeping moves it, nothing else does."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Tokenizer:
    """A thousand words, one token each."""

    all_special_ids = (0,)

    def get_vocab(self) -> dict:
        return {str(at): at for at in range(1000)}

    def decode(self, ids: list, **_: object) -> str:
        return " ".join(map(str, ids))


async def sent(case: dict) -> list:
    clock = Clock()
    real_time, real_sleep = serve.time.time, serve.asyncio.sleep
    serve.time.time, serve.asyncio.sleep = clock.time, clock.sleep
    try:
        np.random.seed(case["seed"])
        requests = [object()] * case["count"]
        offsets = []
        async for _ in serve.get_request(requests, float(case["rate"]), float(case["burstiness"])):
            offsets.append(clock.now - 1000.0)
        return offsets
    finally:
        serve.time.time, serve.asyncio.sleep = real_time, real_sleep


def tokens(prompt: object) -> list:
    if isinstance(prompt, dict):
        prompt = prompt["prompt_token_ids"]
    return prompt if isinstance(prompt, list) else [int(word) for word in prompt.split()]


def main() -> None:
    given = json.load(sys.stdin)
    offsets = [asyncio.run(sent(case)) for case in given["spacing"]]
    data = TimedTrace(
        dataset_path=given["timed_trace"],
        random_seed=0,
        timed_trace_chunk_hash_size=16,
        timed_trace_sec_multiplier=1,
        timed_trace_label_timestamp="timestamp",
        timed_trace_label_input_length="input_length",
        timed_trace_label_output_length="output_length",
        timed_trace_label_hash_ids="hash_ids",
    )
    requests = [
        {
            "timestamp": row.timestamp,
            "prompt": tokens(row.prompt),
            "output_tokens": row.expected_output_len,
        }
        for row in data.sample(Tokenizer(), 10**6)
    ]
    print(json.dumps({"offsets_s": offsets, "requests": requests}))


if __name__ == "__main__":
    main()
