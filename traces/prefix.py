"""Content ids and how many prompt tokens each covers."""

from __future__ import annotations

from collections.abc import Sequence

from vsim.traces.options import Report

_CANDIDATES = (16, 32, 64, 128, 256, 512, 1024)


def fit_block_tokens(
    prompt: Sequence[int],
    ids: list[list[int]],
    lines: Sequence[int],
    default: int,
    report: Report,
) -> int:
    """The tokens one id covers; ids beyond a prompt's end are cut off in place and counted.

    The size is the declared one, else the format's. Only where most rows contradict the format's size and
    every row fits one other size exactly is that one taken, aloud.
    """
    declared = report.options.hash_block_tokens
    if declared is not None and declared < 1:
        report.fail(f"hash_block_tokens={declared} must be at least 1")
    size = declared or default
    with_ids = [row for row, content in enumerate(ids) if content]
    over = [row for row in with_ids if len(ids[row]) > -(-prompt[row] // size)]
    if declared is None and len(with_ids) >= 8 and len(over) * 2 > len(with_ids):
        for candidate in _CANDIDATES:
            if all(
                len(ids[row]) in (prompt[row] // candidate, -(-prompt[row] // candidate))
                for row in with_ids
            ):
                report.oddity(
                    f"hash_ids do not fit blocks of {size} tokens in {len(over)} of {len(with_ids)} rows, but "
                    f"blocks of {candidate} in all: {candidate} is used. --hash-block-tokens overrides."
                )
                return candidate
    for row in over:
        expected = -(-prompt[row] // size)
        if report.options.strict:
            report.fail(
                f"has {len(ids[row])} hash_ids, but {prompt[row]} prompt tokens in blocks of {size} need {expected} "
                "(refused by --strict); --hash-block-tokens sets another block size",
                lines[row],
            )
        report.notice(
            f"more hash_ids than the prompt has blocks of {size} tokens; the extra ids are ignored",
            lines[row],
        )
        ids[row] = ids[row][:expected]
    _announce_private(prompt, ids, with_ids, lines, size, report)
    if with_ids and declared is None:
        report.assume(f"One hash id covers {size} prompt tokens.")
    return size


def _announce_private(
    prompt: Sequence[int],
    ids: Sequence[Sequence[int]],
    with_ids: Sequence[int],
    lines: Sequence[int],
    size: int,
    report: Report,
) -> None:
    """Say which prompts have no ids or too few: nobody can share what has no id."""
    for row in with_ids:
        if len(ids[row]) < prompt[row] // size:
            report.notice(
                f"fewer hash_ids than the prompt has full blocks of {size} tokens; what lies beyond them is private",
                lines[row],
            )
    without = len(ids) - len(with_ids)
    if with_ids and without:
        report.assume(f"{without} of {len(ids)} rows have no hash_ids: their prompts are private.")
