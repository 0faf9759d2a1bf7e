"""The verdicts of docs/examples: every figure in them was printed, or follows from what was printed.

`tests/test_docs.py` runs the commands and holds their output against the page; this holds the prose against
that output. A figure of a paragraph that begins with `**Verdict` must stand in the page's shown output, in
one of its commands or in the rule that it quotes, or be derived in a comment `<!-- 18 = (4003 / 3405 - 1) * 100 -->`
from such figures (and 1, 2, 100, 1000), rounded to the digits that the text gives.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "docs" / "examples").glob("*.md"))
# Figures, not names such as p95, TP2, 70B or vLLM 0.32.
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")
CONSTANTS = {"1", "2", "100", "1000"}
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def figures(text: str) -> list[str]:
    return [found.rstrip(",").replace(",", "") for found in FIGURE.findall(text)]


def value(node: ast.AST) -> float:
    if isinstance(node, ast.Expression):
        return value(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    assert isinstance(node, ast.BinOp), ast.dump(node)
    return OPERATORS[type(node.op)](value(node.left), value(node.right))


def parts(page: Path) -> tuple[set[str], dict[str, str], list[str]]:
    """(figures printed, typed or quoted; derived figures with their expressions; verdicts)."""
    known: set[str] = set()
    derived: dict[str, str] = {}
    verdicts: list[str] = []
    fenced = False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("> "):
            known.update(figures(re.sub(r"[=:]", " ", line)))
        elif found := re.fullmatch(r"<!-- (\S+) = (.+) -->", line):
            derived[found[1]] = found[2]
        elif line.startswith("**Verdict"):
            verdicts.append(line)
    return known, derived, verdicts


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_every_figure_of_a_verdict_was_printed_or_follows(page: Path) -> None:
    known, derived, verdicts = parts(page)
    assert verdicts, f"{page.name} comes to no verdict"
    for text in verdicts:
        for figure in figures(text):
            assert figure in known or figure in derived, f"{page.name}: {figure} in {text[:60]}…"
    for result, expression in derived.items():
        operands = set(figures(expression)) - CONSTANTS
        assert operands <= known | set(derived), f"{page.name}: {operands - known} is nowhere"
        decimals = len(result.partition(".")[2])
        exact = value(ast.parse(expression, mode="eval"))
        assert abs(exact - float(result)) <= 0.5000001 * 10**-decimals, (page.name, result, exact)


def test_a_figure_that_nobody_printed_is_noticed() -> None:
    assert figures("TTFT p95 is 1,234.5 ms at 70B, 9 % more (0.4)") == ["1234.5", "9", "0.4"]
    assert value(ast.parse("(4003 / 3405 - 1) * 100", mode="eval")) == pytest.approx(
        17.56, abs=0.01
    )


def test_the_page_of_rules_says_what_its_examples_say() -> None:
    rules = EXAMPLES[0].parent.parent / "rules-of-thumb.md"
    rows = re.findall(r"^\| .+? \| (.+) \| \[.+?\]\(examples/(.+?)\) \|$", rules.read_text(), re.M)
    assert len(rows) > 10
    for verdict, name in rows:
        known, derived, verdicts = parts(rules.parent / "examples" / name)
        said = known | set(derived) | {figure for text in verdicts for figure in figures(text)}
        for figure in figures(verdict):
            assert figure in said | CONSTANTS, f"{name}: {figure} in {verdict}"
