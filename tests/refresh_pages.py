"""Put what the commands of a page print now into its console blocks: `python tests/refresh_pages.py PAGE…`.

For after a change that is meant to move figures. Where a block shows the whole output, all of it is replaced;
where it has a line `…`, each shown line is replaced by the next printed one that begins with the same words.
Prose is left alone: read it again.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def label(line: str) -> str:
    """The words a printed line begins with, up to its first figure or wide gap."""
    return re.split(r"\s{2,}|(?<=\s)[-+\d]", line.strip(), maxsplit=1)[0].strip()


def fresh(shown: list[str], real: list[str]) -> list[str]:
    if "…" not in [line.strip() for line in shown]:
        return real if shown else []
    found, at = [], 0
    for line in shown:
        if line.strip() == "…":
            found.append(line)
            continue
        at = next((i for i in range(at, len(real)) if label(real[i]) == label(line)), -1)
        if at < 0:
            raise SystemExit(f"no printed line begins with {label(line)!r}")
        found.append(real[at])
        at += 1
    return found


def refresh(page: Path) -> None:
    lines, out = page.read_text().splitlines(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shared in ("traces", "tests"):
            os.symlink(ROOT / shared, folder / shared)
        i = 0
        while i < len(lines):
            out.append(lines[i])
            i += 1
            if out[-1].strip() != "```console":
                continue
            while lines[i].strip() != "```":
                command = []
                while True:
                    command.append(lines[i])
                    i += 1
                    if not command[-1].endswith("\\"):
                        break
                shown = []
                while lines[i].strip() != "```" and not lines[i].startswith("$ "):
                    shown.append(lines[i])
                    i += 1
                text = " ".join(part.removeprefix("$ ").removesuffix("\\") for part in command)
                done = subprocess.run(
                    [sys.executable, "-m", *shlex.split(text)],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    raise SystemExit(f"{page.name}: {text}\n{done.stderr}")
                out += command + fresh(shown, done.stdout.rstrip().splitlines())
    page.write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        refresh(Path(argument))
