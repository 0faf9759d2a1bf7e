"""ServeGen chunks: a recipe of rates and length tables, drawn into requests with a seed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vsim.traces import jsonl
from vsim.traces.draft import MAX_TOKENS, Draft
from vsim.traces.files import TraceFile, open_trace_file
from vsim.traces.options import Report, RowError

WINDOW_S = 600  # of the rates; the length tables span 21,600 s
MAX_REQUESTS = 50_000_000
_PAIR = re.compile(r"\s*(\d{1,9})\s*:\s*([0-9.eE+-]{1,40})\s*(?:,|$)")

Table = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


def recognise_rates(first_line: str) -> bool:
    """Six fields without a header: start, rate, CV, Weibull | Gamma | nothing, shape, scale."""
    fields = first_line.strip().split(",")
    if len(fields) != 6 or fields[3] not in ("Weibull", "Gamma", ""):
        return False
    try:
        [float(fields[at]) for at in (0, 1, 2, 4, 5)]
    except ValueError:
        return False
    return True


def recognise_lengths(head: bytes) -> bool:
    return b'"input_tokens"' in head and re.search(rb'"input_tokens":\s*"\{', head) is not None


def refuse_lengths(file: TraceFile, report: Report) -> Draft:
    """The length tables alone hold no arrivals."""
    other = file.name.replace("-dataset.json", "-trace.csv")
    report.fail(
        f"is ServeGen's table of lengths, without arrivals; read {other if other != file.name else 'the -trace.csv'} "
        "beside it"
    )


def read_servegen(file: TraceFile, report: Report) -> Draft:
    """Draw requests from NAME-trace.csv and the NAME-dataset.json beside it.

    Each window gets the number of requests its rate means, with gaps of the named law (shape as given) stretched
    to fill the window; lengths are drawn independently from the table of that time.
    """
    windows = _windows(file, report)
    tables = _tables(file, report)
    rng = np.random.default_rng(report.options.seed)
    starts = sorted(tables)
    times: list[npt.NDArray[np.float64]] = []
    prompts: list[npt.NDArray[np.int64]] = []
    outputs: list[npt.NDArray[np.int64]] = []
    total = 0
    limit = report.options.limit
    for line, start, rate, law, shape in windows:
        count = round(rate * WINDOW_S)
        if not count:
            continue
        total += count
        if total > MAX_REQUESTS:
            report.fail(f"its rates mean more than {MAX_REQUESTS} requests", line)
        gaps = (
            rng.weibull(shape, count + 1) if law == "Weibull" else rng.gamma(shape, 1.0, count + 1)
        )
        length = gaps.sum()
        offsets = np.cumsum(gaps[:-1]) / length if length > 0 else np.zeros(count)
        times.append(start + offsets * WINDOW_S)
        table = tables[max((at for at in starts if at <= start), default=starts[0])]
        prompts.append(_draw(rng, table[0], count))
        outputs.append(_draw(rng, table[1], count))
        if limit is not None and total > limit:
            break
    report.assume(
        f"ServeGen's file is a recipe: requests are drawn from it with seed {report.options.seed}; each {WINDOW_S} s "
        "window gets exactly the number its rate means; input and output lengths are drawn independently, because "
        "the file has no joint table."
    )
    joined = np.concatenate(times) if times else np.empty(0)
    return Draft(
        time_ns=np.round(joined * 1e9).astype(np.int64),
        prompt=np.concatenate(prompts) if prompts else np.empty(0, np.int64),
        output=np.concatenate(outputs) if outputs else np.empty(0, np.int64),
        first_line=1,
        zero_means="empty answers",
    )


def _windows(file: TraceFile, report: Report) -> list[tuple[int, float, float, str, float]]:
    """(line, start s, rate req/s, law, shape) of each window."""
    out = []
    for line, raw, _ in file.lines():
        fields = raw.decode("utf-8", "replace").strip().split(",")
        try:
            if len(fields) != 6:
                raise RowError(f"has {len(fields)} fields, not 6")
            start, rate, _, shape, _ = (_finite(fields[at]) for at in (0, 1, 2, 4, 5))
            law = fields[3]
            if rate > 0 and (law not in ("Weibull", "Gamma") or not 0.001 <= shape <= 1e6):
                raise RowError(f"has a rate, but the law {law[:20]!r} with shape {shape:g}")
            if start + WINDOW_S > 4e9 or rate > 1e6:
                raise RowError("its start or rate is out of range")
        except RowError as error:
            report.bad_row(line, str(error))
            continue
        out.append((line, start, rate, law, shape))
    return out


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise RowError(f"{text[:40]!r} is not a finite number >= 0")
    return value


def _tables(file: TraceFile, report: Report) -> dict[float, tuple[Table, Table]]:
    """Window start -> (input lengths, output lengths) from the dataset file beside the rates."""
    name = file.path.name.replace("-trace.csv", "-dataset.json")
    beside = file.path.with_name(name)
    if name == file.path.name or not beside.is_file():
        report.fail(
            f"its lengths should lie beside it as {name if name != file.path.name else 'NAME-dataset.json'}"
        )
    other = open_trace_file(Path(beside), report.options.max_bytes)
    within = Report(other.name, report.options)
    try:
        raw = jsonl.parse(other.document())
    except RowError as error:
        within.fail(str(error))
    tables: dict[float, tuple[Table, Table]] = {}
    if isinstance(raw, dict):
        for start, entry in raw.items():
            if (
                not isinstance(entry, dict)
                or not entry
                or entry.get("input_tokens") in (None, "{}")
            ):
                continue
            try:
                tables[_finite(start)] = (
                    _table(entry.get("input_tokens")),
                    _table(entry.get("output_tokens")),
                )
            except RowError as error:
                within.fail(f"window {start[:20]}: {error}")
    if not tables:
        within.fail("holds no table of lengths")
    return tables


def _table(text: object) -> Table:
    """A Python dict as text, {length: probability, …}, read without evaluating it."""
    if not isinstance(text, str) or not text.startswith("{") or not text.endswith("}"):
        raise RowError("a length table is not written as {length: probability, …}")
    lengths, weights = [], []
    body, at = text[1:-1].strip(), 0
    while at < len(body):
        match = _PAIR.match(body, at)
        if match is None:
            raise RowError(f"a length table can't be read at {body[at : at + 20]!r}")
        lengths.append(int(match[1]))
        weights.append(_finite(match[2]))
        at = match.end()
    total = sum(weights)
    if not lengths or not total > 0 or not math.isfinite(total) or max(lengths) > MAX_TOKENS:
        raise RowError("a length table is empty or has impossible values")
    return np.asarray(lengths, dtype=np.int64), np.cumsum(np.asarray(weights) / total)


def _draw(rng: np.random.Generator, table: Table, count: int) -> npt.NDArray[np.int64]:
    lengths, cumulative = table
    at = np.searchsorted(cumulative, rng.random(count), side="right")
    return lengths[np.minimum(at, len(lengths) - 1)]
