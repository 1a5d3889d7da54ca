"""Every hook is documented, shown, exercised by a test and called by the product."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anygauge.plugins import load_plugins
from anygauge_hooks.kernels import KERNEL_FACTS
from anygauge_tests.code_blocks import blocks

ROOT = Path(__file__).parents[2]
PLUGINS = load_plugins(only=[])
HOOKS = PLUGINS.hooks()
"""Hooks of the contract and of its annexes."""
CALLERS = {"_registered", "answers", "collect", "find", "first", "get", "merged", "named", "notify"}
"""Methods of ``Plugins`` whose first argument is a hook."""


def spec(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(PLUGINS.manager.hook, name).spec.function
    return function


def arguments(name: str) -> list[str]:
    return list(inspect.signature(spec(name)).parameters)


def doc_sections() -> dict[str, str]:
    """Return the text under each second-level heading of docs/hooks.md."""
    parts = re.split(r"^## (.+)$", (ROOT / "docs/hooks.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def examples() -> list[str]:
    return blocks(ROOT / "docs/hooks.md", "python")


def test_the_document_has_exactly_the_hooks_in_order_with_their_arguments() -> None:
    expected = [f"`{name}({', '.join(arguments(name))})`" for name in HOOKS]
    assert list(doc_sections()) == expected


@pytest.mark.parametrize("name", HOOKS)
def test_the_document_says_when_a_hook_is_called_how_results_combine_and_shows_one(name: str) -> None:
    text = doc_sections()[f"`{name}({', '.join(arguments(name))})`"]
    prose = " ".join(text.split("```")[0].split())
    assert "Called " in prose
    kind = re.search(r"^ *(First result|Collecting|Observer)\b", inspect.getdoc(spec(name)) or "", re.M)
    assert kind is not None
    assert kind[1] in prose
    assert f"@hookimpl\ndef {name}(" in text


@pytest.mark.parametrize("name", HOOKS)
def test_the_docstring_has_its_sections(name: str) -> None:
    doc = inspect.getdoc(spec(name)) or ""
    assert re.search(r"^Called ", doc, re.M), "say when it is called"
    kinds = re.findall(r"^(First result|Collecting|Observer): ", doc, re.M)
    assert len(kinds) == 1, "say once how results are combined"
    assert (kinds == ["First result"]) is bool(spec(name).anygauge_spec["firstresult"])  # type: ignore[attr-defined]
    assert (kinds == ["Observer"]) is (inspect.signature(spec(name)).return_annotation == "None")
    assert re.search(r"^\.\. versionadded:: \d+\.\d+$", doc, re.M)
    assert re.findall(r"^:param (\w+):", doc, re.M) == arguments(name)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_exercised_by_a_test(name: str) -> None:
    folders = (ROOT / "tests", ROOT / "core/anygauge/testing")
    files = [path for folder in folders for path in folder.rglob("*.py") if "meta" not in path.parts]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in files)


@cache
def hooks_called_by_the_core() -> set[str]:
    """Return what ``plugins.first("x")`` and ``partial(plugins.first, "x")`` name, anywhere in the core."""
    called: set[str] = set()
    for path in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).endswith(".hook"):
                    called.add(node.func.attr)
                chain = [node.func, *node.args]
                called |= {
                    str(name.value)
                    for caller, name in pairwise(chain)
                    if isinstance(caller, ast.Attribute) and caller.attr in CALLERS
                    if isinstance(name, ast.Constant)
                }
    return called


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_called_by_the_product(name: str) -> None:
    assert name in hooks_called_by_the_core()


@pytest.mark.parametrize(
    "source", examples(), ids=lambda source: source.rpartition("@hookimpl\ndef ")[2][:25]
)
def test_an_example_is_a_plugin_that_loads(source: str) -> None:
    module = ModuleType("example")
    exec(compile(source, "docs/hooks.md", "exec"), vars(module))
    plugins = load_plugins(only=[])
    plugins.register(module, "example")
    implemented = [name for name in HOOKS if hasattr(module, name)]
    assert implemented
    for name in implemented:
        if not arguments(name):
            assert plugins.first(name)


def test_the_document_has_every_kernel_op_and_what_is_known_of_it() -> None:
    text = doc_sections()["`register_kernels(backend)`"]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE))
    assert rows == {
        op: ", ".join(f"`{fact}`" for fact in facts) or "none" for op, facts in KERNEL_FACTS.items()
    }
