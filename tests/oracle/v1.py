"""Drives the real V1 `Scheduler`/`AsyncScheduler` and `KVCacheManager` of vLLM 0.32.0 on a virtual clock.

No model is loaded. Fabricated are only VllmConfig (from tinycfg/config.json), KVCacheConfig and
ModelRunnerOutput; everything that decides (Scheduler, AsyncScheduler, KVCacheManager, BlockPool, Request
and, with `kv_offload`, the scheduler side of the native OffloadingConnector) is the installed class.
Runs in the Python of the vLLM environment only; `worker.py` is its entry.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import Counter, deque
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
from common import EOS_TOKEN, build_prompts, crc_ids, out_token, rnd, step_time  # noqa: E402

DEFAULTS = {
    "engine": "v1",
    "block_size": 16,
    "num_gpu_blocks": 1000,  # includes the reserved null block 0
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_num_scheduled_tokens": None,
    "max_num_active_seqs": None,
    "max_model_len": 8192,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "async_scheduling": False,
    "pipeline_parallel_size": 1,
    "v2_model_runner": True,  # CUDA default in 0.32; matters for PP+async only
    "kv_groups": None,  # e.g. [{"type":"full"},{"type":"swa","window":512}]
    "prefix_cache_retention_interval": 0,
    "kv_offload": None,  # e.g. {"cpu_blocks":500,"load":{"base":1e-3,"per_block":1e-5},...}
    "step_time": {"a": 0.01, "b": 1e-5, "c": 1e-5},
    "sched_time": 0.0,  # virtual CPU cost of one schedule() call
    "update_time": 0.0,  # virtual CPU cost of one update_from_output()
    "idle_sleep": 0.0,  # real engine: 0.001 (sleep after an empty step)
}


TINY_MODEL = os.path.join(HERE, "tinycfg")
_CACHE = {}


def build_config(cfg):
    """-> (VllmConfig, KVCacheConfig)"""
    # VllmConfig refuses the V2 runner without Triton, so it is built with V1 and
    # the flag (a property that re-reads the env) is switched afterwards.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    key = ("mc", cfg["max_model_len"])
    if key not in _CACHE:
        if len(_CACHE) > 64:  # a long-lived worker sees many lengths
            _CACHE.clear()
        _CACHE[key] = ModelConfig(
            model=TINY_MODEL,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=cfg["max_model_len"],
        )
    mc = _CACHE[key]
    sc = SchedulerConfig(
        max_num_seqs=cfg["max_num_seqs"],
        max_num_batched_tokens=cfg["max_num_batched_tokens"],
        max_num_scheduled_tokens=cfg["max_num_scheduled_tokens"],
        max_num_active_seqs=cfg["max_num_active_seqs"],
        max_model_len=cfg["max_model_len"],
        is_encoder_decoder=False,
        enable_chunked_prefill=cfg["enable_chunked_prefill"],
        long_prefill_token_threshold=cfg["long_prefill_token_threshold"],
        long_prefill_token_threshold_adaptive=cfg["long_prefill_token_threshold_adaptive"],
        policy=cfg["policy"],
        scheduler_reserve_full_isl=cfg["scheduler_reserve_full_isl"],
        watermark=cfg["watermark"],
        async_scheduling=cfg["async_scheduling"],
    )
    cc = CacheConfig(
        block_size=cfg["block_size"],
        enable_prefix_caching=cfg["enable_prefix_caching"],
        prefix_cache_retention_interval=cfg["prefix_cache_retention_interval"],
    )
    kvt = None
    if cfg["kv_offload"]:
        # Page of FullAttentionSpec(1 head x head_size 1 x f32): 8 bytes/token,
        # rounded up to 4096 bytes per CPU chunk by CPUOffloadingSpec.
        bpc = cfg["kv_offload"].get("blocks_per_chunk", 1)
        nb = cfg["block_size"] * 8 * bpc
        chunk = -(-nb // 4096) * 4096
        extra = {
            "cpu_bytes_to_use": cfg["kv_offload"]["cpu_blocks"] * chunk,
            "spec_name": "CPUOffloadingSpec",
        }
        if bpc != 1:
            extra["blocks_per_chunk"] = bpc
        extra.update(cfg["kv_offload"].get("extra", {}))
        kvt = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id="oracle",
            kv_connector_extra_config=extra,
        )
    vc = VllmConfig(
        model_config=mc,
        scheduler_config=sc,
        cache_config=cc,
        parallel_config=ParallelConfig(),
        kv_transfer_config=kvt,
        device_config=DeviceConfig("cpu"),
    )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if cfg["v2_model_runner"] else "0"
    # VllmConfig.__post_init__ may rewrite knobs for the CPU platform: force the
    # requested values back (the Scheduler only reads these attributes).
    vc.parallel_config.pipeline_parallel_size = cfg["pipeline_parallel_size"]
    vc.scheduler_config.async_scheduling = cfg["async_scheduling"]
    for k in (
        "enable_chunked_prefill",
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "policy",
        "watermark",
        "scheduler_reserve_full_isl",
        "max_num_scheduled_tokens",
    ):
        setattr(vc.scheduler_config, k, cfg[k])
    vc.cache_config.block_size = cfg["block_size"]
    vc.cache_config.enable_prefix_caching = cfg["enable_prefix_caching"]
    vc.cache_config.num_gpu_blocks = cfg["num_gpu_blocks"]
    assert vc.use_v2_model_runner == cfg["v2_model_runner"]

    groups = []
    for gi, g in enumerate(cfg["kv_groups"] or [{"type": "full"}]):
        bs = g.get("block_size", cfg["block_size"])
        common = {"block_size": bs, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        if g["type"] == "full":
            spec = FullAttentionSpec(**common)
        elif g["type"] == "swa":
            spec = SlidingWindowSpec(**common, sliding_window=g["window"], dcp_sharded=False)
        else:
            raise ValueError(g)
        groups.append(KVCacheGroupSpec([f"layer{gi}"], spec))
    kvc = KVCacheConfig(
        num_blocks=cfg["num_gpu_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=cfg["prefix_cache_retention_interval"],
    )
    sched_bs, hash_bs = resolve_kv_cache_block_sizes(kvc, vc)
    kvc.hash_block_size = hash_bs
    kvc.cache_hit_alignment_tokens = sched_bs
    return vc, kvc


def build_scheduler(cfg):
    """-> (scheduler, block_hasher, batch_queue_size)"""
    vc, kvc = build_config(cfg)
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    sched_bs, hash_bs = resolve_kv_cache_block_sizes(kvc, vc)

    base = AsyncScheduler if cfg["async_scheduling"] else Scheduler

    class Probe(base):
        """The real scheduler plus a log of preemptions and counts of what step records cannot show.

        Every override calls the real method with the arguments it got: no decision changes.
        """

        # vLLM keeps these ids in a plain set and, with CPU offload, offers their blocks for storing in the
        # set's order: the hash seed's choice when several requests finish in one step. Here: as they finished.
        @property
        def finished_req_ids(self):
            return self._finished_in_order

        @finished_req_ids.setter
        def finished_req_ids(self, ids):
            self._finished_in_order = InOrder(ids)

        preempt_log: list[str]
        events: Counter[str]
        scheduled_now: set[str]

        def schedule(self, *args, **kwargs):
            self.scheduled_now.clear()
            return super().schedule(*args, **kwargs)

        def _preempt_request(self, request, timestamp, drop_stale_output=False):
            self.preempt_log.append(request.request_id)
            if request.request_id in self.scheduled_now:
                self.events["victim_already_scheduled"] += 1
            if request.num_output_placeholders > 0:
                self.events["victim_with_output_in_flight"] += 1
            return super()._preempt_request(request, timestamp, drop_stale_output)

    sched = Probe(
        vllm_config=vc,
        kv_cache_config=kvc,
        structured_output_manager=StructuredOutputManager(vc),
        include_finished_set=False,
        log_stats=False,
        block_size=sched_bs,
        hash_block_size=hash_bs,
    )
    sched.preempt_log, sched.events, sched.scheduled_now = [], Counter(), set()
    _watch_blocks(sched)
    hasher = None
    if cfg["enable_prefix_caching"] or vc.kv_transfer_config is not None:
        fn = get_hash_fn_by_name(vc.cache_config.prefix_caching_hash_algo)
        init_none_hash(fn)
        hasher = get_request_block_hasher(hash_bs, fn)
    return sched, hasher, vc.max_concurrent_batches


class InOrder(set):
    """A set that is iterated in the order its members came."""

    def __init__(self, members=()):
        super().__init__(members)
        self._order = dict.fromkeys(members)

    def add(self, member):
        super().add(member)
        self._order[member] = None

    def __iter__(self):
        return iter(self._order)

    def __getattribute__(self, name):
        # Any other change would leave the order behind: fail loudly instead of recording nonsense.
        if name in ("remove", "discard", "pop", "clear", "update", "difference_update"):
            raise NotImplementedError(name)
        return super().__getattribute__(name)


def _watch_blocks(sched):
    """Count refused admissions and evictions where they happen, inside the real KV cache manager."""
    from vllm.v1.request import RequestStatus

    manager, pool, events = sched.kv_cache_manager, sched.kv_cache_manager.block_pool, sched.events
    allocate, evict = manager.allocate_slots, pool._maybe_evict_cached_block

    def allocate_slots(request, num_new_tokens, *args, **kwargs):
        waiting = request.status != RequestStatus.RUNNING
        blocks = allocate(request, num_new_tokens, *args, **kwargs)
        if blocks is not None:
            sched.scheduled_now.add(request.request_id)
        elif not waiting:
            events["running_allocation_failed"] += 1
        else:
            events["admission_refused"] += 1
            free = pool.get_num_free_blocks()
            # Would the first chunk alone have fitted? Then it was the full prompt (or the watermark) that did not.
            need = manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=min(
                    kwargs.get("num_new_computed_tokens", 0) + num_new_tokens, manager.max_model_len
                ),
                new_computed_blocks=kwargs["new_computed_blocks"].blocks,
                num_encoder_tokens=0,
                total_computed_tokens=kwargs.get("num_new_computed_tokens", 0),
                num_local_computed_tokens=kwargs.get("num_new_computed_tokens", 0),
                num_tokens_main_model=kwargs.get("num_new_computed_tokens", 0) + num_new_tokens,
                prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
            )
            if need <= free and not kwargs.get("num_external_computed_tokens"):
                events["refused_though_chunk_fits"] += 1
                if manager.watermark_blocks and kwargs.get("has_scheduled_reqs"):
                    events["refused_under_watermark"] += 1
        return blocks

    def maybe_evict_cached_block(block):
        evicted = evict(block)
        events["cached_block_evicted"] += bool(evicted)
        return evicted

    manager.allocate_slots = allocate_slots
    pool._maybe_evict_cached_block = maybe_evict_cached_block


class OffloadSim:
    """Virtual-time stand-in for OffloadingConnectorWorker + CPUOffloadingWorker.

    Per executed batch (also empty ones), at the batch's start time:
      1. handle_preemptions: submit stores queued by the previous batch, submit
         this batch's stores that must be flushed, block until flushed jobs end
      2. submit loads, queue the remaining stores for the next batch
      3. poll: report jobs whose end time <= now
    Loads and stores are two independent serial channels.
    """

    def __init__(self, spec):
        self.load = spec.get("load", {"base": 0.0, "per_block": 0.0})
        self.store = spec.get("store", {"base": 0.0, "per_block": 0.0})
        self.busy = {"load": 0.0, "store": 0.0}
        self.jobs = {}  # job_id -> (end, req_id|None)
        self.unsubmitted = []

    def _submit(self, kind, jid, job, now):
        p = getattr(self, kind)
        src = job.src_spec if kind == "store" else job.dst_spec
        n = len(src.block_ids)
        start = max(now, self.busy[kind])
        end = start + p["base"] + p["per_block"] * n
        self.busy[kind] = end
        self.jobs[jid] = (end, job.req_id if kind == "load" else None)
        return n

    def run(self, meta, now):
        """-> (KVConnectorOutput | None, new_now, info)"""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput

        info = {"load": {}, "store": {}, "flush": []}
        flush = meta.jobs_to_flush or set()
        for jid in sorted(flush):
            job = meta.store_jobs.pop(jid, None)
            if job is not None:
                self.unsubmitted.append((jid, job))
                info["store"][job.req_id] = info["store"].get(job.req_id, 0) + len(
                    job.src_spec.block_ids
                )
        for jid, job in self.unsubmitted:
            self._submit("store", jid, job, now)
        self.unsubmitted = []
        if flush:
            ends = [self.jobs[j][0] for j in flush if j in self.jobs]
            info["flush"] = sorted(flush)
            if ends:
                now = max([now, *ends])
        for jid, job in meta.load_jobs.items():
            info["load"][job.req_id] = self._submit("load", jid, job, now)
        for jid, job in meta.store_jobs.items():
            info["store"][job.req_id] = info["store"].get(job.req_id, 0) + len(
                job.src_spec.block_ids
            )
            self.unsubmitted.append((jid, job))
        done = sorted(j for j, (end, _) in self.jobs.items() if end <= now + 1e-12)
        out = None
        if done:
            wm = OffloadingWorkerMetadata()
            recv = set()
            for j in done:
                _, rid = self.jobs.pop(j)
                wm.mark_completed(j)
                if rid is not None:
                    recv.add(rid)
            out = KVConnectorOutput(finished_recving=recv or None, kv_connector_worker_meta=wm)
            info["recv"] = sorted(recv)
        info = {k: v for k, v in info.items() if v}
        return out, now, info


class Oracle:
    def __init__(self, spec: dict[str, Any], put, check=True, max_steps=10**9):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.Request, self.SamplingParams = Request, SamplingParams
        cfg = dict(DEFAULTS)
        unknown = set(spec["config"]) - set(DEFAULTS) - {"comment"}
        assert not unknown, f"unknown config keys {unknown}"
        cfg.update({k: v for k, v in spec["config"].items() if k != "comment"})
        assert cfg["engine"] == "v1"
        self.cfg = cfg
        self.reqs = spec["requests"]
        self.prompts = build_prompts(self.reqs)
        self.ridx = {r["id"]: k for k, r in enumerate(self.reqs)}
        assert len(self.ridx) == len(self.reqs), "duplicate request ids"
        self.sched, self.hasher, self.qsize = build_scheduler(cfg)
        self.pool = self.sched.kv_cache_manager.block_pool
        self.put = put
        self.check = check
        self.max_steps = max_steps
        self.order = sorted(range(len(self.reqs)), key=lambda k: (self.reqs[k]["arrival"], k))
        self.next_arr = 0
        self.t = 0.0  # engine-core (CPU) clock
        self.stage_free = [0.0] * cfg["pipeline_parallel_size"]
        self.queue = deque()  # newest left, oldest right (as in EngineCore)
        self.step_no = 0
        self.live = {}  # id -> Request (kept after finish)
        self.stats = {}
        self.rejected = []
        self.stalled = False
        self.off = OffloadSim(cfg["kv_offload"]) if cfg["kv_offload"] else None

    # ---- arrivals ---------------------------------------------------------
    def add_arrivals(self):
        while self.next_arr < len(self.order):
            k = self.order[self.next_arr]
            r = self.reqs[k]
            if r["arrival"] > self.t:
                break
            self.next_arr += 1
            prompt = self.prompts[k]
            # Front-end validation (v1/engine/input_processor.py)
            if not 0 < len(prompt) < self.cfg["max_model_len"]:
                self.rejected.append(r["id"])
                continue
            if r.get("finish", "length") == "stop":
                # EOS arrives as output token number `output_tokens`
                sp = self.SamplingParams(
                    max_tokens=self.cfg["max_model_len"] - len(prompt), detokenize=False
                )
                sp._eos_token_id = EOS_TOKEN
            else:
                sp = self.SamplingParams(
                    max_tokens=r["output_tokens"], ignore_eos=True, detokenize=False
                )
            req = self.Request(
                request_id=r["id"],
                prompt_token_ids=prompt,
                sampling_params=sp,
                pooling_params=None,
                arrival_time=r["arrival"],
                priority=r.get("priority", 0),
                block_hasher=self.hasher,
            )
            self.live[r["id"]] = req
            self.stats[r["id"]] = {
                "arrival": r["arrival"],
                "prompt": len(prompt),
                "first_sched": None,
                "hit0": None,
                "first_token": None,
                "finish": None,
                "out": 0,
                "preempt": 0,
            }
            self.sched.add_request(req)

    # ---- one schedule() call ---------------------------------------------
    def schedule(self):
        s = self.sched
        s.preempt_log.clear()
        so = s.schedule()
        comp = {}
        for n in so.scheduled_new_reqs:
            comp[n.req_id] = n.num_computed_tokens
        for rid, c in zip(
            so.scheduled_cached_reqs.req_ids,
            so.scheduled_cached_reqs.num_computed_tokens,
            strict=False,
        ):
            comp[rid] = c
        assert set(comp) == set(so.num_scheduled_tokens)
        new, resumed = [], []
        for rid in so.num_scheduled_tokens:
            st = self.stats[rid]
            if st["first_sched"] is None:
                new.append(rid)
                st["first_sched"] = rnd(self.t)
                st["hit0"] = comp[rid]
                st["_adm"] = True
            elif st.get("_pre"):
                resumed.append(rid)
            st["_pre"] = False
        for rid in s.preempt_log:
            self.stats[rid]["preempt"] += 1
            self.stats[rid]["_pre"] = True
        # emits a token <=> the whole known sequence is computed after this batch
        emits = [rid for rid in so.num_scheduled_tokens if not self.live[rid].is_prefill_chunk]
        rec = {
            "t_sched": rnd(self.t),
            "scheduled": dict(so.num_scheduled_tokens),
            "computed": {r: comp[r] for r in so.num_scheduled_tokens},
            "tokens": so.total_num_scheduled_tokens,
            "new": new,
            "resumed": resumed,
            "preempted": list(s.preempt_log),
            "running": len(s.running),
            "waiting": len(s.waiting) + len(s.kv_holding_waiting),
            "free_sched": self.pool.get_num_free_blocks(),
        }
        hits = {r: comp[r] for r in new + resumed if comp[r] > 0}
        if hits:
            rec["hits"] = hits
        self.t += self.cfg["sched_time"]
        return so, rec, emits

    def execute(self, so, rec):
        """Place the batch on the (virtual) device; returns its end time."""
        n = so.total_num_scheduled_tokens
        kv_out = None
        start = self.t
        if n > 0:
            start = max(start, self.stage_free[0])
        if self.off is not None:
            kv_out, start, info = self.off.run(so.kv_connector_metadata, start)
            if info:
                rec["xfer"] = info
        if n == 0:
            rec["t_start"] = rec["t_end"] = rnd(start)
            rec["dt"] = 0.0
            return start, kv_out
        dt = step_time(self.cfg, n, len(so.num_scheduled_tokens))
        per = dt / len(self.stage_free)
        tt = start
        for k in range(len(self.stage_free)):
            tt = max(tt, self.stage_free[k]) + per
            self.stage_free[k] = tt
        rec["t_start"] = rnd(start)
        rec["dt"] = rnd(dt)
        rec["t_end"] = rnd(tt)
        return tt, kv_out

    # ---- update_from_output() --------------------------------------------
    def update(self, so, rec, emits, kv_out):
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(so.num_scheduled_tokens)
        emits = set(emits)
        sampled = []
        for rid in ids:
            req = self.live[rid]
            if rid in emits and not req.is_finished():
                i = req.num_output_tokens
                r = self.reqs[self.ridx[rid]]
                if r.get("finish", "length") == "stop" and i + 1 == r["output_tokens"]:
                    sampled.append([EOS_TOKEN])
                else:
                    sampled.append([out_token(self.ridx[rid], i)])
            elif rid in emits:
                sampled.append([EOS_TOKEN])  # wasted step, ignored by scheduler
            else:
                sampled.append([])
        mro = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=kv_out,
        )
        before = {
            rid: (self.live[rid].num_output_tokens, self.live[rid].is_finished()) for rid in ids
        }
        self.sched.update_from_output(so, mro)
        tok, fin, wasted = [], [], []
        for rid in ids:
            req, st = self.live[rid], self.stats[rid]
            if req.num_output_tokens > before[rid][0]:
                tok.append(rid)
                st["out"] = req.num_output_tokens
                if st["first_token"] is None:
                    st["first_token"] = rec["t_end"]
            if req.is_finished() and not before[rid][1]:
                fin.append(rid)
                st["finish"] = rec["t_end"]
            if before[rid][1]:
                wasted.append(rid)
        rec["emitted"] = tok
        rec["finished"] = fin
        if wasted:
            rec["wasted"] = wasted  # scheduled after they had finished
        rec["free"] = self.pool.get_num_free_blocks()
        rec["cached"] = len(self.pool.cached_block_hash_to_block)
        rec["fq"] = crc_ids(b.block_id for b in self.pool.free_block_queue.get_all_free_blocks())
        self.t += self.cfg["update_time"]
        if self.check:
            self.invariants()
        if rec["tokens"] or rec["preempted"] or rec.get("xfer"):
            self.put({"step": self.step_no, **rec})
            self.step_no += 1

    def invariants(self):
        refs = {}
        for m in self.sched.kv_cache_manager.coordinator.single_type_managers:
            for _rid, blks in m.req_to_blocks.items():
                for b in blks:
                    if not b.is_null:
                        refs[b.block_id] = refs.get(b.block_id, 0) + 1
        free = {b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()}
        assert not (free & set(refs)), "free block is referenced"
        if not self.sched.deferred_frees and self.off is None:
            for b in self.pool.blocks:
                if not b.is_null:
                    assert b.ref_cnt == refs.get(b.block_id, 0), b
            assert len(free) + len(refs) == self.pool.num_gpu_blocks - 1

    # ---- EngineCore loop ---------------------------------------------------
    def run(self):
        s = self.sched
        while self.step_no < self.max_steps:
            # _process_input_queue
            if not (s.has_requests() or self.queue):
                if self.next_arr >= len(self.order):
                    break
                self.t = max(self.t, self.reqs[self.order[self.next_arr]]["arrival"])
            self.add_arrivals()
            executed, progressed = self.step_sync() if self.qsize == 1 else self.step_bq()
            if not executed and s.has_requests():
                # EngineCoreProc._process_engine_step sleeps 1 ms here
                t_idle = self.t
                self.t += self.cfg["idle_sleep"]
                busy = any(x[1].total_num_scheduled_tokens for x in self.queue)
                if (
                    not progressed
                    and not busy
                    and s.has_unfinished_requests()
                    and not (self.off and (self.off.jobs or self.off.unsubmitted))
                ):
                    # nothing can change before the next arrival
                    if self.next_arr >= len(self.order):
                        self.stalled = True
                        break
                    a = self.reqs[self.order[self.next_arr]]["arrival"]
                    q = self.cfg["idle_sleep"]
                    if q > 0:
                        n = max(1, -(-int((a - t_idle) * 1e9) // int(q * 1e9)))
                        self.t = t_idle + n * q
                    else:
                        self.t = max(self.t, a)
        self.finish()

    def step_sync(self):
        """EngineCore.step"""
        if not self.sched.has_requests():
            return False, False
        so, rec, emits = self.schedule()
        end, kv_out = self.execute(so, rec)
        self.t = max(self.t, end)
        self.update(so, rec, emits, kv_out)
        n = so.total_num_scheduled_tokens
        return n > 0, bool(n or rec["preempted"] or kv_out or so.finished_req_ids)

    def step_bq(self):
        """EngineCore.step_with_batch_queue (no structured outputs)"""
        q = self.queue
        assert len(q) < self.qsize
        executed = False
        progressed = False
        if self.sched.has_requests():
            so, rec, emits = self.schedule()
            end, kv_out = self.execute(so, rec)
            executed = so.total_num_scheduled_tokens > 0
            progressed = bool(executed or rec["preempted"] or kv_out or so.finished_req_ids)
            q.appendleft((end, so, rec, emits, kv_out))
            if len(q) < self.qsize and (executed or self.sched.has_requests()):
                return executed, progressed
        elif not q:
            return False, False
        end, so, rec, emits, kv_out = q.pop()
        self.t = max(self.t, end)
        self.update(so, rec, emits, kv_out)
        return executed, progressed or so.total_num_scheduled_tokens > 0

    def finish(self):
        for st in self.stats.values():
            st.pop("_pre", None)
            st.pop("_adm", None)
        unfinished = sorted(r for r, st in self.stats.items() if st["finish"] is None)
        self.put(
            {
                "summary": {
                    "steps": self.step_no,
                    "t_end": rnd(self.t),
                    "stalled": self.stalled,
                    "rejected": self.rejected,
                    "unfinished": unfinished,
                    "preemptions": sum(st["preempt"] for st in self.stats.values()),
                    "requests": self.stats,
                }
            }
        )
