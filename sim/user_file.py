"""Small JSON and YAML files that a user edits: one flat mapping, read without a silent guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vsim.errors import UserError
from vsim.traces.options import printable

MAX_BYTES = 200_000


class _RepeatedError(ValueError):
    """A key that stands twice in one mapping; `str()` is the key."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedError(key)
        found[key] = value
    return found


def _refuse_repeats(text: str) -> None:
    import yaml

    # safe_load would keep the last of two equal names and say nothing.
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(node, yaml.MappingNode):
        _pairs([(str(key.value), None) for key, _ in node.value])


def _is_scalar(value: Any) -> bool:
    # An integer of thousands of digits cannot even be printed in a message.
    huge = isinstance(value, int) and abs(value) >= 1 << 63
    return not huge and not isinstance(value, dict | list | set | tuple)


def read_mapping(path: str | Path, what: str) -> dict[str, Any]:
    """The mapping that `path` holds: JSON where the name ends in .json, else YAML (safe loading only).

    `what` names it in errors ("price file"). Raises UserError if the file is missing, over 200 kB, not
    text, malformed, not a mapping from text to a value or a list of values, or names a key twice.
    """
    import yaml  # only who has such a file waits for it

    file = Path(path)
    name = printable(str(path))
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {what} {name}: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"{what} {name} is larger than {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
        if file.suffix.lower() == ".json":
            value = json.loads(text, object_pairs_hook=_pairs)
        else:
            _refuse_repeats(text)
            value = yaml.safe_load(text)
    except _RepeatedError as error:
        raise UserError(f"{what} {name} names {printable(str(error))!r} twice") from None
    except UnicodeDecodeError:
        raise UserError(f"{what} {name} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{what} {name}:{error.lineno}: not JSON ({error.msg})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise UserError(f"{what} {name}{line}: not YAML ({printable(str(problem))})") from None
    except (RecursionError, ValueError, TypeError, OverflowError, AttributeError):
        # Nested too deep, a number of too many digits, a date that is none (PyYAML trips over some).
        raise UserError(f"{what} {name} holds a value that cannot be read") from None
    if not isinstance(value, dict):
        raise UserError(f"{what} {name} must be a mapping such as `a100: 1.5`, one name a line")
    for key in value:
        if not isinstance(key, str):
            raise UserError(f"{what} {name}: name {key!r} is not text; put it in quotes")
        # Deeper nesting has no meaning here, and YAML aliases could make it unprintably large.
        item = value[key]
        if not (_is_scalar(item) or (isinstance(item, list) and all(map(_is_scalar, item)))):
            raise UserError(f"{what} {name}: {printable(key)} must be a value or a list of values")
    return value
