"""What the oracle's two engines share: prompts as token ids, step time, log rounding (standard library only).

How a case becomes token ids is part of the golden input schema: only *equality* of token sequences
matters to the schedulers, so any other mapping that is injective in the same way gives the same steps.
"""

from __future__ import annotations

import zlib
from typing import Any

SEG_STRIDE = 1_000_003  # max tokens in one segment / one output stream
OUT_BASE = 1 << 44  # output streams live above every segment
EOS_TOKEN = 7  # never produced by a segment or output stream


def seg_token(seg_id: int, i: int) -> int:
    return 1000 + seg_id * SEG_STRIDE + i


def out_token(ridx: int, i: int) -> int:
    return OUT_BASE + ridx * SEG_STRIDE + i


def build_prompts(requests: list[dict[str, Any]]) -> list[list[int]]:
    """-> list of prompt token-id lists, same order as `requests`.

    A request carries exactly one of
      prompt_token_ids : explicit list
      segments         : [[seg, n], ...]; seg is an int (n first tokens of the
                         shared stream `seg`) or the string "out:<request id>"
                         (n first output tokens of an earlier request)
      input_tokens + hash_ids + hash_block_tokens : Mooncake style; chunk k is
                         the first hash_block_tokens tokens of stream
                         hash_ids[k], last chunk cut to input_tokens
      input_tokens     : private prompt, nothing shared
    """
    ridx = {r["id"]: k for k, r in enumerate(requests)}
    prompts = []
    for k, r in enumerate(requests):
        if "prompt_token_ids" in r:
            toks = list(r["prompt_token_ids"])
        elif "segments" in r:
            toks = []
            for seg, n in r["segments"]:
                if isinstance(seg, str):
                    src = ridx[seg[4:]]
                    toks.extend(out_token(src, i) for i in range(n))
                else:
                    toks.extend(seg_token(seg, i) for i in range(n))
        elif "hash_ids" in r:
            step = r["hash_block_tokens"]
            left = r["input_tokens"]
            toks = []
            for h in r["hash_ids"]:
                n = min(step, left)
                toks.extend(seg_token(h, i) for i in range(n))
                left -= n
            assert left == 0, r["id"]
        else:
            # private stream: ids far away from user segment ids
            toks = [seg_token(4_000_000 + k, i) for i in range(r["input_tokens"])]
        prompts.append(toks)
    return prompts


def step_time(cfg: dict[str, Any], tokens: int, seqs: int) -> float:
    s = cfg["step_time"]
    return s["a"] + s["b"] * tokens + s["c"] * seqs


def rnd(x: float) -> float:
    """Times are rounded to 1 ns in the logs."""
    return round(x, 9)


def crc_ids(ids: Any) -> int:
    """CRC-32 of block ids joined by ',' (order sensitive)."""
    return zlib.crc32(",".join(map(str, ids)).encode())
