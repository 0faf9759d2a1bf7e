"""`vsim replay --fleet`: composes with --replicas and --route, and any file is read or refused in one sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import call  # noqa: F401  (a fixture)

from vsim.errors import UserError
from vsim.sim.fleet.read import read_fleet
from vsim.sim.fleet.spec import FleetSpec

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
HERE = Path(__file__).parent / "data" / "fleet"


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 50 * i, "input_length": 200 + i, "output_length": 20, "hash_ids": [i]}
        for i in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


def replayed(call, trace: Path, *flags: object) -> dict:  # noqa: F811
    code, out, err = call("replay", trace, "--model", MODEL, "--gpu", "a100", *flags, "--json")
    assert code == 0, err
    told: dict = json.loads(out)
    return told


def test_a_file_that_asks_for_nothing_changes_no_byte(
    call,  # noqa: F811
    trace_file: Path,
    tmp_path: Path,
) -> None:
    empty = written(tmp_path, "network:\n")
    flags = ("--replicas", "2", "--route", "least-tokens")
    plain = replayed(call, trace_file, *flags)
    told = replayed(call, trace_file, *flags, "--fleet", empty)
    assert told == plain
    stated = written(tmp_path, "replicas: 2\nroute: least-tokens\n")
    assert replayed(call, trace_file, "--fleet", stated) == plain
    assert replayed(call, trace_file, "--fleet", stated, *flags) == plain


def test_limits_reach_summary_and_exit_code_stays_0(call, trace_file: Path, tmp_path: Path) -> None:  # noqa: F811
    told = replayed(
        call,
        trace_file,
        *("--request-rate", "inf", "--fleet"),
        written(tmp_path, "admission: {max_num_queued_reqs: 10}\n"),
    )
    assert told["completed"] == 10
    assert told["rejected_reasons"] == {"rejected_max_num_queued_reqs": 14}
    assert told["events"] == []


def test_a_run_with_everything_writes_a_report_and_the_same_bytes_twice(
    call,  # noqa: F811
    trace_file: Path,
    tmp_path: Path,
) -> None:
    fleet = written(
        tmp_path,
        "network: {latency_s: 0.01, jitter_s: 0.01}\nadmission: {when_full: wait}\n"
        "failures: [{replica: 0, at_s: 0.3, for_s: 0.2}]\nretry: {attempts: 3}\n"
        "tenants: {each: {max_in_flight: 9, over_limit: wait}}\n"
        "autoscale: {max_replicas: 3, target: 1, cold_start_s: 0.1, sync_s: 0.2, scrape_s: 0.1}\n",
    )
    for name in ("one", "two"):
        code, out, err = call(
            *("replay", trace_file, "--model", MODEL, "--gpu", "a100", "--max-num-seqs", "2"),
            *("--fleet", fleet, "--out", tmp_path / name),
        )
        assert code == 0, err
        assert "replica 0 fails" in out
        shown = out[out.index(" Fleet ---") : out.index("Assumptions:")]
        assert max(map(len, shown.splitlines())) <= 80
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "report.html" in files
    for name in files:
        one, two = (tmp_path / run / name for run in ("one", "two"))
        assert one.read_bytes() == two.read_bytes(), name


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("replicas: 2\n", ["--replicas", "3"], "--replicas 3, and fleet.yaml says replicas: 2"),
        ("route: kv-aware\n", ["--route", "least-tokens"], "fleet.yaml says route: kv-aware"),
        ("replicas: x\n", [], "fleet.yaml:1: replicas"),
        ("failures: [{replica: 2, at_s: 1}]\n", ["--replicas", "2"], "run from 0 to 1"),
        ("autoscale: {max_replicas: 2, target: 1}\n", ["--replicas", "3"], "keeps 1 to 2"),
        ("network: {latency_s: 1}\n", ["-dp", "2"], "data_parallel_size=2"),
        (
            "disaggregation: {prefill_replicas: 1, decode_replicas: 1, bandwidth_gb_s: 1}\n",
            ["--engine", "v0"],
            "drop --engine v0",
        ),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(
    call,  # noqa: F811
    trace_file: Path,
    tmp_path: Path,
    text: str,
    flags: list[str],
    says: str,
) -> None:
    code, out, err = call(
        *("replay", trace_file, "--model", MODEL, "--gpu", "a100", *flags),
        *("--fleet", written(tmp_path, text), "--out", tmp_path / "run"),
    )
    assert code == 2 and out == "" and says in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def read_or_refused(path: Path) -> FleetSpec | None:
    try:
        return read_fleet(path)
    except UserError as error:
        assert "\n" not in str(error) and path.name in str(error)
        return None


@settings(max_examples=40)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(data)
    read_or_refused(path)


SEEDS = [yaml.safe_load(path.read_text()) for path in sorted(HERE.glob("*.yaml"))]
ODD = (None, True, -1, 0, 1, 2, 1e400, 1e-9, 10**30, "x", "reject", "", [], {}, [1], {"a": 1})


@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    spec = copy.deepcopy(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = spec
        while True:
            if not at:
                break
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = data.draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and data.draw(st.booleans()):
                at = at[key]
                continue
            at[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
            break
    path = tmp_path_factory.getbasetemp() / "odd.yaml"
    path.write_text(yaml.safe_dump(spec))
    found = read_or_refused(path)
    if found is not None:
        json.dumps(found.as_dict(), allow_nan=False)
