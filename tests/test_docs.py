"""README and docs say what is so: their commands run, their output is the real one, their links and flags exist.

The convention: a block fenced as `console` is run, page by page and block by block, in an empty folder in which
`traces` and `tests` are the checkout's (as if from the repository root, without littering it). A line that begins
with `$ ` is a command (`\\` at its end continues it) and must exit 0; the lines below it are its output and must
occur in it in this order, a line `…` standing for any number of others. What needs a file of the reader's, a GPU or
minutes is fenced as `sh` or indented, and is not run.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from vsim.cli import COMMANDS, main, vsim

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *EXAMPLES]
MAX_LIMIT = 10_000  # requests that a command in a page may replay: pages must stay quick to test

# Flags that pages name and that are not vsim's.
FOREIGN_FLAGS = {
    "--save-result": "`vllm bench serve`: writes the result that vsim reads and writes",
    "--enable-logging-iteration-details": "`vllm serve`: logs the steps that --from-steps reads",
    "--save-detailed": "`vllm bench serve`: the same with per-request lists",
    "--dataset-name": "`vllm bench serve`: takes our timed_trace files",
    "--n": "tests/exact.py: how many random cases",
    "--quick": "benchmarks/replay_speed.py: a tenth of everything",
    "--huge": "benchmarks/replay_speed.py: ten million requests too",
    "--only": "benchmarks/replay_speed.py: some parts",
    "--page": "benchmarks/replay_speed.py: put the figures onto a page",
    "--peer-python": "benchmarks/replay_speed.py: interpreter that has another simulator",
    "--all-pairs": "benchmarks/h100_rate_sweep.py: every pair of rates",
    "--part": "benchmarks/h100_rate_sweep.py: a part of the pairs",
}
REPOSITORY_SCRIPT_FLAGS = {
    "tests/exact.py": {"--n"},
    "benchmarks/replay_speed.py": {"--quick", "--huge", "--only", "--page", "--peer-python"},
    "benchmarks/h100_rate_sweep.py": {"--all-pairs", "--part"},
}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path, language: str) -> Iterator[list[str]]:
    """Lines of every block of `page` fenced as `language`."""
    block: list[str] | None = None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if block is not None:
                yield block
                block = None
            elif line.strip() == f"```{language}":
                block = []
            elif line.strip() != "```":
                block = None
        elif block is not None:
            block.append(line)
    assert block is None, f"{_name(page)}: a ```{language} block has no end"


def _commands(page: Path) -> list[tuple[str, list[str]]]:
    """(command line, shown output lines) of every command in the page's console blocks."""
    found: list[tuple[str, list[str]]] = []
    for block in _blocks(page, "console"):
        assert block and block[0].startswith("$ "), f"{_name(page)}: start a console block with $"
        unfinished = ""
        for line in block:
            if unfinished or line.startswith("$ "):
                text = unfinished + line.removeprefix("$ ").strip()
                unfinished = text[:-1] if text.endswith("\\") else ""
                if not unfinished:
                    found.append((text, []))
            else:
                found[-1][1].append(line.rstrip())
    return found


RUNNABLE = [page for page in PAGES if _commands(page)]


def _leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[click.Command]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _leaves(child, (*path, name))
    yield command


def _missing_lines(shown: list[str], real: str) -> list[str]:
    """Shown lines that do not occur in `real` in this order; between two shown ones only `…` lets others pass."""
    lines = [line.rstrip() for line in real.splitlines()]
    at, skipping = 0, True  # a page may begin in the middle of the output
    for want in shown:
        if want.strip() == "…":
            skipping = True
        elif skipping:
            if want not in lines[at:]:
                return [want]
            at, skipping = lines.index(want, at) + 1, False
        elif at >= len(lines) or lines[at] != want:
            return [want]
        else:
            at += 1
    return []


@pytest.mark.parametrize("page", RUNNABLE, ids=_name)
def test_console_blocks_run_and_print_what_the_page_shows(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for shared in ("traces", "tests"):
        os.symlink(ROOT / shared, tmp_path / shared)
    monkeypatch.chdir(tmp_path)
    for text, shown in _commands(page):
        arguments = shlex.split(text)
        assert arguments[0] == "vsim", f"{_name(page)}: console blocks hold vsim commands: {text}"
        monkeypatch.setattr(sys, "argv", arguments)
        code: int | str | None = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        real = capsys.readouterr()
        assert code == 0, f"{_name(page)}: $ {text}\nexit code {code}\n{real.err}"
        missing = _missing_lines(shown, real.out + real.err)
        assert not missing, (
            f"{_name(page)}: $ {text}\nshows what it does not print: {missing[0]!r}"
            f"\nit prints\n{real.out}{real.err}"
        )


@pytest.mark.parametrize("page", RUNNABLE, ids=_name)
def test_commands_that_simulate_are_small(page: Path) -> None:
    for text, _ in _commands(page):
        arguments = shlex.split(text)
        if arguments[1] in ("replay", "preemption", "sweep"):
            limit = int(arguments[arguments.index("--limit") + 1]) if "--limit" in arguments else -1
            varied = re.search(r"limit=([\d,]+)", text)
            limit = max(map(int, varied[1].split(","))) if varied else limit
            assert 0 < limit <= MAX_LIMIT, f"{_name(page)}: $ {text}: give --limit"


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_is_in_the_documentation(command: str) -> None:
    assert any(re.search(rf"\bvsim {command}\b", page.read_text()) for page in PAGES), (
        f"no page names vsim {command}"
    )


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{_name(page)} links to {target}: no such file"


def test_the_readme_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    others = [page for page in PAGES[1:] if page not in EXAMPLES]
    missing = [page.name for page in others if f"(docs/{page.name})" not in readme]
    assert not missing, missing


def test_the_page_of_rules_links_every_example() -> None:
    rules = (ROOT / "docs" / "rules-of-thumb.md").read_text()
    missing = [page.name for page in EXAMPLES if f"(examples/{page.name})" not in rules]
    assert not missing, missing


def test_pages_that_help_texts_name_exist() -> None:
    for command in _leaves(vsim):
        texts = [command.help or "", *(getattr(p, "help", None) or "" for p in command.params)]
        for target in re.findall(r"docs/[\w-]+\.md", " ".join(texts)):
            assert (ROOT / target).exists(), (
                f"vsim {command.name} --help names {target}: no such page"
            )


def test_flags_that_pages_name_exist() -> None:
    known = {flag for c in _leaves(vsim) for p in c.params for flag in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "--version"}
    used: set[str] = set()
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            # `--enable-x/--no-…` and `--policies=…` name a flag; a rule like |---| does not.
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line):
                used.add(flag)
                assert flag in known or flag in FOREIGN_FLAGS, (
                    f"{_name(page)}:{number} names {flag}: no command of vsim has it"
                )
    assert set(FOREIGN_FLAGS) <= used, "a foreign flag that no page names any more"


def test_flags_of_the_repository_s_scripts_exist() -> None:
    for script, flags in REPOSITORY_SCRIPT_FLAGS.items():
        text = (ROOT / script).read_text()
        assert all(f'"{flag}"' in text for flag in flags), script


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in targets, f"{_name(page)} names make {target}"


def test_every_engine_flag_has_a_sentence_of_help() -> None:
    replay = vsim.get_command(click.Context(vsim), "capacity")
    assert replay is not None
    bare = [p.opts[0] for p in replay.params if isinstance(p, click.Option) and not p.help]
    assert not bare, bare


def test_no_placeholder_is_left_in_a_page() -> None:
    for page in PAGES:
        left = re.findall(r"@@\w+@@|\bTODO\b|\bTBD\b|\bFIXME\b", page.read_text())
        assert not left, f"{_name(page)}: {left}"
