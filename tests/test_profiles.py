"""`vsim profiles show`: origin and error of a profile, and nothing from the file raw on the terminal."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from vsim.calibrate.step_plot import step_plot
from vsim.cli import vsim
from vsim.errors import UserError


def run(*arguments: str) -> str:
    done = CliRunner().invoke(
        vsim, ["profiles", *arguments], catch_exceptions=False, standalone_mode=False
    )
    return done.stdout


def test_bundled_profiles_are_listed_and_shown() -> None:
    names = [line.split(":")[0] for line in run("list").splitlines()]
    assert names
    for name in names:
        text = run("show", name)
        assert "Origin" in text and "Quality" in text and "Measured up to" in text
        assert "params" not in json.loads(run("show", name, "--json"))


def test_escape_sequences_do_not_reach_the_terminal(tmp_path: Path) -> None:
    data = {
        "schema": "vsim/step-model/1",
        "kind": "roofline",
        "params": {},
        "domain": {},
        "quality": {"\x1b[2J": "\x1b]0;evil\x07"},
        "provenance": {"label": "x\x1b[31m", "note": ["a\u202eb"], "assumptions": ["\x1b[1m"]},
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    text = run("show", str(path))
    assert "\x1b" not in text and "\u202e" not in text and "\x07" not in text


def test_a_plot_needs_samples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fitted on engine steps"):
        run("show", run("list").split(":")[0], "--plot", str(tmp_path / "p.svg"))
    assert not list(tmp_path.iterdir())


def test_the_plot_is_xml_with_a_mark_for_each_step() -> None:
    points = [("grid", 0.01, 0.011), ("grid", 0.1, 0.09), ("serve", 0.02, 0.02)]
    root = ElementTree.fromstring(step_plot(points, "<&> a title"))
    circles = root.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == len(points) + 2  # and one in the legend for each phase
    with pytest.raises(ValueError, match="positive"):
        step_plot([], "nothing")
