"""Would the generated cases notice? Deliberate simplifications of our V1 scheduler, one at a time.

    python tests/mutants.py [--n 200] [--seed 32]

The real engine's steps are recorded once; then each mutant is compared with them. Prints how many cases catch
each and exits 1 if one goes unnoticed. Not part of `make test`: run it when the generator or the scheduler changes.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from oracle.client import RealEngine, Recording, missing
from stepwise import MAX_STEPS, first_difference, our_records
from workloads import fresh_case

# (what the simplification forgets, module, text, text instead)
MUTANTS = [
    (
        "fcfs victim is the first admitted, not the last",
        "vsim.sim.victims",
        "return running[-1]",
        "return running[0]",
    ),
    (
        "freed blocks without key go to the tail",
        "vsim.sim.block_pool",
        "elif keys[block] or not self._unkeyed_blocks_first:",
        "elif True:",
    ),
    (
        "hash entries are dropped on free, not on reuse",
        "vsim.sim.block_pool",
        "            keyed.append(block)\n",
        "            keyed.append(block)\n                if keys[block]: self._forget(block)\n",
    ),
    (
        "a step that preempted admits, too",
        "vsim.sim.scheduler_v1",
        "        if draft.preempted:\n",
        "        if False:\n",
    ),
    (
        "the prefill cap holds for a lone request, too",
        "vsim.sim.scheduler_v1",
        "if num_requests <= 1 and self._rules.uncaps_lone_request:",
        "if False:",
    ),
    (
        "a request with nothing to compute ends the scan",
        "vsim.sim.scheduler_v1",
        "position += 1  # waits for a token in flight; those behind it may go on\n                continue",
        "break",
    ),
    (
        "a wasted last step under async scheduling",
        "vsim.sim.scheduler_v1",
        "if in_flight and computed + 2 - in_flight >= last:",
        "if False:",
    ),
    (
        "a victim scheduled in this step keeps its budget",
        "vsim.sim.scheduler_v1",
        "was_scheduled = draft.take_back(victim)",
        "before = draft.token_budget, draft.input_budget; was_scheduled = draft.take_back(victim);"
        " draft.token_budget, draft.input_budget = before",
    ),
    (
        "the scan does not step back behind a removed victim",
        "vsim.sim.scheduler_v1",
        "                    position -= 1\n",
        "                    pass\n",
    ),
    (
        "max_num_active_seqs is ignored",
        "vsim.sim.scheduler_v1",
        "config.max_num_active_seqs or config.max_num_seqs",
        "config.max_num_seqs",
    ),
    (
        "no room is asked for the whole prompt",
        "vsim.sim.scheduler_v1",
        "config.scheduler_reserve_full_isl and",
        "False and",
    ),
    (
        "the watermark counts also while nothing runs",
        "vsim.sim.scheduler_v1",
        "cache.watermark_blocks if self.running else 0",
        "cache.watermark_blocks",
    ),
    (
        "the watermark is ignored",
        "vsim.sim.scheduler_v1",
        "cache.watermark_blocks if self.running else 0",
        "0",
    ),
    (
        "a victim's token in flight is not awaited",
        "vsim.sim.scheduler_v1",
        "return not request.num_stale_tokens",
        "return True",
    ),
    (
        "model runner V2 lets decodes follow at once",
        "vsim.sim.scheduler_v1",
        "if step_number < request.next_decode_step:",
        "if False:",
    ),
    (
        "whole prompts are chunked although chunking is off",
        "vsim.sim.scheduler_v1",
        "if num_new > budget and not self._chunks_prompts:",
        "if False:",
    ),
    (
        "max_num_scheduled_tokens is ignored",
        "vsim.sim.scheduler_v1",
        "config.max_num_scheduled_tokens or config.max_num_batched_tokens",
        "config.max_num_batched_tokens",
    ),
]


def count_differing(
    module: str, old: str, new: str, recordings: list[tuple[int, Recording]], seed: int
) -> int:
    """Runs in a fresh process: import `module` with `old` replaced, then compare all cases."""
    parent, _, name = module.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    if old not in source:
        return -1
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[module] = mutant
    setattr(sys.modules[parent], name, mutant)
    exec(compile(source.replace(old, new), spec.origin, "exec"), mutant.__dict__)
    differing = 0
    for index, recording in recordings:
        try:
            ours = our_records(fresh_case("v1", seed, index))
        except Exception:
            differing += 1
            continue
        differing += first_difference(recording, ours) is not None
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=32)
    options = parser.parse_args()
    if reason := missing("v1"):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with RealEngine("v1") as real:
        recordings = [
            (i, real.run(fresh_case("v1", options.seed, i), MAX_STEPS)) for i in range(options.n)
        ]
    unnoticed = 0
    context = multiprocessing.get_context("spawn")
    for what, module, old, new in [("nothing", "vsim.sim.victims", "", ""), *MUTANTS]:
        with context.Pool(1) as pool:
            caught = pool.apply(count_differing, (module, old, new, recordings, options.seed))
        if caught < 0:
            print(f"stale  {what}: {module} no longer has {old!r}", flush=True)
        else:
            print(f"{caught:5}  of {options.n} cases catch: {what}", flush=True)
        unnoticed += caught != 0 if what == "nothing" else caught <= 0
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
