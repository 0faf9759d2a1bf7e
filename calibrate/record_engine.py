"""A real vLLM engine in this process whose every step can be seen: composition, duration, CPU share.

Runs only in an environment with vLLM (0.19 to 0.32 share the hooks used here); `record.py` drives it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vsim.calibrate.record_yardstick import Yardstick


@dataclass(slots=True)
class Scheduled:
    """What `schedule()` returned, and the state right after it."""

    output: Any
    start_ns: int
    schedule_ns: int
    cpu_ns: int
    running: int
    waiting: int
    kv_blocks_used: int
    device_ns: int = 0
    launched_ns: int = 0


@dataclass(slots=True)
class EngineStep:
    """One completed step. Request ids are the caller's; durations in ns."""

    requests: list[int]
    num_tokens: list[int]
    num_computed: list[int]
    preempted: list[int]
    new: list[int]
    resumed: list[int]
    emitted: list[int]
    finished: list[int]
    running: int
    waiting: int
    kv_blocks_used: int
    schedule_ns: int
    device_ns: int
    total_ns: int
    cpu_ns: int
    slowdown: float = 1.0  # of the machine around this step; durations are already divided by it


class RecordedEngine:
    """`LLMEngine` with its core's schedule, execute and update wrapped.

    Times: a step lasts from its `schedule()` call, or from the end of the step before it where the two
    overlap, to the end of the `LLMEngine.step()` call that processed its output. The device's part is the
    wall time of `execute_model` and `sample_tokens` on the CPU, and the time between two CUDA events around
    them on a GPU; with tensor parallelism the time from launch to output.
    """

    def __init__(
        self,
        engine_args: dict[str, Any],
        temperature: float = 0.0,
        yardstick: Yardstick | None = None,
    ) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        began = time.perf_counter()
        self.llm = LLMEngine.from_engine_args(
            EngineArgs(**engine_args), usage_context=UsageContext.OPENAI_API_SERVER
        )
        self.start_s = time.perf_counter() - began
        self.core: Any = self.llm.engine_core.engine_core  # type: ignore[attr-defined]
        self.scheduler: Any = self.core.scheduler
        self.config: Any = self.llm.vllm_config
        self.temperature = temperature
        self.yardstick = yardstick
        self.block_size = int(self.config.cache_config.block_size)
        # One block is vLLM's null block and never holds a token.
        self.usable_blocks = int(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1
        self.vocab_size = int(self.config.model_config.get_vocab_size())
        # With tensor parallelism the model runs in vLLM's worker processes, out of reach from here.
        self.remote = int(self.config.parallel_config.tensor_parallel_size) > 1
        self.on_cuda = bool(current_platform.is_cuda_alike()) and not self.remote
        self._torch = torch
        self._events: deque[tuple[Scheduled, Any, Any]] = deque()
        self._pending: deque[Scheduled] = deque()
        self._done: list[tuple[Scheduled, list[str], list[str]]] = []
        self._ids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._admitted: set[int] = set()
        self._last_end_ns = 0
        self._tokens = np.random.default_rng(0)
        self._wrap()
        if yardstick is not None:
            for layer in self._layers():
                layer.register_forward_pre_hook(lambda *_: yardstick.within())
        if not current_platform.is_cuda_alike() and not self.remote:
            self._touch_kv_cache()

    # --- hooks -----------------------------------------------------------------------------------

    def _wrap(self) -> None:
        scheduler, executor = self.scheduler, self.core.model_executor
        schedule, update = scheduler.schedule, scheduler.update_from_output
        pool = scheduler.kv_cache_manager.block_pool

        def recorded_schedule(*args: Any, **kwargs: Any) -> Any:
            cpu, start = time.process_time_ns(), time.perf_counter_ns()
            output = schedule(*args, **kwargs)
            self._pending.append(
                Scheduled(
                    output,
                    start,
                    time.perf_counter_ns() - start,
                    cpu,
                    len(scheduler.running),
                    self._num_waiting(),
                    self.usable_blocks - pool.get_num_free_blocks(),
                )
            )
            return output

        def recorded_update(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            scheduled = self._pending.popleft()
            if self.remote:
                scheduled.device_ns = time.perf_counter_ns() - scheduled.launched_ns
            outputs = update(scheduler_output, *args, **kwargs)
            emitted, finished = [], []
            for client in outputs.values():
                for out in client.outputs:
                    if out.new_token_ids:
                        emitted.append(out.request_id)
                    if out.finish_reason is not None:
                        finished.append(out.request_id)
            self._done.append((scheduled, emitted, finished))
            return outputs

        scheduler.schedule = recorded_schedule
        scheduler.update_from_output = recorded_update
        executor.execute_model = self._on_device(executor.execute_model, first=True)
        executor.sample_tokens = self._on_device(executor.sample_tokens, first=False)

    def _on_device(self, call: Callable[..., Any], first: bool) -> Callable[..., Any]:
        """`call`, its time added to the step that is being launched."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            scheduled = self._pending[-1] if self._pending else None
            if self.remote:
                if first and scheduled is not None:
                    scheduled.launched_ns = time.perf_counter_ns()
                return call(*args, **kwargs)
            if self.on_cuda and scheduled is not None:
                event = self._torch.cuda.Event(enable_timing=True)
                if first:
                    event.record()
                    self._events.append((scheduled, event, None))
                result = call(*args, **kwargs)
                after = self._torch.cuda.Event(enable_timing=True)
                after.record()
                launched, before, _ = self._events.pop()
                self._events.append((launched, before, after))
                return result
            start = time.perf_counter_ns()
            result = call(*args, **kwargs)
            if scheduled is not None:
                scheduled.device_ns += time.perf_counter_ns() - start
            return result

        return timed

    def _num_waiting(self) -> int:
        return sum(
            len(queue)
            for name in ("waiting", "skipped_waiting")
            if (queue := getattr(self.scheduler, name, None)) is not None
        )

    def _touch_kv_cache(self) -> None:
        """Write to every page of the KV cache.

        Untouched memory is one shared zero page on Linux: attention over it would read from the CPU's
        first-level cache and look faster than it is.
        """
        worker = getattr(self.core.model_executor, "driver_worker", None)
        runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
        for cache in _tensors(getattr(runner, "kv_caches", [])):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                cache.normal_()

    def _layers(self) -> list[Any]:
        """The model's decoder layers: vLLM's models keep them in a list of modules called `layers`."""
        worker = self.core.model_executor.driver_worker
        model = getattr(worker, "worker", worker).get_model()
        lists = [m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] == "layers"]
        return list(lists[0]) if lists else []

    def learn_yardstick(self, steps: int = 200) -> None:
        """Let the yardstick find its reference between ordinary decode steps, if it was given none."""
        if self.yardstick is None or self.yardstick.reference_ns is not None:
            return
        sequences = max(1, min(16, int(self.config.scheduler_config.max_num_seqs) // 2))
        length = max(2, min(steps, int(self.config.model_config.max_model_len) // 2))
        done = 0
        while done < steps:
            for request in range(sequences):
                self.add(request, 16, length)
            while self.has_requests:
                done += len(self.step())
            self.forget()
        self.yardstick.learn_reference()

    # --- requests --------------------------------------------------------------------------------

    def add(
        self,
        request: int,
        prompt: list[int] | int,
        output_tokens: int,
        priority: int = 0,
    ) -> str | None:
        """Queue a request of exactly `output_tokens` tokens; a length stands for random tokens.

        Returns vLLM's refusal, None if it was taken.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids = self.random_tokens(prompt) if isinstance(prompt, int) else prompt
        params = SamplingParams(
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            temperature=self.temperature,
            output_kind=RequestOutputKind.DELTA,
        )
        try:
            name = self.llm.add_request(
                str(request), {"prompt_token_ids": ids}, params, priority=priority
            )
        except ValueError as refusal:
            return str(refusal).splitlines()[0]
        # vLLM gives the request an id of its own; older releases don't return it.
        if name not in self.scheduler.requests:
            name = next(reversed(self.scheduler.requests))
        self._ids[name] = request
        self._names[request] = name
        return None

    def random_tokens(self, count: int) -> list[int]:
        """Tokens that no earlier prompt had: no accidental prefix hits."""
        tokens: list[int] = self._tokens.integers(5, self.vocab_size, count).tolist()
        return tokens

    def pretend_computed(self, request: int, tokens: int) -> None:
        """Let the prefix cache hold the first `tokens` of a waiting request, without computing them.

        Values in the KV cache have no influence on how long a step takes, so a context of any length costs
        nothing to set up. `tokens` is cut to whole blocks by vLLM. Needs prefix caching.
        """
        if tokens < self.block_size:
            return
        waiting = self.scheduler.requests[self._names[request]]
        manager = self.scheduler.kv_cache_manager
        manager.allocate_slots(waiting, tokens)
        manager.free(waiting)

    def abort(self) -> None:
        """Drop every request, and let the engine forget them."""
        self.llm.abort_request(list(self._names.values()), internal=True)
        while self.has_requests or self.core.scheduler.has_requests():
            self.llm.step()
        self._pending.clear()
        self._events.clear()
        self._done.clear()

    @property
    def has_requests(self) -> bool:
        return bool(self.llm.has_unfinished_requests())

    # --- steps -----------------------------------------------------------------------------------

    def step(self) -> list[EngineStep]:
        """One `LLMEngine.step()`: the steps it completed, usually one; none while a queue fills."""
        self.llm.step()
        end, cpu = time.perf_counter_ns(), time.process_time_ns()
        own_ns, own_cpu_ns, slowdown = 0, 0, 0.0
        if self.yardstick is not None:
            own_ns, own_cpu_ns = self.yardstick.own_ns, self.yardstick.own_cpu_ns
            slowdown = self.yardstick.end()
        done, self._done = self._done, []
        if done and self.on_cuda:
            self._torch.cuda.synchronize()
            self._read_events()
        steps = []
        for scheduled, emitted, finished in done:
            total = end - max(self._last_end_ns, scheduled.start_ns)
            self._last_end_ns = end
            step = self._summarise(scheduled, emitted, finished, total, cpu)
            steps.append(step if not slowdown else _at_best(step, own_ns, own_cpu_ns, slowdown))
        if self.yardstick is not None:
            self._last_end_ns = time.perf_counter_ns()  # the yardstick's own time is nobody's
        return steps

    def _read_events(self) -> None:
        while self._events and self._events[0][2] is not None and self._events[0][2].query():
            scheduled, before, after = self._events.popleft()
            scheduled.device_ns = round(before.elapsed_time(after) * 1e6)

    def _summarise(
        self, scheduled: Scheduled, emitted: list[str], finished: list[str], total: int, cpu: int
    ) -> EngineStep:
        out, ids = scheduled.output, self._ids
        computed: dict[str, int] = {}
        new: list[int] = []
        resumed: list[int] = []
        for fresh in out.scheduled_new_reqs:
            computed[fresh.req_id] = fresh.num_computed_tokens
            new.append(ids[fresh.req_id])
        cached = out.scheduled_cached_reqs
        again = set(getattr(cached, "resumed_req_ids", ()) or ())
        for name, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            computed[name] = tokens
            if name in again:
                resumed.append(ids[name])
        # The V2 model runner is sent a resumed request as a new one.
        first = [index for index in new if index not in self._admitted]
        back = [index for index in new if index in self._admitted] + resumed
        self._admitted.update(first)
        order = list(out.num_scheduled_tokens)
        return EngineStep(
            requests=[ids[name] for name in order],
            num_tokens=[out.num_scheduled_tokens[name] for name in order],
            num_computed=[computed[name] for name in order],
            preempted=[ids[name] for name in (getattr(out, "preempted_req_ids", None) or ())],
            new=first,
            resumed=back,
            emitted=[ids[name] for name in emitted],
            finished=[ids[name] for name in finished],
            running=scheduled.running,
            waiting=scheduled.waiting,
            kv_blocks_used=scheduled.kv_blocks_used,
            schedule_ns=scheduled.schedule_ns,
            device_ns=scheduled.device_ns,
            total_ns=total,
            cpu_ns=cpu - scheduled.cpu_ns,
        )

    # --- kernels ---------------------------------------------------------------------------------

    def kernel_seconds(self, sizes: list[int], repeats: int) -> dict[str, Any]:
        """Seconds of all linear layers, and of the output head, at several numbers of rows.

        The engine's own modules run one after the other with random input, so weights come from where they
        come from in a step. `repeats` are interleaved. With a yardstick: the median at the undisturbed
        machine's speed; without: the fastest, since other work only ever adds time.
        """
        from vllm.model_executor.layers.linear import LinearBase

        torch = self._torch
        worker = self.core.model_executor.driver_worker
        model = getattr(worker, "worker", worker).get_model()
        linears = [module for module in model.modules() if isinstance(module, LinearBase)]
        hidden = int(self.config.model_config.get_hidden_size())
        dtype = self.config.model_config.dtype
        device = next(model.parameters()).device
        seen: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
        with torch.inference_mode():
            for _ in range(repeats):
                for size in sizes:
                    inputs = {
                        width: torch.randn(size, width, dtype=dtype, device=device)
                        for width in {_input_width(module) for module in linears} | {hidden}
                    }
                    # In a step all earlier work was of this size too; here the size before this one has left the
                    # caches full of what is not needed: 1 row after 2,048 takes half as long again.
                    _run_each(linears, inputs)
                    linear = self._timed(_run_each, linears, inputs)
                    model.compute_logits(inputs[hidden])
                    head = self._timed(model.compute_logits, inputs[hidden])
                    seen[size].append((linear, head))
        typical = min if self.yardstick is None else statistics.median
        return {
            "rows": sizes,
            "linear_s": [typical(linear for linear, _ in seen[size]) for size in sizes],
            "head_s": [typical(head for _, head in seen[size]) for size in sizes],
        }

    def _timed(self, work: Callable[..., Any], *args: Any) -> float:
        if self.on_cuda:
            self._torch.cuda.synchronize()
        if self.yardstick is not None:
            self.yardstick.begin()
        start = time.perf_counter_ns()
        work(*args)
        if self.on_cuda:
            self._torch.cuda.synchronize()
        took_ns = time.perf_counter_ns() - start
        if self.yardstick is not None:
            took_ns = round((took_ns - self.yardstick.own_ns) / self.yardstick.end())
        return took_ns / 1e9

    def forget(self) -> None:
        """Between two measurements: ids start anew, and the prefix cache is emptied."""
        self._ids.clear()
        self._names.clear()
        self._admitted.clear()
        self.llm.reset_prefix_cache()


def _at_best(step: EngineStep, own_ns: int, own_cpu_ns: int, slowdown: float) -> EngineStep:
    """The step as it would have been on the undisturbed machine, without the yardstick's own time in it."""
    return replace(
        step,
        schedule_ns=round(step.schedule_ns / slowdown),
        device_ns=round((step.device_ns - own_ns) / slowdown),
        total_ns=round((step.total_ns - own_ns) / slowdown),
        cpu_ns=max(0, round((step.cpu_ns - own_cpu_ns) / slowdown)),
        slowdown=round(slowdown, 5),
    )


def _run_each(linears: list[Any], inputs: dict[int, Any]) -> None:
    for module in linears:
        module(inputs[_input_width(module)])


def _input_width(module: Any) -> int:
    """Columns of a linear layer's input on this rank."""
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _tensors(caches: Any) -> Iterator[Any]:
    """The tensors in a list, dict or nest of them."""
    if isinstance(caches, dict):
        caches = caches.values()
    elif not isinstance(caches, list | tuple):
        yield caches
        return
    for cache in caches:
        yield from _tensors(cache)
