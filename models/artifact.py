"""Calibration artifact: where a step model's numbers come from, as JSON, `"schema": "vsim/step-model/1"`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from vsim.errors import UserError
from vsim.models.correction import Coefficients, CorrectedStepModel
from vsim.models.domain import Domain
from vsim.models.engine_steps import build_engine_steps
from vsim.models.roofline import RooflineStepModel
from vsim.models.step import StepModel
from vsim.models.table_params import StepContext, build_tables

SCHEMA = "vsim/step-model/1"
MAX_BYTES = 64 << 20  # no honest artifact comes near it


@dataclass(frozen=True, slots=True)
class Calibration:
    """A step model with its birth certificate. Everything in it is JSON, nothing is code.

    `kind` says how to read `params`: "tables", "roofline", "engine-steps", "database" (a general
    database's answers in the parameters of "engine-steps") or "corrected" (a prior of
    another kind plus coefficients). `quality`: samples, held-out count, error on held-out steps, noise floor.
    `provenance`: label, GPU, model, versions, hash of the samples, source, licence, assumptions.
    """

    kind: str
    params: Mapping[str, Any]
    domain: Domain
    quality: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return str(self.provenance.get("label", self.kind))

    @property
    def assumptions(self) -> tuple[str, ...]:
        return tuple(str(a) for a in self.provenance.get("assumptions", ()))

    def step_model(self, context: StepContext) -> StepModel:
        """The model these numbers make in a deployment. Raises UserError if the parameters are not whole."""
        try:
            return build(self.kind, self.params, context)
        except (
            KeyError,
            AttributeError,
            TypeError,
            ValueError,
            IndexError,
            ArithmeticError,
        ) as error:
            raise UserError(
                f"profile of kind {self.kind!r}: its params can't be used: {type(error).__name__} {error}"
            ) from None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "provenance": dict(self.provenance),
            "quality": dict(self.quality),
            "domain": self.domain.to_json(),
            "params": dict(self.params),
        }


def build(kind: str, params: Mapping[str, Any], context: StepContext) -> StepModel:
    """A step model from `params`; the kinds are listed at `Calibration`."""
    if kind == "tables":
        return build_tables(params, context)
    if kind == "roofline":
        return RooflineStepModel(**_finite(params))
    if kind in ("engine-steps", "database"):
        return build_engine_steps(params, context.block_size)
    if kind == "corrected":
        prior = params["prior"]
        return CorrectedStepModel(
            build(prior["kind"], prior["params"], context),
            Coefficients(**_finite(params["coefficients"])),
        )
    raise ValueError(
        f"unknown kind {kind!r}; this version knows tables, roofline, engine-steps, database, corrected"
    )


def _finite(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """`params` as they are. Raises ValueError unless all are finite numbers: a NaN would pass comparisons."""
    for name, value in params.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ValueError(f"{name}={value!r} is no finite number")
    return params


def read_calibration(path: Path) -> Calibration:
    """Read an artifact. Raises UserError if it is none, or of another schema."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(
                f"profile {path.name} is larger than {MAX_BYTES >> 20} MiB: not an artifact"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"profile {path} does not exist; `vsim profiles list` shows the bundled ones"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"profile {path} can't be read: {error}") from None
    return parse_calibration(text, path.name)


def parse_calibration(text: str, name: str) -> Calibration:
    """An artifact from its JSON text; `name` is for messages."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of too many digits
        raise UserError(f"profile {name} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UserError(f"profile {name} holds no JSON object")
    schema = data.get("schema")
    if schema != SCHEMA:
        raise UserError(f"profile {name} has schema {schema!r}; this version reads {SCHEMA!r}")
    kind, params, domain = data.get("kind"), data.get("params"), data.get("domain")
    if not isinstance(kind, str) or not isinstance(params, dict) or not isinstance(domain, dict):
        raise UserError(f"profile {name} lacks kind, params or domain")
    known = {f.name for f in fields(Domain)}
    strange = sorted(set(domain) - known)
    if strange:
        raise UserError(
            f"profile {name}: domain has a feature {strange[0]!r} that {SCHEMA} does not know"
        )
    if any(
        v is not None and (isinstance(v, bool) or not isinstance(v, int)) for v in domain.values()
    ):
        raise UserError(f"profile {name}: domain limits must be whole numbers or null")
    quality, provenance = data.get("quality") or {}, data.get("provenance") or {}
    if not isinstance(quality, dict) or not isinstance(provenance, dict):
        raise UserError(f"profile {name}: quality and provenance must be objects")
    said, tp = provenance.get("assumptions", []), provenance.get("tensor_parallel_size")
    if not isinstance(said, list):
        raise UserError(f"profile {name}: provenance.assumptions must be a list of sentences")
    if tp is not None and (isinstance(tp, bool) or not isinstance(tp, int) or tp < 1):
        raise UserError(
            f"profile {name}: provenance.tensor_parallel_size={tp!r} must be a whole number of at least 1"
        )
    return Calibration(kind, params, Domain(**domain), quality, provenance)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write the artifact, whole or not at all."""
    text = json.dumps(calibration.to_json(), separators=(",", ":"), sort_keys=False)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)
