"""Small runs, written down by hand or drawn at random, for tests of what reads a `Run`."""

from __future__ import annotations

from typing import Any

import numpy as np

from vsim.sim.run import (
    FINISHED,
    OPTIONAL_STEP_COLUMNS,
    REJECTED,
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    Run,
)

MS = 1_000_000
S = 1_000_000_000


def make_run(
    requests: dict[str, Any] | None = None, steps: dict[str, Any] | None = None, **fields: Any
) -> Run:
    """A `Run` from the columns that matter; the others get values that say "nothing happened".

    Without `steps` there are none; `itl` (a list of ns, in `fields`) is turned into the multiset.
    """
    given = requests or {}
    n = len(next(iter(given.values()))) if given else 0
    defaults: dict[str, Any] = {
        "request": np.arange(n),
        "sent_ns": given.get("arrival_ns", np.zeros(n)),
        "first_scheduled_ns": given.get("sent_ns", given.get("arrival_ns", np.zeros(n))),
        "prompt_tokens": np.full(n, 10),
        "output_tokens": np.full(n, 1),
        "status": np.full(n, FINISHED),
        "reason": np.full(n, -1),
    }
    columns = {
        name: np.asarray(given.get(name, defaults.get(name, np.zeros(n))), dtype=kind)
        for name, kind in REQUEST_COLUMNS.items()
    }
    rows = steps or {}
    k = len(next(iter(rows.values()))) if rows else 0
    step_columns = {
        name: np.asarray(rows.get(name, np.zeros(k)), dtype=kind)
        for name, kind in STEP_COLUMNS.items()
    }
    for name, values in rows.items():
        if name in OPTIONAL_STEP_COLUMNS:
            step_columns[name] = np.asarray(values, dtype=OPTIONAL_STEP_COLUMNS[name])
    gaps, counts = np.unique(np.asarray(fields.pop("itl", []), dtype=np.int64), return_counts=True)
    fields.setdefault("block_size", 16)
    fields.setdefault("num_gpu_blocks", 100)
    fields.setdefault("origin", "simulated")
    return Run(
        requests=columns,
        steps=step_columns,
        itl_ns=gaps,
        itl_count=counts.astype(np.int64),
        **fields,
    )


def random_run(n: int = 200, steps: int = 1000, seed: int = 0, **fields: Any) -> Run:
    """A run that hangs together well enough to be drawn: no simulation behind it.

    One request in fifty is rejected, one in twenty preempted.
    """
    rng = np.random.default_rng(seed)
    arrival = np.sort(rng.integers(0, max(1, n) * 200 * MS, n))
    output = rng.integers(1, 400, n)
    ttft = (rng.lognormal(5, 1, n) * MS).astype(np.int64)
    tpot = (rng.lognormal(3, 0.3, n) * MS).astype(np.int64)
    finish = arrival + ttft + tpot * (output - 1)
    status = np.where(rng.random(n) < 0.02, REJECTED, FINISHED)
    preempted = rng.random(n) < 0.05
    rejected = status == REJECTED
    end = int(finish.max()) if n else 1
    start = np.sort(rng.integers(0, end, steps)) if n else np.empty(0, dtype=np.int64)
    running = rng.integers(1, 64, len(start))
    blocks = np.minimum(running * rng.integers(2, 60, len(start)), 3000)
    prefill = np.where(rng.random(len(start)) < 0.2, rng.integers(2, 2048, len(start)), 0)
    fields.setdefault("num_gpu_blocks", 3000)
    fields.setdefault("reasons", ("prompt of 9000 tokens is longer than max_model_len=8192",))
    fields.setdefault("end_ns", end)
    fields.setdefault(
        "counters", {"prefix_cache_queries_tokens": 1000, "prefix_cache_hits_tokens": 250}
    )
    return make_run(
        {
            "arrival_ns": arrival,
            "first_scheduled_ns": np.where(rejected, -1, arrival + ttft // 2),
            "first_token_ns": np.where(rejected, -1, arrival + ttft),
            "finish_ns": np.where(rejected, arrival, finish),
            "prompt_tokens": rng.integers(1, 4000, n),
            "output_tokens": np.where(rejected, 0, output),
            "preemptions": preempted.astype(int),
            "recomputed_tokens": np.where(preempted, 500, 0),
            "status": status,
            "reason": np.where(rejected, 0, -1),
        },
        {
            "start_ns": start,
            "end_ns": start + 20 * MS,
            "tokens": prefill + running,
            "prefill_tokens": prefill,
            "prefill_seqs": (prefill > 0).astype(int),
            "decodes": running,
            "decode_context": running * 700,
            "running": running,
            "waiting": rng.integers(0, 30, len(start)),
            "kv_blocks_used": blocks,
            "kv_tokens_used": blocks * 16 - rng.integers(0, 8, len(start)) * np.minimum(running, 1),
            "preempted": (rng.random(len(start)) < 0.01).astype(int),
        },
        itl=np.repeat(tpot, output - 1),
        **fields,
    )
