"""Wheel and sdist, built and installed from scratch under each Python that is here: `make dist-check`.

For python3.11, 3.12 and 3.13 as far as they are on the PATH: a fresh virtual environment, the wheel and then the
sdist in it with what they require, `vsim --help`, and a small replay away from the checkout that must write a run.
The Pythons that are not here are named.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13")
REPLAY = (
    "--model",
    "meta-llama/Llama-3.1-8B-Instruct",
    "--gpu",
    "a100",
    "--limit",
    "50",
    "--out",
    "run",
)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def executable(python: str) -> Path | None:
    """The interpreter of that name that really starts: a version manager's stand-in may not."""
    managed = sorted(Path.home().glob(f".pyenv/versions/*/bin/{python}"))
    for found in (shutil.which(python), *managed):
        if found and not subprocess.run([found, "-V"], capture_output=True, check=False).returncode:
            return Path(found)
    return None


def check(python: Path, archive: Path, folder: Path) -> None:
    folder.mkdir()
    run(python, "-m", "venv", folder / "env", cwd=folder)
    binaries = folder / "env" / "bin"
    run(binaries / "pip", "install", "--quiet", archive, cwd=folder)
    assert "replay" in run(binaries / "vsim", "--help", cwd=folder)
    shutil.copy(ROOT / "traces" / "azure2023_conv.csv", folder / "trace.csv")
    run(binaries / "vsim", "replay", "trace.csv", *REPLAY, cwd=folder)
    assert (folder / "run" / "report.html").exists()
    profiles = run(binaries / "vsim", "profiles", "list", cwd=folder)
    assert "rtx4090" in profiles, "the bundled profiles are not in the package"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="vsim-dist-") as name:
        base = Path(name)
        run(sys.executable, "-m", "venv", base / "build-env", cwd=base)
        run(base / "build-env" / "bin" / "pip", "install", "--quiet", "build", cwd=base)
        # From what git knows: a stray file in the checkout must not make the difference.
        with open(base / "src.tar", "wb") as tar:
            subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=tar, check=True)
        (base / "src").mkdir()
        run("tar", "xf", base / "src.tar", cwd=base / "src")
        run(
            base / "build-env" / "bin" / "python",
            "-m",
            "build",
            "--outdir",
            base / "dist",
            cwd=base / "src",
        )
        here = {python: found for python in PYTHONS if (found := executable(python))}
        for python, found in here.items():
            for archive in sorted((base / "dist").iterdir()):
                check(found, archive, base / f"{python}-{archive.suffix[1:]}")
                print(f"{python}: {archive.name} installs, helps and replays", flush=True)
        for python in PYTHONS:
            if python not in here:
                print(f"{python}: not on this machine, not checked")
    return 0 if here else 1


if __name__ == "__main__":
    sys.exit(main())
