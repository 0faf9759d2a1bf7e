"""What a stored run was told, so that it can be replayed with one thing different."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.sim.advice import Setup
from vsim.sim.deployment import Deployment, resolve
from vsim.sim.flags import GIVEN
from vsim.sim.replay import Load
from vsim.sim.run import Run
from vsim.sim.text import plain
from vsim.traces.trace import Trace

_BEYOND = ("swap_above_tokens", "victim_rule", "num_cpu_blocks", "pcie_gbps")


def rebuilt(run: Run, trace: Trace, profile: str | None = None) -> tuple[Setup, Load]:
    """`_rebuilt`, and one sentence for a run.json that somebody else wrote."""
    try:
        return _rebuilt(run, trace, profile)
    except (TypeError, ValueError, AttributeError):
        raise UserError("the run's flags or load are not as vsim writes them") from None


def _rebuilt(run: Run, trace: Trace, profile: str | None) -> tuple[Setup, Load]:
    """The setup and load of `run`, which replayed `trace`; `profile` where the run used one.

    Raises UserError where that is not the run's trace, or the run does not say enough to be replayed: the
    deployment that comes out is held against the one that the run stored.
    """
    config = run.config
    if run.origin != "simulated" or "flags" not in config or "load" not in config:
        raise UserError("only a run that vsim replayed can be simulated again")
    if "fleet" in config:
        raise UserError("a run of a fleet described by --fleet is not advised upon")
    flags, told = config["flags"], config["load"]
    if not isinstance(flags, Mapping) or not isinstance(told, Mapping):
        raise UserError("the run's flags or load are not as vsim writes them")
    given = {
        str(name): entry.get("value")
        for name, entry in flags.items()
        if isinstance(entry, Mapping) and entry.get("origin") == GIVEN
    }
    known = set(inspect.signature(resolve).parameters)
    # Ranks of one deployment stand in the run as replicas too.
    ranks = config.get("route") == "data-parallel"
    setup = Setup(
        model=str(config.get("model")),
        gpu=str(config.get("gpu")),
        flags={name: value for name, value in given.items() if name in known},
        profile=profile,
        beyond={name: value for name, value in given.items() if name in _BEYOND},
        overlap_swaps=bool(told.get("overlap_swaps", False)),
        replicas=1 if ranks else _whole(config.get("replicas", 1)),
        route="round-robin" if ranks else str(config.get("route", "round-robin")),
    )
    _check_deployment(run, setup.deployment(), profile)
    rate, burstiness = told.get("request_rate"), told.get("burstiness")
    load = Load(
        limit=told.get("limit"),
        time_scale=told.get("time_scale", 1.0),
        request_rate=None if rate is None else float(rate),
        burstiness=1.0 if burstiness is None else float(burstiness),
        max_concurrency=told.get("max_concurrency"),
        seed=told.get("seed", 0),
        overlong=told.get("overlong", "reject"),
    )
    sent = load.apply(trace)
    columns = run.requests
    if len(sent) != run.num_requests or not np.array_equal(
        sent.prompt_tokens, columns["prompt_tokens"]
    ):
        raise UserError(
            f"{trace.source.name} is not what this run replayed ({run.num_requests:,} requests of "
            f"{plain(config.get('trace', {}).get('name', 'another trace'))}), or was read in another way"
        )
    return setup, load


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise UserError(f"the run's replicas are {plain(value)}: not a whole number of at least 1")
    return value


def _check_deployment(run: Run, deployment: Deployment, profile: str | None) -> None:
    """Flags that a run does not store (engine, release) would show in what is resolved."""
    stored = {
        name: entry.get("value") if isinstance(entry, Mapping) else None
        for name, entry in run.config["flags"].items()
    }
    for name in sorted(set(stored) | set(deployment.flags)):
        if stored.get(name) != deployment.flags.get(name):
            raise UserError(
                f"the run's deployment cannot be built again from what it stored ({name} was "
                f"{plain(stored.get(name))}, now {plain(deployment.flags.get(name))}): replay it with --advise"
            )
    blocks = run.config.get("kv_cache", {}).get("num_gpu_blocks")
    if blocks != deployment.kv_cache_blocks:
        raise UserError(
            f"the run had {plain(blocks)} KV blocks, its flags now give {deployment.kv_cache_blocks}: replay it "
            "with --advise"
        )
    model = run.provenance.get("step_model", {})
    if model.get("kind") != "roofline" and profile is None:
        raise UserError(
            f"the run's step times are from {plain(model.get('name'))}: give that with --profile"
        )
