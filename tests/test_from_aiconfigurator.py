"""`vsim calibrate --from-aiconfigurator`: a general database's answers as a prior, labelled as such."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vsim.calibrate.fit import OTHER_PRIOR_WIDTH, PRIOR_WIDTH
from vsim.calibrate.from_aiconfigurator import LABEL, grid
from vsim.commands.calibrate import calibrate
from vsim.commands.replay import replay
from vsim.errors import UserError
from vsim.models.artifact import read_calibration
from vsim.models.step import StepShape
from vsim.models.table_params import StepContext

FLAGS = ["--gpu", "h100", "--model", "meta-llama/Llama-3.1-8B", "--max-model-len", "8192"]


class Database:
    """Answers as the package does: milliseconds for what is scheduled; the model is read while it is made."""

    asked: dict[str, Any]

    @classmethod
    def from_native(cls, config: dict[str, Any]) -> Database:
        cls.asked = config
        shape = json.loads((Path(config["model_name"]) / "config.json").read_text())
        if shape["hidden_size"] < 1024:
            raise RuntimeError("perf database error:\nno such attention")
        return cls()

    def estimate_forward_pass_time_ms(self, told: dict[str, Any]) -> float:
        what = told["scheduled_requests"]
        tokens = what["sum_prefill_tokens"] + what["num_decode_requests"]
        return 5 + 0.02 * tokens + 1e-5 * what["sum_decode_kv_tokens"]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The package as far as vsim uses it, and an empty folder to work in."""
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / "query_versions.yaml").write_text(
        "defaults: {vllm: {current: 0.24.0}}\noverrides: {a100_sxm: {vllm: {current: 0.14.0}}}\n"
    )
    sys.modules["aiconfigurator_core"].__file__ = str(tmp_path / "__init__.py")
    inner = ModuleType("aiconfigurator_core.sdk.rust_engine_step")
    inner.RustForwardPassPerfModel = Database  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, inner.__name__, inner)
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.12.0" if "aiconfig" in name else real(name)
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*more: str, flags: list[str] = FLAGS) -> Result:
    return CliRunner().invoke(
        calibrate, [*flags, "--from-aiconfigurator", "--out", "p.json", *more]
    )


def test_the_databases_answers_become_a_prior_that_says_what_it_is(package: Path) -> None:
    made = run("-tp", "2")
    assert made.exit_code == 0, made.output
    assert (Database.asked["system_name"], Database.asked["tp_size"]) == ("h100_sxm", 2)
    found = read_calibration(package / "p.json")
    assert found.label == LABEL and "not measured here" in made.output
    assert found.provenance["vllm_version"] == "0.24.0"
    assert "aiconfigurator-core 0.12.0" in found.provenance["source"]
    assert found.quality["random_steps_against_database"]["p95_abs_pct"] < 1
    assert "held_out_error" not in found.quality, "no engine was seen: there is no error to state"
    model = found.step_model(StepContext())
    shape = StepShape(((512, 0),), 32, 32 * 500, 500)
    assert model.device_seconds(shape) == pytest.approx(5e-3 + 2e-5 * 544 + 1e-8 * 16000, rel=0.01)


def test_a_prior_from_a_database_is_trusted_as_little_as_a_data_sheet(package: Path) -> None:
    run()
    kind = read_calibration(package / "p.json").kind
    assert PRIOR_WIDTH.get(kind, OTHER_PRIOR_WIDTH) == OTHER_PRIOR_WIDTH
    (package / "t.csv").write_text("timestamp,input_tokens,output_tokens\n0,100,20\n1,200,30\n")
    shown = CliRunner().invoke(replay, ["t.csv", *FLAGS, "--profile", "p.json"])
    assert shown.exit_code == 0, shown.output
    assert "not measured here" in " ".join(shown.output.split())
    assert "expect tens of percent of error" in " ".join(shown.output.split())


def test_measured_steps_correct_it(package: Path) -> None:
    run()
    (package / "p.json").rename(package / "prior.json")
    rows = []
    for at in range(120):
        n = 1 + at % 40
        row = {
            "scheduled": {str(i): 1 for i in range(n)},
            "computed": {str(i): 500 for i in range(n)},
            "dt": (5 + 0.02 * n + 1e-5 * 500 * n + 2) / 1e3,
        }
        rows.append(json.dumps(row))
    (package / "steps.jsonl").write_text("\n".join(rows) + "\n")
    args = [*FLAGS, "--from-steps", "steps.jsonl", "--prior", "prior.json", "--out", "q.json"]
    made = CliRunner().invoke(calibrate, args)
    assert made.exit_code == 0, made.output
    found = read_calibration(package / "q.json")
    assert found.params["prior"]["kind"] == "database"
    assert found.quality["held_out_error"]["median_abs_pct"] < 2
    assert found.quality["prior_held_out_error"]["median_abs_pct"] > 20
    assert LABEL in found.label


@pytest.mark.parametrize(
    ("flags", "more", "says"),
    [
        (["--gpu", "rtx4090", *FLAGS[2:]], [], "its database has no RTX-4090; it has A100-80GB"),
        (["--gpu", "h100", "--model", "tiny"], [], "for tiny on H100-SXM: no such attention"),
        (FLAGS, ["--quantization", "fp8"], "are not passed on"),
        (FLAGS, ["--kv-cache-dtype", "fp8"], "are not passed on"),
        (FLAGS, ["--refit"], "different sources"),
        (FLAGS, ["--prior", "x.json"], "--prior belongs to"),
    ],
)
def test_what_it_does_not_know_is_refused(
    package: Path, flags: list[str], more: list[str], says: str
) -> None:
    found = run(*more, flags=flags)
    assert isinstance(found.exception, UserError)
    assert says in str(found.exception)
    assert not (package / "p.json").exists()


def test_without_the_package_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    assert "pip install 'vsim[aic]'" in str(run().exception)


@pytest.mark.parametrize(
    ("tokens", "seqs", "length"), [(16, 1, 16), (2048, 256, 8192), (64, 8, 40)]
)
def test_the_grid_stays_inside_the_engine(tokens: int, seqs: int, length: int) -> None:
    shapes = list(grid(tokens, seqs, length))
    assert max(s.num_tokens for s in shapes) <= max(tokens, seqs)
    assert max(s.num_decodes for s in shapes) == seqs
    assert all(s.decode_context_max < length for s in shapes)


def test_the_real_package_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiconfigurator_core")
    monkeypatch.chdir(tmp_path)
    made = run()
    assert made.exit_code == 0, made.output
    quality = read_calibration(tmp_path / "p.json").quality
    assert quality["random_steps_against_database"]["median_abs_pct"] < 3
