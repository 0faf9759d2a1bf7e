"""Validation cases made from a known truth: what a fit must find again, and what a prediction must meet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vsim.calibrate.case import Case, read_case
from vsim.calibrate.predict import predict
from vsim.models.correction import Coefficients, CorrectedStepModel

CASES = Path(__file__).parent / "data" / "cases"
RTXPRO = CASES / "rtxpro6000-llama-3.1-8b"
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_case(
    folder: Path,
    truth: Coefficients,
    engine: dict[str, Any],
    requests: int = 150,
    rate: float = 8.0,
    frontend_s: float = 1e-3,
    profile: Path = RTXPRO / "profile",
    seed: int = 0,
) -> Case:
    """A case whose "measured" run is the case's own tables plus `truth`, stamped as vLLM stamps.

    `queued_s` is when the engine looked into its inbox: the end of the step that ran at arrival.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "profile").exists():
        shutil.copytree(profile, folder / "profile")
    base = json.loads((RTXPRO / "engine.json").read_text())
    (folder / "engine.json").write_text(json.dumps(base | engine))
    arrival = np.round(0.1 + np.cumsum(rng.exponential(1 / rate, requests)), 6)
    prompt = rng.lognormal(6.2, 0.9, requests).astype(int).clip(8, 6000)
    output = rng.lognormal(5.3, 0.6, requests).astype(int).clip(2, 1500)
    rows = [
        {
            "request_id": i,
            "timestamp": float(a),
            "input_tokens": int(p),
            "output_tokens": int(o),
            "hash_ids": [],
        }
        for i, (a, p, o) in enumerate(zip(arrival, prompt, output, strict=True))
    ]
    _write(folder / "trace.jsonl", rows)
    placeholder = [{"ttft_s": 1.0, "e2e_s": 2.0, "output_tokens": 2}] * requests
    _write(folder / "measured.jsonl", placeholder)
    case = read_case(folder)
    model = CorrectedStepModel(case.step_model(None).model, truth)
    run = predict(case, model, frontend_s)
    ends = np.array([0, *(wave.end_ns for wave in run.waves)])
    start = float(arrival[0])
    measured = []
    for i in range(requests):
        sent = int(case.trace.arrival_ns[i])
        first, last = int(run.first_token_ns[i]), int(run.finish_ns[i])
        inbox = sent + round(frontend_s * 1e9)
        if not run.waves:  # replicas that run free: their step boundaries are not at hand
            ends = np.array([0, inbox])
        at = int(np.searchsorted(ends, inbox))
        busy = at < len(ends) and any(
            w.start_ns <= inbox < w.end_ns for w in run.waves[max(0, at - 2) : at + 1]
        )
        queued = min(int(ends[at]), int(run.first_scheduled_ns[i])) if busy else inbox
        measured.append(
            {
                "request_id": i,
                "output_tokens": int(output[i]),
                "arrival_s": float(arrival[i]),
                "queued_s": queued / 1e9 + start,
                "ttft_s": (first - sent) / 1e9,
                "e2e_s": (last - sent) / 1e9,
            }
        )
    _write(folder / "measured.jsonl", measured)
    return read_case(folder)


def moe_profile(folder: Path) -> Path:
    """Tables of a sparse model: the dense case's, with a made-up moe.csv in place of the dense MLP."""
    shutil.copytree(RTXPRO / "profile", folder)
    lines = ["tokens,activated_experts,time_us"]
    for tokens in (1, 8, 64, 256, 512, 1024, 2048):
        for experts in (1, 8, 32, 64, 128):
            if experts <= tokens * 8:
                lines.append(f"{tokens},{experts},{20 + 6 * experts + 0.35 * tokens:.3f}")
    (folder / "tp1" / "moe.csv").write_text("\n".join(lines) + "\n")
    return folder


def with_rows(case: Case, rows: Sequence[int], add_s: float) -> Case:
    """`case` with the measured times of some rows moved: they must not matter where they are not seen."""
    m = case.measured

    def moved(column: np.ndarray) -> np.ndarray:
        column = column.copy()
        column[list(rows)] += add_s
        return column

    changed = replace(
        m,
        **{
            name: moved(getattr(m, name))
            for name in ("queued_s", "first_token_s", "last_token_s", "ttft_s", "tpot_s", "e2e_s")
        },
    )
    return replace(case, measured=changed)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
