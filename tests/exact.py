"""Fresh random cases: every step of the real vLLM scheduler against ours.

    python tests/exact.py --engine v1 --n 2000 --seed 7 [--jobs 1] [--out DIR] [--real-only]

Prints progress, the census of situations reached on the real engine, and the number of cases and steps
compared. A difference is named by step and key, shrunk, and saved as a case that `vsim debug steps` reads.
Exit status 1 on any difference. Case i of a seed is the same in any run; `--start` continues a series.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from census import Census
from oracle.client import VERSION, Case, RealEngine, Recording, missing
from stepwise import MAX_STEPS, compare, shrink
from workloads import fresh_case

Result = tuple[int, Case, Recording, str | None]


class Checker:
    """Compares case after case on one real engine of its own."""

    def __init__(self, engine: str, seed: int, real_only: bool) -> None:
        self.engine, self.seed, self.real_only = engine, seed, real_only
        self.real = RealEngine(engine).__enter__()

    def __call__(self, index: int) -> Result:
        case = fresh_case(self.engine, self.seed, index)
        if self.real_only:
            return index, case, self.real.run(case, MAX_STEPS), None
        recording, difference = compare(self.real, case)
        return index, case, recording, difference


_checker: Checker | None = None


def _start(engine: str, seed: int, real_only: bool) -> None:
    global _checker  # noqa: PLW0603 (one per worker process)
    _checker = Checker(engine, seed, real_only)


def _check(index: int) -> Result:
    assert _checker is not None
    return _checker(index)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=["v1", "v0"], default="v1")
    parser.add_argument("--n", type=int, default=2000, help="number of cases")
    parser.add_argument("--seed", type=int, help="default: a fresh one, printed")
    parser.add_argument("--start", type=int, default=0, help="first case of the series")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("build/exact"), help="where differing cases go"
    )
    parser.add_argument(
        "--real-only", action="store_true", help="only the real engine and its census"
    )
    options = parser.parse_args()
    if reason := missing(options.engine):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(
        f"vLLM {VERSION[options.engine]} ({options.engine}), {options.n} cases of seed {seed}",
        flush=True,
    )

    census, differing, began = Census(), [], time.monotonic()
    arguments = (options.engine, seed, options.real_only)
    indices = range(options.start, options.start + options.n)
    with ProcessPoolExecutor(options.jobs, initializer=_start, initargs=arguments) as pool:
        for done, (index, case, recording, difference) in enumerate(pool.map(_check, indices), 1):
            census.add(case, recording)
            if difference:
                differing.append(index)
                if len(differing) == 1:
                    report_difference(options, seed, index, case, difference)
                else:
                    print(f"case {index} differs: {difference[:150]}", flush=True)
            if done % max(1, options.n // 20) == 0:
                spent = time.monotonic() - began
                print(
                    f"{done}/{options.n} cases, {census.num_steps} steps, "
                    f"{len(differing)} differ, {spent:.0f} s",
                    flush=True,
                )
    print(census.table())
    compared = "recorded" if options.real_only else "compared"
    print(
        f"seed {seed}: {census.num_cases} cases, {census.num_steps} steps {compared}; {len(differing)} cases differ"
    )
    if differing:
        print("differing cases:", *differing)
    return 1 if differing else 0


def report_difference(
    options: argparse.Namespace, seed: int, index: int, case: Case, difference: str
) -> None:
    print(f"case {index} differs: {difference}\nshrinking ...", flush=True)
    with RealEngine(options.engine) as real:

        def differs(candidate: Case) -> bool:
            recording, text = compare(real, candidate)
            return text is not None and recording.crash is None

        small = shrink(case, differs)
        recording, text = compare(real, small)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{options.engine}-seed{seed}-case{index}"
    files: dict[str, Any] = {name: case, f"{name}-small": small}
    for file, content in files.items():
        (options.out / f"{file}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    records = [*recording.steps, {"summary": recording.summary}]
    lines = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records)
    (options.out / f"{name}-small.real.jsonl").write_text(lines)
    print(f"{len(case['requests'])} requests shrunk to {len(small['requests'])}: {text}")
    print(
        f"saved {options.out / name}*.json, the real steps beside it\n{json.dumps(small)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
