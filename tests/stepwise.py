"""Real records against ours: where they first differ, and the smallest case that still does."""

from __future__ import annotations

import copy
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oracle.client import Case, RealEngine, Recording

# Some cases never end (V0's documented livelock): both sides are compared up to here.
MAX_STEPS = 3000
OURS_LIMIT_S = 60.0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A hang of our own scheduler is a difference like any other. Main thread only."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def our_records(case: Case, max_steps: int = MAX_STEPS) -> list[dict[str, Any]]:
    """What `vsim debug steps` writes for `case`: at most `max_steps` steps, and the summary.

    With a step limit our V0 follows a livelock, as the real class does, instead of ending the run there.
    """
    from vsim.sim.case import parse_case

    if case["config"]["engine"] == "v1":
        from vsim.sim.steplog import run_case
    else:
        from vsim.sim.steplog_v0 import run_case

    with time_limit(OURS_LIMIT_S):
        return list(run_case(parse_case(case, "case"), max_steps))


def first_difference(real: Recording, ours: list[dict[str, Any]]) -> str | None:
    """The first step and key in which `ours` is not what the real engine recorded, or None.

    Values are compared as JSON text: the order inside dictionaries is schedule order and counts.
    """
    expected = real.steps if real.summary is None else [*real.steps, {"summary": real.summary}]
    for i, (want, got) in enumerate(zip(expected, ours, strict=False)):
        if "summary" in want and "summary" in got:
            return _differing(want["summary"], got["summary"], "summary")
        found = _differing(want, got, f"step {i}")
        if found:
            return found
    if len(ours) < len(expected):
        return f"step {len(ours)}: missing; the real engine has {json.dumps(expected[len(ours)])[:400]}"
    # The real classes raised: every step before is compared, nothing after.
    if real.summary is not None and len(ours) > len(expected):
        return f"step {len(expected)}: one too many: {json.dumps(ours[len(expected)])[:400]}"
    return None


def _differing(want: dict[str, Any], got: dict[str, Any], where: str) -> str | None:
    for key in [*want, *(k for k in got if k not in want)]:
        real, ours = (json.dumps(d[key]) if key in d else "absent" for d in (want, got))
        if real == ours:
            continue
        if isinstance(want.get(key), dict) and isinstance(got.get(key), dict):
            inner = _differing(want[key], got[key], f"{where}, {key}")
            if inner:
                return inner
            return f"{where}, {key}: another order: real {list(want[key])}, ours {list(got[key])}"
        return f"{where}, {key}: real {real[:300]}, ours {ours[:300]}"
    return None


def compare(real: RealEngine, case: Case) -> tuple[Recording, str | None]:
    """Run both. The recording is for the census; the text says where ours first differs."""
    recording = real.run(case, MAX_STEPS)
    try:
        ours = our_records(case)
    except Exception as e:
        return recording, f"ours raised {type(e).__name__}: {e}"
    return recording, first_difference(recording, ours)


def shrink(case: Case, differs: Callable[[Case], bool], limit_s: float = 60.0) -> Case:
    """A smaller case that still differs: fewer requests, shorter, simpler configuration. Greedy, bounded in time."""
    deadline = time.monotonic() + limit_s
    smaller = True
    while smaller and time.monotonic() < deadline:
        smaller = False
        for candidate in _smaller(case):
            if time.monotonic() > deadline:
                break
            if candidate != case and differs(candidate):
                case, smaller = candidate, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    requests = case["requests"]
    size = len(requests) // 2
    while size:
        for start in range(0, len(requests), size):
            yield _without(case, range(start, min(start + size, len(requests))))
        size //= 2
    for key in list(case["config"]):
        if key not in (
            "engine",
            "block_size",
            "num_gpu_blocks",
            "max_model_len",
            "max_num_batched_tokens",
        ):
            candidate = copy.deepcopy(case)
            del candidate["config"][key]
            yield candidate
    for i, request in enumerate(requests):
        for key in ("finish", "priority"):
            if key in request:
                candidate = copy.deepcopy(case)
                del candidate["requests"][i][key]
                yield candidate
        for value in (0.0, round(request["arrival"] / 2, 3)):
            if request["arrival"] > value:
                yield _with(case, i, arrival=value)
        for value in (1, request["output_tokens"] // 2, request["output_tokens"] - 1):
            if 0 < value < request["output_tokens"]:
                yield _with(case, i, output_tokens=value)
        if "segments" in request:
            for k, (stream, n) in enumerate(request["segments"]):
                for value in (0, n // 2, n - 1):
                    if value < n:
                        segments = [list(s) for s in request["segments"]]
                        segments[k] = [stream, value]
                        yield _with(case, i, segments=[s for s in segments if s[1]])
        elif "hash_ids" not in request and "prompt_token_ids" not in request:
            for value in (1, request["input_tokens"] // 2, request["input_tokens"] - 1):
                if 0 < value < request["input_tokens"]:
                    yield _with(case, i, input_tokens=value)


def _with(case: Case, i: int, **fields: Any) -> Case:
    candidate = copy.deepcopy(case)
    candidate["requests"][i].update(fields)
    return candidate


def _without(case: Case, gone: range) -> Case:
    names = {case["requests"][i]["id"] for i in gone}
    requests = [copy.deepcopy(r) for i, r in enumerate(case["requests"]) if i not in gone]
    for i, request in enumerate(requests):
        for segment in request.get("segments", []):
            # Answers of a request that is gone become private text.
            if isinstance(segment[0], str) and segment[0][4:] in names:
                segment[0] = 3_000_000 + i
    return {**case, "requests": requests}
