"""What a replay used and costs: replicas side by side, GPU-hours, the user's prices and nobody else's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import call  # noqa: F401  (a fixture)

from vsim.sim.replica_spread import spread_lines

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 50 * i, "input_length": 200 + i, "output_length": 20, "hash_ids": [i]}
        for i in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replayed(call, trace: Path, *flags: object) -> dict:  # noqa: F811
    code, out, err = call("replay", trace, "--model", MODEL, "--gpu", "a100", *flags, "--json")
    assert code == 0, err
    told: dict = json.loads(out)
    return told


def test_without_prices_there_are_gpu_hours_and_no_money(call, trace_file: Path) -> None:  # noqa: F811
    told = replayed(call, trace_file, "-tp", "2", "--replicas", "3")
    assert told["gpus"] == 6 and told["replicas"] == 3 and told["gpu_name"] == "A100-80GB"
    assert told["gpu_hours"] == pytest.approx(6 * told["duration"] / 3600)
    per_million = told["gpu_hours"] / told["total_output_tokens"] * 1e6
    assert told["gpu_hours_per_million_output_tokens"] == pytest.approx(per_million)
    assert not [key for key in told if key.startswith(("cost", "currency", "prices"))]


def test_the_bill_is_worked_out_by_hand(call, trace_file: Path, tmp_path: Path) -> None:  # noqa: F811
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "currency: EUR\nsource: a contract\ndate: 2026-11-01\na100: 2\n"
        "storage_gb: 500\nstorage_per_gb_month: 0.1\nnetwork_per_month: 23\n"
        "network_per_gb: 0.5\nbytes_per_output_token: 200\nother_per_month: 7\n"
    )
    told = replayed(call, trace_file, "--replicas", "2", "--prices", prices)
    hours = told["duration"] / 3600
    traffic = told["total_output_tokens"] * 200 / 1e9 * 0.5  # of the run
    assert told["cost_gpus_per_month"] == 2 * 2 * 730
    assert told["cost_storage_per_month"] == 50 and told["cost_other_per_month"] == 7
    assert told["cost_network_per_month"] == pytest.approx(23 + traffic / hours * 730)
    month = told["cost_per_month"]
    assert month == pytest.approx(2920 + 50 + 7 + told["cost_network_per_month"])
    assert told["cost_of_run"] == pytest.approx(month / 730 * hours)
    for kind, tokens in (
        ("_input", told["total_input_tokens"]),
        ("_output", told["total_output_tokens"]),
        ("", told["total_input_tokens"] + told["total_output_tokens"]),
    ):
        expected = told["cost_of_run"] * 1e6 / tokens
        assert told[f"cost_per_million{kind}_tokens"] == pytest.approx(expected)
    assert told["prices"] == "Prices: prices.yaml, a contract of 2026-11-01"


def test_the_table_shows_replicas_and_the_bill(call, trace_file: Path, tmp_path: Path) -> None:  # noqa: F811
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\na100: 2\n")
    flags = ("--model", MODEL, "--gpu", "a100", "--replicas", "2", "--route", "least-requests")
    code, out, err = call("replay", trace_file, *flags, "--prices", prices)
    assert code == 0, err
    assert "on 2 replicas of 1 x A100-80GB behind least-requests" in " ".join(out.split())
    assert "Replicas (latencies in ms)" in out and "Cost of a month like it (EUR):" in out
    assert "names neither source nor date" in out
    assert max(len(line) for line in out.splitlines()[2:40]) <= 80
    code, out, _ = call("replay", trace_file, *flags[:4])
    assert code == 0 and "Replicas (" not in out and "Cost" not in out and "GPU-hours" in out


def test_the_spread_adds_up_and_shows_an_idle_replica(call, trace_file: Path) -> None:  # noqa: F811
    told = replayed(call, trace_file, "--replicas", "2")
    rows = told["per_replica"]
    assert [row["requests"] for row in rows] == [12, 12]
    assert sum(row["output_tokens"] for row in rows) == told["total_output_tokens"]
    assert sum(row["kv_usage_mean"] for row in rows) / 2 == pytest.approx(told["kv_usage_mean"])
    assert all(0 < row["busy"] <= 1 for row in rows)
    # A router that always picks the emptier one leaves most of thirty replicas idle; they are paid for.
    told = replayed(call, trace_file, "--replicas", "30", "--route", "least-requests")
    rows = told["per_replica"]
    assert len(rows) == 30 and rows[29] == {
        "replica": 29,
        "requests": 0,
        "output_tokens": 0,
        "p95_ttft_ms": None,
        "p95_tpot_ms": None,
        "busy": 0.0,
        "kv_usage_mean": 0.0,
        "kv_usage_peak": 0.0,
        "waiting_peak": 0,
        "preemptions": 0,
    }
    assert sum(row["kv_usage_mean"] for row in rows) / 30 == pytest.approx(told["kv_usage_mean"])
    lines = spread_lines(rows)
    assert [line.split()[0] for line in lines] == ["replica", "least", "median", "most"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--route", "nearest"], "nearest"),
        (["--replicas", "0"], "replicas"),
        (["--prices", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_input_is_one_sentence(call, trace_file: Path, flags: list[str], says: str) -> None:  # noqa: F811
    code, out, err = call("replay", trace_file, "--model", MODEL, "--gpu", "a100", *flags)
    assert code == 2 and out == "" and says in err and err.count("\n") == 1


def test_no_price_stops_before_any_work(call, trace_file: Path, tmp_path: Path) -> None:  # noqa: F811
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nh100: 2\n")
    code, _, err = call(
        *("replay", trace_file, "--model", MODEL, "--gpu", "a100", "--prices", prices)
    )
    assert code == 2 and "no price for A100" in err


def test_a_sweep_ends_with_its_best_rows_and_where_the_table_lies(
    call,  # noqa: F811
    trace_file: Path,
    tmp_path: Path,
) -> None:
    prices, out = tmp_path / "prices.yaml", tmp_path / "t.parquet"
    prices.write_text("currency: EUR\na100: 2\nh100: 3\n")
    base = ("sweep", trace_file, "--model", MODEL, "--out", out)
    vary = ("--vary", "gpu=a100,h100", "--vary", "replicas=1,2")
    code, said, err = call(*base, *vary)
    assert code == 0, err
    assert "Best 4 of 4 by p95_ttft_ms, smallest first" in said
    assert said.splitlines()[-1] == f"Wrote {out}: 4 points"
    code, said, err = call(*base, *vary, "--prices", prices, "--top", "2")
    assert code == 0, err
    lines = said.splitlines()
    assert lines[0].startswith("Best 2 of 4 by cost_per_million_output_tokens")
    assert lines[1].split() == [
        *("point", "gpu", "replicas", "GPUs", "tok/s", "TTFT", "p95", "TPOT", "p95", "preempt."),
        *("EUR/month", "EUR/Mtok", "out"),
    ]
    assert [line.split()[1:3] for line in lines[2:4]] == [["a100", "1"], ["h100", "1"]]
    code, said, _ = call(*base, *vary, "--sort-by", "output_throughput", "--top", "1")
    assert code == 0 and "largest first" in said
    by_point = ("--sort-by", "point", "--show", "kv_usage_peak", "--top", "3")
    code, said, _ = call(*base, *vary, *by_point)
    lines = said.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["point", "0", "1", "2"]
    assert lines[1].split()[-1] == "kv_usage_peak"
    code, said, _ = call(*base, *vary, "--sort-by", "replicas", "--top", "2")
    assert [line.split()[2] for line in said.splitlines()[2:4]] == ["1", "1"]
    code, said, _ = call(*base, *vary, "--top", "0")
    assert said == f"Wrote {out}: 4 points, 4 of them from the journal\n"
    for name in ("p95_ttft", "cost_per_month", "block_size; drop"):
        code, said, err = call(*base, *vary, "--sort-by", name)
        assert code == 2 and said == "" and name in err and err.count("\n") == 1
    code, said, err = call(*base, *vary, "--sort-by", "gpu")
    assert code == 2 and "no such number" in err


def test_a_sweep_of_refusals_says_the_first_reason(call, trace_file: Path, tmp_path: Path) -> None:  # noqa: F811
    code, said, err = call(
        *("sweep", trace_file, "--model", MODEL, "--gpu", "a100"),
        *("--vary", "block_size=0,3", "--out", tmp_path / "t.parquet"),
    )
    assert code == 0, err
    assert "Every point was refused; the first: " in said and "2 refused" in said


def test_report_and_pull_request_summary_hold_the_bill(
    call,  # noqa: F811
    trace_file: Path,
    tmp_path: Path,
) -> None:
    prices, run = tmp_path / "prices.yaml", tmp_path / "run"
    prices.write_text("currency: <EUR>\nsource: a & b\na100: 2\n")
    flags = ("--model", MODEL, "--gpu", "a100", "--replicas", "2", "--prices", prices)
    code, _, err = call("replay", trace_file, *flags, "--out", run)
    assert code == 0, err
    page = (run / "report.html").read_text()
    assert "GPU time and cost" in page and "Cost of the run (&lt;EUR&gt;)" in page
    assert "a &amp; b" in page and "<EUR>" not in page
    code, _, err = call("export", run, "--format", "markdown", "--out", tmp_path / "pr.md")
    assert code == 0, err
    assert "GPU-hours of the run" in (tmp_path / "pr.md").read_text()
