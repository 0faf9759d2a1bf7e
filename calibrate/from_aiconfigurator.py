"""A prior from aiconfigurator's database of kernel times, for GPUs and models that nobody here measured.

`aiconfigurator-core` (NVIDIA, Apache-2.0, optional extra `aic`) answers what one forward pass of a batch takes on its
GPUs, from tables of kernels measured under vLLM. Its answers over a grid of steps are fitted into the parameters that
an "engine-steps" profile has, so that a replay needs neither the package nor its tables.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from vsim import __version__
from vsim.calibrate.fit_samples import domain_of, errors_of, fit_params, predict, samples_hash
from vsim.calibrate.samples import StepSample
from vsim.calibrate.step_logs import Logged, samples_of
from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.step import StepShape
from vsim.sim.deployment import Deployment

LABEL = "prior from aiconfigurator's database, not measured here"
# Our names of GPUs -> its names of systems, where it has tables measured under vLLM.
SYSTEMS = {
    "A100-80GB": "a100_sxm",
    "H100-SXM": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx_pro_6000_server",
}
CONTEXTS = (0, 1024, 4096, 16384, 65536)
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_KV_TOKENS = 1 << 21
CHECKED = 200  # random steps on which the fit is held against the database

Seconds = Callable[[StepShape], float]


def from_aiconfigurator(
    deployment: Deployment, model_config: dict[str, Any], command: str = ""
) -> Calibration:
    """The database's step times for this GPU, model and tensor-parallel size, as a profile of kind "database".

    Raises UserError if the package is missing, or knows neither the GPU nor the model.
    """
    system = SYSTEMS.get(deployment.gpu.name)
    if system is None:
        raise UserError(
            f"--from-aiconfigurator: its database has no {deployment.gpu.name}; it has {', '.join(SYSTEMS)}"
        )
    if deployment.kv_cache_dtype.startswith("fp8") or (
        deployment.quantization is not None and not model_config.get("quantization_config")
    ):
        raise UserError(
            "--from-aiconfigurator: precision comes from the model's config.json; --quantization and "
            "--kv-cache-dtype are not passed on"
        )
    seconds = _estimator(system, model_config, deployment)
    scheduler = deployment.scheduler
    shapes = list(
        grid(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.max_model_len)
    )
    rows = samples_of(
        [Logged(shape, t, t) for shape in shapes if (t := seconds(shape)) > 0],
        scheduler.block_size,
    )
    params = fit_params(rows)
    checked = random_shapes(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, shapes)
    return Calibration(
        kind="database",
        params=params,
        domain=domain_of(rows),
        quality={
            "samples": len(rows),
            "held_out": 0,
            # Not an error against any engine: how well the parameters repeat the database.
            "fit_to_database": _error(params, rows),
            "random_steps_against_database": _error(
                params,
                samples_of(
                    [Logged(s, t, t) for s in checked if (t := seconds(s)) > 0],
                    scheduler.block_size,
                ),
            ),
        },
        provenance={
            "label": LABEL,
            "gpu": deployment.gpu.name,
            "gpu_name": deployment.gpu.device_name,
            "model": deployment.model.name,
            "model_config": model_config,
            "tensor_parallel_size": deployment.tensor_parallel_size,
            "dtype": deployment.dtype,
            "quantization": deployment.flags.get("quantization"),
            "vllm_version": _tables_of(system),
            "vsim_version": __version__,
            "samples_sha256": samples_hash(rows),
            "source": f"aiconfigurator-core {metadata.version('aiconfigurator-core')}, system {system}, backend vllm",
            "licence": "Apache-2.0",
            "command": command,
            "assumptions": [
                "step times come from aiconfigurator's tables of single kernels, not from this GPU: expect tens "
                "of percent of error until they are corrected (--from-bench, --from-steps)",
                "the CPU's, the launches' and the sampler's time of a step are not in the database: taken as 0 s",
            ],
        },
    )


def grid(max_tokens: int, max_seqs: int, max_len: int) -> Iterator[StepShape]:
    """Steps that span what the engine can hold: chunks alone and in company, decodes alone, both together."""
    sizes = [n for n in (2 << k for k in range(20)) if n < max_tokens] + [max_tokens]
    contexts = [c for c in CONTEXTS if c < max_len]
    batches = [n for n in DECODES if n < max_seqs] + [max_seqs]
    for new in sizes:
        for context in contexts:
            if context + new <= max_len:
                yield StepShape(((new, context),), 0, 0, 0)
        if new >= 64:
            yield StepShape(((new // 4, 0),) * 4, 0, 0, 0)
    for n in batches:
        for context in (64, 256, *contexts[1:], max_len - 1):
            if context < max_len and n * context <= MOST_KV_TOKENS:
                yield StepShape((), n, n * context, context)
    for n in batches[::2]:
        for new in sizes[4::2]:
            for context in (256, 2048):
                if n + new <= max_tokens and context < max_len:
                    yield StepShape(((new, 0),), n, n * context, context)


def random_shapes(max_tokens: int, max_seqs: int, spanned: list[StepShape]) -> list[StepShape]:
    """Steps between those of the grid, as serving makes them."""
    rng = np.random.default_rng(12345)
    longest = max(shape.decode_context_max for shape in spanned)
    found = []
    for _ in range(CHECKED):
        n = int(rng.integers(0, min(max_seqs, max_tokens) + 1))
        room = max_tokens - n
        new = int(rng.integers(2, room + 1)) if room >= 2 and (n == 0 or rng.random() < 0.3) else 0
        context = int(np.exp(rng.uniform(np.log(32), np.log(longest))))
        context = min(context, MOST_KV_TOKENS // max(n, 1))
        if n or new:
            found.append(StepShape(((new, 0),) if new else (), n, n * context, context if n else 0))
    return found


def _error(params: dict[str, Any], rows: list[StepSample]) -> dict[str, Any]:
    error = errors_of(predict(params, rows), np.array([row.total_s for row in rows]))
    return {name: error[name] for name in ("median_abs_pct", "p95_abs_pct", "bias_pct")}


def _estimator(system: str, model_config: dict[str, Any], deployment: Deployment) -> Seconds:
    """The database's own forward-pass model. Raises UserError with its reason if it has none."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is at hand: nothing is to be looked up
    try:
        from aiconfigurator_core.sdk.rust_engine_step import (  # type: ignore[import-not-found,unused-ignore]
            RustForwardPassPerfModel,
        )
    except ImportError:
        raise UserError(
            "--from-aiconfigurator needs aiconfigurator-core: pip install 'vsim[aic]'"
        ) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    tp = deployment.tensor_parallel_size
    with tempfile.TemporaryDirectory(prefix="vsim-aic-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config))
        try:
            model = RustForwardPassPerfModel.from_native(
                {
                    "schema_version": 1,
                    "model_name": folder,
                    "system_name": system,
                    "backend": "vllm",
                    "tp_size": tp,
                    "pp_size": 1,
                    "attention_dp_size": 1,
                    "moe_tp_size": tp,
                    "moe_ep_size": 1,
                }
            )
        except Exception as error:  # the package's own, and its compiled part's
            raise _cannot(deployment, error, folder) from None

    def seconds(shape: StepShape) -> float:
        kv = sum(context for _, context in shape.prefills)
        lengths = [new for new, _ in shape.prefills]
        scheduled = {
            "num_prefill_requests": len(lengths),
            "sum_prefill_tokens": sum(lengths),
            "var_prefill_length": float(np.var(lengths)) if lengths else 0.0,
            "sum_prefill_kv_tokens": kv,
            "num_decode_requests": shape.num_decodes,
            "sum_decode_kv_tokens": shape.decode_context_sum,
            "var_decode_kv_tokens": 0.0,
        }
        nothing = {
            name: 0.0 if "var" in name else 0
            for name in scheduled
            if name != "sum_prefill_kv_tokens"
        }
        told = {
            "version": 1,
            "worker_id": "vsim",
            "dp_rank": 0,
            "counter_id": 0,
            "wall_time": 0.0,
            "scheduled_requests": scheduled,
            "queued_requests": nothing,
        }
        try:
            answer = model.estimate_forward_pass_time_ms(told)
        except Exception as error:
            raise _cannot(deployment, error) from None
        return 0.0 if answer is None else float(answer) / 1e3

    return seconds


def _cannot(deployment: Deployment, error: Exception, folder: str = "") -> UserError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    why = lines[-1][:300]
    return UserError(
        f"--from-aiconfigurator: its database can't answer for {deployment.model.name} on "
        f"{deployment.gpu.name}: {why.replace(folder, 'the model') if folder else why}"
    )


def _tables_of(system: str) -> str:
    """The vLLM release under which the system's tables were measured, as the package says; "" if it doesn't."""
    import aiconfigurator_core  # type: ignore[import-not-found,unused-ignore]
    import yaml

    try:
        path = Path(str(aiconfigurator_core.__file__)).parent / "systems" / "query_versions.yaml"
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        default = told["defaults"]["vllm"]["current"]
        return str(told["overrides"].get(system, {}).get("vllm", {}).get("current", default))
    except (OSError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return ""
