"""YAML that a user edits, read so that every complaint names file, line and key. Safe loading only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from vsim.errors import UserError
from vsim.traces.options import printable

MAX_BYTES = 200_000
MAX_DEPTH = 20


class Section:
    """One mapping of the file. Readers take keys out; `end` complains about what nobody asked for."""

    def __init__(self, file: str, path: str, node: yaml.Node) -> None:
        self.file = file
        self.path = path
        self.line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            what = f"{path} must be" if path else "it must be"
            raise UserError(
                f"{file}:{self.line}: {what} a mapping such as `key: value`, one a line"
            )
        self._left: dict[str, yaml.Node] = {}
        self._known: list[str] = []
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{file}:{line}: a key must be a plain word")
            name = printable(str(key.value))
            if name in self._left:
                raise UserError(f"{file}:{line}: {self._dotted(name)} stands twice; keep one")
            self._left[name] = value
        self._lines = {name: value.start_mark.line + 1 for name, value in self._left.items()}

    def names(self) -> list[str]:
        """Keys not read yet, in the file's order."""
        return list(self._left)

    def had(self, key: str) -> bool:
        """Did the file have it, read by now or not?"""
        return key in self._lines

    def fail(self, key: str, rule: str) -> UserError:
        """An error about `key`, where it stands."""
        line = self._lines.get(key, self.line)
        return UserError(f"{self.file}:{line}: {self._dotted(key)} {rule}")

    def missing(self, keys: str, example: str) -> UserError:
        """An error about keys that should be there."""
        where = f"{self.path} needs" if self.path else "it needs"
        return UserError(f"{self.file}:{self.line}: {where} {keys}, for example {example}")

    def number(
        self,
        key: str,
        default: float,
        *,
        least: float = 0.0,
        most: float = 1e15,
        positive: bool = False,
    ) -> float:
        """A finite number, `default` where the key is missing."""
        return default if key not in self else self._number(key, least, most, positive)

    def number_or_none(
        self, key: str, *, least: float = 0.0, positive: bool = False
    ) -> float | None:
        return None if key not in self else self._number(key, least, 1e9, positive)

    def integer(self, key: str, default: int, *, least: int = 0, most: int = 1 << 40) -> int:
        found = self.integer_or_none(key, least=least, most=most)
        return default if found is None else found

    def integer_or_none(self, key: str, *, least: int = 0, most: int = 1 << 40) -> int | None:
        if key not in self:
            return None
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be a whole number, not {_shown(value)}")
        self._check(key, value, least, most, False)
        return value

    def choice(self, key: str, default: str, options: tuple[str, ...]) -> str:
        if key not in self:
            return default
        value = self._take(key)
        if value not in options:
            raise self.fail(key, f"must be one of {', '.join(options)}, not {_shown(value)}")
        return str(value)

    def text(self, key: str) -> str:
        """Text; the key must be there (`in`)."""
        return str(self._take(key))

    def flag(self, key: str, default: bool) -> bool:
        if key not in self:
            return default
        value = self._take(key)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {_shown(value)}")
        return value

    def section(self, key: str) -> Section | None:
        """The mapping under `key`; None where it is missing or empty."""
        self._known.append(key)
        node = self._left.pop(key, None)
        if node is None or _is_empty(node):
            return None
        return Section(self.file, self._dotted(key), node)

    def sections(self, key: str) -> list[Section]:
        """The list of mappings under `key`."""
        self._known.append(key)
        node = self._left.pop(key, None)
        if node is None or _is_empty(node):
            return []
        if not isinstance(node, yaml.SequenceNode):
            raise self.fail(key, "must be a list of mappings, each beginning with `-`")
        path = self._dotted(key)
        return [Section(self.file, f"{path}[{i}]", item) for i, item in enumerate(node.value)]

    def end(self) -> None:
        """Nothing may be left: a misspelt key must not pass for a missing one."""
        for key in self._left:
            known = ", ".join(sorted(set(self._known)))
            raise self.fail(key, f"is not known here; known are {known}")

    def __contains__(self, key: str) -> bool:
        self._known.append(key)
        return key in self._left

    def _dotted(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _take(self, key: str) -> Any:
        node = self._left.pop(key)
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(key, "must be a single value")
        value = _scalar(node)
        if value is _UNREADABLE:
            raise self.fail(key, "holds a value that cannot be read")
        return value

    def _number(self, key: str, least: float, most: float, positive: bool) -> float:
        value = self._take(key)
        if isinstance(value, str):
            try:
                value = float(value)  # YAML 1.1 takes 1e3 for text
            except ValueError:
                raise self.fail(key, f"must be a number, not {_shown(value)}") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"must be a number, not {_shown(value)}")
        if isinstance(value, int) and abs(value) > 1 << 62:
            raise self.fail(key, "is out of range")
        if not math.isfinite(value):
            raise self.fail(key, "must be finite")
        self._check(key, value, least, most, positive)
        return float(value)

    def _check(self, key: str, value: float, least: float, most: float, positive: bool) -> None:
        if isinstance(value, int) and abs(value) > 1 << 62:
            raise self.fail(key, "is out of range")  # of too many digits to be shown, even
        if positive and not value > 0:
            raise self.fail(key, f"is {value:g} and must be positive")
        if value < least:
            raise self.fail(key, f"is {value:g} and must be at least {least:g}")
        if value > most:
            raise self.fail(key, f"is {value:g} and must be at most {most:g}")


_UNREADABLE = object()


def _scalar(node: yaml.ScalarNode) -> Any:
    if ":" in str(node.value) and node.tag.endswith((":int", ":float")):
        return str(node.value)  # 1:30 is ninety to YAML 1.1, and a mistake to us
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, AttributeError):
        return _UNREADABLE


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")


def _shown(value: Any) -> str:
    return printable(repr(value))[:60]


def read_located(path: str | Path, what: str) -> Section:
    """The mapping that a YAML (or JSON) file holds. `what` names the kind of file in errors ("fleet file").

    Raises UserError if it is missing, over 200 kB, not text, malformed, nested too deep, or uses anchors.
    """
    name = printable(Path(path).name)
    try:
        with Path(path).open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise UserError(f"cannot read {what} {printable(str(path))}: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"{what} {name} is larger than {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
        _refuse_depth(text, what, name)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise UserError(f"{what} {name} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise UserError(f"{what} {name}{line}: not YAML ({printable(str(problem))})") from None
    except (RecursionError, ValueError, TypeError, OverflowError, AttributeError):
        raise UserError(f"{what} {name} holds a value that cannot be read") from None
    if node is None:
        raise UserError(f"{what} {name} is empty; see docs/fleet.md for what it may hold")
    return Section(f"{what} {name}", "", node)


def _refuse_depth(text: str, what: str, name: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = 0 if event.start_mark is None else event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise UserError(
                f"{what} {name}:{line}: anchors and aliases (*name) are not read; repeat it"
            )
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise UserError(f"{what} {name}:{line}: nested too deep")
