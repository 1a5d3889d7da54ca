"""The threat model names tests that exist, and every part of it is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names of the tests in a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(each.name for each in nodes if isinstance(each, kinds) and each.name.startswith("test_"))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part.rpartition("/")[2])
def test_a_test_that_the_threat_model_names_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file()
    assert name in names_in(ROOT / file)


def test_every_row_of_the_threat_model_names_a_test() -> None:
    _, _, table = PAGE.partition("\n| who | what they reach |")
    rows = [line for line in table.partition("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    assert len(rows) >= 7
    assert [row for row in rows if "::test_" not in row] == []


def test_every_file_of_attacks_is_in_the_threat_model() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "security").glob("test_*.py")}
    assert files - {file for file, _ in NAMED} == set()
