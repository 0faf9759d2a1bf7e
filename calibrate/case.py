"""A validation case: a folder with a real run's trace, engine settings and per-request timings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.calibrate.from_tables import from_tables
from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.hardware import Gpu, find_gpu
from vsim.models.links import link_figures
from vsim.models.load import LoadedStepModel, load_step_model, read_profile
from vsim.models.model_spec import ModelSpec, load_model, spec_from_config
from vsim.models.profile_check import Asked, doubts, mismatch, other_engine
from vsim.models.table_params import StepContext
from vsim.sim.config import SchedulerConfig
from vsim.sim.deployment import resolve
from vsim.traces.trace import Trace, TraceSource

FloatArray = npt.NDArray[np.float64]

MAX_ROWS = 5_000_000
# Flags of `resolve` that engine.json may carry under the same name; null means vLLM's default.
FLAGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "block_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "scheduler_reserve_full_isl",
    "async_scheduling",
    "enforce_eager",
    "swap_space",
    "preemption_mode",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the real run did, per request: arrays of shape (n,), seconds on the trace's clock, NaN: not known.

    TTFT and E2E run from the client's arrival; `tpot_s` is NaN for a single output token.
    """

    arrival_s: FloatArray
    queued_s: FloatArray  # when the engine took it from its inbox
    first_token_s: FloatArray
    last_token_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    e2e_s: FloatArray


@dataclass(frozen=True, slots=True)
class Case:
    """One folder, read. `gpu` is None where the catalogue has none of that name."""

    name: str
    folder: Path
    engine: dict[str, Any]
    trace: Trace
    measured: Measured
    model: ModelSpec
    gpu: Gpu | None
    scheduler: SchedulerConfig
    assumptions: tuple[str, ...] = ()
    peer: dict[str, Any] | None = None  # peer_error.json
    peer_sim: dict[str, FloatArray] | None = None  # peer_sim.jsonl: ttft, tpot, e2e by request
    ranks: int = 1  # data-parallel replicas
    expert_parallel: bool = False
    tensor_parallel_size: int = 1
    values_not_recorded: tuple[str, ...] = field(default=())

    @property
    def context(self) -> StepContext:
        return StepContext(
            max_num_seqs=self.scheduler.max_num_seqs,
            max_num_batched_tokens=self.scheduler.max_num_batched_tokens,
            enforce_eager=bool(self.engine.get("enforce_eager") or False),
            data_parallel_size=self.ranks,
            enable_expert_parallel=self.expert_parallel,
            block_size=self.scheduler.block_size,
        )

    def step_model(self, profile: str | None) -> LoadedStepModel:
        """`profile` if given, else the case's own tables, else a bundled profile, else the roofline."""
        if profile is not None:
            name, calibration = read_profile(profile)
            asked = Asked(
                enforce_eager=self.context.enforce_eager,
                engine=self.scheduler.engine,
                engine_version=self.scheduler.engine_version,
                block_size=self.scheduler.block_size,
                on_cpu=self.gpu is not None and self.gpu.platform == "cpu",
            )
            wrong = mismatch(
                calibration, self.gpu, self.model, self.tensor_parallel_size
            ) or other_engine(calibration, asked)
            if wrong:
                raise UserError(f"profile {name} is not of this run: {wrong}")
            notes = doubts(calibration, name, asked)
            model = calibration.step_model(self.context)
            return LoadedStepModel(model, calibration, name, notes=notes)
        if (self.folder / "profile").is_dir():
            calibration = self.tables()
            return LoadedStepModel(calibration.step_model(self.context), calibration, "profile/")
        if self.gpu is None:
            raise UserError(
                f"{self.name} has no profile/ folder and its GPU {self.engine.get('gpu')!r} is not in the "
                "catalogue: give --profile"
            )
        return load_step_model(
            gpu=self.gpu,
            model=self.model,
            tensor_parallel_size=self.tensor_parallel_size,
            context=self.context,
        )

    def tables(self) -> Calibration:
        """The case's own layerwise tables."""
        moe = self.model.moe
        return from_tables(
            self.folder / "profile",
            num_layers=self.model.num_layers,
            hidden_size=self.model.hidden_size,
            vocab_size=self.model.vocab_size,
            tensor_parallel_size=self.tensor_parallel_size,
            num_experts=moe.num_experts if moe else 0,
            experts_per_token=moe.experts_per_token if moe else 0,
            link=link_figures(self.gpu),
            source=str(self.engine.get("source_path") or ""),
            licence=str(self.engine.get("licence") or ""),
        )


def read_case(folder: Path) -> Case:
    """Read a case folder (format: tests/data/cases/README.md). Raises UserError naming file and line."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder: a case holds engine.json, trace.jsonl, measured.jsonl"
        )
    engine = _json(folder / "engine.json")
    rows = _rows(folder / "trace.jsonl")
    trace, start_s = _trace(rows, folder)
    measured = _measured(_rows(folder / "measured.jsonl"), len(trace), start_s)
    ranks, tp = _count(engine, "data_parallel_size"), _count(engine, "tensor_parallel_size")
    gpu = _gpu(engine)
    model = _model(engine)
    scheduler, assumptions = _scheduler(engine, model, gpu)
    peer_path, sim_path = folder / "peer_error.json", folder / "peer_sim.jsonl"
    return Case(
        name=folder.resolve().name,
        folder=folder,
        engine=engine,
        trace=trace,
        measured=measured,
        model=model,
        gpu=gpu,
        scheduler=scheduler,
        assumptions=assumptions,
        peer=_json(peer_path) if peer_path.exists() else None,
        peer_sim=_peer_sim(sim_path, len(trace)) if sim_path.exists() else None,
        ranks=ranks,
        expert_parallel=bool(engine.get("enable_expert_parallel")),
        tensor_parallel_size=tp,
        values_not_recorded=_texts(engine.get("values_not_recorded")),
    )


def _count(engine: dict[str, Any], key: str) -> int:
    value = 1 if engine.get(key) is None else engine[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
        raise UserError(f"engine.json: {key}={value!r} must be a whole number from 1 to 1024")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent.name} has no {path.name}: not a validation case") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path.name} holds no JSON object")
    return data


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if len(rows) >= MAX_ROWS:
                    raise UserError(f"{path.name} has more than {MAX_ROWS} rows")
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise UserError(f"{path.name}:{number}: not JSON") from None
                if not isinstance(row, dict):
                    raise UserError(f"{path.name}:{number}: not a JSON object")
                row["__line__"] = number
                rows.append(row)
    except FileNotFoundError:
        raise UserError(f"{path.parent.name} has no {path.name}: not a validation case") from None
    except UnicodeDecodeError:
        raise UserError(f"{path.name} is not UTF-8 text") from None
    if not rows:
        raise UserError(f"{path.name} is empty")
    return rows


def _number(row: dict[str, Any], key: str, name: str, least: float = 0.0) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e12:
        raise UserError(
            f"{name}:{row['__line__']}: {key}={value!r} must be a number from {least:g} on"
        )
    return float(value)


def _trace(rows: list[dict[str, Any]], folder: Path) -> tuple[Trace, float]:
    """(the trace, its first arrival in seconds on the file's clock). Rows are put in order of arrival."""
    name = "trace.jsonl"
    times = [_number(row, "timestamp", name) for row in rows]
    if any(b < a for a, b in pairwise(times)):
        raise UserError(
            f"{name}: rows are not in order of timestamp; measured.jsonl must match row by row"
        )
    ids: list[int] = []
    offsets = [0]
    for row in rows:
        hashes = row.get("hash_ids") or []
        if not isinstance(hashes, list) or not all(
            isinstance(h, int) and abs(h) < 2**62 for h in hashes
        ):
            raise UserError(f"{name}:{row['__line__']}: hash_ids must be a list of whole numbers")
        ids += hashes
        offsets.append(len(ids))
    start = times[0]
    trace = Trace(
        arrival_ns=np.round((np.array(times) - start) * 1e9).astype(np.int64),
        prompt_tokens=np.array([_number(r, "input_tokens", name, 1) for r in rows], dtype=np.int64),
        output_tokens=np.array(
            [_number(r, "output_tokens", name, 1) for r in rows], dtype=np.int64
        ),
        source=TraceSource(name=folder.name, format="case"),
        prefix_offsets=np.array(offsets, dtype=np.int64) if ids else None,
        prefix_ids=np.array(ids, dtype=np.int64) if ids else None,
        prefix_block_tokens=16 if ids else 0,
    )
    return trace, start


def _measured(rows: list[dict[str, Any]], n: int, start_s: float) -> Measured:
    name = "measured.jsonl"
    if len(rows) != n:
        raise UserError(f"{name} has {len(rows)} rows, trace.jsonl {n}: they must match row by row")

    def column(key: str, must: bool = True) -> FloatArray:
        return np.array(
            [
                _number(row, key, name) if must or row.get(key) is not None else np.nan
                for row in rows
            ]
        )

    ttft, e2e = column("ttft_s"), column("e2e_s")
    arrival = column("arrival_s", must=False)
    tokens = np.array([_number(row, "output_tokens", name) for row in rows])
    several = tokens > 1
    tpot = np.full(n, np.nan)
    np.divide(e2e - ttft, tokens - 1, out=tpot, where=several)
    given = column("tpot_s", must=False)
    tpot = np.where(several & ~np.isnan(given), given, tpot)
    return Measured(
        arrival_s=arrival - start_s,
        queued_s=column("queued_s", must=False) - start_s,
        first_token_s=arrival - start_s + ttft,
        last_token_s=arrival - start_s + e2e,
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=e2e,
    )


def _gpu(engine: dict[str, Any]) -> Gpu | None:
    for key in ("gpu", "gpu_name"):
        if isinstance(engine.get(key), str):
            try:
                return find_gpu(engine[key])
            except UserError:
                continue
    return None


def _model(engine: dict[str, Any]) -> ModelSpec:
    name = str(engine.get("model") or "")
    try:
        return load_model(name)
    except UserError:
        config = engine.get("hf_config")
        if not isinstance(config, dict):
            raise UserError(
                f"engine.json: model {name!r} is not in the catalogue and there is no hf_config"
            ) from None
        # Only sizes matter here; a shortened config need not say how long a context the model takes.
        length = {"max_position_embeddings": engine.get("max_model_len") or 131_072}
        try:
            return spec_from_config(length | config, name, where="engine.json hf_config")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"engine.json hf_config can't be read: {error}") from None


def _scheduler(
    engine: dict[str, Any], model: ModelSpec, gpu: Gpu | None
) -> tuple[SchedulerConfig, tuple[str, ...]]:
    version = str(engine.get("vllm_version") or "0.32.0").split("+")[0].removeprefix("v")
    flags = {name: engine[name] for name in FLAGS if engine.get(name) is not None}
    blocks = engine.get("num_gpu_blocks")
    said: list[str] = []
    if gpu is None:
        # Only memory and defaults depend on the device, and a case names most of them.
        if blocks is None:
            raise UserError(
                f"engine.json: GPU {engine.get('gpu')!r} is not in the catalogue and num_gpu_blocks is not "
                "recorded: the KV cache's size can't be known"
            )
        gpu = find_gpu("h100")
        said.append(
            f"GPU {engine.get('gpu')!r} is not in the catalogue: flags not recorded as on an H100"
        )
    engine_name = "v0" if str(engine.get("engine") or "").lower() == "v0" else "v1"
    try:
        deployment = resolve(
            model,
            gpu,
            scheduling_policy=engine.get("policy"),
            num_gpu_blocks_override=blocks,
            engine=engine_name,
            engine_version=version,
            usage="server",
            what_if=True,
            **flags,
        )
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"engine.json: a setting has a value of the wrong kind ({error})") from None
    said += deployment.assumptions
    if blocks is None:
        said.append(
            f"num_gpu_blocks was not recorded: {deployment.scheduler.num_gpu_blocks} from the capacity model"
        )
    return deployment.scheduler, tuple(said)


def _peer_sim(path: Path, n: int) -> dict[str, FloatArray]:
    columns = {key: np.full(n, np.nan) for key in ("ttft", "tpot", "e2e")}
    for row in _rows(path):
        index = row.get("request_id")
        if isinstance(index, int) and 0 <= index < n:
            for key, column in columns.items():
                value = row.get(f"{key}_s")
                column[index] = float(value) if isinstance(value, int | float) else np.nan
    return columns
