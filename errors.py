"""The one kind of failure a user can mend: bad input, said in one sentence."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. `str(error)` is one clear sentence: name, value, rule, and the remedy.

    `vsim` prints it to stderr as `error: …` and exits with code 2; nothing is left half written.
    Raise it wherever input enters (files, flags, configurations), with file and line if there are any.
    Whatever the input held, the sentence is one line that a terminal only shows: control characters,
    line breaks and bidirectional overrides are escaped.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Text from a file, safe on a terminal and in a one-line message: control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
