"""`vsim plan`: the cheapest deployment that meets every objective, found with few simulations."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsim.cli import main
from vsim.errors import UserError
from vsim.models.correction import Coefficients, CorrectedStepModel
from vsim.models.load import load_step_model
from vsim.models.step import StepShape
from vsim.models.uncertainty import Uncertainty, slowed
from vsim.sim.plan import search as search_module
from vsim.sim.plan.around import look_around
from vsim.sim.plan.candidates import Candidate, Space
from vsim.sim.plan.evaluate import (
    Evaluation,
    Probe,
    Question,
    engine_of,
    evaluate,
    probe,
    serve_line,
)
from vsim.sim.plan.render import plan_data, plan_json, render
from vsim.sim.plan.search import search, smallest
from vsim.sim.plan.slo import goodput_slo, parse_slo
from vsim.sim.replay import Load
from vsim.sim.sweep import Workers
from vsim.sim.sweep_space import Point
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace

AZURE = Path(__file__).resolve().parent.parent / "traces" / "azure2023_conv.csv"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
PRICES = {"a100": Fraction(20), "h100": Fraction(31)}


@pytest.mark.parametrize(
    ("text", "key", "limit"),
    [
        ("ttft_p95<=2s", "p95_ttft_ms", 2000.0),
        ("tpot_p99.9 <= 100ms", "p99.9_tpot_ms", 100.0),
        ("e2e_mean<=1min", "mean_e2el_ms", 60_000.0),
        ("itl_median<=500us", "median_itl_ms", 0.5),
        ("output_throughput>=1000", "output_throughput", 1000.0),
        ("error_rate<=5%", "error_rate", 0.05),
    ],
)
def test_objectives_are_written_as_people_say_them(text: str, key: str, limit: float) -> None:
    slo = parse_slo(text)
    assert (slo.key, slo.limit) == (key, pytest.approx(limit))


@pytest.mark.parametrize(
    "text",
    ["ttft_p95<2s", "ttft_p95<=2", "ttft_p95>=2s", "ttft_p0<=1s", "ttft<=1s", "speed_p95<=1s",
     "output_throughput<=3", "error_rate<=120%", "ttft_p95<=1e999s", "ttft_p95<=-1s", ""],
)  # fmt: skip
def test_what_is_no_objective_is_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match="--slo"):
        parse_slo(text)


@given(st.text(max_size=40))
def test_any_text_is_an_objective_or_one_sentence(text: str) -> None:
    try:
        assert math.isfinite(parse_slo(text).limit)
    except UserError as error:
        assert "\n" not in str(error)


def test_goodput_takes_the_tightest_limit_of_each_latency() -> None:
    slo, limits = goodput_slo(0.99, [parse_slo("ttft_p95<=2s"), parse_slo("ttft_p50<=1s")])
    assert limits == {"ttft": 1000.0}
    assert slo.ratio({"goodput_fraction": 0.99}) == 1.0
    assert slo.ratio({"goodput_fraction": 0.5}) > 1


def test_the_slow_end_is_slower_and_stays_one_correction() -> None:
    model = load_step_model("rtx4090-llama-3.1-8b").model
    sd = Uncertainty(0.03, 0.03)
    corrected = CorrectedStepModel(model, Coefficients(per_step_s=1e-3, scale=1.1))
    for step in (StepShape(((512, 0),), 0, 0, 0), StepShape((), 8, 4000, 600)):
        for base in (model, corrected):
            slow = slowed(base, sd, 1.645)
            assert isinstance(slow, CorrectedStepModel)
            assert not isinstance(slow.prior, CorrectedStepModel)
            ratio = slow.device_seconds(step) / base.device_seconds(step)
            assert 1.03 < ratio < 1.09


# --- the search, with a made-up world in place of simulations -----------------------------------------


class World:
    """Each candidate needs so many replicas; a simulation only compares. It counts what it is asked."""

    def __init__(self, needs: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.needs = needs
        self.asked: list[tuple[str, int]] = []
        monkeypatch.setattr(search_module, "probe", self.probe)
        monkeypatch.setattr(search_module, "evaluate", self.evaluate)

    def probe(self, trace: Trace, point: dict[str, str], question: Question) -> Probe:
        return Probe(gpus=1, capacity_rps=(rps := 10.0 / self.needs[point["gpu"]]), most_rps=rps)

    def evaluate(
        self, trace: Trace, point: dict[str, str], replicas: int, question: Question
    ) -> Evaluation:
        self.asked.append((point["gpu"], replicas))
        ratio = self.needs[point["gpu"]] / replicas
        return Evaluation(replicas, (ratio,), (ratio,), "compute", {}, 1)


TEN_A_SECOND = Trace.of([i / 10 for i in range(101)], [8] * 101, [2] * 101)
QUESTION = Question((parse_slo("ttft_p95<=1s"),), {}, Load())


@given(
    needs=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    prices=st.lists(st.integers(1, 30), min_size=8, max_size=8),
    survive=st.integers(0, 2),
)
def test_the_search_finds_what_trying_everything_finds(
    needs: list[int], prices: list[int], survive: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = World({f"g{i}": n for i, n in enumerate(needs)}, patch)
        cost = {f"g{i}": Fraction(price) for i, price in enumerate(prices)}
        space = Space([{"gpu": gpu} for gpu in world.needs], cost.__getitem__, 64, survive)
        plan = search(TEN_A_SECOND, space, QUESTION, Workers())
        best = min(
            (
                (cost[gpu] * (n + survive), world.needs[gpu] / n, number, n + survive)
                for number, gpu in enumerate(world.needs)
                for n in range(1, 65 - survive)
                if n >= world.needs[gpu]
            ),
            default=None,
        )
        if best is None:
            assert plan.best is None
        else:
            assert plan.best is not None
            assert (plan.best.cost(plan.replicas), plan.best.number, plan.replicas) == (
                best[0],
                best[2],
                best[3],
            )
        assert len(world.asked) == len(set(world.asked)), "nothing is simulated twice"


def test_a_rival_that_cannot_be_as_cheap_costs_one_simulation_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World({"good": 4, "slow": 9, "dear": 1}, monkeypatch)
    cost = {"good": Fraction(1), "slow": Fraction(1), "dear": Fraction(5)}
    space = Space([{"gpu": gpu} for gpu in world.needs], cost.__getitem__)
    plan = search(TEN_A_SECOND, space, QUESTION, Workers())
    assert plan.best is not None and plan.best.point["gpu"] == "good"
    assert [gpu for gpu, _ in world.asked].count("slow") <= 1
    assert "dear" not in [gpu for gpu, _ in world.asked]
    assert [c.skipped for c in plan.candidates if c.point["gpu"] == "dear"] == [
        "dearer than the plan with 1 already"
    ]


@given(need=st.integers(1, 64), guess=st.integers(1, 64))
def test_the_smallest_number_is_found_from_any_guess(need: int, guess: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        World({"g": need}, patch)
        candidate = Candidate(0, {"gpu": "g"}, Fraction(1), Probe(gpus=1))
        assert smallest(TEN_A_SECOND, candidate, QUESTION, guess, 64) == need
        assert len(candidate.seen) <= 14


def test_simulations_that_contradict_monotony_are_told() -> None:
    candidate = Candidate(0, {"gpu": "g"}, Fraction(1), Probe(gpus=1))
    for replicas, ratio in ((1, 2.0), (2, 0.9), (3, 0.8)):
        candidate.seen[replicas] = Evaluation(replicas, (ratio,), (ratio,), "compute", {}, 1)
    assert candidate.worsened() is None
    candidate.seen[4] = Evaluation(4, (1.1,), (1.1,), "compute", {}, 1)
    assert candidate.worsened() == (2, 4)


@given(
    met=st.lists(st.sets(st.integers(1, 12)), min_size=1, max_size=3),
    survive=st.integers(0, 1),
)
def test_where_more_replicas_are_worse_the_plan_says_so(met: list[set[int]], survive: int) -> None:
    """A made-up world without any order: what was simulated is told, and every contradiction looked into."""
    with pytest.MonkeyPatch.context() as patch:
        world = World({f"g{i}": 3 for i in range(len(met))}, patch)
        good = {f"g{i}": sizes for i, sizes in enumerate(met)}

        def judged(
            trace: Trace, point: dict[str, str], replicas: int, question: Question
        ) -> Evaluation:
            ratio = 0.9 if replicas in good[point["gpu"]] else 1.5
            return Evaluation(replicas, (ratio,), (ratio,), "compute", {}, 1)

        patch.setattr(search_module, "evaluate", judged)
        space = Space([{"gpu": gpu} for gpu in world.needs], None, 12, survive)
        plan = search(TEN_A_SECOND, space, QUESTION, Workers())
        if plan.best is None:
            return
        serving = plan.replicas - survive
        assert serving in good[str(plan.best.point["gpu"])]
        for candidate in plan.candidates:
            if candidate.worsened() is not None:
                fewer = range(1, serving)
                assert all(n in candidate.seen for n in fewer) and not good[
                    str(candidate.point["gpu"])
                ] & set(fewer)


def test_a_first_look_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says, prompts that are shared are simulated, and so is one candidate of an empty plan."""
    for telling in (True, False):
        world = World({"good": 2, "other": 5}, monkeypatch)

        def look(
            trace: Trace, point: dict[str, str], question: Question, telling: bool = telling
        ) -> Probe:
            return Probe(
                gpus=1,
                capacity_rps=0.01,
                most_rps=0.01,
                alone=9.0,
                alone_slo="ttft",
                telling=telling,
            )

        monkeypatch.setattr(search_module, "probe", look)
        space = Space([{"gpu": gpu} for gpu in world.needs], None, 8)
        plan = search(TEN_A_SECOND, space, QUESTION, Workers())
        assert plan.best is not None
        assert (plan.best.point["gpu"], plan.replicas) == ("good", 2)


def test_data_parallel_ranks_are_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"g": 1}, monkeypatch)
    points: list[Point] = [{"gpu": "g", "data_parallel_size": 2}]
    plan = search(TEN_A_SECOND, Space(points, None, 8), QUESTION, Workers())
    assert plan.replicas == 1 and world.asked == [("g", 1)]
    spare = search(TEN_A_SECOND, Space(points, None, 8, survive=1), QUESTION, Workers())
    assert spare.best is None


# --- for real -------------------------------------------------------------------------------------------


def azure(requests: int) -> Trace:
    return read_trace(AZURE, limit=requests)


def test_plan_agrees_with_the_exhaustive_sweep_on_azure() -> None:
    trace = azure(600)
    slos = tuple(map(parse_slo, ("ttft_p95<=500ms", "tpot_p95<=30ms", "error_rate<=0")))
    question = Question(slos, {}, Load(time_scale=1 / 4))
    points = [
        {"model": MODEL, "gpu": gpu, "max_num_batched_tokens": budget}
        for gpu in PRICES
        for budget in (2048, 8192)
    ]
    space = Space(points, PRICES.__getitem__, 6)
    plan = search(trace, space, question, Workers())
    assert plan.best is not None
    everything = []
    for number, point in enumerate(points):
        for replicas in range(1, 7):
            seen = evaluate(trace, point, replicas, question)
            if seen.met:
                cost = PRICES[point["gpu"]] * engine_of(point)[0].gpus * replicas
                everything.append((cost, seen.worst, number, replicas))
    assert (plan.best.number, plan.replicas) == min(everything)[2:]


def test_one_very_long_answer_does_not_make_an_engine_hopeless() -> None:
    """In the sample it drains alone for minutes; in the trace others run beside it."""
    answers = [20] * 399 + [12_000]
    trace = Trace.of([i / 10 for i in range(400)], [64] * 400, answers)
    question = Question((parse_slo("ttft_p95<=1s"),), {}, Load())
    found = probe(trace, {"model": MODEL, "gpu": "a100"}, question)
    assert found.capacity_rps < 10 / 2 < found.most_rps
    plan = search(trace, Space([{"model": MODEL, "gpu": "a100"}], None, 1), question, Workers())
    assert plan.best is not None


def test_an_impossible_objective_names_the_nearest_miss() -> None:
    trace = azure(100)
    question = Question((parse_slo("tpot_p95<=1us"),), {}, Load())
    space = Space([{"model": MODEL, "gpu": "a100"}], None, 4)
    plan = search(trace, space, question, Workers())
    assert plan.best is None and plan.nearest is not None
    said = render(plan, trace, space, question, None, ["gpu"])
    assert said.startswith("Nothing in this space meets the objectives.")
    assert "Nearest miss of those simulated: " in said and "compute binds" in said
    json.loads(plan_json(plan_data(plan, trace, space, question, None, {})))


def test_what_is_planned_to_survive_is_paid_for() -> None:
    trace = azure(200)
    question = Question((parse_slo("ttft_p95<=1s"),), {}, Load())
    points = [{"model": MODEL, "gpu": "h100"}]
    alone = search(trace, Space(points, None, 8), question, Workers())
    spare = search(trace, Space(points, None, 8, survive=1), question, Workers())
    assert spare.replicas == alone.replicas + 1


def test_headroom_is_traffic_that_is_still_served() -> None:
    trace = azure(300)
    question = Question((parse_slo("ttft_p95<=1s"),), {}, Load(time_scale=1 / 4))
    space = Space([{"model": MODEL, "gpu": "a100"}], None, 8)
    plan = search(trace, space, question, Workers())
    look_around(trace, plan, space, question, Workers())
    assert plan.best is not None and plan.headroom is not None and plan.headroom >= 1
    more = dataclasses.replace(question, load=Load(time_scale=1 / 4 / plan.headroom))
    assert evaluate(trace, plan.best.point, plan.replicas, more).met
    assert plan.expected is not None and plan.expected.worst <= plan.best.seen[plan.replicas].worst


def test_the_serve_line_holds_the_flags_that_were_chosen() -> None:
    line = serve_line(
        {"model": "a/b", "gpu": "h100", "tensor_parallel_size": 2, "enable_prefix_caching": False,
         "route": "least-requests", "block_size": None}
    )  # fmt: skip
    assert line == "vllm serve a/b --tensor-parallel-size 2 --no-enable-prefix-caching"


Vsim = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vsim:
    """(exit code, standard output, standard error) of `vsim plan` on the Azure trace."""

    def called(*arguments: str, command: str = "plan", trace: Path = AZURE) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vsim", command, str(trace), *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return called


COMMON = ["--model", MODEL, "--gpu", "a100,h100", "--slo", "ttft_p95<=500ms", "--limit", "200"]


def test_the_same_plan_from_one_process_and_from_two(run: Vsim, tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    assert run(*COMMON, "--json", str(one))[0] == 0
    assert run(*COMMON, "--json", str(two), "--jobs", "2")[0] == 0
    assert one.read_bytes() == two.read_bytes()
    assert json.loads(one.read_text())["schema"] == "vsim/plan/1"


def test_the_same_plan_from_a_dask_cluster(run: Vsim, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    here, there = tmp_path / "1.json", tmp_path / "2.json"
    assert run(*COMMON, "--json", str(here))[0] == 0
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        dask = ["--backend", "dask", "--address", cluster.scheduler_address]
        assert run(*COMMON, "--json", str(there), *dask)[0] == 0
    assert here.read_bytes() == there.read_bytes()


def test_exit_codes(run: Vsim) -> None:
    base = ["--model", MODEL, "--gpu", "a100", "--limit", "50"]
    assert run(*base, "--slo", "ttft_p95<=10s")[0] == 0
    assert run(*base, "--slo", "ttft_p95<=1us")[0] == 1
    for wrong in (
        base,
        [*base, "--slo", "ttft_p95<=1s", "--slo", "ttft_p95<=2s"],
        [*base, "--slo", "ttft_p95<=1s", "--traffic", "0x"],
        [*base, "--slo", "ttft_p95<=1s", "--vary", "replicas=1,2"],
        ["--model", MODEL, "--slo", "ttft_p95<=1s"],
    ):
        code, out, err = run(*wrong)
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_the_bill_is_the_one_that_replay_writes(run: Vsim, tmp_path: Path) -> None:
    """Storage, network and all; GPUs alone decide, and replicas that may fail are paid for."""
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "currency: EUR\na100: 2\nstorage_per_month: 100\nnetwork_per_gb: 0.05\nbytes_per_output_token: 200\n"
    )
    engine = ["--model", MODEL, "--limit", "200", "--max-num-seqs", "64", "--prices", str(prices)]
    asked = [
        *engine,
        "--gpu",
        "a100",
        "--vary",
        "block_size=16",
        "--slo",
        "ttft_p95<=1s",
        "--json",
        "-",
    ]
    code, out, _ = run(*asked)
    plan = json.loads(out)["plan"]
    assert code == 0
    replayed = replayed_summary(
        run, [*engine, "--gpu", "a100", "--block-size", "16"], plan["replicas"]
    )
    for name, amount in plan["bill"].items():
        assert replayed[name] == amount, name
    assert plan["cost_per_hour"] == pytest.approx(plan["bill"]["cost_per_hour"], rel=1e-12)
    spare = json.loads(run(*asked, "--survive-replicas", "1")[1])["plan"]
    more = spare["bill"]["cost_gpus_per_month"] - plan["bill"]["cost_gpus_per_month"]
    assert more == 2 * 730
    assert spare["bill"]["cost_storage_per_month"] == 100


def replayed_summary(run: Vsim, arguments: list[str], replicas: int) -> dict[str, Any]:
    deployed = [*arguments, "--replicas", str(replicas), "--json"]
    code, out, _ = run(*deployed, command="replay")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_what_is_no_choice_of_a_plan_is_one_sentence(run: Vsim) -> None:
    base = ["--model", MODEL, "--gpu", "a100", "--limit", "50", "--slo", "ttft_p95<=1s"]
    for wrong in (
        "max_concurrency=4,8",
        "overlong=clip",
        "swap_above_tokens=9",
        "victim_rule=x",
        "usage=llm",
    ):
        code, out, err = run(*base, "--vary", wrong)
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert run(*base, "--usage", "llm")[0] == 2


def test_a_wide_space_holds_router_seats_and_blocks(run: Vsim) -> None:
    base = [
        "--model",
        MODEL,
        "--gpu",
        "h100",
        "--limit",
        "50",
        "--slo",
        "ttft_p95<=1s",
        "--json",
        "-",
    ]
    varied = json.loads(run(*base, "--wide", "-tp", "1")[1])["asked"]["varied"]
    assert {"gpu", "max_num_batched_tokens", "block_size", "max_num_seqs", "route"} == set(varied)


def test_a_trace_of_one_instant_rules_nothing_out_by_its_rate(run: Vsim, tmp_path: Path) -> None:
    trace = tmp_path / "one.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,20\n")
    code, out, _ = run(
        "--model", MODEL, "--gpu", "h100", "--slo", "ttft_p95<=1s", "--json", "-", trace=trace
    )
    assert code == 0
    assert not any("hopeless" in str(c["skipped"]) for c in json.loads(out)["candidates"])
