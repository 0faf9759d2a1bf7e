"""Drives the real V0 `Scheduler` and `SelfAttnBlockSpaceManager` of vLLM 0.8.5 on a virtual clock.

Follows `LLMEngine.step()` in its synchronous form (no async output processing, no multi-step, no
speculation): SWAP and RECOMPUTE preemption, chunked prefill on and off, V0 prefix caching.
Runs in the Python of the vLLM 0.8.5 environment only; `worker.py` is its entry.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_V1", "0")
os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib.util
import sys
import time
import types
from collections import Counter

from common import EOS_TOKEN, build_prompts, crc_ids, out_token, rnd, step_time


def _stub_vllm():
    """Import sub-packages without running vllm/__init__.py (needs fastapi, ...)
    and without the Triton placeholder that confuses newer torch."""
    spec = importlib.util.find_spec("vllm")
    m = types.ModuleType("vllm")
    m.__path__ = list(spec.submodule_search_locations)
    m.__spec__ = spec
    sys.modules["vllm"] = m

    class _Any:
        def __getattr__(self, n):
            return _Any()

        def __call__(self, *a, **k):
            return a[0] if len(a) == 1 and callable(a[0]) and not k else _Any()

    tu = types.ModuleType("vllm.triton_utils")
    tu.HAS_TRITON = False
    tu.triton = _Any()
    tu.tl = _Any()
    tu.__path__ = []
    sys.modules["vllm.triton_utils"] = tu


_stub_vllm()
import vllm.core.scheduler as scheduler_v0  # noqa: E402
from vllm.config import CacheConfig, SchedulerConfig  # noqa: E402
from vllm.inputs import token_inputs  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.sequence import (  # noqa: E402
    Logprob,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from vllm.utils import Device  # noqa: E402

DEFAULTS = {
    "engine": "v0",
    "block_size": 16,
    "num_gpu_blocks": 1000,
    "num_cpu_blocks": 1000,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_model_len": 2048,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "preemption_mode": None,  # None | "recompute" | "swap"
    "policy": "fcfs",
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "step_time": {"a": 0.01, "b": 1e-5, "c": 1e-5},
    "swap_time": {"in": 0.0, "out": 0.0},  # seconds per block, added to dt
    "idle_sleep": 0.0,
}


class VTime:
    """Stands in for the `time` module inside vllm.core.scheduler."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        return self.now

    @staticmethod
    def perf_counter():
        return time.perf_counter()


def build_scheduler(cfg):
    sc = SchedulerConfig(
        runner_type="generate",
        max_num_batched_tokens=cfg["max_num_batched_tokens"],
        max_num_seqs=cfg["max_num_seqs"],
        max_model_len=cfg["max_model_len"],
        enable_chunked_prefill=cfg["enable_chunked_prefill"],
        preemption_mode=cfg["preemption_mode"],
        policy=cfg["policy"],
        max_num_partial_prefills=cfg["max_num_partial_prefills"],
        max_long_partial_prefills=cfg["max_long_partial_prefills"],
        long_prefill_token_threshold=cfg["long_prefill_token_threshold"],
    )
    cc = CacheConfig(
        block_size=cfg["block_size"],
        gpu_memory_utilization=0.9,
        swap_space=0,
        cache_dtype="auto",
        enable_prefix_caching=cfg["enable_prefix_caching"],
    )
    cc.num_gpu_blocks = cfg["num_gpu_blocks"]
    cc.num_cpu_blocks = cfg["num_cpu_blocks"]

    class Probe(scheduler_v0.Scheduler):
        """Real scheduler + ordered logs (no behaviour change)."""

        def _preempt_by_recompute(self, seq_group):
            self.log_recompute.append(seq_group.request_id)
            return super()._preempt_by_recompute(seq_group)

        def _swap_out(self, seq_group, blocks_to_swap_out):
            r = super()._swap_out(seq_group, blocks_to_swap_out)
            self.log_out.append(seq_group.request_id)
            return r

        def _swap_in(self, seq_group, blocks_to_swap_in):
            self.log_in.append(seq_group.request_id)
            return super()._swap_in(seq_group, blocks_to_swap_in)

    s = Probe(sc, cc, None)
    s.log_recompute, s.log_out, s.log_in = [], [], []
    s.events = Counter()
    return s


class Oracle:
    def __init__(self, spec, put, check=True, max_steps=10**9):
        cfg = dict(DEFAULTS)
        unknown = set(spec["config"]) - set(DEFAULTS) - {"comment"}
        assert not unknown, f"unknown config keys {unknown}"
        cfg.update({k: v for k, v in spec["config"].items() if k != "comment"})
        assert cfg["engine"] == "v0"
        self.cfg = cfg
        self.reqs = spec["requests"]
        self.prompts = build_prompts(self.reqs)
        self.ridx = {r["id"]: k for k, r in enumerate(self.reqs)}
        assert len(self.ridx) == len(self.reqs)
        self.vt = VTime()
        scheduler_v0.time = self.vt
        self.sched = build_scheduler(cfg)
        self.bm = self.sched.block_manager
        self.put = put
        self.check = check
        self.max_steps = max_steps
        self.order = sorted(range(len(self.reqs)), key=lambda k: (self.reqs[k]["arrival"], k))
        self.next_arr = 0
        self.t = 0.0
        self.step_no = 0
        self.groups = {}
        self.stats = {}
        self.rejected = []
        self.stalled = False
        self.error = None

    def add_arrivals(self):
        while self.next_arr < len(self.order):
            k = self.order[self.next_arr]
            r = self.reqs[k]
            if r["arrival"] > self.t:
                break
            self.next_arr += 1
            prompt = self.prompts[k]
            # LLMEngine._validate_model_input: only len > max_model_len raises
            if not 0 < len(prompt) <= self.cfg["max_model_len"]:
                self.rejected.append(r["id"])
                continue
            seq = Sequence(k, token_inputs(prompt), self.cfg["block_size"], eos_token_id=EOS_TOKEN)
            if r.get("finish", "length") == "stop":
                sp = SamplingParams(max_tokens=None, detokenize=False)
            else:
                sp = SamplingParams(
                    max_tokens=r["output_tokens"], ignore_eos=True, detokenize=False
                )
            g = SequenceGroup(
                request_id=r["id"],
                seqs=[seq],
                arrival_time=r["arrival"],
                sampling_params=sp,
                priority=r.get("priority", 0),
            )
            self.groups[r["id"]] = g
            self.stats[r["id"]] = {
                "arrival": r["arrival"],
                "prompt": len(prompt),
                "first_sched": None,
                "hit0": None,
                "first_token": None,
                "finish": None,
                "out": 0,
                "recompute": 0,
                "swap": 0,
                "ignored": False,
            }
            self.sched.add_seq_group(g)

    # StopChecker.maybe_stop_sequence without stop strings / min_tokens
    def stop_check(self, seq, sp):
        if not sp.ignore_eos and seq.get_last_token_id() == seq.eos_token_id:
            seq.status = SequenceStatus.FINISHED_STOPPED
        elif seq.get_len() > self.cfg["max_model_len"] or seq.get_output_len() == sp.max_tokens:
            seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED

    def free_list(self, device):
        a = self.bm.block_allocator._allocators[device]
        if hasattr(a, "_hashless_allocator"):
            return list(a._hashless_allocator._free_block_indices)
        return list(a._free_block_indices)

    def step(self):
        s, cfg = self.sched, self.cfg
        for log in (s.log_recompute, s.log_out, s.log_in):
            log.clear()
        self.vt.now = self.t
        n_pre = s.num_cumulative_preemption
        meta, so, _ = s.schedule()
        s.get_and_reset_finished_requests_ids()
        scheduled, computed, cached, prompt_ids = {}, {}, {}, []
        uncached = 0
        tracker = self.bm._computed_blocks_tracker
        for ssg, m in zip(so.scheduled_seq_groups, meta, strict=False):
            g = ssg.seq_group
            rid = g.request_id
            scheduled[rid] = ssg.token_chunk_size
            before = g.first_seq.get_num_computed_tokens()
            computed[rid] = before
            n = ssg.token_chunk_size
            if m.is_prompt:
                prompt_ids.append(rid)
                if cfg["enable_prefix_caching"]:
                    hit = max(
                        0,
                        tracker._seq_id_to_num_tokens_computed.get(g.first_seq.seq_id, 0) - before,
                    )
                    if hit >= n > 0:
                        hit = n - 1
                    if hit:
                        cached[rid] = hit
                    n -= hit
            uncached += n
        new = [r for r in scheduled if self.stats[r]["first_sched"] is None]
        for r in new:
            self.stats[r]["first_sched"] = rnd(self.t)
            self.stats[r]["hit0"] = cached.get(r, 0)
        for r in s.log_recompute:
            self.stats[r]["recompute"] += 1
        for r in s.log_out:
            self.stats[r]["swap"] += 1
        ignored = [g.request_id for g in so.ignored_seq_groups]
        for r in ignored:
            self.stats[r]["ignored"] = True
        dt = step_time(cfg, uncached, len(scheduled)) if scheduled else 0.0
        dt += cfg["swap_time"]["in"] * len(so.blocks_to_swap_in)
        dt += cfg["swap_time"]["out"] * len(so.blocks_to_swap_out)
        rec = {
            "step": self.step_no,
            "t_start": rnd(self.t),
            "dt": rnd(dt),
            "t_end": rnd(self.t + dt),
            "scheduled": scheduled,
            "computed": computed,
            "prompt": prompt_ids,
            "num_batched_tokens": so.num_batched_tokens,
            "tokens": uncached,
            "new": new,
            "recomputed": list(s.log_recompute),
            "swapped_out": list(s.log_out),
            "swapped_in": list(s.log_in),
            "ignored": ignored,
            "swap_in": [list(map(int, x)) for x in so.blocks_to_swap_in],
            "swap_out": [list(map(int, x)) for x in so.blocks_to_swap_out],
            "copy": [list(map(int, x)) for x in so.blocks_to_copy],
            "preempted": so.preempted,
            "cum_preempt": s.num_cumulative_preemption,
            "q": [len(s.running), len(s.swapped), len(s.waiting)],
            "free_sched": self.bm.get_num_free_gpu_blocks(),
            "free_cpu_sched": self.bm.get_num_free_cpu_blocks(),
        }
        if cached:
            rec["hits"] = cached
        self.t += dt
        # _process_model_outputs
        emitted, finished = [], []
        if not so.is_empty():
            for ssg, m in zip(so.scheduled_seq_groups, meta, strict=False):
                g = ssg.seq_group
                if g.is_finished():
                    continue
                g.update_num_computed_tokens(m.token_chunk_size or 0)
                if m.do_sample:
                    seq = g.first_seq
                    rid = g.request_id
                    r = self.reqs[self.ridx[rid]]
                    i = seq.get_output_len()
                    tok = out_token(self.ridx[rid], i)
                    if r.get("finish", "length") == "stop" and i + 1 == r["output_tokens"]:
                        tok = EOS_TOKEN
                    seq.append_token_id(tok, {tok: Logprob(0.0)})
                    emitted.append(rid)
                    st = self.stats[rid]
                    st["out"] = seq.get_output_len()
                    if st["first_token"] is None:
                        st["first_token"] = rnd(self.t)
                    self.stop_check(seq, g.sampling_params)
                    if seq.is_finished():
                        s.free_seq(seq)
                if g.is_finished():
                    finished.append(g.request_id)
                    self.stats[g.request_id]["finish"] = rnd(self.t)
            if finished:
                s.free_finished_seq_groups()
        rec["emitted"] = emitted
        rec["finished"] = finished
        rec["free"] = self.bm.get_num_free_gpu_blocks()
        rec["free_cpu"] = self.bm.get_num_free_cpu_blocks()
        rec["fq"] = crc_ids(self.free_list(Device.GPU))
        rec["fq_cpu"] = crc_ids(self.free_list(Device.CPU))
        # A step that only shuffles blocks (swap/recompute/ignore) is logged too;
        # log_recompute alone leaves is_empty() True but still changes state.
        changed = bool(
            scheduled
            or s.log_recompute
            or s.log_out
            or s.log_in
            or ignored
            or s.num_cumulative_preemption != n_pre
        )
        if changed:
            self.put(rec)
            self.step_no += 1
        if self.check:
            self.invariants()
        return changed

    def invariants(self):
        a = self.bm.block_allocator._allocators[Device.GPU]
        if hasattr(a, "_hashless_allocator"):
            return
        refs = {}
        for bt in self.bm.block_tables.values():
            for b in bt.physical_block_ids:
                refs[b] = refs.get(b, 0) + 1
        gpu = {b for b in refs if b < self.cfg["num_gpu_blocks"]}
        assert len(gpu) + len(a._free_block_indices) == self.cfg["num_gpu_blocks"]

    def run(self):
        s = self.sched
        while self.step_no < self.max_steps:
            if not s.has_unfinished_seqs():
                if self.next_arr >= len(self.order):
                    break
                self.t = max(self.t, self.reqs[self.order[self.next_arr]]["arrival"])
            self.add_arrivals()
            if not s.has_unfinished_seqs():
                continue
            try:
                changed = self.step()
            except (RuntimeError, AssertionError) as e:
                self.error = f"{type(e).__name__}: {str(e)[:120]}"
                break
            if not changed:
                if self.next_arr >= len(self.order):
                    self.stalled = True
                    break
                self.t = max(self.t, self.reqs[self.order[self.next_arr]]["arrival"])
        unfinished = sorted(
            r for r, st in self.stats.items() if st["finish"] is None and not st["ignored"]
        )
        self.put(
            {
                "summary": {
                    "steps": self.step_no,
                    "t_end": rnd(self.t),
                    "stalled": self.stalled,
                    "error": self.error,
                    "rejected": self.rejected,
                    "unfinished": unfinished,
                    "cum_preempt": s.num_cumulative_preemption,
                    "requests": self.stats,
                }
            }
        )
