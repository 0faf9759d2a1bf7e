"""Prompts are equal where their tokens are, whatever pieces they were written in."""

from hypothesis import given
from hypothesis import strategies as st

from vsim.sim.block_keys import BlockKeys, KeyTable
from vsim.sim.content import (
    STREAM_TOKENS,
    Run,
    joined,
    output_run,
    private_run,
    stream_run,
    token_runs,
    trace_prompt,
)
from vsim.traces.trace import TraceRequest


def tokens_of(runs: tuple[Run, ...]) -> list[int]:
    return [first + position for first, length in runs for position in range(length)]


def mooncake(
    index: int, prompt_tokens: int, ids: tuple[int, ...], piece: int = 512
) -> TraceRequest:
    return TraceRequest(
        index=index,
        arrival_ns=0,
        prompt_tokens=prompt_tokens,
        output_tokens=1,
        prefix_ids=ids,
        prefix_block_tokens=piece,
    )


def shared_blocks(table: KeyTable, one: TraceRequest, other: TraceRequest) -> int:
    keys = [BlockKeys(table, trace_prompt(r)).upto(r.prompt_tokens) for r in (one, other)]
    equal = [mine == theirs for mine, theirs in zip(*keys, strict=False)]
    return (*equal, False).index(False)


# Few token values and short runs, so that sequences really do share prefixes.
sequences = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=12).map(
    lambda pieces: [10 * stream + i for stream, length in pieces for i in range(length)]
)


@given(sequences, st.data())
def test_runs_do_not_depend_on_how_a_sequence_was_cut(
    tokens: list[int], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    pieces: list[Run] = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        pieces += token_runs(tokens[start:end])
    assert joined(pieces) == tuple(token_runs(tokens))
    assert tokens_of(joined(pieces)) == tokens


@given(st.lists(sequences, min_size=2, max_size=5), st.integers(1, 5), st.data())
def test_keys_are_equal_exactly_where_prefixes_are(
    prompts: list[list[int]], block_size: int, data: st.DataObject
) -> None:
    table = KeyTable(block_size)
    prefix_of_key: dict[int, tuple[int, ...]] = {}
    key_of_prefix: dict[tuple[int, ...], int] = {}
    for tokens in prompts:
        keys = BlockKeys(table, token_runs(tokens))
        # As in a real run, keys are asked for bit by bit as tokens become known.
        for known in sorted(data.draw(st.sets(st.integers(0, len(tokens))))):
            keys.upto(known)
        for position, key in enumerate(keys.upto(len(tokens))):
            prefix = tuple(tokens[: (position + 1) * block_size])
            assert prefix_of_key.setdefault(key, prefix) == prefix
            assert key_of_prefix.setdefault(prefix, key) == key


def test_a_last_piece_cut_short_shares_the_whole_blocks_it_covers() -> None:
    # 300 of 512 tokens: 18 blocks of 16 are whole.
    assert shared_blocks(KeyTable(16), mooncake(0, 512, (5,)), mooncake(1, 300, (5,))) == 18


def test_equal_prompts_share_all_their_blocks() -> None:
    assert shared_blocks(KeyTable(16), mooncake(0, 512, (5,)), mooncake(1, 512, (5,))) == 32


def test_a_piece_after_another_prefix_is_another_block() -> None:
    assert shared_blocks(KeyTable(16), mooncake(0, 1024, (1, 5)), mooncake(1, 1024, (2, 5))) == 0


def test_pieces_need_not_be_whole_blocks() -> None:
    one, other = mooncake(0, 150, (1, 2, 3), piece=50), mooncake(1, 150, (1, 2, 4), piece=50)
    assert shared_blocks(KeyTable(16), one, other) == 6  # 100 shared tokens


def test_what_has_no_id_is_shared_with_nobody() -> None:
    one, other = mooncake(0, 1024, (5,)), mooncake(1, 1024, (5,))
    assert shared_blocks(KeyTable(16), one, other) == 32
    assert shared_blocks(KeyTable(16), mooncake(0, 64, ()), mooncake(1, 64, ())) == 0


def test_content_ids_may_be_any_whole_numbers() -> None:
    table = KeyTable(16)
    negative, positive = mooncake(0, 512, (-1,)), mooncake(1, 512, (1,))
    assert shared_blocks(table, negative, positive) == 0
    assert shared_blocks(table, negative, mooncake(2, 512, (-1,))) == 32
    assert shared_blocks(table, negative, mooncake(3, 512, (0,))) == 0


def test_streams_keep_apart() -> None:
    runs = [
        stream_run(0, 10),
        stream_run(1, 10),
        output_run(0, 10),
        output_run(1, 10),
        private_run(0, 10),
    ]
    seen = [token for run in runs for token in tokens_of((run,))]
    assert len(set(seen)) == len(seen)
    assert stream_run(1, 1)[0] - stream_run(0, 1)[0] == STREAM_TOKENS
