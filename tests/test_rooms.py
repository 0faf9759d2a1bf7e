"""The house keeps its walls: who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room may import itself and the rooms listed.
MAY_IMPORT = {
    "models": {"errors"},
    "traces": {"errors"},
    "sim": {"errors", "models", "traces"},
    "calibrate": {"errors", "models", "traces", "sim"},
    "commands": {"errors", "models", "traces", "sim", "calibrate"},
}
# A library may be imported only by these files (prefixes of paths from the root).
ONLY_IN = {
    "simpy": ("sim/engine.py", "sim/client.py", "sim/cluster.py", "sim/router.py", "sim/fleet/"),
    "vllm": ("calibrate/record",),
    "sklearn": ("calibrate/fit",),
    "click": ("cli.py", "commands/"),
}


def sources() -> list[Path]:
    rooms = [ROOT / room for room in MAY_IMPORT]
    return [ROOT / "cli.py", *(path for room in rooms for path in sorted(room.rglob("*.py")))]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write vsim.…"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "vsim" and len(parts) > 1 and room in MAY_IMPORT and parts[1] in MAY_IMPORT:
            assert parts[1] == room or parts[1] in MAY_IMPORT[room], f"{path.name} imports {name}"
        if parts[0] in {"sim", "traces", "models", "calibrate", "commands"}:
            pytest.fail(f"{path.name} imports {name}: write vsim.{name}")
        allowed = ONLY_IN.get(parts[0])
        if allowed is not None:
            assert str(path.relative_to(ROOT)).startswith(allowed), f"{name} in {path.name}"
