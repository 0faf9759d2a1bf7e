"""How often do 90 % intervals hold what a real engine did? Over every real run in the repository.

    python benchmarks/coverage.py [--draws 10] [--part gpu|cpu] [CASES ...]

Cells: mean, p50, p90, p95, p99 of TTFT, TPOT and E2E, and output throughput, of each prediction of each run. CASES:
folders of validation cases (or folders of such folders) instead of tests/data/cases. About five minutes.

The intervals are those of `vsim validate --intervals` (GPU cases, from their kernel tables and from a roofline, each with
and without a correction learned from the first 100 requests) and of `vsim spotcheck` (CPU): the step model's error
alone, since prediction and measurement served the same requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vsim.calibrate.case import Case, read_case
from vsim.calibrate.ensemble import bands
from vsim.calibrate.spot import numbers, scheduler_config, transferred
from vsim.calibrate.validate import CELLS, METRICS, cells, validate
from vsim.models.artifact import Calibration, read_calibration
from vsim.models.domain import Domain
from vsim.models.load import LoadedStepModel
from vsim.models.model_spec import spec_from_config
from vsim.models.roofline import roofline_params
from vsim.models.table_params import StepContext
from vsim.models.uncertainty import uncertainty_of
from vsim.traces.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
SPOTS = tuple(ROOT / "benchmarks" / "data" / name for name in ("cpu_spot", "cpu_spot_busy"))
FIT_FIRST = 100


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of one prediction of one real run."""

    kind: str  # what was predicted from
    run: str
    name: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def gpu_cells(case: Case, draws: int) -> Iterator[Cell]:
    """A validation case, predicted from what it carries and from the data sheet, uncorrected and corrected."""
    priors: list[tuple[str, LoadedStepModel]] = []
    if (case.folder / "profile").is_dir():
        priors.append(("tables", case.step_model(None)))
    if case.gpu is not None and case.tensor_parallel_size == 1:
        params = roofline_params(case.gpu, case.model)
        calibration = Calibration("roofline", params, Domain(), provenance={"label": "roofline"})
        model = LoadedStepModel(calibration.step_model(case.context), calibration, "roofline")
        priors.append(("roofline", model))
    for prior, model in priors:
        for visible in (0, min(FIT_FIRST, len(case.trace) // 2)):
            found = validate(case, model, visible, draws=draws).validation
            kind = f"{prior}, corrected" if visible else prior
            for metric in METRICS:
                distance = found.metrics[metric]
                for cell in CELLS:
                    yield Cell(
                        kind,
                        case.name,
                        f"{metric} {cell}",
                        distance.measured_s[cell],
                        distance.predicted_s[cell],
                        *found.intervals[metric][cell],
                    )
            rate = found.throughput
            yield Cell(
                kind,
                case.name,
                "throughput",
                *(rate[k] for k in ("measured", "predicted", "low", "high")),
            )


def cpu_cells(path: Path, profile: Calibration, draws: int) -> Iterator[Cell]:
    """A recorded spot check: each of its repeats is a real run of the same requests."""
    told = json.loads(path.read_text())
    columns = {
        name: np.array(told[name]) for name in ("arrival_ns", "prompt_tokens", "output_tokens")
    }
    trace = Trace.of(
        (columns["arrival_ns"] / 1e9).tolist(),
        columns["prompt_tokens"].tolist(),
        columns["output_tokens"].tolist(),
    )
    trace = replace(trace, arrival_ns=columns["arrival_ns"])
    config = {**told["config"], "num_gpu_blocks": told["num_gpu_blocks"]}
    scheduler = scheduler_config(config, told["vllm_version"])
    kind = "CPU engine's steps"
    if told["model_config"] != profile.provenance["model_config"]:
        kind = "CPU, carried over to another model"
        profile = transferred(
            profile, spec_from_config(told["model_config"], told["config"]["model"])
        )
    context = StepContext(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        enforce_eager=True,
        block_size=scheduler.block_size,
    )
    model = profile.step_model(context)
    found = bands(trace, scheduler, model, uncertainty_of(profile), numbers, draws)
    for number, (first, last) in enumerate(
        zip(told["first_token_ns"], told["finish_ns"], strict=True), 1
    ):
        measured = measured_numbers(columns, np.array(first), np.array(last))
        for (metric, statistic), band in found.items():
            if metric == "request_throughput":
                continue  # the same as output throughput: all requests were served
            name = "throughput" if metric == "output_throughput" else f"{metric} {statistic}"
            yield Cell(
                kind,
                f"{path.parent.name}/{path.stem}, repeat {number}",
                name,
                measured[metric, statistic],
                band.median,
                band.low,
                band.high,
            )


def measured_numbers(
    columns: dict[str, Any], first: Any, last: Any
) -> dict[tuple[str, str], float]:
    """As `calibrate.spot.numbers`, from the recorded times."""
    sent, output = columns["arrival_ns"], columns["output_tokens"]
    several = output > 1
    values = {
        "ttft": first - sent,
        "tpot": ((last - first)[several] / (output[several] - 1)),
        "e2e": last - sent,
    }
    found = {
        (name, cell): value / 1e6
        for name, one in values.items()
        for cell, value in cells(one.astype(float)).items()
    }
    found["output_throughput", "mean"] = float(output.sum() / ((last.max() - sent.min()) / 1e9))
    return found


def table(found: list[Cell]) -> str:
    """Coverage by kind, how wide the intervals are and how far off the predictions.

    The last column is the median of |error| / half-width: 0.41 if errors are normal and the widths exact. It says
    more than coverage where few runs stand behind many cells, which rise and fall together.
    """
    lines = [
        f"{'predicted from':<36}{'runs':>5}{'cells':>7}{'inside':>8}{'half-width':>12}{'|error|':>9}{'ratio':>7}",
    ]
    for kind in [*dict.fromkeys(cell.kind for cell in found), "all"]:
        some = [cell for cell in found if kind in (cell.kind, "all")]
        halves = np.array([(c.high - c.low) / 2 / c.predicted for c in some])
        errors = np.array([abs(c.measured / c.predicted - 1) for c in some])
        runs = len({c.run for c in some})
        inside = np.mean([c.inside for c in some])
        lines.append(
            f"{kind:<36}{runs:>5}{len(some):>7}{inside:>8.1%}{np.median(halves):>12.2%}"
            f"{np.median(errors):>9.2%}{np.median(errors / np.maximum(halves, 1e-12)):>7.2f}"
        )
    outside = [c for c in found if not c.inside]
    if outside:
        lines += ["", "outside:"]
        lines += [
            f"  {c.kind}: {c.run}: {c.name} {c.measured:.4g}, interval {c.low:.4g} to {c.high:.4g}"
            for c in outside
        ]
    return "\n".join(lines)


def cases_in(folders: list[Path]) -> list[Case]:
    """Every validation case at or one level below the folders."""
    places = [
        place
        for folder in folders
        for place in (folder, *sorted(p for p in folder.iterdir() if p.is_dir()))
        if (place / "engine.json").is_file()
    ]
    return [read_case(place) for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", type=Path, metavar="CASES")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--part", choices=["gpu", "cpu"], help="only these runs")
    asked = parser.parse_args()
    found: list[Cell] = []
    if asked.part != "cpu":
        for case in cases_in(asked.cases or [ROOT / "tests" / "data" / "cases"]):
            found += gpu_cells(case, asked.draws)
    if asked.part != "gpu":
        for folder in SPOTS:
            profile = read_calibration(folder / "cpu.json")
            for path in sorted(folder.glob("*.json")):
                if path.name != "cpu.json":
                    found += cpu_cells(path, profile, max(asked.draws, 15))
    print(table(found))


if __name__ == "__main__":
    main()
