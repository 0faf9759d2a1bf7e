"""Raw step samples: what one real engine step computed and how long it took.

A samples file is one Parquet file, `NAME.samples.parquet`, and while a measurement runs a journal beside
it, `NAME.samples.jsonl`: whole lines, appended, so that a kill at any moment loses at most the line being
written. Readers take both together; `compact` turns them into the Parquet file alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from vsim.errors import UserError
from vsim.models.step import StepShape

SCHEMA = "vsim/step-samples/1"

# What must be equal for two sessions to share a samples file: else they are other machines or models.
IDENTITY = (
    "device",
    "vllm_version",
    "model",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "threads",
    "enforce_eager",
    "yardstick_ns",
)


@dataclass(frozen=True, slots=True)
class StepSample:
    """One engine step as measured. Times in seconds, contexts in tokens in the KV cache before the step.

    Sequences with exactly one new token are decodes, whatever they are called elsewhere (`StepShape`).
    """

    session: str  # which engine start measured it; key of Samples.sessions
    seq: int  # number of the step in its session; (session, seq) is unique
    phase: str  # "grid", "train" (a serving run to fit on), "serve" (held out) or "spot"
    point: str  # which design point or serving run, e.g. "decode b16 c512"
    repeat: int  # how often the point had been measured before
    index: int  # step number within this repeat: (point, index) names the same composition in each repeat
    prefill_new: tuple[int, ...]  # new tokens of each prefill chunk
    prefill_context: tuple[int, ...]
    num_decodes: int
    decode_context_sum: int
    decode_context_max: int
    decode_context_sumsq: float  # sum of squares: the spread follows from it
    block_size: int
    kv_blocks_used: int
    running: int
    waiting: int
    admitted: int  # sequences scheduled for the first time, or again after a preemption
    finished: int
    preempted: int
    schedule_s: float  # the scheduler's own part
    device_s: float  # model and sampler: device events on CUDA, wall time of the call on the CPU
    update_s: float  # everything after the device: bookkeeping, output processing
    total_s: float  # wall time of the whole step; schedule + device + update + glue
    cpu_s: (
        float  # CPU time of this process during the step: less than total_s when something else ran
    )
    warmup: bool = False  # first steps of a session or of a new shape: not for fitting
    disturbed: bool = False  # something else had the CPU meanwhile: not for fitting
    # How much slower than at its best the machine was around the step: durations are divided by it.
    slowdown: float = 1.0

    @property
    def host_s(self) -> float:
        """Seconds of the step during which the device waits for the CPU."""
        return max(0.0, self.total_s - self.device_s)

    @property
    def shape(self) -> StepShape:
        return StepShape(
            tuple(zip(self.prefill_new, self.prefill_context, strict=True)),
            self.num_decodes,
            self.decode_context_sum,
            self.decode_context_max,
        )

    @property
    def prefill_tokens(self) -> int:
        return sum(self.prefill_new)

    @property
    def usable(self) -> bool:
        """May it be fitted or scored?"""
        return not (self.warmup or self.disturbed)


@dataclass(slots=True)
class Samples:
    """All samples of a file, with what is known about each session (JSON-ready).

    A session holds at least `IDENTITY`'s keys, `block_size`, `num_gpu_blocks`, `engine_args`, `date`.
    """

    rows: list[StepSample] = field(default_factory=list)
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def usable(self, phase: str | None = None) -> list[StepSample]:
        """Rows fit to be fitted or scored, of one phase or of all."""
        return [row for row in self.rows if row.usable and phase in (None, row.phase)]

    def repeats_done(self) -> dict[tuple[str, int], int]:
        """(point, block size) -> how many repeats of it are there, disturbed ones not counted."""
        seen: dict[tuple[str, int], set[tuple[str, int]]] = {}
        spoiled: set[tuple[str, int, str, int]] = set()
        for row in self.rows:
            key = (row.point, row.block_size)
            seen.setdefault(key, set()).add((row.session, row.repeat))
            if row.disturbed:
                spoiled.add((*key, row.session, row.repeat))
        return {
            key: sum((*key, *repeat) not in spoiled for repeat in repeats)
            for key, repeats in seen.items()
        }


_FIELDS = {f.name: f.type for f in fields(StepSample)}
_LATER = {"slowdown": 1.0}  # columns that files of earlier releases lack, and what those meant
_TUPLES = ("prefill_new", "prefill_context")


def parquet_path(path: Path) -> Path:
    """`NAME.samples.parquet` for an artifact `NAME.json`, a samples path, or a bare name."""
    name = path.name
    for ending in (".samples.parquet", ".samples.jsonl", ".json"):
        if name.endswith(ending):
            name = name[: -len(ending)]
            break
    return path.with_name(f"{name}.samples.parquet")


def journal_path(path: Path) -> Path:
    """The journal beside `parquet_path(path)`."""
    parquet = parquet_path(path)
    return parquet.with_name(parquet.name.removesuffix(".parquet") + ".jsonl")


def read_samples(path: Path) -> Samples:
    """Everything measured so far: the Parquet file, then the journal's whole lines, each row once.

    Raises UserError for a file of another schema or one that can't be read; a missing file is no samples.
    """
    samples = Samples()
    seen: set[tuple[str, int]] = set()
    for session, row in [*_read_parquet(parquet_path(path)), *_read_journal(journal_path(path))]:
        if session is not None:
            samples.sessions[session[0]] = session[1]
        if row is not None and (row.session, row.seq) not in seen:
            seen.add((row.session, row.seq))
            samples.rows.append(row)
    return samples


Entry = tuple[tuple[str, dict[str, Any]] | None, StepSample | None]


def _read_parquet(path: Path) -> Iterator[Entry]:
    if not path.exists():
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not a readable Parquet file: {first}") from None
    meta = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    _check_schema(meta.get("schema"), path)
    missing = [n for n in _FIELDS if n not in table.column_names and n not in _LATER]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)} of schema {SCHEMA}")
    for name, session in json.loads(meta.get("sessions", "{}")).items():
        yield (name, session), None
    for number, raw in enumerate(table.to_pylist()):
        try:
            yield None, _row(raw)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: row {number} is not a sample of schema {SCHEMA}: {error}"
            ) from None


def _read_journal(path: Path) -> Iterator[Entry]:
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return  # a kill in mid-write tore it
            try:
                entry = json.loads(line)
                if "session" in entry and "seq" not in entry:
                    _check_schema(entry.get("schema"), path)
                    if not isinstance(entry["session"], str) or not isinstance(
                        entry["about"], dict
                    ):
                        raise TypeError("a session needs a name and an object")
                    yield (entry["session"], entry["about"]), None
                else:
                    yield None, _row(entry)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{path}:{number} is not a sample of schema {SCHEMA}: {error}"
                ) from None


def _check_schema(schema: object, path: Path) -> None:
    if schema != SCHEMA:
        raise UserError(f"{path} has schema {schema!r}; this vsim reads {SCHEMA!r}")


def _row(raw: dict[str, Any]) -> StepSample:
    """A sample from its fields. Raises KeyError, TypeError or ValueError where they are none."""
    values: dict[str, Any] = {
        name: _LATER[name] if name not in raw and name in _LATER else raw[name] for name in _FIELDS
    }
    for name, kind in _FIELDS.items():
        value = values[name]
        if name in _TUPLES:
            if not isinstance(value, list) or not all(_is_count(n) for n in value):
                raise TypeError(f"{name} must be a list of whole numbers")
            values[name] = tuple(value)
        elif kind == "int" and not _is_count(value):
            raise TypeError(f"{name}={value!r} must be a whole number from 0 to 10^15")
        elif kind == "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} must be a number")
            if not 0 <= value < 1e18:
                raise ValueError(f"{name}={value!r} must be finite and not negative")
        elif kind in ("str", "bool") and type(value).__name__ != kind:
            raise TypeError(f"{name}={value!r} must be of type {kind}")
        elif kind == "str":
            value.encode()  # half a surrogate pair can't be written again
    if len(values["prefill_new"]) != len(values["prefill_context"]):
        raise ValueError("prefill_new and prefill_context must be equally long")
    return StepSample(**values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15


class Journal:
    """The open end of a samples file. Each append is one whole line, flushed before it returns."""

    def __init__(self, path: Path) -> None:
        self.path = journal_path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def session(self, name: str, about: dict[str, Any]) -> None:
        """Announce an engine start; before its first sample."""
        self._write({"schema": SCHEMA, "session": name, "about": about})

    def append(self, rows: Iterable[StepSample]) -> None:
        for row in rows:
            self._write(asdict(row))

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def write_parquet(samples: Samples, path: Path) -> Path:
    """Write all rows to `parquet_path(path)`, whole or not at all; returns that path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    columns = [
        (name, pa.list_(pa.int64()) if name in _TUPLES else kinds[str(kind)])
        for name, kind in _FIELDS.items()
    ]
    schema = pa.schema(
        columns,
        metadata={"schema": SCHEMA, "sessions": json.dumps(samples.sessions, sort_keys=True)},
    )
    table = pa.Table.from_pydict(
        {name: [getattr(row, name) for row in samples.rows] for name in _FIELDS}, schema=schema
    )
    target = parquet_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        pq.write_table(table, partial, compression="zstd")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def compact(path: Path) -> Path:
    """Parquet and journal -> one Parquet file, whose path is returned. A kill between the two leaves both, which reads the same."""
    samples = read_samples(path)
    try:
        target = write_parquet(samples, path)
    except ImportError:
        # A bare GPU machine may lack pyarrow: the journal holds everything, and reads the same elsewhere.
        return journal_path(path)
    journal_path(path).unlink(missing_ok=True)
    return target


def check_same_device(samples: Samples, about: dict[str, Any], path: Path) -> None:
    """Refuse to add a session of another device, engine or model to a file. Raises UserError."""
    for session in samples.sessions.values():
        for key in IDENTITY:
            if session.get(key) != about.get(key):
                raise UserError(
                    f"{parquet_path(path)} was measured with {key}={_short(session.get(key))}, this run has "
                    f"{_short(about.get(key))}: samples of both can't be mixed; choose another --out"
                )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else text[:57] + "..."
