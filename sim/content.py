"""What tokens a prompt is made of, as far as equality of tokens can matter to a scheduler.

No simulated token has a text. A scheduler only asks whether two sequences begin with the same tokens, so a
sequence is a list of *runs*: `(first, length)` stands for the consecutive token ids `first, first + 1, ...`.
Shared content (a Mooncake block, a system prompt, another request's output) is a stretch of the same ids.
The maximal runs of a sequence are a property of its tokens alone, so any two notations of one sequence
(explicit ids, segments, hash ids) become equal here.

The numbering of streams is that of the golden cases (oracle_common.py): it keeps every stream apart.
"""

from __future__ import annotations

from collections.abc import Iterable

from vsim.traces.trace import TraceRequest

Run = tuple[int, int]

STREAM_TOKENS = (
    1_000_003  # ids set aside for one stream; longer segments are refused where they enter
)
EOS_TOKEN = 7  # in no stream
_FIRST_STREAM = 1_000
_FIRST_OUTPUT_STREAM = 1 << 44
_PRIVATE_STREAM = 4_000_000  # stream of request 0's private prompt in a golden case


def stream_run(stream: int, length: int) -> Run:
    """The first `length` tokens of the shared stream `stream` (>= 0)."""
    return (_FIRST_STREAM + stream * STREAM_TOKENS, length)


def output_run(request: int, length: int) -> Run:
    """The first `length` tokens that request number `request` generates."""
    return (_FIRST_OUTPUT_STREAM + request * STREAM_TOKENS, length)


def private_run(request: int, length: int) -> Run:
    """A case's prompt that is given by its length alone."""
    return stream_run(_PRIVATE_STREAM + request, length)


def token_runs(tokens: Iterable[int]) -> list[Run]:
    """Explicit token ids as maximal runs."""
    runs: list[Run] = []
    first = length = 0
    for token in tokens:
        if length and token == first + length:
            length += 1
            continue
        if length:
            runs.append((first, length))
        first, length = token, 1
    if length:
        runs.append((first, length))
    return runs


def joined(pieces: Iterable[Run]) -> tuple[Run, ...]:
    """Pieces laid end to end as maximal runs; empty pieces vanish."""
    runs: list[Run] = []
    for first, length in pieces:
        if length <= 0:
            continue
        if runs and runs[-1][0] + runs[-1][1] == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((first, length))
    return tuple(runs)


def trace_prompt(request: TraceRequest) -> tuple[Run, ...]:
    """A trace row's prompt: its content ids, the last one cut to length, then tokens of its own.

    Private tokens are negative ids, so they meet no content id whatever that is (content ids are >= 0 or
    hashed: any integer is fine as long as `prefix_block_tokens` <= STREAM_TOKENS).
    """
    left = request.prompt_tokens
    pieces: list[Run] = []
    for content in request.prefix_ids:
        length = min(request.prefix_block_tokens, left)
        if length <= 0:
            break
        # Even streams for ids >= 0, odd ones below: both stay clear of the private (negative) ids.
        pieces.append(stream_run(2 * content if content >= 0 else -2 * content - 1, length))
        left -= length
    pieces.append((-(request.index + 1) * STREAM_TOKENS, left))
    return joined(pieces)
