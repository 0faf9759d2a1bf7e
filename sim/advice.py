"""What binds a deployment, who was in the way, and which one change would help: each proved by simulating it.

Three questions, one method. The trace (or, of a long one, the stretch with most of its slow requests) is
replayed as it was, then again with exactly one thing different: a flag, one more replica, or without a
suspect (a giant prompt, one tenant's burst). Nothing is advised that was not replayed, and every sentence
carries the two figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.sim.advice_suspects import suspects
from vsim.sim.advice_verdicts import TAIL, Tails, Verdict, pair, verdicts
from vsim.sim.deployment import Deployment, resolve
from vsim.sim.explain import explain_tail
from vsim.sim.replay import Load, replay, step_model_for, with_preemption
from vsim.sim.run import FINISHED, Run
from vsim.sim.text import duration, number, percent, plain
from vsim.traces.arrivals import select
from vsim.traces.trace import Int64Array, Trace

SCHEMA = "vsim/advice/1"
MOST_REQUESTS = 4000  # of one replay
MOST_TOKENS = 1_000_000  # output tokens of one replay
STEPWISE = 8  # a replay without compiled code has so many times fewer of both
HELPS = 0.10  # a flag that shortens the tail by less is not worth naming
LIMITS = 0.03  # a larger KV cache that helps by less is no limit
WAITS = 0.10  # share of the tail's time below which nothing is queued for
FEWEST = 20  # finished requests below which a tail means nothing
SOME_HITS = 0.03  # the same where it at least doubles today's
HITS = 0.10  # share of prompt tokens that a change must find beyond today's hits to be named for it

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Setup:
    """What `vsim replay` was told: enough to replay it with one thing different.

    `flags` are `resolve`'s arguments as given (None: not given); `beyond` those of `with_preemption`.
    """

    model: str
    gpu: str
    flags: Mapping[str, Any]
    profile: str | None = None
    beyond: Mapping[str, Any] = field(default_factory=dict)
    overlap_swaps: bool = False
    replicas: int = 1
    route: str = "round-robin"

    def deployment(self, **changes: Any) -> Deployment:
        """The deployment with `changes` to its flags. Raises UserError for what vLLM would refuse."""
        flags = {k: v for k, v in {**self.flags, **changes}.items() if v is not None}
        return with_preemption(resolve(self.model, self.gpu, **flags), **self.beyond)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing different. `flags`: as for `resolve`; `kind`: what the change is about."""

    kind: str
    words: str
    flags: Mapping[str, Any]
    replicas: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A change replayed: tails of the requests that finished both ways, as it was and with the change."""

    change: Change
    before: Tails
    after: Tails

    @property
    def gain(self) -> float:
        """1 − geometric mean of the ratios of both tails: 0.5 is half as long."""
        return 1 - math.sqrt(self.after.product / self.before.product)

    @property
    def lengthens(self) -> bool:
        """Does either tail get longer, by more than a hundredth?"""
        pairs = (self.after.ttft_ns, self.before.ttft_ns), (self.after.e2el_ns, self.before.e2el_ns)
        return any(after > 1.01 * before for after, before in pairs)


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything found. `data()` is what a run's summary keeps, `sentences` what a person reads."""

    binds: str
    binding: str  # "kv", "seats", "budget", "prefill", ...
    verdicts: tuple[Verdict, ...]
    trials: tuple[Trial, ...]
    untried: tuple[str, ...]
    simulated: int  # requests of each replay
    of: int
    replays: int

    @property
    def best(self) -> Trial | None:
        """The flag that helps most, if any does; hardware is not a flag."""
        flags = [t for t in self.trials if t.change.replicas is None and t.gain >= HELPS]
        return max(flags, key=lambda t: t.gain, default=None)

    @property
    def next(self) -> list[Trial]:
        """Flags about something else that help as well, best first; at most two."""
        best = self.best
        kinds = {best.change.kind} if best is not None else set()
        found = []
        for trial in sorted(self.trials, key=lambda t: -t.gain):
            if trial.change.replicas is None and trial.gain >= HELPS:
                if trial.change.kind not in kinds:
                    found.append(trial)
                kinds.add(trial.change.kind)
        return found[:2]

    @property
    def sentences(self) -> tuple[str, ...]:
        said = [*_too_much_or_little(self.best), self.binds]
        said += [_accusation(v) for v in self.verdicts if v.guilty]
        best, flags = self.best, [t for t in self.trials if t.change.replicas is None]
        if best is not None:
            said.append(
                f"Of {_count(len(flags), 'flag change')} simulated one at a time, this helps most: "
                f"{best.change.words}: {_from_to(best.before, best.after)}."
            )
        else:
            tried = f"{_count(len(flags), 'change')} of one flag simulated"
            said.append(
                f"None of the {tried} shortens the tails by {percent(HELPS, 0)}."
                if flags
                else "No flag's limit was reached: no change of a flag was worth simulating."
            )
        limits = [t for t in self.trials if t is not best and _limits(t)]
        said += [_also(t) for t in limits]
        more = [t for t in self.next if t not in limits]
        said += [f"Next best: {t.change.words}: {_from_to(t.before, t.after)}." for t in more]
        for trial in self.trials:
            if trial.change.replicas is not None and trial.gain >= HELPS:
                said.append(f"{trial.change.words}: {_from_to(trial.before, trial.after)}.")
        whole = "all" if self.simulated == self.of else f"{number(self.simulated)} of"
        if self.replays:
            times = _count(self.replays, "time")
            said.append(f"Simulated for this: {whole} {number(self.of)} requests, {times}.")
        return tuple(said)

    def data(self) -> dict[str, Any]:
        """JSON-ready."""
        best, told = self.best, self.sentences
        key = {*_too_much_or_little(best), *(_accusation(v) for v in self.verdicts if v.guilty)}
        if best is not None:
            key |= {s for s in told if s.startswith("Of ") and best.change.words in s}
        key |= {_also(t) for t in self.trials if t.change.kind in ("kv", "block")}
        return {
            "schema": SCHEMA,
            "sentences": [plain(s) for s in told],
            "key": [i for i, s in enumerate(told) if s in key],  # places of those to stress
            "binding": self.binding,
            "culprits": [
                {"kind": v.suspect.kind, "name": plain(v.suspect.name)}
                | {"requests": list(v.suspect.requests[:20]), "num_requests": v.suspect.count}
                | _tails_ms(v.before, v.after)
                for v in self.verdicts
                if v.guilty
            ],
            "best": None if best is None else best.change.kind,
            "trials": [
                {"kind": t.change.kind, "change": plain(t.change.words), "gain": t.gain}
                | _tails_ms(t.before, t.after)
                for t in self.trials
            ],
            "untried": list(self.untried),
            "requests_simulated": self.simulated,
            "requests": self.of,
            "replays": self.replays,
        }


def advise(
    trace: Trace,
    setup: Setup,
    load: Load,
    run: Run | None = None,
    on_replay: Callable[[int], None] | None = None,
) -> Advice | None:
    """What binds `setup` under `trace`, and what would help; None where too few requests finish.

    `run`: the whole replay, if there is one already; of a long trace the stretch to simulate is chosen by
    it, and is the beginning without it. Bounded: each replay has at most MOST_REQUESTS requests and
    MOST_TOKENS output tokens. `on_replay` is told before each which one it is, from 1. Deterministic. Raises UserError for what `replay` refuses.
    """
    sent = load.apply(trace)
    quiet = Load(max_concurrency=load.max_concurrency, seed=load.seed, overlong=load.overlong)
    work = _Work(setup, quiet, on_replay)
    scale = _scale(setup)
    limit = _limit(sent.output_tokens, scale)
    if limit == len(sent):
        run = run or work.replay(sent)
        rows = np.arange(len(sent))
    else:
        rows = np.arange(limit) if run is None else _slow_stretch(run, sent, scale)
    if len(rows) < len(sent):
        sent_part = select(sent, rows, "")
        base = work.replay(sent_part)
    else:
        assert run is not None
        sent_part, base = sent, run
    if int((base.requests["status"] == FINISHED).sum()) < FEWEST or not len(base.steps["start_ns"]):
        return None
    binding, binds = _binding(base, setup.deployment())
    began_ns = int(sent.arrival_ns[rows[0]] - sent.arrival_ns[0])
    judged = [
        dataclasses.replace(v, suspect=v.suspect.shifted(int(rows[0]), began_ns / 1e9))
        for v in verdicts(
            base, suspects(base), lambda kept: work.replay(select(sent_part, kept, ""))
        )
    ]
    trials: list[Trial] = []
    changes, untried = _changes(setup, base, sent_part)
    everyone = np.arange(len(sent_part))
    for change in changes:
        try:
            after = work.replay(sent_part, change)
        except UserError as error:
            untried.append(f"{change.words}: vLLM would refuse it: {error}")
            continue
        trials.append(Trial(change, *pair(base, everyone, after, everyone)))
    return Advice(
        binds=binds,
        binding=binding,
        verdicts=tuple(judged),
        trials=tuple(trials),
        untried=tuple(untried),
        simulated=len(sent_part),
        of=len(sent),
        replays=work.replays,
    )


class _Work:
    """Replays, counted."""

    def __init__(self, setup: Setup, load: Load, on_replay: Callable[[int], None] | None) -> None:
        self.setup, self.load, self.replays = setup, load, 0
        self.on_replay = on_replay

    def replay(self, trace: Trace, change: Change | None = None) -> Run:
        deployment = self.setup.deployment(**(change.flags if change else {}))
        if self.on_replay is not None:
            self.on_replay(self.replays + 1)
        replicas = self.setup.replicas
        if change is not None and change.replicas is not None:
            replicas = change.replicas
        model = step_model_for(deployment, self.setup.profile)
        run = replay(
            trace,
            deployment,
            model,
            self.load,
            overlap_swaps=self.setup.overlap_swaps,
            replicas=replicas,
            route=self.setup.route,
        )
        self.replays += 1
        return run


def _limit(output_tokens: Int64Array, scale: int) -> int:
    """How many of these, in order, one replay may have."""
    total = np.cumsum(output_tokens)
    by_tokens = int(np.searchsorted(total, MOST_TOKENS // scale, side="right"))
    return min(len(output_tokens), max(1, min(MOST_REQUESTS // scale, by_tokens)))


def _scale(setup: Setup) -> int:
    """Without compiled code (docs/performance.md) a replay takes longer: a smaller part must do."""
    deployment = setup.deployment()
    config = deployment.scheduler
    stepwise = config.engine == "v0" or config.kv_offload is not None
    return STEPWISE if stepwise or deployment.data_parallel_size > 1 else 1


def _slow_stretch(run: Run, trace: Trace, scale: int) -> Int64Array:
    """Rows of a stretch as long as one replay may be, around where the slow requests took most time.

    The quarter of such a length with most time spent by slow requests, a quarter before it and what follows.
    """
    columns = run.requests
    done = columns["status"] == FINISHED
    size = _limit(trace.output_tokens, scale)
    latency = np.where(done, columns["finish_ns"] - columns["sent_ns"], 0)
    if done.any():
        latency[latency < np.percentile(latency[done], 100 * (1 - TAIL))] = 0
    total = np.concatenate([[0], np.cumsum(latency // 1000)])
    part = max(1, size // 4)
    worst = int((total[part:] - total[:-part]).argmax())
    start = max(0, min(worst - part, len(trace) - size))
    return np.arange(start, start + _limit(trace.output_tokens[start:], scale))


def _binding(run: Run, deployment: Deployment) -> tuple[str, str]:
    """(kind, sentence): what the slowest requests' time went to, waiting before work."""
    parts = explain_tail(run, 100 * (1 - TAIL)).parts_ns
    total = sum(parts.values()) or 1.0
    config = deployment.scheduler
    waits = {
        "kv": parts["wait_kv"] + parts["wait_preempting"] + parts["preempted"],
        "seats": parts["wait_seats"],
        "budget": parts["wait_budget"],
    }
    kind, most = max(waits.items(), key=lambda item: item[1])
    words = {
        "kv": f"the KV cache size ({number(config.num_gpu_blocks)} blocks of {config.block_size} tokens)",
        "seats": f"the number of seats (max_num_seqs={config.max_num_seqs})",
        "budget": f"the step's token budget (max_num_batched_tokens={config.max_num_batched_tokens})",
    }
    what = {
        "kv": "was spent waiting for room in it or preempted",
        "seats": "was spent waiting for one",
        "budget": "was spent waiting while it was used up",
    }
    if most / total >= WAITS:
        share = percent(most / total, 0)
        return kind, f"What binds is {words[kind]}: {share} of the slowest 5 %'s time {what[kind]}."
    work = {
        "prefill": ("prefill", parts["prefill"]),
        "decode": ("decode", parts["decode"] + parts["decode_host"]),
        "stalls": ("decode beside others' prompt chunks", parts["decode_stalled"]),
    }
    kind, (name, most) = max(work.items(), key=lambda item: item[1][1])
    return kind, (
        "The slowest 5 % spend their time in the steps themselves, not waiting "
        f"({percent(most / total, 0)} of it is {name})."
    )


def _changes(setup: Setup, run: Run, trace: Trace) -> tuple[list[Change], list[str]]:
    """Single changes worth a replay, and sentences on those that are not: their limit was never reached."""
    deployment = setup.deployment()
    config, steps = deployment.scheduler, run.steps
    found: list[Change] = []
    untried: list[str] = []

    blocks = config.num_gpu_blocks
    caching = config.enable_prefix_caching and (
        trace.prefix_ids is not None or trace.session is not None
    )
    if steps["kv_blocks_used"].max() >= 0.9 * run.num_gpu_blocks or caching:
        larger = math.ceil(1.25 * blocks)
        found.append(
            Change(
                "kv",
                f"a KV cache 25 % larger (--num-gpu-blocks-override {larger} instead of {blocks}{_how_to_get(deployment)})",
                {"num_gpu_blocks_override": larger},
            )
        )
    else:
        untried.append("a larger KV cache: it was never 90 % full")
    seats, budget = config.max_num_seqs, config.max_num_batched_tokens
    if steps["running"].max() >= seats:
        found.append(_flag("seats", "max_num_seqs", seats, 2 * seats))
    else:
        untried.append(f"more seats: max_num_seqs={seats} was never reached")
    half = seats // 2
    if half and steps["running"].max() > half:
        found.append(_flag("seats", "max_num_seqs", seats, half))
    else:
        untried.append(f"half the seats: no more than {half} were ever taken")
    if steps["tokens"].max() >= budget:
        found.append(_flag("budget", "max_num_batched_tokens", budget, 2 * budget))
    else:
        untried.append(f"a larger token budget: max_num_batched_tokens={budget} was never used up")
    if steps["tokens"].max() > budget // 2 and budget // 2 >= seats:
        found.append(_flag("budget", "max_num_batched_tokens", budget, budget // 2))
    if config.engine == "v1" and config.enable_chunked_prefill:
        now = config.long_prefill_token_threshold
        other = 0 if now else max(1, budget // 4)
        if now or int(trace.prompt_tokens.max()) > other:
            found.append(_flag("chunks", "long_prefill_token_threshold", now, other))
    if not config.enable_prefix_caching and (
        trace.prefix_ids is not None or trace.session is not None
    ):
        found.append(Change("caching", "--enable-prefix-caching", {"enable_prefix_caching": True}))
    size = config.block_size
    if caching or size > 32:
        smaller = 16 if size > 16 else 2 * size
        flags: dict[str, Any] = {"block_size": smaller}
        if setup.flags.get("num_gpu_blocks_override") is not None:
            flags["num_gpu_blocks_override"] = max(1, blocks * size // smaller)
        found.append(
            Change(
                "block", f"block size {smaller} instead of {size} (--block-size {smaller})", flags
            )
        )
    if deployment.data_parallel_size == 1:
        more = setup.replicas + 1
        found.append(
            Change("replica", f"One more replica ({more} instead of {setup.replicas})", {}, more)
        )
    return found, untried


def _flag(kind: str, name: str, now: int, then: int) -> Change:
    return Change(kind, f"--{name.replace('_', '-')} {then} instead of {now}", {name: then})


def _how_to_get(deployment: Deployment) -> str:
    """Whether this GPU holds a quarter more KV cache, and by which flag."""
    capacity = deployment.capacity
    if deployment.flags.get("num_gpu_blocks_override") is not None or not capacity.requested_bytes:
        return ""
    total = capacity.requested_bytes / deployment.gpu_memory_utilization
    needed = deployment.gpu_memory_utilization + 0.25 * capacity.available_bytes / total
    if needed <= 0.98:
        return f"; --gpu-memory-utilization {math.ceil(needed * 100) / 100:g} gives about that"
    return "; this GPU does not hold it: an FP8 KV cache, more tensor parallelism or a larger GPU would"


def _from_to(before: Tails, after: Tails) -> str:
    text = (
        f"the slowest 5 % are complete within {_s(after.e2el_ns)} on average instead of {_s(before.e2el_ns)}, "
        f"and see their first token after {_s(after.ttft_ns)} instead of {_s(before.ttft_ns)}"
    )
    if abs(after.hits - before.hits) >= 0.01:
        text += f", with {percent(after.hits, 0)} of prompt tokens from the prefix cache instead of {percent(before.hits, 0)}"
    return text


def _finds_more(trial: Trial) -> bool:
    before, after = trial.before.hits, trial.after.hits
    many = after - before >= HITS or (after - before >= SOME_HITS and after >= 2 * before)
    return trial.change.replicas is None and many


def _limits(trial: Trial) -> bool:
    """Is what was changed a limit, though not the one whose change helps most?

    A larger KV cache that nobody needs changes nothing at all, so a small gain is no accident; a gain of
    the budget's may be one.
    """
    if trial.change.kind == "kv" and trial.gain >= LIMITS and not trial.lengthens:
        return True
    return _finds_more(trial) and trial.gain > -LIMITS


_BLOCK = "The block size is too large for the beginnings that prompts share"


def _also(trial: Trial) -> str:
    what = {"kv": "The KV cache size is a limit too", "block": _BLOCK}
    said = what.get(trial.change.kind, "This finds more in the prefix cache")
    return f"{said}: with {trial.change.words} {_from_to(trial.before, trial.after)}."


def _too_much_or_little(best: Trial | None) -> list[str]:
    """What is wrong, in a word, where the change that helps most says so."""
    if best is None:
        return []
    if best.change.kind == "kv":
        return ["The KV cache size is too small for this load."]
    if best.change.kind == "block" and _finds_more(best):
        return [f"{_BLOCK}."]
    return []


def _accusation(verdict: Verdict) -> str:
    them = "it" if verdict.suspect.count == 1 else "them"
    where = f"simulated without {them}, of the others"
    if verdict.others:
        # Figures with and without it, both without the other suspects.
        many = _count(verdict.others, "other suspect")
        where = (
            f"where the {many} {'is' if verdict.others == 1 else 'are'} taken out, without {them}"
        )
    return f"{verdict.suspect.words} in everyone's way: {where} {_from_to(verdict.before, verdict.after)}."


def _tails_ms(before: Tails, after: Tails) -> dict[str, Any]:
    return {
        side: {"ttft_ms": t.ttft_ns / 1e6, "e2el_ms": t.e2el_ns / 1e6, "hit_rate": t.hits}
        for side, t in (("before", before), ("after", after))
    }


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _s(ns: float) -> str:
    return duration(ns / 1e9)
