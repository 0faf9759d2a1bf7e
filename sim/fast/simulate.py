"""What `cluster.simulate_cluster` runs on compiled code, and what it must leave to the step-by-step path.

`attempt` returns the run, equal to the reference path's in every byte, or None where something is asked
that the kernel does not know: then nothing has happened, and the caller goes step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vsim.models.kernel_params import KernelParams, export
from vsim.sim.config import MAX_BLOCKS, KVGroup, SchedulerConfig
from vsim.sim.content import STREAM_TOKENS
from vsim.sim.fast import places as kernel
from vsim.sim.fast.columns import Columns
from vsim.sim.fast.compiled import CompileError, entry
from vsim.sim.fast.gaps import Gaps
from vsim.sim.front_end import TOO_LONG, FrontEnd
from vsim.sim.kv_groups import make_groups
from vsim.sim.router import (
    PowerOfTwo,
    RoundRobin,
    Route,
    home_of,
    kv_aware,
    least_requests,
    least_tokens,
    prefix_affinity,
    session_affinity,
)
from vsim.sim.run import STEP_COLUMNS, Column, Run
from vsim.sim.versions import v1_rules
from vsim.traces.trace import Trace

if TYPE_CHECKING:
    from vsim.sim.cluster import ReplicaSpec

NS = 1_000_000_000
MAX_REPLICAS = 256  # the next event is looked for among all of them
MAX_TABLE = 1 << 29  # block table entries; pages that nobody touches cost nothing
MAX_MEMBERS = 1 << 26  # sequences in all batches in flight
ROWS = 1 << 15  # steps between two looks at the clock

# Attributes of `_World`, in the order of the arguments of `kernel.advance` (a test compares).
ARRAYS = (
    "cfg",
    "glob",
    "rep",
    "hot",
    "free_slots",
    "slot_of",
    "running",
    "table",
    "free_rows",
    "heap",
    "after",
    "offsets",
    "nodes",
    "pool",
    "keys",
    "chains",
    "arrivals",
    "prompts",
    "answers",
    "caps",
    "priority",
    "refused",
    "aborted",
    "sent",
    "replica",
    "fixed",
    "pairs",
    "marks",
    "counts",
    "ends",
    "reason_order",
    "rows",
    "gaps",
    "spans",
    "fly",
    "members",
    "scratch",
    "stages",
    "ints",
    "floats",
    "follower_at",
    "followers",
    "think",
    "held_back",
    "thinking",
    "groups",
    "grouped",
    "odd",
    "joined",
    "classes",
    "calendar",
    "preempted",
    "prefix_table",  # of `kernel.entry` alone
)

Ints = npt.NDArray[np.int64]


def covers(
    trace: Trace,
    replicas: Sequence[ReplicaSpec],
    route: Route | None,
    front_end: Callable[..., str | None] | None,
) -> bool:
    """Does the kernel know everything that is asked, as far as a glance tells?"""
    first = replicas[0]
    config = first.config
    return (
        config.engine == "v1"
        and config.kv_offload is None
        and (_one_group(config) or _no_shared_content(trace) or not config.enable_prefix_caching)
        and config.num_gpu_blocks <= MAX_BLOCKS
        and config.num_cpu_blocks <= MAX_BLOCKS
        and 0 < len(trace) < 1 << 31
        and trace.prefix_block_tokens < STREAM_TOKENS
        and (trace.sessions is None or _plain_turns(trace))
        and (front_end is None or type(front_end) is FrontEnd)
        and len(replicas) <= MAX_REPLICAS
        and all(
            spec.config == config
            and spec.step_model is first.step_model
            and spec.frontend_s == first.frontend_s
            for spec in replicas[1:]
        )
        and (len(replicas) == 1 or _route_code(route) is not None)
    )


def _one_group(config: SchedulerConfig) -> bool:
    """One group of full attention. Of several, or of a window, the kernel counts blocks, but knows none."""
    return config.kv_groups == (KVGroup(),)


def _no_shared_content(trace: Trace) -> bool:
    return trace.prefix_ids is None or not len(trace.prefix_ids) or not trace.prefix_block_tokens


def _plain_turns(trace: Trace) -> bool:
    """No turn waits for a row that does not exist, or thinks for less than no time."""
    assert trace.sessions is not None
    after, think = trace.sessions.after, trace.sessions.think_ns
    return bool((after < len(trace)).all() and (think[after >= 0] >= 0).all())


def attempt(
    trace: Trace,
    replicas: Sequence[ReplicaSpec],
    route: Route | None,
    max_concurrency: int | None,
    front_end: Callable[..., str | None] | None,
    on_step: Callable[[int, int], None] | None,
) -> Run | None:
    """The run of `simulate_cluster` with these arguments, or None: not covered, nothing has happened."""
    config, n = replicas[0].config, len(trace)
    if not covers(trace, replicas, route, front_end):
        return None
    usable = max(config.num_gpu_blocks - 1, 0)
    max_running = min(config.max_num_active_seqs or config.max_num_seqs, n, usable)
    depth = config.max_concurrent_batches
    width = -(-config.max_model_len // config.block_size) + 2
    if (
        max_running < 1
        or len(replicas) * max_running * width > MAX_TABLE
        or len(replicas) * max_running * (depth + 2) > MAX_MEMBERS
    ):
        return None
    budget = min(
        config.max_num_scheduled_tokens or config.max_num_batched_tokens,
        config.max_num_batched_tokens,
    )
    params = export(
        replicas[0].step_model, min(budget, max_running * config.max_model_len), max_running
    )
    if params is None:
        return None
    try:
        entry()
    except CompileError:
        return None
    # Without shared content a block is found again only by a request that was preempted.
    once = config.enable_prefix_caching and _no_shared_content(trace)
    drawn = route.draws() if isinstance(route, PowerOfTwo) else None
    for counts_only in (True, False) if once else (False,):
        if drawn is not None and isinstance(route, PowerOfTwo):
            route.draws(drawn)
        world = _World(
            trace, replicas, route, max_concurrency, front_end, max_running, params, counts_only
        )
        run = world.run(on_step)
        if run is not None or not world.blocks_matter or not _one_group(config):
            return run
    return None


def _route_code(route: Route | None) -> int | None:
    """The kernel's number of a route; None: it does not know it."""
    if route is None or type(route) is RoundRobin:
        return 0
    if type(route) is PowerOfTwo:
        return 3
    plain: tuple[tuple[Route, int], ...] = (
        (least_requests, 1),
        (least_tokens, 2),
        (prefix_affinity, 4),
        (session_affinity, 4),
        (kv_aware, 5),
    )
    return next((code for known, code in plain if route is known), None)


class _World:
    """The kernel's arrays, and the run that they hold in the end."""

    def __init__(
        self,
        trace: Trace,
        replicas: Sequence[ReplicaSpec],
        route: Route | None,
        max_concurrency: int | None,
        front_end: Callable[..., str | None] | None,
        max_running: int,
        params: KernelParams,
        counts_only: bool,
    ) -> None:
        self.entry = entry()
        self.trace, self.replicas, self.route, self.params = trace, replicas, route, params
        self.ints, self.floats = params.integers, params.floats
        self.config = config = replicas[0].config
        self.caching = config.enable_prefix_caching and not counts_only
        self.counts_only = counts_only
        n, count = len(trace), len(replicas)
        depth = config.max_concurrent_batches
        self.most = most = max_running * (depth + 2)
        self.cfg = self._settings(max_concurrency, max_running)
        zeros = np.zeros
        self.glob = zeros(kernel.GLOBALS, dtype=np.int64)
        self.glob[[kernel.G_GATE_HEAD, kernel.G_GATE_TAIL, kernel.G_TURN]] = -1
        self.glob[kernel.G_SEQ] = count + 1  # the client begins, then each replica
        self.rep = zeros((count, kernel.REPLICA), dtype=np.int64)
        self.rep[:, kernel.R_SEQ] = np.arange(1, count + 1)
        for place in ("WAIT_HEAD", "WAIT_TAIL", "INBOX_HEAD", "INBOX_TAIL"):
            self.rep[:, getattr(kernel, f"R_{place}")] = -1
        self.rep[:, [kernel.R_ODD, kernel.R_RESERVE]] = -1
        self.rep[:, kernel.R_FREE] = max(config.num_gpu_blocks - 1, 0)
        self.rep[:, kernel.R_ROWS_FREE] = max_running
        self.free_rows = np.arange(count * max_running, dtype=np.int64)[::-1]
        self.free_rows = np.ascontiguousarray(self.free_rows.reshape(count, max_running))
        self.hot = np.full((0, kernel.HOT), -1, dtype=np.int64)
        self.free_slots = zeros(0, dtype=np.int64)
        rules = make_groups(config)
        self.groups = np.array(
            [
                (g.block_size, g.window or 0, -1 if g.admission_cap is None else g.admission_cap)
                for g in rules
            ],
            dtype=np.int64,
        )
        self.grouped = zeros((0, 0 if _one_group(config) else 2 * len(rules)), dtype=np.int64)
        self._more_slots(most * count)
        self.slot_of = np.full(n, -1, dtype=np.int32)
        self.after = np.full(n, -1, dtype=np.int32)
        self.running = zeros((count, max_running + 1), dtype=np.int64)
        priority = config.policy == "priority"
        self.heap = zeros((count, n if priority else 0), dtype=np.int32)
        self._blocks()
        self._shared_prefixes()
        self.arrivals = _int64(trace.arrival_ns)
        if trace.sessions is not None:
            self.arrivals = self.arrivals.copy()  # turns come when they come
        self._turns()
        self.prompts, self.answers = _int64(trace.prompt_tokens), _int64(trace.output_tokens)
        self.caps = self.answers if trace.max_tokens is None else _int64(trace.max_tokens)
        some = trace.priority
        self.priority = zeros(n if priority else 0, dtype=np.int32)
        if priority and some is not None:
            self.priority[:] = some
        nobody = zeros(0, dtype=np.bool_)
        self.refused = front_end.refused(trace) if isinstance(front_end, FrontEnd) else nobody
        self.aborted = (
            nobody if trace.aborted is None else np.ascontiguousarray(trace.aborted, dtype=np.bool_)
        )
        self.sent = np.full(n, -1, dtype=np.int64)
        self.replica = np.full(n if count > 1 else 0, -1, dtype=np.int32)
        self._route_choices()
        self.marks = np.full((3, n), -1, dtype=np.int64)
        self.counts = zeros((3, n), dtype=np.int64)
        self.preempted = zeros(n, dtype=np.int32)
        self.ends = np.empty((2, n), dtype=np.int16)
        self.ends[0], self.ends[1] = 2, -1
        self.reason_order = np.full(3, -1, dtype=np.int64)
        self.rows = np.empty((ROWS + depth + 2, kernel.ROW_COLUMNS), dtype=np.int64)
        self.gaps = np.empty((max(1 << 16, 4 * most), 2), dtype=np.int64)
        self.spans = np.empty((max(1 << 12, 4 * most), 3), dtype=np.int64)
        self.fly = zeros((count, depth, kernel.FLY), dtype=np.int64)
        self.members = zeros((count, depth, max_running, kernel.MEMBER), dtype=np.int64)
        self.scratch = zeros(2 * most + int(self.cfg[kernel.C_TABLE]), dtype=np.int64)
        self._steady(max_running)
        self.stages = zeros((count, config.pipeline_parallel_size), dtype=np.int64)

    def _settings(self, max_concurrency: int | None, max_running: int) -> Ints:
        config, trace = self.config, self.trace
        rules = v1_rules(config)
        cfg = np.zeros(kernel.SETTINGS, dtype=np.int64)
        block_size = config.block_size
        ids = trace.prefix_block_tokens if trace.prefix_ids is not None else 0
        size = 64
        while size < 2 * config.num_gpu_blocks:
            size *= 2
        next_decode = 0
        if config.async_scheduling and config.v2_model_runner:
            next_decode = config.pipeline_parallel_size
        for name, value in {
            "REQUESTS": len(trace),
            "REPLICAS": len(self.replicas),
            "BLOCK": block_size,
            "BLOCKS": max(config.num_gpu_blocks, 1),
            "MAX_RUNNING": max_running,
            "BUDGET": config.max_num_scheduled_tokens or config.max_num_batched_tokens,
            "INPUT_BUDGET": config.max_num_batched_tokens,
            "MAX_LEN": config.max_model_len,
            "CACHING": self.caching,
            "LOOKS_UP": config.enable_prefix_caching,
            "COUNTS_ONLY": self.counts_only,
            "CHUNKS": config.enable_chunked_prefill or not rules.can_keep_prompts_whole,
            "RESERVES": config.scheduler_reserve_full_isl and rules.reserves_full_isl,
            "WATERMARK": int(config.watermark * config.num_gpu_blocks),
            "LONG": config.long_prefill_token_threshold,
            "ADAPTIVE": config.long_prefill_token_threshold_adaptive,
            "LONE": rules.uncaps_lone_request,
            "LONGEST": config.max_model_len - rules.length_margin,
            "UNKEYED_FIRST": rules.reuses_unkeyed_blocks_first,
            "STALE": rules.tracks_stale_output,
            "DROPS": rules.drops_output_of_preempted,
            "KEEPS_PLACE": rules.keeps_place_after_any_victim,
            "ASYNC": config.async_scheduling,
            "NEXT": next_decode,
            "DEPTH": config.max_concurrent_batches,
            "STAGES": config.pipeline_parallel_size,
            "FRONTEND_NS": round(self.replicas[0].frontend_s * NS),
            "GATE": -1 if max_concurrency is None else max_concurrency,
            "PRIORITY": config.policy == "priority",
            "ROUTE": _route_code(self.route) or 0,
            "IDS_TOKENS": ids if self.caching else 0,
            "IDS_KEYS": ids // block_size + 2,
            "HASH": size if self.caching else 1,
            "GROUPS": not _one_group(config),
            "SESSIONS": trace.sessions is not None,
            "TABLE": -(-config.max_model_len // block_size) + 2,
            # Pipeline stages take turns, and windows give back blocks in mid-decode.
            "STEADY": config.pipeline_parallel_size == 1 and _one_group(config),
        }.items():
            cfg[getattr(kernel, f"C_{name}")] = int(value)
        return cfg

    def _blocks(self) -> None:
        """The pool, all free in order of number; block 0 of each replica closes its ring."""
        count = len(self.replicas)
        caching, blocks = self.caching, int(self.cfg[kernel.C_BLOCKS])
        size = int(self.cfg[kernel.C_HASH])
        total = count * blocks if caching else 0
        self.pool = np.full((total, kernel.POOL), -1, dtype=np.int32)
        self.keys = np.zeros(total, dtype=np.int64)
        self.chains = np.full(2 * count * size, -1, dtype=np.int32)
        max_running = int(self.cfg[kernel.C_MAX_RUNNING])
        width = int(self.cfg[kernel.C_TABLE]) if caching else 0
        self.table = np.empty((count * max_running, width), dtype=np.int32)
        if caching:
            for r in range(count):
                ring = np.arange(blocks, dtype=np.int32) + r * blocks
                self.pool[ring, kernel.B_NEXT] = np.roll(ring, -1)
                self.pool[ring, kernel.B_BEFORE] = np.roll(ring, 1)
            self.pool[:, kernel.B_REFS] = 0

    def _shared_prefixes(self) -> None:
        trace = self.trace
        self.offsets = self.nodes = np.zeros(0, dtype=np.int64)
        self.prefix_table = np.zeros((0, 3), dtype=np.int64)
        covered = int(self.cfg[kernel.C_IDS_TOKENS])
        if covered and trace.prefix_ids is not None and trace.prefix_offsets is not None:
            self.offsets = _int64(trace.prefix_offsets)
            self.nodes = np.array(trace.prefix_ids, dtype=np.int64)  # ids, until they are numbered

    def _steady(self, max_running: int) -> None:
        """Room for what the kernel knows of steady requests."""
        count, depth = len(self.replicas), self.config.max_concurrent_batches
        together = bool(self.cfg[kernel.C_STEADY])
        self.odd = np.zeros((count, max_running + 1), dtype=np.int64)
        self.joined = np.zeros((count, depth, max_running), dtype=np.int64)
        self.classes = np.zeros((count, self.config.block_size), dtype=np.int64)
        # A request's last steady step is at most so many steps ahead; those on their way stay listed.
        most = min(int(np.minimum(self.answers, self.caps).max()), self.config.max_model_len)
        self.cfg[kernel.C_CALENDAR] = max(most, 1) + depth + 2
        places = int(self.cfg[kernel.C_CALENDAR]) if together else 0
        self.calendar = np.full((count, places), -1, dtype=np.int32)

    def _turns(self) -> None:
        """Who waits for whom: `followers` of row i from `follower_at[i]` on, in order of rows."""
        sessions, n = self.trace.sessions, len(self.trace)
        self.follower_at = self.think = np.zeros(0, dtype=np.int64)
        self.followers = self.held_back = np.zeros(0, dtype=np.int32)
        self.thinking = np.zeros((0, 3), dtype=np.int64)
        if sessions is None:
            return
        waits = np.flatnonzero(sessions.after >= 0)
        before = sessions.after[waits]
        self.followers = waits[np.argsort(before, kind="stable")].astype(np.int32)
        counted = np.bincount(before, minlength=n)
        self.follower_at = np.concatenate([[0], np.cumsum(counted)]).astype(np.int64)
        self.think = np.full(n, -1, dtype=np.int64)
        self.think[waits] = sessions.think_ns[waits]
        self.held_back = np.zeros(len(waits) + 1, dtype=np.int32)
        self.thinking = np.zeros((len(waits) + 1, 3), dtype=np.int64)

    def _route_choices(self) -> None:
        """What a route decides without looking at the replicas: draws, and homes of prefixes."""
        trace, route, count = self.trace, self.route, len(self.replicas)
        self.fixed = np.zeros(0, dtype=np.int32)
        self.pairs = np.zeros((0, 2), dtype=np.int32)
        if count == 1:
            return
        if isinstance(route, RoundRobin):
            self.glob[kernel.G_TURN] = route.turn
        elif isinstance(route, PowerOfTwo):
            self.glob[kernel.G_TURN] = 0
            drawn = [route.draw(count) for _ in range(len(trace))]
            self.pairs = np.array(drawn, dtype=np.int32).reshape(-1, 2)
        elif route is prefix_affinity or route is session_affinity:
            self.fixed = np.full(len(trace), -1, dtype=np.int32)
            has: npt.NDArray[Any] = np.zeros(0, dtype=np.int64)
            contents: npt.NDArray[Any] = has
            if route is session_affinity and trace.session is not None:
                has = np.flatnonzero(trace.session >= 0)
                contents = trace.session[has]
            elif route is prefix_affinity and trace.prefix_ids is not None:
                assert trace.prefix_offsets is not None
                has = np.flatnonzero(np.diff(trace.prefix_offsets) > 0)
                contents = trace.prefix_ids[trace.prefix_offsets[has]]
            if len(has):
                firsts, which = np.unique(contents, return_inverse=True)
                homes = np.array([home_of(int(c), count) for c in firsts], dtype=np.int32)
                self.fixed[has] = homes[which]

    def _more_slots(self, least: int) -> None:
        """Room for more requests that were admitted and have not ended."""
        old, free = len(self.hot), int(self.glob[kernel.G_SLOTS])
        new = max(2 * old, 2 * least)
        hot = np.full((new, kernel.HOT), -1, dtype=np.int64)
        hot[:old] = self.hot
        slots = np.empty(new, dtype=np.int64)
        slots[: new - old] = np.arange(new - 1, old - 1, -1)
        slots[new - old : new - old + free] = self.free_slots[:free]
        grouped = np.zeros((new, self.grouped.shape[1]), dtype=np.int64)
        grouped[:old] = self.grouped
        self.hot, self.free_slots, self.grouped = hot, slots, grouped
        self.glob[kernel.G_SLOTS] = new - old + free

    def run(self, on_step: Callable[[int, int], None] | None) -> Run | None:
        glob = self.glob
        several = len(self.replicas) > 1
        steps = Columns(
            STEP_COLUMNS | {"emitted": "int32"} | ({"replica": "int32"} if several else {})
        )
        gaps = Gaps()
        spans: list[Ints] = []
        if len(self.nodes):
            size = 1 << (2 * len(self.nodes)).bit_length()
            self.prefix_table = np.full((size, 3), -1, dtype=np.int64)
            self._advance(task=1)
            self.prefix_table = np.zeros((0, 3), dtype=np.int64)
        going = True
        while going:
            if glob[kernel.G_SLOTS] < self.most:
                self._more_slots(self.most)
            going = self._advance()
            if glob[kernel.G_ERROR]:
                return None  # the step model itself says what is wrong with it
            self._drain_rows(steps)
            gaps.add(self.gaps[: glob[kernel.G_GAPS]])
            spans.append(self.spans[: glob[kernel.G_SPANS]].copy())
            glob[[kernel.G_ROWS, kernel.G_GAPS, kernel.G_SPANS]] = 0
            if on_step is not None:
                on_step(int(glob[kernel.G_NOW]), int(glob[kernel.G_ENDED]))
        self._note_model()
        itl_ns, itl_count = gaps.result()
        requests = self._request_columns()
        # Room for what is still to be made of the run.
        self.slot_of = self.after = np.zeros(0, dtype=np.int32)
        return Run(
            origin="simulated",
            requests=requests,
            steps=steps.result(),
            itl_ns=itl_ns,
            itl_count=itl_count,
            block_size=self.config.block_size,
            num_gpu_blocks=max(self.config.num_gpu_blocks - 1, 0),
            reasons=self._reasons(),
            tenant_names=self.trace.tenant_names,
            counters=self._counters(),
            preemption_spans=np.concatenate(spans).reshape(-1, 3),
            end_ns=int(glob[kernel.G_NOW]),
            ended_early=self._ended_early(),
        )

    @property
    def blocks_matter(self) -> bool:
        """Did a run that only counted blocks come to where it matters which?"""
        return bool(self.glob[kernel.G_ERROR] == kernel.BLOCKS_MATTER)

    def _advance(self, task: int = 0) -> bool:
        """The kernel's next slice. `self` keeps the arrays alive whose addresses it is given."""
        arrays = [getattr(self, name) for name in ARRAYS]
        places = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
        dims = np.zeros((len(arrays), 4), dtype=np.int64)
        for row, array in zip(dims, arrays, strict=True):
            assert array.flags.c_contiguous
            row[: array.ndim] = array.shape
        return self.entry(places.ctypes.data, dims.ctypes.data, task)

    def _drain_rows(self, steps: Columns) -> None:
        rows = self.rows[: self.glob[kernel.G_ROWS]]
        places = [name for name in STEP_COLUMNS if name != "swapped_blocks"]
        places += ["emitted", "replica"]
        steps.add(
            len(rows),
            {name: rows[:, places.index(name)] for name in steps.names if name in places},
        )

    def _note_model(self) -> None:
        loaded, glob = self.params.loaded, self.glob
        if loaded is None:
            return
        loaded.steps += int(glob[kernel.G_STEPS])
        loaded.steps_outside += int(glob[kernel.G_OUTSIDE])
        for place, name in enumerate(loaded.calibration.domain.to_json()):
            count = int(glob[kernel.G_BEYOND + place])
            if count:
                loaded.outside[name] = loaded.outside.get(name, 0) + count

    def _request_columns(self) -> dict[str, Column]:
        trace, n = self.trace, len(self.trace)
        # Those that never ended still stand in their slots.
        alive = self.hot[self.slot_of[self.slot_of >= 0]]
        rows = alive[:, kernel.H_REQUEST]
        self.counts[0, rows] = alive[:, kernel.H_KNOWN] - alive[:, kernel.H_PROMPT]
        self.preempted[rows] = alive[:, kernel.H_PREEMPTIONS]
        zeros = np.zeros(n, dtype=np.int32)
        columns: dict[str, Any] = {
            "request": np.arange(n, dtype=np.int64),
            "arrival_ns": self.arrivals,
            "sent_ns": self.sent,
            "first_scheduled_ns": self.marks[0],
            "first_token_ns": self.marks[1],
            "finish_ns": self.marks[2],
            "prompt_tokens": self.prompts,
            "output_tokens": self.counts[0],
            "cached_tokens": self.counts[1],
            "preemptions": self.preempted,
            "recomputed_tokens": self.counts[2],
            "status": self.ends[0].astype(np.int8),
            "reason": self.ends[1],
            "tenant": zeros if trace.tenant is None else np.asarray(trace.tenant, dtype=np.int32),
            "priority": zeros
            if trace.priority is None
            else np.asarray(trace.priority, dtype=np.int32),
        }
        if len(self.replicas) > 1:
            columns["replica"] = self.replica
        return columns

    def _reasons(self) -> tuple[str, ...]:
        texts = (
            TOO_LONG,
            "prompt is empty",
            f"prompt is not below max_model_len={self.config.max_model_len}",
        )
        order = self.reason_order.tolist()
        seen = sorted((place, code) for code, place in enumerate(order) if place >= 0)
        return tuple(texts[code] for _, code in seen)

    def _counters(self) -> dict[str, int]:
        total = self.rep.sum(axis=0)
        return {
            "prefix_cache_queries_tokens": int(total[kernel.R_QUERIES]),
            "prefix_cache_hits_tokens": int(total[kernel.R_HITS]),
            "preempted_prefix_cache_queries_tokens": int(total[kernel.R_QUERIES_AGAIN]),
            "preempted_prefix_cache_hits_tokens": int(total[kernel.R_HITS_AGAIN]),
            "preemptions": int(total[kernel.R_PREEMPTIONS]),
            "recomputed_tokens": int(total[kernel.R_RECOMPUTED]),
        }

    def _ended_early(self) -> str | None:
        n = len(self.trace)
        left = n - int(self.glob[kernel.G_ENDED])
        if not left:
            return None
        total = self.rep.sum(axis=0)
        usable = max(self.config.num_gpu_blocks - 1, 0) * len(self.replicas)
        return (
            f"stalled: {left} of {n} requests could never be scheduled "
            f"({int(total[kernel.R_WAITING])} waiting, {int(total[kernel.R_FREE])} of "
            f"{usable} KV blocks free)"
        )


def _int64(values: npt.NDArray[Any]) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int64)
