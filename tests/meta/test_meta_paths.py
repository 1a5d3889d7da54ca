"""Tests, benches and examples read nothing above the root of the clone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ALLOWED = {"tests/conftest.py", "tests/backends/npu/test_mindspeed_simulated.py"}
"""The fixtures of published data sets and of MindSpeed's package, which skip their tests without them."""


def levels(node: ast.expr | None, names: Mapping[str, int]) -> int | None:
    """Return how many directories above ``__file__`` a path expression is, or ``None`` for other expressions.

    ``names`` has the variables whose level is known.
    """
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Call(func=ast.Name(id="Path"), args=[argument]):
            return levels(argument, names)
        case ast.Call(func=ast.Attribute(value=path, attr="resolve" | "absolute")):
            return levels(path, names)
        case ast.Attribute(value=path, attr="parent"):
            return add(levels(path, names), 1)
        case ast.Subscript(
            value=ast.Attribute(value=path, attr="parents"), slice=ast.Constant(value=int(index))
        ):
            return add(levels(path, names), index + 1)
    return None


def add(level: int | None, more: int) -> int | None:
    return None if level is None else level + more


def outside(source: str, depth: int) -> Iterator[str]:
    """Yield the paths that lie above the root, which is ``depth`` directories above the file."""
    if "__file__" not in source:
        return  # most files, which take seconds to parse
    names = {"__file__": 0}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and (level := levels(node.value, names)) is not None:
            names |= {target.id: level for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.expr) and (levels(node, names) or 0) > depth:
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", ["tests", "bench", "examples"])
def test_nothing_above_the_clone_is_read(root: Path, folder: str) -> None:
    problems = {}
    for path in sorted((root / folder).rglob("*.py")):
        name = path.relative_to(root)
        problems[str(name)] = list(outside(path.read_text(encoding="utf-8"), len(name.parts)))
    assert len(problems) > 1
    assert {name for name, found in problems.items() if found} == ALLOWED & problems.keys()


@pytest.mark.parametrize(
    "source",
    [
        "Path(__file__).parents[2]",
        "Path(__file__).resolve().parent.parents[1]",
        "ROOT = Path(__file__).parents[1]\nDATA = ROOT.parent / 'data'",
        "def data():\n    here = Path(__file__).absolute()\n    return here.parents[2]",
    ],
)
def test_the_rule_sees(source: str) -> None:
    assert list(outside(source, 2))
    assert not list(outside(source, 3))
