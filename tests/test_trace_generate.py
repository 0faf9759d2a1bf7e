"""Made traces have the law they were asked for; fitted ones look like what they were learned from."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.traces.arrivals import head, rerate, scale_time, send_offsets_s
from vsim.traces.burstiness import counts, hurst, index_of_dispersion
from vsim.traces.edit import anonymize, merge, scale_load, slice_trace
from vsim.traces.facts import facts
from vsim.traces.fit import fit, generate_from, load
from vsim.traces.lengths import parse
from vsim.traces.processes import PROCESSES, Arrivals, draw
from vsim.traces.readers import read_trace
from vsim.traces.sharing import sharing
from vsim.traces.synth import Conversation, Workload, generate
from vsim.traces.trace import Trace
from vsim.traces.write import write_trace

ROOT = Path(__file__).parents[1]
AZURE = ROOT / "traces" / "azure2023_conv.csv"
DATA = Path(__file__).parent / "data" / "traces"

SPECS = {
    "constant": Arrivals("constant", rate=5, duration_s=4000),
    "poisson": Arrivals("poisson", rate=5, duration_s=4000),
    "gamma": Arrivals("gamma", rate=5, duration_s=4000, burstiness=0.25),
    "weibull": Arrivals("weibull", rate=5, duration_s=4000, burstiness=0.5),
    "mmpp": Arrivals("mmpp", rates=(2, 20), holds_s=(15, 3), duration_s=4000),
    "onoff-pareto": Arrivals("onoff-pareto", rate=5, duration_s=4000, sources=100),
    "steps": Arrivals("steps", rates=(1, 5, 9), holds_s=(100,), duration_s=3000),
    "ramp": Arrivals("ramp", rate=0, end_rate=10, duration_s=4000),
    "diurnal": Arrivals("diurnal", rate=5, period_s=400, duration_s=4000),
}


@pytest.mark.parametrize("kind", PROCESSES)
def test_every_process_keeps_its_mean_rate(kind: str) -> None:
    spec = SPECS[kind]
    times = draw(spec, np.random.default_rng(1))
    assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] < spec.duration_s  # type: ignore[operator]
    assert len(times) / spec.duration_s == pytest.approx(5, rel=0.12)  # type: ignore[operator]


@pytest.mark.parametrize("kind", PROCESSES)
def test_a_number_of_requests_can_be_asked_for_instead(kind: str) -> None:
    import dataclasses

    spec = dataclasses.replace(SPECS[kind], duration_s=None, requests=321)
    assert len(draw(spec, np.random.default_rng(1))) == 321


@pytest.mark.parametrize(("shape", "dispersion"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25)])
def test_gamma_gaps_have_the_dispersion_of_their_shape(shape: float, dispersion: float) -> None:
    spec = Arrivals("gamma", rate=10, duration_s=20_000, burstiness=shape)
    ns = (draw(spec, np.random.default_rng(2)) * 1e9).astype(np.int64)
    assert index_of_dispersion(counts(ns, 60)) == pytest.approx(dispersion, rel=0.2)


def test_on_off_sources_have_long_memory_and_poisson_has_none() -> None:
    rng = np.random.default_rng(3)
    bursty = Arrivals("onoff-pareto", rate=20, duration_s=8000, sources=40, alpha=1.3)
    calm = Arrivals("poisson", rate=20, duration_s=8000)
    estimates = [
        hurst(counts((draw(spec, rng) * 1e9).astype(np.int64), 1)) for spec in (bursty, calm)
    ]
    assert estimates[0] > 0.7
    assert 0.4 < estimates[1] < 0.6


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [
        ("7", 7, 7, 7),
        ("uniform:10:20", 10, 20, 15),
        ("lognormal:400:1.0", 1, 10**9, 400),
        ("lognormal:400:1.0:500", 1, 500, 400),
        ("mix:0.5=5,0.5=uniform:100:200", 5, 200, None),
        ("chat", 8, 2048, None),
    ],
)
def test_lengths_are_what_they_say(text: str, low: int, high: int, median: int | None) -> None:
    values = parse(text).draw(np.random.default_rng(0), 20_000)
    assert low <= values.min() and values.max() <= high
    if median is not None:
        assert np.median(values) == pytest.approx(median, rel=0.03)


def test_the_long_context_mix_has_its_37_percent_above_8k() -> None:
    values = parse("long-context").draw(np.random.default_rng(0), 50_000)
    assert (values > 8192).mean() == pytest.approx(0.37, abs=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-5",
        "uniform:5",
        "uniform:9:5",
        "lognormal:0:1",
        "mix:1",
        "mix:0=5",
        "mix:x=5",
        "1e3",
    ],
)
def test_lengths_that_can_not_be_read_say_what_can(text: str) -> None:
    with pytest.raises(UserError, match="lengths"):
        parse(text)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Arrivals("poisson", rate=5), "--requests"),
        (Arrivals("poisson", requests=5), "need a rate"),
        (Arrivals("poisson", rate=math.nan, requests=5), "rate=nan"),
        (Arrivals("poisson", rate=-1, requests=5), "rate=-1"),
        (Arrivals("poisson", rate=1e9, duration_s=1e9), "over 100,000,000 requests"),
        (Arrivals("mmpp", rates=(1,), holds_s=(1,), requests=5), "at least 2"),
        (Arrivals("mmpp", rates=(0, 0), holds_s=(1, 1), requests=5), "all rates are 0"),
        (Arrivals("steps", requests=5), "needs --rates"),
        (Arrivals("ramp", rate=1, requests=5), "--end-rate"),
        (Arrivals("onoff-pareto", rate=1, requests=5, alpha=1), "alpha=1"),
        (Arrivals("bogus", rate=1, requests=5), "is not one of"),
    ],
)
def test_impossible_arrivals_are_refused(spec: Arrivals, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        draw(spec, np.random.default_rng(0))


def chat(**more: object) -> Trace:
    workload = Workload(
        Arrivals("poisson", rate=2, requests=200),
        parse("lognormal:100:1"),
        parse("uniform:1:300"),
        conversation=Conversation(parse("uniform:1:6"), 5.0),
        system_prompt_tokens=100,
        system_prompts=2,
        tenants={"a": 3, "b": 1},
    )
    import dataclasses

    return generate(dataclasses.replace(workload, **more), seed=5)  # type: ignore[arg-type]


def test_conversations_grow_and_wait_for_each_other() -> None:
    trace = chat()
    assert trace.sessions is not None and trace.session is not None and trace.tenant is not None
    dependent = np.flatnonzero(trace.sessions.after >= 0)
    before = trace.sessions.after[dependent]
    assert len(trace) - len(dependent) == 200
    assert (trace.session[before] == trace.session[dependent]).all()
    assert (trace.tenant[before] == trace.tenant[dependent]).all()
    grown = (
        trace.prompt_tokens[dependent] - trace.prompt_tokens[before] - trace.output_tokens[before]
    )
    assert (grown >= 1).all()
    gap = trace.arrival_ns[dependent] - trace.arrival_ns[before]
    assert (gap == trace.sessions.think_ns[dependent]).all()


def test_content_ids_share_exactly_the_system_prompt_and_the_conversation() -> None:
    trace = chat()
    assert trace.sessions is not None
    shared = sharing(trace)
    assert shared is not None
    dependent = trace.sessions.after >= 0
    expected = trace.prompt_tokens[trace.sessions.after[dependent]] // 16 * 16
    assert (shared.common_tokens[dependent] == expected).all()
    # 100 tokens of system prompt hold six full blocks; only the first two openings find none.
    openings = shared.common_tokens[~dependent]
    assert sorted(set(openings.tolist())) == [0, 96] and (openings == 0).sum() == 2


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_trace(chat(), tmp_path / f"{name}.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_made_traces_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    trace = chat()
    for name in ("t.jsonl", "t.parquet"):
        write_trace(trace, tmp_path / name)
        back = read_trace(tmp_path / name, strict=True)
        assert (back.arrival_ns == trace.arrival_ns).all()
        assert back.sessions is not None and trace.sessions is not None
        assert (back.sessions.after == trace.sessions.after).all()
        assert facts(back) == facts(trace)


@pytest.mark.parametrize("seed", range(3))
def test_a_fitted_generator_reproduces_azure_within_five_percent(seed: int) -> None:
    real = facts(read_trace(AZURE))
    made = facts(generate_from(fit(read_trace(AZURE)), seed))
    assert made["requests"] == real["requests"]
    assert made["rate"]["mean_per_s"] == pytest.approx(real["rate"]["mean_per_s"], rel=0.05)
    for window, value in real["burstiness"]["index_of_dispersion"].items():
        assert made["burstiness"]["index_of_dispersion"][window] == pytest.approx(value, rel=0.05)
    for kind in ("prompt", "output"):
        for name in ("p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "mean"):
            assert made["lengths"][kind][name] == pytest.approx(
                real["lengths"][kind][name], rel=0.05
            )
    assert made["lengths"]["rank_correlation"] == pytest.approx(
        real["lengths"]["rank_correlation"], abs=0.03
    )


def test_a_recipe_can_be_shared_and_stretched(tmp_path: Path) -> None:
    recipe = fit(read_trace(AZURE))
    text = json.dumps(recipe)
    assert "azure" not in text.lower() and len(text) < 200_000
    (tmp_path / "r.json").write_text(text)
    again = load(tmp_path / "r.json")
    assert len(generate_from(again, requests=50_000)) == 50_000
    faster = generate_from(again, rate=20.0)
    assert facts(faster)["rate"]["mean_per_s"] == pytest.approx(20, rel=0.01)
    assert generate_from(again, duration_s=100).span_s < 100


def test_a_fitted_generator_talks_and_shares_like_the_original() -> None:
    real, made = chat(), generate_from(fit(chat()), seed=2)
    assert made.sessions is not None and real.sessions is not None
    one, two = facts(real), facts(made)
    assert two["sessions"]["sessions"] == one["sessions"]["sessions"]
    assert two["sessions"]["turns"]["mean"] == pytest.approx(
        one["sessions"]["turns"]["mean"], rel=0.05
    )
    assert two["sessions"]["think_s"]["p50"] == pytest.approx(
        one["sessions"]["think_s"]["p50"], rel=0.05
    )
    assert two["lengths"]["prompt"]["p50"] == pytest.approx(
        one["lengths"]["prompt"]["p50"], rel=0.1
    )
    assert two["prefix"]["hit_ceiling"]["16"] == pytest.approx(
        one["prefix"]["hit_ceiling"]["16"], abs=0.05
    )
    dependent = np.flatnonzero(made.sessions.after >= 0)
    assert (made.session[made.sessions.after[dependent]] == made.session[dependent]).all()  # type: ignore[index]
    assert (made.sessions.after < np.arange(len(made))).all()


def test_a_fitted_generator_shares_prefixes_like_mooncake() -> None:
    real = read_trace(DATA / "mooncake_conversation_head.jsonl")
    made = generate_from(fit(real), requests=600)
    shared = [sharing(trace) for trace in (real, made)]
    assert shared[0] is not None and shared[1] is not None
    assert shared[1].ceiling(16) == pytest.approx(shared[0].ceiling(16), abs=0.05)
    assert made.prefix_block_tokens == 512


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_recipe_is_refused_or_used(data: st.DataObject) -> None:
    import tempfile

    recipe = fit(chat())
    places = [recipe, *(recipe[name] for name in ("arrivals", "lengths", "sharing", "sessions"))]
    where = data.draw(st.sampled_from(places))
    key = data.draw(st.sampled_from(sorted(where)))
    odd = [None, [], {}, "x", -1, 0, 1.5, 1e300, math.nan, [1, "a"], [[]], [[[]]], [10**12], [0]]
    where[key] = data.draw(st.sampled_from(odd))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.json"
        path.write_text(json.dumps(recipe))
        try:
            assert len(generate_from(load(path), requests=50))
        except UserError as error:
            assert str(error).isprintable()


def test_requests_are_spaced_as_vllm_bench_serve_spaces_them() -> None:
    offsets = send_offsets_s(1000, 8.0, 0.5, seed=3)
    assert offsets[-1] == pytest.approx(1000 / 8.0)  # stretched to end at count / rate
    assert offsets[0] > 0  # the first one waits for its gap as well
    gaps = np.diff(offsets)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(0.5), rel=0.1)
    assert send_offsets_s(3, math.inf, 1.0, 0).tolist() == [0, 0, 0]
    assert send_offsets_s(4, 2.0, math.inf, 0).tolist() == [0.5, 1.0, 1.5, 2.0]
    legacy = np.random.RandomState(3)
    drawn = np.cumsum([legacy.gamma(shape=0.5, scale=1 / (8.0 * 0.5)) for _ in range(1000)])
    assert offsets == pytest.approx(drawn * (1000 / 8.0 / drawn[-1]))


def test_retiming_keeps_the_requests() -> None:
    trace = read_trace(DATA / "azure2023_code_head.csv")
    for other in (rerate(trace, 5.0), rerate(trace, math.inf), scale_time(trace, 0.5)):
        assert (other.prompt_tokens == trace.prompt_tokens).all()
    assert scale_time(trace, 0.5).span_s == pytest.approx(trace.span_s / 2)
    assert len(head(trace, 7)) == 7 and head(trace, 10**6) is trace
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(UserError):
            rerate(trace, bad)
        with pytest.raises(UserError):
            scale_time(trace, bad)


def test_of_conversations_only_the_openings_are_spaced() -> None:
    trace = rerate(chat(), 10.0, burstiness=float("inf"))
    assert trace.sessions is not None
    openings = trace.arrival_ns[trace.sessions.after < 0]
    assert len(openings) == 200 and set(np.diff(openings).tolist()) == {100_000_000}
    dependent = np.flatnonzero(trace.sessions.after >= 0)
    waits = trace.arrival_ns[dependent] - trace.arrival_ns[trace.sessions.after[dependent]]
    assert (waits == trace.sessions.think_ns[dependent]).all()
    assert (np.diff(trace.arrival_ns) >= 0).all()
    shared, before = sharing(trace), sharing(chat())
    assert shared is not None and before is not None
    assert shared.ceiling(16) == pytest.approx(before.ceiling(16), abs=0.01)


def test_a_slice_counts_from_its_own_first_arrival() -> None:
    trace = chat()
    part = slice_trace(trace, from_s=20, to_s=60, tenant="a")
    assert part.arrival_ns[0] == 0 and part.span_s < 40
    assert 0 < len(part) < len(trace)
    assert {part.tenant_names[code] for code in part.tenant.tolist()} == {"a"}  # type: ignore[union-attr]
    with pytest.raises(UserError, match="there are a, b"):
        slice_trace(trace, tenant="c")
    with pytest.raises(UserError, match="no request fits"):
        slice_trace(trace, from_s=1e9)


def test_slices_put_together_again_are_the_whole_sharing_included() -> None:
    trace = chat()
    whole = merge([slice_trace(trace, tenant="a"), slice_trace(trace, tenant="b")])
    assert len(whole) == len(trace)
    assert sorted(whole.prompt_tokens.tolist()) == sorted(trace.prompt_tokens.tolist())
    assert whole.sessions is not None and trace.sessions is not None
    assert (whole.sessions.after >= 0).sum() == (trace.sessions.after >= 0).sum()
    dependent = np.flatnonzero(whole.sessions.after >= 0)
    assert (whole.session[whole.sessions.after[dependent]] == whole.session[dependent]).all()  # type: ignore[index]


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5])
def test_load_is_scaled_with_whole_sessions(factor: float) -> None:
    trace = chat()
    scaled = scale_load(trace, factor, seed=1)
    assert len(scaled) / len(trace) == pytest.approx(factor, rel=0.15)
    assert scaled.sessions is not None
    assert (scaled.sessions.after < np.arange(len(scaled))).all()
    assert scaled.span_s == pytest.approx(trace.span_s, rel=0.2)


def test_anonymized_traces_hold_no_name_and_share_as_before() -> None:
    trace = read_trace(DATA / "mooncake_conversation_head.jsonl")
    hidden = anonymize(trace)
    assert "mooncake" not in repr(hidden)
    before, after = sharing(trace), sharing(hidden)
    assert before is not None and after is not None
    assert (before.common_tokens == after.common_tokens).all()
    named = anonymize(chat(), round_tokens=64)
    assert named.tenant_names == ("t0", "t1")
    assert (named.prompt_tokens % 64 == 0).all()


def test_requests_that_share_nothing_are_made_as_all_others_are() -> None:
    """The short way past sessions and ids gives the requests of the long one."""
    plain = Workload(SPECS["mmpp"], parse("lognormal:400:1.0"), parse("uniform:1:50"))
    with_one_tenant = dataclasses.replace(plain, tenants={"all": 1.0})
    short, long = generate(plain, 3), generate(with_one_tenant, 3)
    for name in ("arrival_ns", "prompt_tokens", "output_tokens"):
        assert getattr(short, name).tolist() == getattr(long, name).tolist()
    assert short.assumptions == long.assumptions
