"""Two tracks: the offline number, the replay, and the factor between them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_cli import call  # noqa: F401  (a fixture)

from vsim.errors import UserError
from vsim.sim.deployment import resolve
from vsim.sim.dualtrack import Targets, _derating, dual_track, fixed_lengths, render
from vsim.sim.replay import Load, replay, step_model_for
from vsim.sim.summary import summarize
from vsim.traces.trace import Trace, TraceSource

MODEL, GPU = "meta-llama/Llama-3.1-8B-Instruct", "a100"
DEPLOYMENT = resolve(MODEL, GPU, max_num_seqs=4)


def small_trace(count: int = 24, gap_ms: int = 400) -> Trace:
    return Trace(
        arrival_ns=np.arange(count, dtype=np.int64) * gap_ms * 1_000_000,
        prompt_tokens=np.full(count, 500, dtype=np.int64) + np.arange(count, dtype=np.int64),
        output_tokens=np.full(count, 20, dtype=np.int64),
        source=TraceSource("small.jsonl", "test", "0" * 64),
    )


def by_name(result: dict) -> dict[str, dict]:
    return {track["name"]: track for track in result["tracks"]}


def test_each_track_is_what_vsim_replay_gives_for_that_load() -> None:
    trace = small_trace()
    tracks = by_name(dual_track(trace, DEPLOYMENT, concurrency=(2,), targets=None))
    loads = {
        "offline, all at once": Load(request_rate=float("inf")),
        "offline, concurrency 2": Load(request_rate=float("inf"), max_concurrency=2),
        "replay": Load(),
        "replay, time scale 0.5": Load(time_scale=0.5),
    }
    assert list(tracks) == list(loads)
    for name, load in loads.items():
        summary = summarize(replay(trace, DEPLOYMENT, step_model_for(DEPLOYMENT), load))
        for key in ("output_throughput", "p95_ttft_ms", "kv_fragmentation_mean", "preemptions"):
            assert tracks[name][key] == summary[key], (name, key)


def test_derating_is_the_largest_load_within_the_targets_over_the_offline_figure() -> None:
    trace, targets = small_trace(), Targets(ttft_p95_ms=200, tpot_p95_ms=100)
    result = dual_track(trace, DEPLOYMENT, concurrency=(), targets=targets)
    knee = result["derating"]
    assert 1.0 <= knee["speed"] < knee["first_failing_speed"] <= 1.06 * knee["speed"]

    def at(speed: float) -> dict:
        load = Load(time_scale=1 / speed)
        return summarize(replay(trace, DEPLOYMENT, step_model_for(DEPLOYMENT), load))

    assert at(knee["speed"])["p95_ttft_ms"] <= 200 < at(knee["first_failing_speed"])["p95_ttft_ms"]
    offline = by_name(result)["offline, all at once"]
    assert offline["p95_ttft_ms"] > 200  # all at once is past the knee
    assert (
        offline["derating"] == at(knee["speed"])["output_throughput"] / offline["output_throughput"]
    )


@pytest.mark.parametrize("knee", [0.013, 0.4, 0.99, 1.0, 1.7, 2.0, 37.0])
def test_the_search_finds_any_knee(knee: float) -> None:
    runs: list[float] = []

    def at(speed: float) -> dict:
        runs.append(speed)
        return {
            "p95_ttft_ms": 1000.0 if speed <= knee else 5000.0,
            "p95_tpot_ms": None,
            "ended_early": None,
            "output_throughput": 100 * speed,
            "request_throughput": speed,
        }

    known = {1.0: at(1.0), 2.0: at(2.0), float("inf"): at(1e9)}
    runs.clear()
    found = _derating(small_trace(), Targets(), at, lambda: at(1e-9), known)
    assert found["speed"] <= knee < found["first_failing_speed"] <= 1.05 * found["speed"] * 1.001
    assert found["output_throughput"] == 100 * found["speed"]
    assert len(runs) == len(set(runs)) <= 14


def test_no_knee_is_said_in_words() -> None:
    tight = Targets(ttft_p95_ms=0.001)
    missed = dual_track(small_trace(6), DEPLOYMENT, concurrency=(), targets=tight)
    assert missed["derating"]["output_throughput"] is None
    assert "one request at a time already misses them" in render(missed)
    loose = dual_track(small_trace(6), DEPLOYMENT, concurrency=())
    assert "even all at once meets them" in render(loose)
    assert by_name(loose)["offline, all at once"]["derating"] == 1.0
    at_once = dual_track(small_trace(6, gap_ms=0), DEPLOYMENT, concurrency=())
    assert "no times of its own" in render(at_once)


def test_distortion_is_the_relative_change_from_compressing_time() -> None:
    result = dual_track(small_trace(), DEPLOYMENT, concurrency=(), targets=None)
    tracks, change = by_name(result), result["time_compression"]["relative_change"]
    ratio = tracks["replay, time scale 0.5"]["p95_ttft_ms"] / tracks["replay"]["p95_ttft_ms"]
    assert change["p95_ttft_ms"] == pytest.approx(ratio - 1)
    assert change["preemptions"] is None  # none before: no ratio


def test_an_offline_benchmark_of_fixed_lengths() -> None:
    other = fixed_lengths(small_trace(), 512, 7)
    result = dual_track(
        small_trace(), DEPLOYMENT, offline_trace=other, concurrency=(), targets=None
    )
    tracks = by_name(result)
    assert tracks["offline, all at once"]["completed"] == 24
    offline = tracks["offline, all at once"]
    assert round(offline["output_throughput"] * offline["duration"]) == 24 * 7
    with pytest.raises(UserError, match="at least 1"):
        fixed_lengths(small_trace(), 0, 7)


def test_the_command_prints_a_table_or_json(call, tmp_path: Path) -> None:  # noqa: F811
    path, prices = tmp_path / "small.jsonl", tmp_path / "prices.yaml"
    rows = [
        {"timestamp": 300 * i, "input_length": 300, "output_length": 9, "hash_ids": [i]}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prices.write_text("currency: EUR\na100: 1.5\n")
    asked = ("dualtrack", path, "--model", MODEL, "--gpu", GPU, "--concurrency", "2,4")
    code, out, err = call(*asked, "--prices", prices)
    assert code == 0, err
    assert "offline, concurrency 4" in out and "EUR/Mtok out" in out and "derate" in out
    assert "roofline, not measured" in out and "\x1b" not in out + err
    code, out, _ = call(*asked, "--no-derating", "--json")
    told = json.loads(out)
    assert code == 0 and told["schema"] == "vsim/dualtrack/1" and told["derating"] is None
    assert len(told["tracks"]) == 5 and "currency" not in told["tracks"][0]
    for args, names in (
        (["--concurrency", "many"], "many"),
        (["--concurrency", "0"], "concurrency=0"),
        (["--concurrency", "4,4"], "twice"),
        (["--ttft-p95", "-1"], "--ttft-p95"),
        (["--offline-lengths", "512"], "IN/OUT"),
        (["--offline-lengths", "5/5", "--offline-trace", "x"], "give one"),
        (["--offline-trace", "nowhere.json"], "nowhere.json"),
        (["--prices", "nowhere.yaml"], "nowhere.yaml"),
    ):
        code, out, err = call(*asked, *args)
        assert code == 2 and out == "" and names in err and err.count("\n") == 1


def test_an_offline_track_that_never_fills_the_engine_is_told() -> None:
    trace = small_trace(count=12)
    result = dual_track(trace, DEPLOYMENT, concurrency=(4, 12, 32), targets=None)
    assert result["unfilled_concurrency"] == [12, 32]
    assert "The offline track has only 12 requests: concurrency 12, 32 holds" in render(result)
    assert "has only" not in render(dual_track(trace, DEPLOYMENT, concurrency=(4,), targets=None))
