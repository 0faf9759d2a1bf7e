"""Nobody waits for a library that his command does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.models import load
from vsim.models.artifact import read_calibration
from vsim.models.hardware import find_gpu
from vsim.models.model_spec import load_model
from vsim.models.step import StepShape
from vsim.models.table_params import StepContext
from vsim.sim.fast.compiled import entry
from vsim.traces.arrow import to_arrow, to_numpy

AZURE = Path(__file__).parent.parent / "traces" / "azure2023_conv.csv"
REPLAY = ["replay", str(AZURE), "--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "a100"]
SLOW = {"pandas", "pyarrow", "scipy", "sklearn", "plotly", "yaml", "joblib"}


def modules_after(*args: str) -> set[str]:
    """What `vsim ARGS` imported."""
    code = (
        "import sys\n"
        "from vsim.cli import main\n"
        "sys.argv = ['vsim', *sys.argv[1:]]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "print('\\n' + ' '.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def imported_by(*args: str) -> set[str]:
    """Which of the slow libraries `vsim ARGS` imported."""
    return SLOW & modules_after(*args)


def test_a_replay_to_the_table_imports_none_of_the_slow_libraries() -> None:
    assert imported_by(*REPLAY, "--limit", "20") == set()


def test_a_replay_to_files_needs_arrow_but_not_pandas(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert imported_by(*REPLAY, "--limit", "20", "--out", str(run)) == {"pyarrow"}
    assert "pandas" not in imported_by("explain", str(run))


def test_a_generated_trace_goes_to_parquet_and_back_without_pandas(tmp_path: Path) -> None:
    made = tmp_path / "made.parquet"
    said = imported_by("trace", "generate", "--rate", "5", "--requests", "20", "--out", str(made))
    assert "pandas" not in said
    assert imported_by("replay", str(made), *REPLAY[2:]) == {"pyarrow"}


KINDS = ("int64", "int32", "int16", "int8", "uint64", "float64", "float32", "bool")


@pytest.mark.parametrize("kind", KINDS)
@given(values=st.lists(st.integers(0, 1), max_size=40), cut=st.integers(0, 40))
def test_columns_come_back_from_arrow_as_they_went(kind: str, values: list[int], cut: int) -> None:
    import pyarrow as pa

    column = np.array(values, dtype=kind)
    array = to_arrow(column)
    assert array.equals(pa.array(column))
    # A slice, and a column in two pieces, are what row groups of a file come as.
    assert to_numpy(array.slice(cut)).tolist() == column[cut:].tolist()
    pieces = pa.chunked_array([array[:cut], array[cut:]], type=array.type)
    assert to_numpy(pieces).tolist() == column.tolist()
    assert to_numpy(pieces).dtype == column.dtype


def test_nulls_are_left_to_arrows_own_conversion() -> None:
    import pyarrow as pa

    assert np.isnan(to_numpy(pa.array([1, None]))[1])


def test_a_profile_is_parsed_once_until_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = next(path for _, path in load.bundled_profiles()).read_text()
    profile = tmp_path / "mine.json"
    profile.write_text(text)
    parsed = []
    monkeypatch.setattr(load, "read_calibration", lambda p: parsed.append(p) or read_calibration(p))
    first = load.read_profile(profile)[1]
    assert load.read_profile(profile)[1] is first and len(parsed) == 1
    profile.write_text(text.replace('"schema"', '"label": "new", "schema"', 1))
    assert load.read_profile(profile)[1] is not first and len(parsed) == 2
    profile.unlink()
    with pytest.raises(UserError, match="neither a file"):
        load.read_profile(profile)


def test_the_compiled_path_starts_without_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    entry()  # compiled and kept, if no run did that before
    monkeypatch.setenv("VSIM_ENGINE", "fast")
    found = modules_after(*REPLAY, "--limit", "20")
    assert "llvmlite" in found
    assert not {"numba", "scipy"} & found


def test_a_step_model_is_made_once_for_a_deployment_and_counts_anew_for_each_run() -> None:
    gpu, model = find_gpu("rtx4090"), load_model("meta-llama/Llama-3.1-8B")
    asked = [load.load_step_model(gpu=gpu, model=model) for _ in range(2)]
    wider = load.load_step_model(gpu=gpu, model=model, context=StepContext(max_num_seqs=8))
    assert asked[0].model is asked[1].model and asked[0].model is not wider.model
    asked[0].device_seconds(StepShape(((10, 0),), 0, 0, 0))
    assert (asked[0].steps, asked[1].steps) == (1, 0)
