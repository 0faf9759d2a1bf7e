"""The one kind of failure a user can mend: bad input, said in one sentence."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. `str(error)` is one clear sentence: name, value, rule, and the remedy.

    `vsim` prints it to stderr as `error: …` and exits with code 2; nothing is left half written.
    Raise it wherever input enters (files, flags, configurations), with file and line if there are any.
    """
