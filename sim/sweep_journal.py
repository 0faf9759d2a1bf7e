"""Journal of a sweep: one whole JSON line a finished point, on disk before the next one counts."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vsim.errors import UserError

SCHEMA = "vsim/sweep-journal/1"
_HEADER = json.dumps({"schema": SCHEMA}) + "\n"


class Journal:
    """Finished points by key. Made by `open_journal`, which also holds its lock."""

    def __init__(self, descriptor: int, path: Path, results: dict[str, dict[str, Any]]) -> None:
        self._descriptor = descriptor
        self._path = path
        self.results = results

    def append(self, key: str, result: dict[str, Any]) -> None:
        """Keep `result`: when this returns it survives kill -9 and power loss. Raises UserError (disk full)."""
        line = json.dumps({"key": key, "result": result}, allow_nan=False).encode() + b"\n"
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror or error}; finished points are kept, make room "
                "and run again to go on"
            ) from None
        self.results[key] = result


def journal_path(table: Path) -> Path:
    """The journal that belongs to a table: beside it, `NAME.journal`."""
    return table.with_name(table.name + ".journal")


@contextmanager
def open_journal(table: Path) -> Iterator[Journal]:
    """The journal beside `table`, read back and locked for this process until the block ends.

    A torn last line (a kill in mid-write) is cut off; its point is simulated again. The lock is the
    kernel's, on the journal itself: it ends with its holder, however that ends. Raises UserError if
    another process has it, or if the file is something else.
    """
    path = journal_path(table)
    try:
        table.absolute().parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{table} is being written by another vsim sweep (it holds {path.name}): wait for it, "
                "or choose another --out"
            ) from None
        try:
            results = _read(descriptor, path)
        except OSError as error:
            raise UserError(f"cannot use {path}: {error.strerror or error}") from None
        yield Journal(descriptor, path, results)
    finally:
        os.close(descriptor)  # gives the lock back


def _read(descriptor: int, path: Path) -> dict[str, dict[str, Any]]:
    """Results so far; leaves the file ending in a whole line."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        header = file.read(len(_HEADER))
        if not _HEADER.encode().startswith(header):
            raise UserError(f"{path} is not a journal of vsim sweep ({SCHEMA}): move it away")
        if len(header) < len(_HEADER):  # new, or killed while it was being made
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _HEADER.encode())
            os.fsync(descriptor)
            _sync_folder(path)
            return {}
        results: dict[str, dict[str, Any]] = {}
        end = len(header)
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                entry = json.loads(line)
                results[str(entry["key"])] = _checked(entry["result"])
            except (ValueError, KeyError, TypeError, RecursionError):
                # A damaged line costs one simulation, not the sweep.
                continue
    if end < os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, end)
        os.fsync(descriptor)
    return results


def _checked(result: Any) -> dict[str, Any]:
    whole = isinstance(result, dict) and (
        (result.get("status") == "refused" and isinstance(result.get("reason"), str))
        or (result.get("status") == "done" and isinstance(result.get("numbers"), dict))
    )
    if not whole:
        raise TypeError("not a result")
    return dict(result)


def _sync_folder(path: Path) -> None:
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
