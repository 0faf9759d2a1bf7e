"""What the reader was told, and what it has to tell: options in, assumptions and complaints out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from vsim.errors import UserError, printable

__all__ = [
    "OnError",
    "ReadOptions",
    "Report",
    "RowError",
    "ZeroOutput",
    "printable",
]

ZeroOutput = Literal["drop", "prefill-only", "error"]
OnError = Literal["fail", "skip"]

SHOWN_EXAMPLES = 5


class RowError(ValueError):
    """One row can't be used; `str()` names field, value and rule."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Choices of whoever reads a trace; the defaults suit a well-formed public file.

    `column_map`: our field -> the file's column. `output_tokens_model`: where the file has no output length:
    a constant, or "upper-bound" to take the client's cap. `max_bytes`: limit on the decompressed size.
    """

    time_unit: str | None = None
    limit: int | None = None
    strict: bool = False
    on_error: OnError = "fail"
    zero_output: ZeroOutput = "drop"
    column_map: Mapping[str, str] = field(default_factory=dict)
    hash_block_tokens: int | None = None
    output_tokens_model: int | Literal["upper-bound"] | None = None
    tokenizer: str | None = None  # a local tokenizer.json, for formats that carry text
    seed: int = 0  # for formats that describe a distribution, not requests
    max_bytes: int | None = None


@dataclass(slots=True)
class Report:
    """Collects what reading one file assumed, dropped or complained about.

    Strict reading turns every tolerated oddity into an error; `on_error="skip"` turns an unusable row into a
    counted one. `name` is the file's name without its folder.
    """

    name: str
    options: ReadOptions
    sentences: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)  # first few complaints about skipped rows
    noticed: Counter[str] = field(default_factory=Counter)
    noticed_first: dict[str, int] = field(default_factory=dict)

    def fail(self, message: str, line: int | None = None) -> NoReturn:
        where = self.name if line is None else f"{self.name}:{line}"
        raise UserError(printable(f"{where}: {message}"))

    def bad_row(self, line: int, message: str) -> None:
        """A row that can't be used: an error, or skipped and counted with `on_error="skip"`."""
        if self.options.on_error == "fail":
            self.fail(f"{message}; --on-error skip leaves such rows out", line)
        self.dropped["bad_row"] += 1
        if len(self.skipped) < SHOWN_EXAMPLES:
            self.skipped.append(printable(f"{self.name}:{line}: {message}"))

    def enough(self, rows_with_output: int) -> bool:
        """Have so many usable rows been read that the limit is reached, and passed, whatever follows?"""
        limit = self.options.limit
        return limit is not None and rows_with_output > limit

    def notice(self, kind: str, line: int, count: int = 1) -> None:
        """A row that is used although it's odd. `kind` reads on after a number of rows."""
        if self.options.strict:
            self.fail(f"{kind} (refused by --strict)", line)
        self.noticed[kind] += count
        self.noticed_first.setdefault(kind, line)

    def assume(self, sentence: str) -> None:
        sentence = printable(sentence)
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    def oddity(self, sentence: str, line: int | None = None) -> None:
        """Something about the whole file that strict reading refuses and lenient reading announces."""
        if self.options.strict:
            self.fail(f"{sentence} (refused by --strict)", line)
        self.assume(sentence)

    def all_sentences(self) -> tuple[str, ...]:
        sentences = list(self.sentences)
        for kind, count in self.noticed.items():
            rows = "1 row" if count == 1 else f"{count} rows"
            sentences.append(f"{rows}: {kind} (first at line {self.noticed_first[kind]}).")
        if self.dropped["bad_row"]:
            count = self.dropped["bad_row"]
            shown = "; ".join(self.skipped)
            more = count - len(self.skipped)
            rest = f"; and {more} more" if more > 0 else ""
            sentences.append(f"{count} unusable row{'s' * (count != 1)} skipped: {shown}{rest}.")
        return tuple(sentences)
