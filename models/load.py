"""Which step model a deployment gets: a profile, a bundled one that fits, or the roofline that says so."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vsim.errors import UserError
from vsim.models.artifact import Calibration, read_calibration
from vsim.models.domain import WORDS, Domain
from vsim.models.engine_steps import block_size_note
from vsim.models.hardware import Gpu
from vsim.models.model_spec import ModelSpec
from vsim.models.profile_check import Asked, doubts, mismatch, other_engine
from vsim.models.roofline import LABEL, roofline_params
from vsim.models.step import FloatArray, StepModel, StepShape, decode_run_seconds, lockstep_seconds
from vsim.models.table_params import StepContext

HERE = Path(__file__).parent
# What a profile's numbers can break in the arithmetic of a step model, and the longest step that is one.
_BROKEN = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
MAX_STEP_S = 1e6
NOT_PROFILES = {"gpus.json", "model_configs.json"}


@dataclass(slots=True)
class LoadedStepModel:
    """A step model with its origin, counting the steps that lie outside what was measured.

    `outside`: feature -> steps in which it was exceeded; `steps_outside`: steps with any.
    """

    model: StepModel
    calibration: Calibration
    name: str
    steps: int = 0
    steps_outside: int = 0
    outside: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what this deployment asks of the model that was not measured
    _domain: Domain = field(init=False)

    def __post_init__(self) -> None:
        self._domain = self.calibration.domain

    def device_seconds(self, shape: StepShape) -> float:
        self.steps += 1
        beyond = self._domain.outside(shape)
        if beyond:
            self._note(beyond, 1)
        try:
            seconds = self.model.device_seconds(shape)
            if 0 <= seconds < MAX_STEP_S:
                return seconds
        except _BROKEN as error:
            raise self._unusable(f"{type(error).__name__} {error}") from error
        raise self._unusable(f"a step of {shape.num_tokens} tokens would take {seconds} s")

    def host_seconds(self, shape: StepShape) -> float:
        try:
            seconds = self.model.host_seconds(shape)
            if 0 <= seconds < MAX_STEP_S:
                return seconds
        except _BROKEN as error:
            raise self._unusable(f"{type(error).__name__} {error}") from error
        raise self._unusable(
            f"the CPU's work for a step of {shape.num_tokens} tokens would take {seconds} s"
        )

    def decode_run_seconds(self, shape: StepShape, steps: int) -> FloatArray:
        """See `RunStepModel`."""
        self.steps += steps
        inside = self._domain.decode_steps_inside(shape)
        if inside is not None and inside < steps:
            self._note(self._domain.outside(shape.after_decodes(steps - 1)), steps - inside)
        try:
            # A NaN compares false: it fails the test with what is negative or endless.
            seconds = decode_run_seconds(self.model, shape, steps)
            sound = (seconds >= 0) & (seconds < MAX_STEP_S)
            if bool(sound.all()):
                return seconds
        except _BROKEN as error:
            raise self._unusable(f"{type(error).__name__} {error}") from error
        at = int(sound.argmin())
        tokens = shape.after_decodes(at).num_tokens
        raise self._unusable(f"a step of {tokens} tokens would take {seconds[at]} s")

    def lockstep_seconds(self, shapes: Sequence[StepShape]) -> float:
        """See `LockstepModel`."""
        self.steps += 1
        beyond = {name for shape in shapes for name in self._domain.outside(shape)}
        if beyond:
            self._note(tuple(sorted(beyond)), 1)
        try:
            seconds = lockstep_seconds(self.model, shapes)
            if 0 <= seconds < MAX_STEP_S:
                return seconds
        except _BROKEN as error:
            raise self._unusable(f"{type(error).__name__} {error}") from error
        tokens = sum(shape.num_tokens for shape in shapes)
        raise self._unusable(f"a step of {tokens} tokens over all ranks would take {seconds} s")

    def _unusable(self, why: str) -> UserError:
        return UserError(f"profile {self.name}: its params can't be used: {why}")

    @property
    def label(self) -> str:
        return self.calibration.label

    @property
    def provenance(self) -> dict[str, Any]:
        """JSON-ready: what a run stores about its step model."""
        kept = {k: v for k, v in self.calibration.provenance.items() if k != "assumptions"}
        return {
            "name": self.name,
            "kind": self.calibration.kind,
            "label": self.label,
            "steps_outside_domain": self.steps_outside,
            "outside_domain": dict(sorted(self.outside.items())),
            **kept,
        }

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences for the user: the artifact's own, and what this run asked beyond the samples."""
        said = [*self.calibration.assumptions, *self.notes]
        if self.calibration.kind == "roofline":
            said.insert(0, f"step time is a {LABEL}: expect tens of percent of error")
        if self.steps_outside:
            domain = self._domain.to_json()
            parts = ", ".join(
                f"{WORDS[name]} above {domain[name]} in {count}"
                for name, count in sorted(self.outside.items())
            )
            said.append(
                f"{self.steps_outside} of {self.steps} steps lie outside what the profile measured "
                f"and are extrapolated ({parts})"
            )
        return tuple(said)

    def _note(self, beyond: tuple[str, ...], steps: int) -> None:
        self.steps_outside += steps
        for name in beyond:
            self.outside[name] = self.outside.get(name, 0) + steps


def bundled_profiles() -> Iterator[tuple[str, Path]]:
    """(name, path) of each profile that ships with vsim, by name."""
    for path in sorted(HERE.glob("*.json")):
        if path.name not in NOT_PROFILES:
            yield path.stem, path


def read_profile(name_or_path: str | Path) -> tuple[str, Calibration]:
    """A bundled profile by name, or any artifact by path: (name, calibration)."""
    path = Path(name_or_path)
    if not path.exists():
        bundled = dict(bundled_profiles())
        if str(name_or_path) in bundled:
            return path.name, _read(bundled[str(name_or_path)])
        raise UserError(
            f"profile {str(name_or_path)!r} is neither a file nor a bundled profile "
            f"({', '.join(bundled) or 'none'})"
        )
    return path.stem, _read(path)


def _read(path: Path) -> Calibration:
    """The artifact at `path`, parsed once as long as the file stays as it is: a sweep asks at every point."""
    try:
        found = path.stat()
    except OSError:
        return read_calibration(path)  # which says what is wrong with it
    return _read_once(path, found.st_mtime_ns, found.st_size, found.st_ino)


@functools.lru_cache(maxsize=8)
def _read_once(path: Path, *_: int) -> Calibration:
    return read_calibration(path)


@functools.lru_cache
def _says(path: Path) -> Calibration:
    """A bundled profile by its provenance alone: what it was measured on, without its 10 ms of tables."""
    text = path.read_text(encoding="utf-8")
    mark = '"provenance":'
    if text.count(mark) != 1:
        return _read(path)
    at = text.index(mark) + len(mark)
    provenance, _ = json.JSONDecoder().raw_decode(text[at:].lstrip())
    return Calibration("", {}, Domain(), provenance=provenance)


_MODELS_KEPT = 16
_models: dict[tuple[int, StepContext], tuple[Calibration, StepModel]] = {}


def _built(calibration: Calibration, context: StepContext) -> StepModel:
    """The step model of a profile, made once: a sweep asks for the same few. It remembers nothing of a run."""
    key = (id(calibration), context)
    found = _models.get(key)
    if found is None or found[0] is not calibration:
        if len(_models) >= _MODELS_KEPT:
            _models.clear()
        found = _models[key] = (calibration, calibration.step_model(context))
    return found[1]


def load_step_model(
    profile: str | Path | None = None,
    *,
    gpu: Gpu | None = None,
    model: ModelSpec | None = None,
    tensor_parallel_size: int = 1,
    weight_bytes_per_param: float = 2.0,
    kv_bytes_per_element: float = 2.0,
    context: StepContext | None = None,
    asked: Asked | None = None,
) -> LoadedStepModel:
    """The step model for a deployment.

    `profile`: a path or bundled name; without one the bundled profile of this `gpu` (a `Gpu`), `model`
    (a `ModelSpec`) and `tensor_parallel_size`, and without that the roofline. A given profile of another
    GPU, model, tensor-parallel size, precision or release (`asked`) is refused (UserError).
    """
    context = context or StepContext()
    asked = asked or Asked()
    if profile is not None:
        name, calibration = read_profile(profile)
        wrong = mismatch(calibration, gpu, model, tensor_parallel_size) or other_engine(
            calibration, asked
        )
        if wrong:
            raise UserError(f"profile {name} does not fit this deployment: {wrong}")
        note = (
            block_size_note(calibration.params, context.block_size)
            if calibration.kind == "engine-steps"
            else None
        )
        notes: tuple[str, ...] = (note,) if note else ()
        notes += doubts(calibration, name, asked)
        notes += _other_widths(calibration, name, weight_bytes_per_param, kv_bytes_per_element)
        return LoadedStepModel(_built(calibration, context), calibration, name, notes=notes)
    if gpu is None or model is None:
        raise UserError("a step model needs --profile, or --gpu and --model")
    if weight_bytes_per_param == 2.0 and kv_bytes_per_element == 2.0:
        for name, path in bundled_profiles():
            if mismatch(_says(path), gpu, model, tensor_parallel_size):
                continue
            calibration = _read(path)
            if not (
                mismatch(calibration, gpu, model, tensor_parallel_size)
                or other_engine(calibration, asked)
            ):
                return LoadedStepModel(_built(calibration, context), calibration, name)
    calibration = Calibration(
        kind="roofline",
        params=roofline_params(
            gpu,
            model,
            tensor_parallel_size=tensor_parallel_size,
            weight_bytes_per_param=weight_bytes_per_param,
            kv_bytes_per_element=kv_bytes_per_element,
        ),
        domain=Domain(),
        provenance={"label": LABEL, "gpu": gpu.name, "tensor_parallel_size": tensor_parallel_size},
    )
    return LoadedStepModel(calibration.step_model(context), calibration, LABEL)


def _other_widths(
    calibration: Calibration, name: str, weight_bytes: float, kv_bytes: float
) -> tuple[str, ...]:
    """A sentence if the profile was measured with 16-bit weights and KV cache and these are narrower."""
    says = calibration.provenance
    measured = str(says.get("dtype") or "").lower()
    plain = measured in ("bf16", "bfloat16", "fp16", "float16", "half") and not (
        says.get("quantization") or str(says.get("kv_cache_dtype") or "auto").startswith("fp8")
    )
    if not plain or (weight_bytes >= 2.0 and kv_bytes >= 2.0):
        return ()
    which = "weights" if weight_bytes < 2.0 else "KV cache"
    return (
        f"profile {name} was measured in {measured}; this deployment's {which} is narrower: its steps are "
        "taken as long as with 16 bits",
    )
