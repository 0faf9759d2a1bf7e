"""A scheduler case: the golden input schema (`vsim debug steps CASE.json`) -> config, requests, clock.

The schema is documented in docs/exactness.md. Whatever it does not know, or has the wrong type or range, is
refused by name: a case that is read loosely proves nothing.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from vsim.errors import UserError
from vsim.sim.config import MAX_BLOCKS, KVGroup, KVOffload, SchedulerConfig
from vsim.sim.content import (
    STREAM_TOKENS,
    Run,
    joined,
    output_run,
    private_run,
    stream_run,
    token_runs,
)

MAX_STAGES = 4096  # pipeline stages: more than any model has layers
MAX_CASE_BYTES = 1 << 29  # unpacked; a .gz that grows beyond it is refused unread


@dataclass(frozen=True, slots=True)
class StepTime:
    """Virtual duration of a batch: a + b * tokens + c * sequences, in seconds."""

    a: float = 0.01
    b: float = 1e-5
    c: float = 1e-5


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Virtual duration of one copy between GPU and CPU: base + per_block * blocks, in seconds."""

    base: float = 0.0
    per_block: float = 0.0

    def end(self, start: float, blocks: int) -> float:
        # Summed in this order: an arrival at the very end of a copy tells one ulp from the other.
        return start + self.base + self.per_block * blocks


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """One request of a case. It can be added to a scheduler wherever a `TraceRequest` can.

    `finish` "length": the client asked for exactly `output_tokens`. "stop": the model says EOS as output
    token number `output_tokens`; the client's cap lies beyond.
    """

    id: str
    index: int  # position in the file, and the request's identity in Step and StepOutput
    arrival_s: float
    runs: tuple[Run, ...]  # the prompt's tokens (content.py)
    prompt_tokens: int
    output_tokens: int
    finish: Literal["length", "stop"] = "length"
    priority: int = 0
    # The rest of TraceRequest's fields, for whoever reads those.
    max_tokens: int | None = None
    tenant: int = 0
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = 0

    @property
    def arrival_ns(self) -> int:
        return round(self.arrival_s * 1e9)


@dataclass(frozen=True, slots=True)
class Case:
    """A whole case. Times are seconds of the virtual clock."""

    name: str
    config: SchedulerConfig
    requests: tuple[CaseRequest, ...]
    step_time: StepTime = StepTime()
    sched_time: float = 0.0  # CPU time of one schedule() call (V1)
    update_time: float = 0.0  # CPU time of processing one batch's output (V1)
    idle_sleep: float = 0.0  # the engine's nap after a batch without tokens; 0.001 in real vLLM
    load_time: TransferTime = TransferTime()  # V1 CPU offload: CPU -> GPU
    store_time: TransferTime = TransferTime()  # V1 CPU offload: GPU -> CPU
    swap_in_s: float = 0.0  # V0, per block
    swap_out_s: float = 0.0
    comment: str = ""


def load_case(path: str | Path) -> Case:
    """Read a case file (JSON, gzip when the name ends in .gz). Raises UserError."""
    path = Path(path)
    try:
        with path.open("rb") as raw:
            if path.name.endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    data = unpacked.read(MAX_CASE_BYTES + 1)
            else:
                data = raw.read(MAX_CASE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_CASE_BYTES:
        raise UserError(f"{path}: larger than {MAX_CASE_BYTES} bytes unpacked, which no case needs")
    name = path.name
    try:
        obj = json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}: not JSON: {error.msg}") from None
    except _RepeatedKeyError as error:
        raise UserError(
            f"{name}: the key {_shown(error.args[0])} stands twice in one object"
        ) from None
    except (RecursionError, ValueError):
        raise UserError(f"{name}: nested too deep, or a number too long, to be a case") from None
    return parse_case(obj, name)


def parse_case(obj: Any, name: str) -> Case:
    """A parsed JSON object as a `Case`; `name` stands in front of every complaint. Raises UserError."""
    top = _Fields(obj, name, "")
    config = top.take("config", _object)
    requests = top.take("requests", _list)
    top.nothing_left()
    fields = _Fields(config, name, "config")
    engine = fields.take("engine", _one_of("v1", "v0"), "v1")
    case = _v1_case(fields, name) if engine == "v1" else _v0_case(fields, name)
    fields.nothing_left()
    _refuse_what_vllm_refuses(case.config, name)
    return Case(**{**_as_dict(case), "requests": _requests(requests, name)})


def _v1_case(fields: _Fields, name: str) -> Case:
    """The V1 half of a case's config, defaults as the oracle's."""
    take = fields.take
    block_size = take("block_size", _count(1), 16)
    offload, load, store = _offload(take("kv_offload", _optional(_object), None), name)
    config = SchedulerConfig(
        engine="v1",
        block_size=block_size,
        num_gpu_blocks=take("num_gpu_blocks", _count(1, MAX_BLOCKS), 1000),
        max_num_seqs=take("max_num_seqs", _count(1), 256),
        max_num_batched_tokens=take("max_num_batched_tokens", _count(1), 2048),
        max_num_scheduled_tokens=take("max_num_scheduled_tokens", _optional(_count(1)), None),
        max_num_active_seqs=take("max_num_active_seqs", _optional(_count(1)), None),
        max_model_len=take("max_model_len", _count(1), 8192),
        enable_prefix_caching=take("enable_prefix_caching", _flag, True),
        enable_chunked_prefill=take("enable_chunked_prefill", _flag, True),
        policy=take("policy", _one_of("fcfs", "priority"), "fcfs"),
        long_prefill_token_threshold=take("long_prefill_token_threshold", _count(0), 0),
        long_prefill_token_threshold_adaptive=take(
            "long_prefill_token_threshold_adaptive", _flag, False
        ),
        scheduler_reserve_full_isl=take("scheduler_reserve_full_isl", _flag, True),
        watermark=take("watermark", _fraction, 0.0),
        async_scheduling=take("async_scheduling", _flag, False),
        pipeline_parallel_size=take("pipeline_parallel_size", _count(1, MAX_STAGES), 1),
        v2_model_runner=take("v2_model_runner", _flag, True),
        kv_groups=_groups(take("kv_groups", _optional(_list), None), name),
        prefix_cache_retention_interval=take(
            "prefix_cache_retention_interval", _optional(_count(0)), 0
        ),
        kv_offload=offload,
    )
    return Case(
        name=name,
        config=config,
        requests=(),
        step_time=_step_time(take("step_time", _object, {}), name),
        sched_time=take("sched_time", _seconds, 0.0),
        update_time=take("update_time", _seconds, 0.0),
        idle_sleep=take("idle_sleep", _seconds, 0.0),
        load_time=load,
        store_time=store,
        comment=take("comment", _text, ""),
    )


def _v0_case(fields: _Fields, name: str) -> Case:
    """The V0 half of a case's config, defaults as the oracle's."""
    take = fields.take
    config = SchedulerConfig(
        engine="v0",
        engine_version="0.8.5",
        block_size=take("block_size", _count(1), 16),
        num_gpu_blocks=take("num_gpu_blocks", _count(1, MAX_BLOCKS), 1000),
        num_cpu_blocks=take("num_cpu_blocks", _count(0, MAX_BLOCKS), 1000),
        max_num_seqs=take("max_num_seqs", _count(1), 256),
        max_num_batched_tokens=take("max_num_batched_tokens", _count(1), 2048),
        max_model_len=take("max_model_len", _count(1), 2048),
        enable_prefix_caching=take("enable_prefix_caching", _flag, False),
        enable_chunked_prefill=take("enable_chunked_prefill", _flag, False),
        preemption_mode=take("preemption_mode", _optional(_one_of("recompute", "swap")), None),
        policy=take("policy", _one_of("fcfs", "priority"), "fcfs"),
        max_num_partial_prefills=take("max_num_partial_prefills", _count(1), 1),
        max_long_partial_prefills=take("max_long_partial_prefills", _count(1), 1),
        long_prefill_token_threshold=take("long_prefill_token_threshold", _count(0), 0),
    )
    swap = _Fields(take("swap_time", _object, {}), name, "config.swap_time")
    case = Case(
        name=name,
        config=config,
        requests=(),
        step_time=_step_time(take("step_time", _object, {}), name),
        idle_sleep=take("idle_sleep", _seconds, 0.0),
        swap_in_s=swap.take("in", _seconds, 0.0),
        swap_out_s=swap.take("out", _seconds, 0.0),
        comment=take("comment", _text, ""),
    )
    swap.nothing_left()
    return case


def _step_time(obj: dict[str, Any], name: str) -> StepTime:
    fields = _Fields(obj, name, "config.step_time")
    default = StepTime()
    if not obj:
        return default
    # Half a step time is more likely a typing mistake than a wish: a, b and c stand together.
    time = StepTime(
        a=fields.take("a", _seconds), b=fields.take("b", _seconds), c=fields.take("c", _seconds)
    )
    fields.nothing_left()
    return time


def _groups(groups: list[Any] | None, name: str) -> tuple[KVGroup, ...]:
    if not groups:
        return (KVGroup(),)
    out = []
    for position, obj in enumerate(groups):
        where = f"config.kv_groups[{position}]"
        fields = _Fields(obj, name, where)
        kind: Literal["full", "swa"] = fields.take("type", _one_of("full", "swa"))
        window = fields.take("window", _count(1)) if kind == "swa" else None
        out.append(KVGroup(kind, window, fields.take("block_size", _optional(_count(1)), None)))
        fields.nothing_left()
    return tuple(out)


def _offload(
    obj: dict[str, Any] | None, name: str
) -> tuple[KVOffload | None, TransferTime, TransferTime]:
    if not obj:
        return None, TransferTime(), TransferTime()
    fields = _Fields(obj, name, "config.kv_offload")
    extra = _Fields(fields.take("extra", _object, {}), name, "config.kv_offload.extra")
    extra.take("eviction_policy", _one_of("lru"), "lru")
    offload = KVOffload(
        cpu_blocks=fields.take("cpu_blocks", _count(1)),
        blocks_per_chunk=fields.take("blocks_per_chunk", _count(1), 1),
        offload_prompt_only=extra.take("offload_prompt_only", _flag, True),
        store_threshold=extra.take("store_threshold", _count(0), 0),
    )
    extra.nothing_left()
    times = []
    for channel in ("load", "store"):
        where = f"config.kv_offload.{channel}"
        parts = _Fields(fields.take(channel, _object, {}), name, where)
        times.append(
            TransferTime(parts.take("base", _seconds, 0.0), parts.take("per_block", _seconds, 0.0))
        )
        parts.nothing_left()
    fields.nothing_left()
    return offload, times[0], times[1]


def _refuse_what_vllm_refuses(config: SchedulerConfig, name: str) -> None:
    """The checks that vLLM's own SchedulerConfig makes (0.32.0 and 0.8.5, config/scheduler.py)."""
    budget, seqs = config.max_num_batched_tokens, config.max_num_seqs
    if budget < config.max_model_len and not config.enable_chunked_prefill:
        raise UserError(
            f"{name}: config.max_num_batched_tokens={budget} is below max_model_len={config.max_model_len}"
            " without chunked prefill, which vLLM refuses; raise it or enable_chunked_prefill"
        )
    if budget < seqs:
        raise UserError(
            f"{name}: config.max_num_batched_tokens={budget} is below max_num_seqs={seqs}, which vLLM refuses"
        )
    if config.max_num_active_seqs is not None and config.max_num_active_seqs > seqs:
        raise UserError(
            f"{name}: config.max_num_active_seqs={config.max_num_active_seqs} is above max_num_seqs={seqs},"
            " which vLLM refuses"
        )
    partial, long = config.max_num_partial_prefills, config.max_long_partial_prefills
    if partial > 1 and not config.enable_chunked_prefill:
        raise UserError(
            f"{name}: config.max_num_partial_prefills={partial} needs enable_chunked_prefill, else vLLM refuses it"
        )
    if long > partial:
        raise UserError(
            f"{name}: config.max_long_partial_prefills={long} is above max_num_partial_prefills={partial},"
            " which vLLM refuses"
        )
    # 0.8.5 looks at the threshold only where it has a use for it.
    capped = config.engine == "v1" or partial > 1
    if capped and config.long_prefill_token_threshold > config.max_model_len:
        raise UserError(
            f"{name}: config.long_prefill_token_threshold={config.long_prefill_token_threshold} is above"
            f" max_model_len={config.max_model_len}, which vLLM refuses"
        )


def _requests(items: list[Any], name: str) -> tuple[CaseRequest, ...]:
    ids: dict[str, int] = {}
    for position, obj in enumerate(items):
        fields = _Fields(obj, name, f"requests[{position}]")
        request_id = fields.take("id", _text)
        if not request_id:
            raise UserError(f"{name}: requests[{position}].id is empty")
        if request_id in ids:
            raise UserError(
                f"{name}: requests[{position}].id={_shown(request_id)} is already requests[{ids[request_id]}]"
            )
        ids[request_id] = position
    return tuple(_request(obj, position, ids, name) for position, obj in enumerate(items))


def _request(obj: Any, index: int, ids: dict[str, int], name: str) -> CaseRequest:
    where = f"requests[{index}]"
    fields = _Fields(obj, name, where)
    request_id = fields.take("id", _text)
    arrival_s = fields.take("arrival", _seconds)
    output_tokens = fields.take("output_tokens", _count(1, STREAM_TOKENS))
    finish: Literal["length", "stop"] = fields.take("finish", _one_of("length", "stop"), "length")
    priority = fields.take("priority", _integer, 0)
    forms = [key for key in ("prompt_token_ids", "segments", "input_tokens") if key in obj]
    if len(forms) != 1:
        raise UserError(
            f"{name}: {where} needs exactly one of prompt_token_ids, segments or input_tokens,"
            f" and has {' and '.join(forms) or 'none'}"
        )
    if forms == ["prompt_token_ids"]:
        tokens = fields.take("prompt_token_ids", _list)
        for position, token in enumerate(tokens):
            _count(0)(token, f"{name}: {where}.prompt_token_ids[{position}]")
        pieces = token_runs(tokens)
    elif forms == ["segments"]:
        segments = fields.take("segments", _list)
        pieces = [
            _segment(piece, ids, f"{name}: {where}.segments[{position}]")
            for position, piece in enumerate(segments)
        ]
    elif "hash_ids" in obj:
        pieces = _mooncake(fields, f"{name}: {where}")
    else:
        pieces = [private_run(index, fields.take("input_tokens", _count(0, STREAM_TOKENS)))]
    fields.nothing_left()
    runs = joined(pieces)
    return CaseRequest(
        id=request_id,
        index=index,
        arrival_s=arrival_s,
        runs=runs,
        prompt_tokens=sum(length for _, length in runs),
        output_tokens=output_tokens,
        finish=finish,
        priority=priority,
    )


def _segment(piece: Any, ids: dict[str, int], where: str) -> Run:
    if not isinstance(piece, list) or len(piece) != 2:
        raise UserError(f"{where} must be [stream, tokens], not {_shown(piece)}")
    stream, length = piece
    _count(0, STREAM_TOKENS)(length, f"{where}[1]")
    if not isinstance(stream, str):
        return stream_run(_count(0)(stream, f"{where}[0]"), length)
    source = ids.get(stream[4:]) if stream.startswith("out:") else None
    if source is None:
        raise UserError(
            f'{where}[0]={_shown(stream)} must be a number or "out:" and the id of a request'
        )
    return output_run(source, length)


def _mooncake(fields: _Fields, where: str) -> list[Run]:
    left = fields.take("input_tokens", _count(0))
    content_ids = fields.take("hash_ids", _list)
    block_tokens = fields.take("hash_block_tokens", _count(1, STREAM_TOKENS))
    # Ids beyond the prompt's end name nothing: the recorder of the cases ignores them too.
    if len(content_ids) < -(-left // block_tokens):
        raise UserError(
            f"{where}.hash_ids has {len(content_ids)} ids, but input_tokens={left} in pieces of"
            f" hash_block_tokens={block_tokens} needs {-(-left // block_tokens)}"
        )
    pieces = []
    for position, content in enumerate(content_ids):
        _count(0)(content, f"{where}.hash_ids[{position}]")
        length = min(block_tokens, left)
        pieces.append(stream_run(content, length))
        left -= length
    return pieces


# --- one value at a time -------------------------------------------------------------------------------

Check = Callable[[Any, str], Any]
_REQUIRED = object()


class _Fields:
    """The keys of one JSON object, each to be taken once."""

    def __init__(self, obj: Any, name: str, where: str) -> None:
        if not isinstance(obj, dict):
            raise UserError(f"{name}: {where or 'the case'} must be an object, not {_shown(obj)}")
        self._left = dict(obj)
        self._name = name
        self._where = f"{where}." if where else ""

    def take(self, key: str, check: Check, default: Any = _REQUIRED) -> Any:
        where = f"{self._name}: {self._where}{key}"
        if key not in self._left:
            if default is _REQUIRED:
                raise UserError(f"{where} is missing")
            return default
        return check(self._left.pop(key), where)

    def nothing_left(self) -> None:
        for key in self._left:
            raise UserError(f"{self._name}: {self._where}{key} is not a key of a case")


class _RepeatedKeyError(Exception):
    pass


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj = dict(pairs)
    if len(obj) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return obj


def _refuse(where: str, value: Any, rule: str) -> NoReturn:
    raise UserError(f"{where}={_shown(value)} must be {rule}")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = "a value too large to show"
    return text if len(text) <= 60 else text[:57] + "..."


def _object(value: Any, where: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else _refuse(where, value, "an object")


def _list(value: Any, where: str) -> list[Any]:
    return value if isinstance(value, list) else _refuse(where, value, "a list")


def _text(value: Any, where: str) -> str:
    return value if isinstance(value, str) else _refuse(where, value, "a string")


def _flag(value: Any, where: str) -> bool:
    return value if isinstance(value, bool) else _refuse(where, value, "true or false")


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(where, value, "a whole number")
    if abs(value) >= 1 << 62:
        _refuse(where, value, "below 2^62 in size")
    return value


def _count(low: int, high: int | None = None) -> Check:
    def check(value: Any, where: str) -> int:
        number = _integer(value, where)
        if number < low:
            _refuse(where, value, f"at least {low}")
        if high is not None and number > high:
            _refuse(where, value, f"at most {high}")
        return number

    return check


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(where, value, "a number of seconds")
    if not 0 <= value < 1e12:  # false for NaN and infinity too
        _refuse(where, value, "at least 0 seconds, and finite")
    return value


def _fraction(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(where, value, "a number")
    if not 0 <= value < 1:
        _refuse(where, value, "at least 0 and below 1")
    return value


def _one_of(*words: str) -> Check:
    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in words:
            _refuse(where, value, " or ".join(f'"{word}"' for word in words))
        return value

    return check


def _optional(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)


def _as_dict(case: Case) -> dict[str, Any]:
    return {key: getattr(case, key) for key in Case.__dataclass_fields__}
