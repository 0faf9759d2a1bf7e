"""How to read a trace, as click options: the same on every command that takes one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from vsim.errors import UserError

_FLAGS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (
        ("--format", "trace_format"),
        {"help": "Trace format by name; default: recognised by content."},
    ),
    (
        ("--time-unit",),
        {"type": click.Choice(["s", "ms", "us", "ns"]), "help": "Unit of numeric timestamps."},
    ),
    (("--limit",), {"type": click.IntRange(min=1), "help": "Only the first N usable requests."}),
    (("--strict",), {"is_flag": True, "help": "Refuse what lenient reading would announce."}),
    (
        ("--on-error",),
        {
            "type": click.Choice(["fail", "skip"]),
            "default": "fail",
            "show_default": True,
            "help": "Unusable rows: stop at the first, or count them.",
        },
    ),
    (
        ("--zero-output",),
        {
            "type": click.Choice(["drop", "prefill-only", "error"]),
            "default": "drop",
            "show_default": True,
            "help": "Rows with 0 output tokens (failed requests).",
        },
    ),
    (
        ("--map", "column_map"),
        {
            "multiple": True,
            "metavar": "FIELD=COLUMN",
            "help": "Which column holds a field, e.g. input_tokens=prompt_len. Repeatable.",
        },
    ),
    (
        ("--hash-block-tokens",),
        {"type": click.IntRange(min=1), "help": "Prompt tokens one hash id covers."},
    ),
    (
        ("--output-tokens", "output_tokens_model"),
        {
            "metavar": "N|upper-bound",
            "help": "Output length where the file has none; upper-bound: the cap.",
        },
    ),
    (("--tokenizer",), {"help": "Folder with a tokenizer.json, for formats that hold text."}),
]
NAMES = (
    "trace_format",
    "time_unit",
    "limit",
    "strict",
    "on_error",
    "zero_output",
    "column_map",
    "hash_block_tokens",
    "output_tokens_model",
    "tokenizer",
)


def trace_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the reading options to a command; they arrive as the dict `trace_flags`, fit for `read_trace`."""

    return _with_flags(command, "trace_flags", NAMES)


def read_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same without --limit, which such a command has itself; they arrive as the dict `reading`."""
    return _with_flags(command, "reading", tuple(name for name in NAMES if name != "limit"))


def _with_flags(
    command: Callable[..., Any], argument: str, names: tuple[str, ...]
) -> Callable[..., Any]:
    @functools.wraps(command)
    def gathered(*args: Any, **values: Any) -> Any:
        flags = {name: values.pop(name) for name in names}
        return command(*args, **{argument: _resolved(flags)}, **values)

    for name, (declarations, attributes) in reversed(list(zip(NAMES, _FLAGS, strict=True))):
        if name in names:
            gathered = click.option(*declarations, **attributes)(gathered)
    return gathered


def _resolved(flags: dict[str, Any]) -> dict[str, Any]:
    """Texts to values. Raises UserError for a --map or --output-tokens that can't be understood."""
    flags["format"] = flags.pop("trace_format")
    names = {}
    for item in flags["column_map"]:
        ours, equals, theirs = item.partition("=")
        if not (ours and equals and theirs):
            raise UserError(
                f"--map {item}: write FIELD=COLUMN, for example --map input_tokens=prompt_len"
            )
        names[ours] = theirs
    flags["column_map"] = names or None
    model = flags["output_tokens_model"]
    if model is not None and model != "upper-bound":
        if not (model.isascii() and model.isdigit() and 0 < len(model) <= 9 and int(model)):
            raise UserError(
                f"--output-tokens {model}: give a positive whole number, or upper-bound"
            )
        flags["output_tokens_model"] = int(model)
    return flags
