"""N replicas behind a router, on one simulated clock. One replica is the special case that `simulate` runs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import simpy

from vsim.errors import UserError
from vsim.models.step import StepModel
from vsim.sim.bounds import BoundReachedError, Bounds, Watch
from vsim.sim.client import Client
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import NS, HostLink, Replica, make_scheduler
from vsim.sim.fast.dispatch import Engine, chosen, worthwhile
from vsim.sim.recorder import Recorder
from vsim.sim.router import Route, round_robin
from vsim.sim.run import Run
from vsim.sim.scheduler import EngineDiedError
from vsim.traces.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica: its scheduler's configuration, its step model, its link to the host.

    `frontend_s`: seconds between the client's send and the engine's inbox.
    """

    config: SchedulerConfig
    step_model: StepModel
    host_link: HostLink | None = None
    frontend_s: float = 0.0


def simulate_cluster(
    trace: Trace,
    replicas: Sequence[ReplicaSpec],
    route: Route | None = None,
    *,
    max_concurrency: int | None = None,
    front_end: Callable[[TraceRequest], str | None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
    bounds: Bounds | None = None,
) -> Run:
    """Replay `trace` on `replicas` and return what happened, on the client's clock.

    `route` picks a replica for each request when it is sent (default: round robin). The rest is as in
    `engine.simulate`. With several replicas the run has the columns `replica`; blocks per replica are those
    of the first, and all must have the same block size (UserError).
    `engine`: "fast" asks for the compiled kernel (UserError where it does not know what is asked),
    "reference" for the step-by-step path; None takes whichever is sooner done. The runs are equal.
    `bounds`: where the run ends, whatever is left. Equal as well: what the kernel simulates beyond a bound is
    thrown away, and the beginning is gone through step by step.
    """
    if not replicas:
        raise UserError("a cluster needs at least one replica")
    first = replicas[0].config
    if any(spec.config.block_size != first.block_size for spec in replicas):
        raise UserError("all replicas of a cluster need the same block_size")
    route = route or round_robin()
    asked = chosen(engine)
    watch = None if bounds is None else Watch(bounds, len(trace), on_step)
    if asked == "fast" or (asked is None and worthwhile(trace, replicas)):
        from vsim.sim.fast.simulate import attempt

        untouched = copy.deepcopy(route)  # what a route remembers, if the run is gone through again
        glance, beyond, run = on_step if watch is None else watch.glance, False, None
        try:
            run = attempt(trace, replicas, route, max_concurrency, front_end, glance)
        except BoundReachedError:
            beyond = True
        if run is not None:
            if bounds is None or bounds.hold_for(run):
                return run
            beyond = True
        route = untouched
        if engine == "fast" and not beyond:
            raise UserError("engine=fast: the compiled kernel does not know all that is asked here")
    if watch is not None:
        on_step = watch
    env = simpy.Environment(initial_time=0)
    recorder = Recorder(trace, len(replicas))
    running: list[Replica] = []

    def send(index: int) -> None:
        place = route(trace.request(index), running) if len(running) > 1 else 0
        if recorder.replica is not None:
            recorder.replica[index] = place
        running[place].receive(index)

    client = Client(env, trace, send, max_concurrency)
    # Replicas with the same HostLink object wait for each other's copies.
    links = {id(spec.host_link): simpy.Resource(env) for spec in replicas if spec.host_link}
    for number, spec in enumerate(replicas):
        replica = Replica(
            env,
            trace,
            make_scheduler(spec.config),
            spec.config,
            spec.step_model,
            recorder,
            client.finished,
            frontend_ns=round(spec.frontend_s * NS),
            front_end=front_end,
            host_link=spec.host_link,
            on_step=None if on_step is None else lambda: on_step(int(env.now), client.num_ended),
            number=number,
            link=links.get(id(spec.host_link)),
        )
        running.append(replica)
    env.process(client.run())
    for replica in running:
        env.process(replica.run())
    ended_early = None
    try:
        if watch is None:
            env.run()
        else:
            watch.run(env, lambda: client.num_ended)
    except EngineDiedError as death:
        ended_early = f"the engine died: {death}"
    except BoundReachedError as bound:
        ended_early = str(bound)
    left = len(trace) - client.num_ended
    schedulers = [replica.scheduler for replica in running]
    if left and ended_early is None:
        ended_early = (
            f"stalled: {left} of {len(trace)} requests could never be scheduled "
            f"({sum(s.num_waiting for s in schedulers)} waiting, "
            f"{sum(s.num_free_blocks for s in schedulers)} of "
            f"{sum(s.num_usable_blocks for s in schedulers)} KV blocks free)"
        )
    counters: Counter[str] = Counter()
    for scheduler in schedulers:
        counters.update(scheduler.counters)
    if first.kv_offload is not None:
        counters["offload_loaded_blocks"] = recorder.loaded_blocks
        counters["offload_stored_blocks"] = recorder.stored_blocks
    itl_ns, itl_count = recorder.gaps()
    return Run(
        origin="simulated",
        requests=recorder.request_columns(client.columns()),
        steps=recorder.step_columns(),
        itl_ns=itl_ns,
        itl_count=itl_count,
        block_size=first.block_size,
        num_gpu_blocks=schedulers[0].num_usable_blocks,
        reasons=tuple(recorder.reasons),
        tenant_names=trace.tenant_names,
        counters=dict(counters),
        preemption_spans=recorder.spans(),
        end_ns=int(env.now),
        ended_early=ended_early,
    )
