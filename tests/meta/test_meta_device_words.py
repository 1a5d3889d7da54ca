"""The core, the contract and the models name no vendor's device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WORDS = ("cuda", "npu", "nccl", "hccl")
ENDING = re.compile(rf"({'|'.join(WORDS)})(?![A-Za-z0-9_])")
"""A source without any is not parsed. A word may follow an escape, such as that of a newline."""
WORD = re.compile(rf"(?<![A-Za-z0-9_]){ENDING.pattern}")


def offences(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of what names a device; docstrings may."""
    if not ENDING.search(source):
        return
    tree = ast.parse(source)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if WORD.search(node.value):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in ("cuda", "npu"):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(WORD.search(name) for name in names):
                yield node.lineno, ast.unparse(node)


def test_core_contract_and_models_name_no_device(root: Path) -> None:
    files = [path for folder in ("core", "hooks", "models") for path in (root / folder).rglob("*.py")]
    assert len(files) > 30
    found = [
        f"{path.relative_to(root)}:{line}: {text}"
        for path in sorted(files)
        if "scope" not in path.stem
        for line, text in offences(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'x = "cuda"',
        'x = f"cuda:{i}"',
        "torch.cuda.empty_cache()",
        "tensor.cuda()",
        "import torch.cuda",
        "from torch import npu",
        'init(backend="nccl")',
        r'print("on\ncuda")',
    ],
)
def test_the_rule_sees(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize("source", ['"""Runs on cuda."""', "# cuda\nx = 1", 'x = "barracuda"', 'x = "input"'])
def test_the_rule_lets_pass(source: str) -> None:
    assert not list(offences(source))
