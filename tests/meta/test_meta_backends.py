"""docs/backends.md shows the backends as they are, on any host."""

from __future__ import annotations

import importlib.util
import inspect
import re
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from anygauge.kernels import table
from anygauge.plugins import load_plugins
from anygauge_hooks.kernels import KERNEL_OPS


@pytest.fixture(scope="module")
def script(root: Path) -> Mapping[str, Any]:
    return runpy.run_path(str(root / "bench/backends_page.py"))


@pytest.fixture(scope="module")
def rows(root: Path) -> Mapping[str, Sequence[str]]:
    """Return the cells of the page's made tables, by what is in the first column."""
    made = re.findall(r"^<!-- made: .*?^<!-- end -->", (root / "docs/backends.md").read_text(), re.M | re.S)
    lines = re.findall(r"^\| `(\w+)` \| (.*) \|$", "\n".join(made), re.M)
    return {name: cells.split(" | ") for name, cells in lines}


def test_the_page_is_up_to_date(script: Mapping[str, Any], root: Path) -> None:
    page = (root / "docs/backends.md").read_text()
    assert script["with_tables"](script["with_files"](page)) == page, "run bench/backends_page.py"


@pytest.mark.parametrize("found", [None, object()], ids=["nothing", "everything"])
def test_the_tables_do_not_depend_on_what_is_installed(
    found: object, script: Mapping[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / "docs/backends.md").read_text()
    script["with_tables"](page)  # modules that are imported keep the function that they found
    monkeypatch.setattr(importlib.util, "find_spec", lambda *names: found)
    monkeypatch.setattr(table, "find_spec", lambda *names: found)
    assert script["with_tables"](page) == page


def called() -> set[str]:
    """Return the hooks that are called for a backend, those of the annexes too."""
    plugins = load_plugins(only=[])
    functions = {name: getattr(plugins.manager.hook, name).spec.function for name in plugins.hooks()}
    return {name for name, hook in functions.items() if "backend" in inspect.signature(hook).parameters}


def test_every_hook_of_a_backend_and_every_operation_has_a_row(rows: Mapping[str, Sequence[str]]) -> None:
    assert set(rows) >= {*called(), *KERNEL_OPS, "register_backends"}
    assert all(len(cells) == 3 for cells in rows.values())


def test_the_page_says_of_each_hook_of_a_device_when_to_implement_it(root: Path) -> None:
    table = (root / "docs/backends.md").read_text().partition("## Every hook of a device")[2]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", table.partition("\n## ")[0], re.M)
    told = [hook for hook, _ in rows]
    assert len(told) == len(set(told))
    assert called() <= set(told) <= set(load_plugins(only=[]).hooks())
    suite = root / "core/anygauge/testing/conformance"
    fixtures = (root / "core/anygauge/testing/plugin.py").read_text()
    for hook, modules in rows:
        sources = [(suite / f"{name}.py").read_text() for name in re.findall(r"`(test_\w+)`", modules)]
        assert sources, hook
        assert any(hook in source for source in (*sources, fixtures)), f"nothing of the suite calls {hook}"


def test_what_cuda_implements_npu_implements_or_names_what_stands_in(
    rows: Mapping[str, Sequence[str]],
) -> None:
    left = {name for name, (_, cuda, npu) in rows.items() if cuda != "-" and npu == "-"}
    assert not left


def test_every_plugin_of_the_page_loads(root: Path) -> None:
    assert not load_plugins(only=["cpu", "cuda", "npu"]).load_errors
