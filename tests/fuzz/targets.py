"""What is fuzzed: every reader of bytes that a user may hand to vsim, called as the commands call it."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vsim.tests.fuzz.damage import damaged_bytes, damaged_tree

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data"
ROOT = HERE.parent.parent
Read = Callable[[Path, bytes], object]


@dataclass(frozen=True)
class Target:
    """`read(scratch folder, input)` must return, or raise UserError."""

    name: str
    seeds: Callable[[], list[bytes]]
    read: Read
    weight: int  # its share of the inputs, against the other targets'
    trees: float = 0.6  # share of inputs that are damaged as JSON trees, the rest as bytes

    def input(self, rng: random.Random) -> bytes:
        seeds = self.seeds()
        seed = rng.choice(seeds)
        if rng.random() < self.trees:
            return damaged_tree(rng, seed)
        return damaged_bytes(rng, seed, rng.choice(seeds))


def _file(folder: Path, data: bytes, name: str = "f") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def _own_rng(data: bytes) -> random.Random:
    """Options are drawn from the input itself, so that an input alone tells the whole story."""
    return random.Random(data)


def _yaml_seeds(pattern: str) -> list[bytes]:
    import yaml

    found = [path.read_bytes() for path in sorted(DATA.glob(pattern))]
    return found + [json.dumps(yaml.safe_load(text)).encode() for text in found]


# Traces


@cache
def _trace_seeds() -> list[bytes]:
    from vsim.tests.fuzz_traces import corpus

    return corpus()


def _trace(folder: Path, data: bytes) -> None:
    from vsim.tests.fuzz_traces import options
    from vsim.tests.test_trace_fuzz import check
    from vsim.traces.readers import read_trace

    check(read_trace(_file(folder, data), **options(_own_rng(data))))  # type: ignore[arg-type]


@cache
def _timing_seeds() -> list[bytes]:
    detailed = {
        "completed": 2, "duration": 3.0, "input_lens": [4, 5], "output_lens": [2, 3], "ttfts": [0.1, 0.2],
        "itls": [[0.1], [0.1, 0.2]], "start_times": [0.0, 1.0], "errors": ["", ""], "request_throughput": 1.0,
        "total_input_tokens": 9, "total_output_tokens": 5, "mean_ttft_ms": 150.0, "p99_ttft_ms": 200.0,
        "latencies": [0.2, 0.5], "queue_times": [0.0, 0.1],
    }  # fmt: skip
    lines = [
        {"arrival": 0.0, "first_token": 0.5, "end": 1.5, "output_tokens": 4},
        {"ttft": 0.5, "itls": [0.1, 0.2], "latency": 0.8, "output_tokens": 3, "status": "ok"},
    ]
    return [json.dumps(row).encode() for row in (detailed, *lines)]


def _timings(folder: Path, data: bytes) -> None:
    from vsim.traces.timings import read_timings

    read_timings(_file(folder, data))


def _bench(folder: Path, data: bytes) -> None:
    from vsim.sim.bench_json import bench_run, load_bench

    bench_run(load_bench(_file(folder, data)), "bench")


@cache
def _recipe_seeds() -> list[bytes]:
    from vsim.traces.fit import fit
    from vsim.traces.readers import read_trace

    trace = read_trace(ROOT / "traces" / "azure2023_conv.csv", limit=60)
    return [json.dumps(fit(trace)).encode()]


def _recipe(folder: Path, data: bytes) -> None:
    from vsim.traces.fit import load

    load(_file(folder, data))


# Step models, model configs, deployments


@cache
def _profile_seeds() -> list[bytes]:
    roofline = {
        "num_layers": 32, "flops_per_token": 1.4e10, "weight_bytes": 1.5e10, "head_flops_per_seq": 1e9,
        "head_bytes": 1e9, "attention_flops_per_pair": 524288.0, "kv_bytes_per_token": 131072.0,
        "peak_flops_per_s": 1e15, "bytes_per_s": 2e12,
    }  # fmt: skip
    tables = {
        "tensor_parallel_size": 1, "num_layers": 2, "hidden_size": 64, "vocab_size": 128,
        "per_step": {"tokens": [1, 8, 64], "us": [1.0, 2.0, 9.0]},
        "per_layer": {"tokens": [1, 8, 64], "us": [5.0, 6.0, 20.0]},
        "head": {"sequences": [1, 8], "us": [3.0, 4.0]},
        "attention": {"kv_axes": [[64, 512], [0]], "rows": [[0, 0, 1, 0, [2.0, 3.0]], [0, 0, 8, 0, [4.0, 9.0]],
                      [64, 0, 0, 1, [3.0]], [64, 512, 0, 1, [4.0]], [128, 0, 0, 1, [5.0]]]},
        "skew": None, "experts": None, "link": {"latency_s": 1e-6, "bytes_per_s": 1e11},
        "host": {"base_s": 0.001, "per_seq_s": 1e-5},
    }  # fmt: skip
    engine = {
        "tokens": {"tokens": [1, 16, 256], "seconds": [0.01, 0.02, 0.1]}, "per_seq_s": 1e-5, "per_chunk_s": 1e-4,
        "per_mixed_step_s": 1e-3, "host": {"base_s": 1e-3, "per_seq_s": 1e-5},
        "attention": [{"block_size": 16, "per_pair_s": 1e-10, "per_kv_token_s": 1e-8}, {"block_size": 128}],
    }  # fmt: skip
    corrected = {
        "prior": {"kind": "roofline", "params": roofline},
        "coefficients": {"per_step_s": 0.001, "scale": 1.1, "per_kv_token_s": 1e-9},
    }
    kinds = {
        "roofline": roofline,
        "tables": tables,
        "engine-steps": engine,
        "corrected": corrected,
    }
    return [
        json.dumps(
            {
                "schema": "vsim/step-model/1",
                "kind": kind,
                "provenance": {"label": kind, "gpu": "a100", "tensor_parallel_size": 1, "assumptions": ["made up"]},
                "quality": {"samples": 3},
                "domain": {"max_tokens": 2048, "max_seqs": 256},
                "params": params,
            }
        ).encode()
        for kind, params in kinds.items()
    ]  # fmt: skip


def _profile(_: Path, data: bytes) -> None:
    from vsim.errors import UserError
    from vsim.models.artifact import parse_calibration
    from vsim.models.load import MAX_STEP_S, LoadedStepModel
    from vsim.models.step import StepShape
    from vsim.models.table_params import StepContext

    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    rng = _own_rng(data)
    calibration = parse_calibration(text, "fuzzed")
    context = StepContext(block_size=rng.choice((None, 16, 64)))
    loaded = LoadedStepModel(calibration.step_model(context), calibration, "fuzzed")
    shapes = [
        StepShape((), 4, 400, 130),
        StepShape(((64, 64), (7, 500)), 3, 90, 40),
        StepShape(((4096, 9000),), 300, 900_000, 100_000),
    ]
    try:
        for shape in shapes:
            for seconds in (loaded.device_seconds(shape), loaded.host_seconds(shape)):
                assert 0 <= seconds < MAX_STEP_S
            # What the fast path asks for at once must be as sound as a step alone.
            run = loaded.decode_run_seconds(shapes[0], 20)
            assert len(run) == 20
            assert ((run >= 0) & (run < MAX_STEP_S)).all()
        assert 0 <= loaded.lockstep_seconds(shapes) < MAX_STEP_S
        _ = loaded.assumptions, json.dumps(loaded.provenance, default=str)
    except UserError as error:
        assert "\n" not in str(error)
        raise


@cache
def _config_seeds() -> list[bytes]:
    from vsim.models.model_spec import bundled_models

    return [json.dumps(row["config"]).encode() for row in bundled_models().values()]


def _config(folder: Path, data: bytes) -> None:
    from vsim.models.hardware import gpus
    from vsim.models.hf_config import read_config, spec_from_config
    from vsim.sim.deployment import resolve
    from vsim.tests.test_deployment_fuzz import FLAGS

    rng = _own_rng(data)
    model = spec_from_config(read_config(_file(folder, data, "config.json")), "fuzzed")
    flags: dict[str, Any] = {
        name: rng.choice(values) for name, values in FLAGS.items() if rng.random() < 0.08
    }
    resolve(model, rng.choice(gpus()), **flags)


@cache
def _log_seeds() -> list[bytes]:
    return [LOG.encode()]


LOG = """\
INFO 08-17 19:43 [__init__.py:1] vLLM API server version 0.19.0
INFO Model loading took 14.99 GiB memory and 3.1 seconds
INFO Available KV cache memory: 5.21 GiB
INFO GPU KV cache size: 42,672 tokens
INFO Maximum concurrency for 8,192 tokens per request: 5.21x
INFO # GPU blocks: 2667, # CPU blocks: 2048
INFO Memory profiling takes 0.52 seconds; the current vLLM instance can use total_gpu_memory (23.64GiB) x \
gpu_memory_utilization (0.90) = 21.28GiB; model weights take 14.99GiB; non_torch_memory takes 0.07GiB; PyTorch \
activation peak memory takes 1.20GiB; the rest of the memory reserved for KV Cache is 5.02GiB.
"""


def _startup_log(_: Path, data: bytes) -> None:
    from vsim.models.startup_log import parse_startup_log

    parse_startup_log(data.decode(errors="replace"))


# Cases, prices, fleets, grids, limits


@cache
def _case_seeds() -> list[bytes]:
    found = []
    for path in sorted((DATA / "golden").glob("v?-??.json")):
        tree = json.loads(path.read_bytes())
        tree["requests"] = tree["requests"][:4]
        found.append(json.dumps(tree).encode())
    return [*found, gzip.compress(found[0], mtime=0)]


def _case(folder: Path, data: bytes) -> None:
    from vsim.sim.case import load_case

    load_case(_file(folder, data, "c.json.gz" if data[:2] == b"\x1f\x8b" else "c.json"))


@cache
def _price_seeds() -> list[bytes]:
    return [
        b"currency: EUR\na100: 1.8\nh100: 3\nstorage_per_month: 40\n",
        b'{"currency": "USD", "a100": 1.8, "l4": 0.7, "storage_per_month": 3}',
        *_yaml_seeds("examples/placeholder-prices.yaml"),
    ]


def _prices(folder: Path, data: bytes) -> None:
    from vsim.sim.cost import read_prices

    read_prices(_file(folder, data, "p.json" if data[:1] == b"{" else "p.yaml"))


@cache
def _fleet_seeds() -> list[bytes]:
    return _yaml_seeds("fleet/*.yaml")


def _fleet(folder: Path, data: bytes) -> None:
    from vsim.sim.fleet.read import read_fleet

    read_fleet(_file(folder, data, "fleet.yaml"))


@cache
def _grid_seeds() -> list[bytes]:
    return [
        b"block_size: [16, 32]\nrequest_rate: 1..20:log\nmax_num_seqs: 64\n",
        b'{"block_size": [16, 32], "request_rate": "1..20:log", "enable_prefix_caching": [true, false]}',
        b"block_size=16,32",
        b"request_rate=1..20:log",
    ]


def _grid(folder: Path, data: bytes) -> None:
    from vsim.errors import UserError
    from vsim.sim.sweep_space import parse_vary, read_grid

    try:
        parse_vary(data.decode(errors="replace"))
    except UserError as error:
        assert str(error).isprintable(), repr(str(error))
    read_grid(_file(folder, data, "g.yaml"))


@cache
def _slo_seeds() -> list[bytes]:
    return [
        b"ttft_p95<=2s", b"tpot_p99<=50ms", b"error_rate<=0", b"goodput_fraction>=95%", b"e2el_p50<=1e3ms",
        b"request_throughput>=4", b"ttft:200", b"itl_p99.9<=0.1s", b"speculative", b'{"method": "eagle"}',
    ]  # fmt: skip


def _slo(_: Path, data: bytes) -> None:
    from vsim.errors import UserError
    from vsim.sim.metrics import parse_goodput
    from vsim.sim.plan.slo import parse_slo

    text = data.decode(errors="replace")
    try:
        parse_goodput([text])
    except UserError as error:
        assert str(error).isprintable(), repr(str(error))
    parse_slo(text)


# What vsim itself wrote, damaged since


@cache
def _run_folder() -> Path:
    from vsim.sim.run_io import write_run
    from vsim.sim.summary import summarize
    from vsim.tests.make_run import random_run

    folder = Path(tempfile.mkdtemp(prefix="vsim-fuzz-run-"))
    run = random_run(12, 40)
    write_run(run, folder / "r", summarize(run), report=False)
    return folder / "r"


RUN_FILES = (
    "run.json", "run.json", "run.json", "summary.json", "requests.parquet", "timeline.parquet", "itl.parquet",
)  # fmt: skip


@cache
def _run_seeds() -> list[bytes]:
    return [name.encode() + b"\n" + (_run_folder() / name).read_bytes() for name in RUN_FILES]


def _run_input(rng: random.Random) -> bytes:
    name, _, content = rng.choice(_run_seeds()).partition(b"\n")
    tree = name.endswith(b".json") and rng.random() < 0.6
    return (
        name + b"\n" + (damaged_tree(rng, content) if tree else damaged_bytes(rng, content, content))
    )  # fmt: skip


def _run(folder: Path, data: bytes) -> None:
    from vsim.sim.run_io import read_run, read_summary
    from vsim.sim.summary import summarize

    name, _, content = data.partition(b"\n")
    file = name.decode(errors="replace")
    if file not in RUN_FILES:
        return
    for other in set(RUN_FILES):
        (folder / other).unlink(missing_ok=True)
        if other != file:
            (folder / other).symlink_to(_run_folder() / other)
    (folder / file).write_bytes(content)
    if file == "summary.json":
        read_summary(folder)
        return
    run = read_run(folder)
    if _own_rng(data).random() < 0.2:
        summarize(run)


@cache
def _journal_seeds() -> list[bytes]:
    from vsim.sim.sweep_journal import open_journal

    with tempfile.TemporaryDirectory() as name:
        table = Path(name) / "t.csv"
        with open_journal(table) as journal:
            journal.append("k1", {"status": "done", "numbers": {"ttft_ms_mean": 1.0}})
            journal.append("k2", {"status": "refused", "reason": "too small"})
        return [(Path(name) / "t.csv.journal").read_bytes()]


def _journal(folder: Path, data: bytes) -> None:
    from vsim.sim.sweep_journal import open_journal

    _file(folder, data, "t.csv.journal")
    with open_journal(folder / "t.csv"):
        pass


@cache
def _sample_seeds() -> list[bytes]:
    from vsim.calibrate.samples import Journal, StepSample, journal_path

    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "s.parquet"
        with Journal(store) as journal:
            journal.session("a", {"device": "x", "vllm_version": "0.32.0"})
            rows = (
                StepSample(
                    session="a", seq=i, phase="grid", point="decode b1 c16", repeat=0, index=i, prefill_new=(16,),
                    prefill_context=(0,), num_decodes=1, decode_context_sum=9, decode_context_max=9,
                    decode_context_sumsq=81.0, block_size=16, kv_blocks_used=3, running=2, waiting=0, admitted=0,
                    finished=0, preempted=0, schedule_s=1e-4, device_s=1e-2, update_s=1e-4, total_s=0.011, cpu_s=0.011,
                )
                for i in range(3)
            )  # fmt: skip
            journal.append(rows)
        return [journal_path(store).read_bytes()]


def _samples(folder: Path, data: bytes) -> None:
    from vsim.calibrate.samples import journal_path, read_samples

    store = folder / "s.parquet"
    journal_path(store).write_bytes(data)
    read_samples(store)


@cache
def _measured_seeds() -> list[bytes]:
    base = DATA / "cases" / "rtx4090-llama-3.1-8b"
    return [
        name.encode() + b"\n" + b"".join((base / name).read_bytes().splitlines(True)[:lines])
        for name, lines in (("engine.json", None), ("measured.jsonl", 6), ("trace.jsonl", 6))
    ]


def _measured_case(folder: Path, data: bytes) -> None:
    from vsim.calibrate.case import read_case

    good = {seed.partition(b"\n")[0]: seed.partition(b"\n")[2] for seed in _measured_seeds()}
    name, _, content = data.partition(b"\n")
    if name not in good:
        return
    for file, text in {**good, name: content}.items():
        (folder / file.decode()).write_bytes(text)
    read_case(folder)


TARGETS = (
    Target("trace", _trace_seeds, _trace, 20, trees=0.15),
    Target("timings", _timing_seeds, _timings, 6),
    Target("bench", _timing_seeds, _bench, 6),
    Target("recipe", _recipe_seeds, _recipe, 4),
    Target("profile", _profile_seeds, _profile, 14, trees=0.8),
    Target("config", _config_seeds, _config, 10, trees=0.8),
    Target("startup-log", _log_seeds, _startup_log, 1, trees=0.0),
    Target("case", _case_seeds, _case, 10, trees=0.7),
    Target("prices", _price_seeds, _prices, 6),
    Target("fleet", _fleet_seeds, _fleet, 4),
    Target("grid", _grid_seeds, _grid, 3),
    Target("slo", _slo_seeds, _slo, 8, trees=0.0),
    Target("run", _run_seeds, _run, 6),
    Target("journal", _journal_seeds, _journal, 6, trees=0.0),
    Target("samples", _sample_seeds, _samples, 6, trees=0.0),
    Target("measured-case", _measured_seeds, _measured_case, 4, trees=0.0),
)
BY_NAME = {target.name: target for target in TARGETS}


def draw(target: Target, rng: random.Random) -> bytes:
    """An input of `target`: those of folders keep their first line, which names the damaged file."""
    if target.name == "run":
        return _run_input(rng)
    if target.name == "measured-case":
        name, _, content = rng.choice(_measured_seeds()).partition(b"\n")
        lines = content.splitlines(True)
        tree = rng.random() < 0.6
        if tree and name.endswith(b".json"):
            return name + b"\n" + damaged_tree(rng, content)
        if tree:
            at = rng.randrange(len(lines))
            lines[at] = damaged_tree(rng, lines[at]) + b"\n"
            return name + b"\n" + b"".join(lines)
        return name + b"\n" + damaged_bytes(rng, content, content)
    if target.name in ("journal", "samples") and rng.random() < 0.5:
        lines = target.seeds()[0].splitlines(True)
        at = rng.randrange(len(lines))
        lines[at] = damaged_tree(rng, lines[at]) + b"\n"
        return b"".join(lines)
    return target.input(rng)
