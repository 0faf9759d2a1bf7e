"""Any bytes are read or refused with one sentence: past failures, and a bounded share of fresh damage."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.domain import Domain
from vsim.models.load import LoadedStepModel
from vsim.models.step import StepShape
from vsim.sim.run_io import read_run, write_run
from vsim.sim.summary import summarize
from vsim.sim.user_file import read_mapping
from vsim.tests.fuzz.run import CORPUS, FAILED, HangError, _hang, fuzz, outcome
from vsim.tests.fuzz.targets import BY_NAME, TARGETS, Target
from vsim.tests.make_run import random_run
from vsim.traces.readers import read_trace

PAST = sorted(CORPUS.glob("*/*.bin"))
ROW = b'{"timestamp": 0, "input_tokens": 5, "output_tokens": 5, "tenant": "'
DECODES = StepShape((), 4, 400, 130)


@pytest.fixture
def bell() -> Iterator[None]:
    """Hangs end as failures, as under `make fuzz`."""
    before = signal.signal(signal.SIGALRM, _hang)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("path", PAST, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_once_failed_is_read_or_refused(path: Path, tmp_path: Path, bell: None) -> None:
    result, said = outcome(BY_NAME[path.parent.name], tmp_path, path.read_bytes())
    assert result != FAILED, said


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_fresh_damage_is_read_or_refused(
    target: Target, bell: None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fuzz(target, 60 * target.weight, seed=10)
    assert found[FAILED] == 0, capsys.readouterr().out
    # A fuzzer whose every input is refused at the door proves nothing of the rooms behind it.
    assert found["read"] > 0 or target.weight < 2


def test_the_fuzzer_itself_sees_hangs_and_tracebacks(tmp_path: Path, bell: None) -> None:
    def endless(_: Path, __: bytes) -> None:
        while True:
            pass

    def broken(_: Path, data: bytes) -> None:
        json.loads(data)

    def unprintable(_: Path, __: bytes) -> None:
        raise UserError("")

    from vsim.tests.fuzz import run

    before, run.LIMIT_S = run.LIMIT_S, 0.05
    try:
        for read in (endless, broken, unprintable):
            assert outcome(Target("x", list, read, 1), tmp_path, b"{")[0] == FAILED
    finally:
        run.LIMIT_S = before
    assert not issubclass(HangError, Exception)


def test_whatever_input_holds_a_sentence_stays_one_printable_line() -> None:
    said = str(UserError("trace \x1b[2J\nname \u202egpj.exe"))
    assert said == "trace \\x1b[2J\\nname \\u202egpj.exe"


class OneBadStep:
    """A step model whose fifth step of a run, and whose step over all ranks, is `bad`."""

    def __init__(self, bad: float) -> None:
        self.bad = bad

    def device_seconds(self, shape: StepShape) -> float:
        return self.bad if shape.decode_context_sum >= DECODES.decode_context_sum + 16 else 0.01

    def host_seconds(self, shape: StepShape) -> float:
        return 0.0

    def lockstep_seconds(self, shapes: list[StepShape]) -> float:
        return self.bad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-9, -float("inf"), 1e7, 1e300])
def test_a_profile_whose_steps_take_no_sound_time_is_refused(bad: float) -> None:
    model = LoadedStepModel(OneBadStep(bad), Calibration("tables", {}, Domain()), "hostile")
    assert model.decode_run_seconds(DECODES, 4).tolist() == [0.01] * 4
    with pytest.raises(UserError, match="profile hostile: its params can't be used: a step of 4"):
        model.decode_run_seconds(DECODES, 20)
    with pytest.raises(UserError, match="over all ranks"):
        model.lockstep_seconds([DECODES, DECODES])


# Bombs: little on disk, much in memory


def test_a_gzip_bomb_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    bomb = tmp_path / "t.jsonl.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        file.write(ROW)
        for _ in range(80):
            file.write(b"7" * (1 << 20))  # one line of 80 MiB
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(UserError, match="a line is longer than"):
        read_trace(bomb)


def test_a_zstd_bomb_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    import zstandard

    bomb = tmp_path / "t.jsonl.zst"
    bomb.write_bytes(zstandard.ZstdCompressor().compress(ROW + b"7" * (80 << 20)))
    with pytest.raises(UserError, match="a line is longer than"):
        read_trace(bomb)


def test_yaml_aliases_do_not_multiply(tmp_path: Path) -> None:
    laughs = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
    )
    bomb = tmp_path / "p.yaml"
    bomb.write_text(laughs)
    with pytest.raises(UserError, match="must be a value or a list of values"):
        read_mapping(bomb, "price file")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_deep_nesting_is_refused(text: str, tmp_path: Path) -> None:
    for target in ("trace", "timings", "bench", "recipe", "profile", "config", "case", "prices"):
        result, said = outcome(BY_NAME[target], tmp_path, text.encode())
        assert result != FAILED, (target, said)


def test_a_run_that_claims_more_rows_than_its_bytes_can_hold_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = random_run(10, 20)
    write_run(run, tmp_path / "r", summarize(run), report=False)
    column = pa.array([0], pa.int64()).take(pa.array([0] * 3_000_000))
    table = pa.table({"itl_ns": column, "count": column})
    pq.write_table(table, tmp_path / "r" / "itl.parquet", compression="zstd")
    with pytest.raises(UserError, match="claims 3000000 rows"):
        read_run(tmp_path / "r")
