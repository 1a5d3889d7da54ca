"""The faults of ``bench/mutations.py`` can still be made, and the tests that see them are still there."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MUTATIONS: list[Any] = runpy.run_path(str(ROOT / "bench/mutations.py"))["MUTATIONS"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_text_stands_once_in_its_file(mutation: Any) -> None:
    for edit in mutation.edits:
        assert (ROOT / edit.path).read_text(encoding="utf-8").count(edit.old) == 1, edit
        assert edit.new != edit.old


def test_names_are_distinct() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_the_tests_are_there() -> None:
    for path, name in {tuple(test.split("::")) for mutation in MUTATIONS for test in mutation.tests}:
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        assert any(isinstance(each, ast.FunctionDef) and each.name == name for each in body), (path, name)
