"""Arrival process x lengths, tenants, shared system prompts and conversations -> `Trace`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.traces.lengths import Lengths
from vsim.traces.processes import Arrivals, draw
from vsim.traces.trace import Int64Array, Sessions, Trace, TraceSource

BLOCK_TOKENS = 16
Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Conversation:
    """Multi-turn sessions: each arrival opens one; later turns follow after a pause.

    `turns`: how many turns; `think_s`: mean of the exponential pause between an answer and the next question.
    Each turn's prompt is all that was said before plus a new message.
    """

    turns: Lengths
    think_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What to make. `joint` replaces both lengths by pairs drawn from a real trace's rows."""

    arrivals: Arrivals
    prompt: Lengths | None = None
    output: Lengths | None = None
    joint: tuple[Int64Array, Int64Array] | None = None
    conversation: Conversation | None = None
    system_prompt_tokens: int = 0
    system_prompts: int = 1
    tenants: dict[str, float] = field(default_factory=dict)  # name -> share


def generate(workload: Workload, seed: int = 0, name: str = "generated") -> Trace:
    """Make a trace; the same workload and seed give the same trace.

    Raises UserError for parameters that can't be, or if no request comes out.
    """
    rng = np.random.default_rng(seed)
    opening_s = draw(workload.arrivals, rng)
    if not len(opening_s):
        raise UserError("no request came out: the rate is too low for the duration")
    if workload.system_prompt_tokens < 0 or workload.system_prompts < 1:
        raise UserError("a shared system prompt needs a length >= 0 and a number >= 1")
    count = len(opening_s)
    turns = np.ones(count, dtype=np.int64)
    if workload.conversation is not None:
        turns = workload.conversation.turns.draw(rng, count)
        if int(turns.max()) > 10_000:
            raise UserError("a conversation of more than 10,000 turns is not plausible")
    total = int(turns.sum())
    message, output = _lengths(workload, rng, total)
    source = TraceSource(name, "generated")
    if workload.conversation is None and not workload.system_prompt_tokens and not workload.tenants:
        return _unrelated(workload, opening_s, message, output, source, seed)
    builder = _Builder(workload, rng, opening_s, turns, message, output)
    return builder.trace(source, seed)


def _drawn(workload: Workload, seed: int) -> str:
    return f"Requests are drawn with seed {seed}: {workload.arrivals.kind} arrivals."


def _unrelated(
    workload: Workload,
    opening_s: npt.NDArray[np.float64],
    prompt: Int64Array,
    output: Int64Array,
    source: TraceSource,
    seed: int,
) -> Trace:
    """Requests that share nothing: what `_Builder` would make, in a fraction of its memory."""
    opening_s *= 1e9
    time = np.round(opening_s, out=opening_s).astype(np.int64)
    if (time[1:] < time[:-1]).any():
        order = np.argsort(time, kind="stable")
        time, prompt, output = time[order], prompt[order], output[order]
    time -= time[0]
    return Trace(time, prompt, output, source, assumptions=(_drawn(workload, seed),))


def _lengths(workload: Workload, rng: Rng, total: int) -> tuple[Int64Array, Int64Array]:
    if workload.joint is not None:
        rows = rng.integers(0, len(workload.joint[0]), total)
        return workload.joint[0][rows], workload.joint[1][rows]
    if workload.prompt is None or workload.output is None:
        raise UserError("give prompt and output lengths, or a trace to take them from")
    return workload.prompt.draw(rng, total), workload.output.draw(rng, total)


class _Builder:
    """Lays turns out in time and gives prompts their content ids."""

    def __init__(
        self,
        workload: Workload,
        rng: Rng,
        opening_s: npt.NDArray[np.float64],
        turns: Int64Array,
        message: Int64Array,
        output: Int64Array,
    ) -> None:
        self.workload = workload
        total = len(message)
        first = np.concatenate(([0], np.cumsum(turns)[:-1]))
        self.session = np.repeat(np.arange(len(turns)), turns)
        self.turn = np.arange(total) - first[self.session]
        self.output = output
        self.system = np.zeros(len(turns), dtype=np.int64)
        if workload.system_prompt_tokens and workload.system_prompts > 1:
            self.system = rng.integers(0, workload.system_prompts, len(turns))
        # Context before a turn: the system prompt and all messages and answers of the session so far.
        said = message + output
        before = np.cumsum(said) - said
        context = before - before[first][self.session]
        self.prompt = workload.system_prompt_tokens + context + message
        think = np.zeros(total, dtype=np.int64)
        if workload.conversation is not None and (self.turn > 0).any():
            pause = workload.conversation.think_s
            if not (0 <= pause < 1e8):
                raise UserError(f"think_s={pause} must be a plausible number of seconds")
            later = self.turn > 0
            think[later] = np.round(rng.exponential(pause, int(later.sum())) * 1e9).astype(np.int64)
        opening = np.round(opening_s * 1e9).astype(np.int64)
        waited = np.cumsum(think)
        # Later turns are placed as if answers took no time; replay waits for the real end of the turn before.
        self.time = opening[self.session] + waited - waited[first][self.session]
        self.think = think
        self.tenant: npt.NDArray[np.int32] | None = None
        self.tenant_names: tuple[str, ...] = ()
        if workload.tenants:
            names = tuple(workload.tenants)
            shares = np.asarray([workload.tenants[name] for name in names], dtype=float)
            if not (shares >= 0).all() or not shares.sum() > 0 or not np.isfinite(shares).all():
                raise UserError(f"tenant shares {workload.tenants} must add up to more than 0")
            chosen = rng.choice(len(names), len(turns), p=shares / shares.sum())
            self.tenant = chosen[self.session].astype(np.int32)
            self.tenant_names = names

    def trace(self, source: TraceSource, seed: int) -> Trace:
        order = np.argsort(self.time, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        dependent = self.turn > 0
        after = np.where(dependent, place[np.maximum(np.arange(len(order)) - 1, 0)], -1)[order]
        time = self.time[order]
        many = bool(dependent.any())
        offsets, ids = self._ids(order)
        said = [_drawn(self.workload, seed)]
        if ids is not None:
            said.append(
                "Content ids say what prompts share: system prompts and the conversation so far, in blocks of "
                f"{BLOCK_TOKENS} tokens."
            )
        return Trace(
            arrival_ns=time - time[0],
            prompt_tokens=self.prompt[order],
            output_tokens=self.output[order],
            source=source,
            tenant=None if self.tenant is None else self.tenant[order],
            tenant_names=self.tenant_names,
            sessions=Sessions(after, np.where(after >= 0, self.think[order], 0)) if many else None,
            session=self.session[order].astype(np.int32) if many else None,
            session_names=tuple(f"s{at}" for at in range(int(self.session[-1]) + 1))
            if many
            else (),
            prefix_offsets=offsets,
            prefix_ids=ids,
            prefix_block_tokens=BLOCK_TOKENS if ids is not None else 0,
            assumptions=tuple(said),
        )

    def _ids(self, order: Int64Array) -> tuple[Int64Array | None, Int64Array | None]:
        """One id for each full block that another prompt may hold as well; the rest is private.

        A block wholly inside a system prompt is everybody's who has it, any other the session's.
        """
        shared_blocks = self.workload.system_prompt_tokens // BLOCK_TOKENS
        many = bool((self.turn > 0).any())
        if not shared_blocks and not many:
            return None, None
        full = self.prompt // BLOCK_TOKENS
        number = full[order] if many else np.minimum(full, shared_blocks)[order]
        offsets = np.concatenate(([0], np.cumsum(number))).astype(np.int64)
        session = self.session[order]
        # System prompts come first; each session then gets as many ids as its longest prompt has blocks.
        longest = np.zeros(int(session.max()) + 1, dtype=np.int64)
        np.maximum.at(longest, self.session, full)
        base = self.workload.system_prompts * shared_blocks + np.cumsum(longest) - longest
        block = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], number)
        own = np.repeat(base[session], number) + block
        common = np.repeat(self.system[session] * shared_blocks, number) + block
        return offsets, np.where(block < shared_blocks, common, own)
