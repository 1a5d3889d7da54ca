"""docs/npu-patches.md: a row for each hunk of five patches, with code that is there and tests that pass."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/npu-patches.md"
HUNKS = {"S": 41, "G": 45, "R": 22, "M": 8, "P": 4}
ROW = re.compile(r"^\| ([SGRMP]\d+) \| (.+) \| (.+) \| (.+) \| (.+) \| (.+) \| (\w+) \|$", re.M)
SECTION = re.compile(r"^## [^\n]+ \((\d+)\)$(.*?)(?=^## |\Z)", re.M | re.S)
REFERENCE = re.compile(r"`([\w./]+\.py)::([\w.]+)`")
STATES = ("replaced", "upstream", "not needed", "open")
KINDS = ("behavior", "code", "text", "nothing")
OF_TEXT = {"test_the_installed_source_does_it"}
"""Tests that look for a regular expression in another project's source."""
OF_CODE = {
    "test_no_function_of_a_hunk_is_compiled",
    "test_the_legacy_tree_of_megatron_is_not_installed",
    "test_core_contract_and_models_name_no_device",
    "test_the_command_line_and_every_plugin_import_nothing_heavy",
    "test_every_argument_has_its_value_there_and_every_value_a_user",
}
"""Tests that inspect code or settings without running them."""
TARGETS = {
    "parallel": ("test-parallel", "tests/distributed"),
    "sglang": ("test-sglang", "tests/sglang"),
    "npu_sim": ("test-npu-sim", "tests/backends/npu"),
}
"""Targets of the Makefile, each with the folder of its tests, by the marker of those tests."""

NEEDS_IPV6 = {"tests/unit/weight_sync/test_push.py::test_the_group_is_formed_over_ipv6"}
"""Skipped on a host that has none."""


class Row(NamedTuple):
    """One hunk."""

    hunk: str
    where: str
    change: str
    state: str
    here: str
    test: str
    kind: str


def rows() -> list[Row]:
    return [Row(*cells) for cells in ROW.findall(PAGE.read_text())]


def kind(row: Row) -> str:
    """Return what the tests of a row show, at most."""
    names = {name for _, name in REFERENCE.findall(row.test)}
    if not names:
        return "nothing"
    if names <= OF_TEXT:
        return "text"
    return "code" if names <= OF_CODE | OF_TEXT else "behavior"


def symbols(row: Row) -> list[tuple[str, str]]:
    return REFERENCE.findall(row.here)


def named_tests() -> list[tuple[str, str]]:
    return sorted({found for row in rows() for found in REFERENCE.findall(row.test)})


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def defined(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Sequence[ast.stmt]]]:
    """Yield every name that statements bind, with what is inside it."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.body
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((ast.unparse(target), []) for target in targets)


def is_defined(path: str, name: str) -> bool:
    body: Sequence[ast.stmt] | None = tree(path).body if (ROOT / path).is_file() else None
    for part in name.split("."):
        body = dict(defined(body)).get(part) if body is not None else None
    return body is not None


def markers(path: str, name: str) -> set[str]:
    """Return the markers of a test: its own, and those of its file."""
    found = [
        node.value
        for node in tree(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            found += node.decorator_list
    return set(re.findall(r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, found))))


def target(path: str, name: str) -> str | None:
    """Return the marker that keeps a test out of ``make test``."""
    left_out = markers(path, name) & {*TARGETS, "soak", "gpu_host"}
    return min(left_out) if left_out else None


def test_every_hunk_has_one_row() -> None:
    expected = [f"{letter}{number}" for letter, count in HUNKS.items() for number in range(1, count + 1)]
    assert [row.hunk for row in rows()] == expected
    assert len(expected) == 120


def test_the_hunks_that_the_pull_request_lacks_are_named() -> None:
    (more,) = re.findall(
        r"added three to\s+`slime.patch`, for IPv6 addresses: (\w+), (\w+) and (\w+)\.", PAGE.read_text()
    )
    added = [row for row in rows() if row.hunk in more]
    assert len(added) == 3
    assert f"has {sum(HUNKS.values()) - len(added)} hunks" in PAGE.read_text()


def test_the_figures_of_the_page_are_those_of_its_tables() -> None:
    page = PAGE.read_text()
    found = [(int(count), len(ROW.findall(text))) for count, text in SECTION.findall(page)]
    assert found == [(count, count) for count in HUNKS.values()]
    states = Counter(row.state for row in rows())
    assert {*states} <= {*STATES}
    for state in STATES:
        (count,) = re.findall(rf"^\| {state} \| (\d+) \|", page, re.M)
        assert int(count) == states[state], state


def test_the_last_column_says_how_a_row_is_tested() -> None:
    assert [(row.hunk, row.kind) for row in rows()] == [(row.hunk, kind(row)) for row in rows()]
    counts = dict(re.findall(r"^\| (\w+) \| (\d+) \| (?:a|no) test", PAGE.read_text(), re.M))
    assert {name: int(count) for name, count in counts.items()} == Counter(row.kind for row in rows())
    assert {*counts} == {*KINDS}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.hunk)
def test_a_row_says_what_takes_the_place_and_what_covers_it(row: Row) -> None:
    missing = [name for name in symbols(row) if not is_defined(*name)]
    assert not missing
    if row.state == "replaced":
        assert symbols(row)
    if row.state in ("replaced", "upstream"):
        assert REFERENCE.search(row.test)
    assert len(row.change) > 5
    assert len(row.here) > 5


def test_every_symbol_of_the_page_is_there() -> None:
    """Those of the settings below the tables of hunks too."""
    missing = [found for found in REFERENCE.findall(PAGE.read_text()) if not is_defined(*found)]
    assert not missing


def test_the_source_of_sglang_is_searched_for_what_upstream_has() -> None:
    """A row that only belongs to another one's change says to which."""
    source = (ROOT / "tests/sglang/test_sglang_on_npu.py").read_text()
    findings = set(re.findall(r'^    "(R\d+)": \(', source, re.M))
    for row in rows():
        if row.state == "upstream" and row.kind == "text":
            other = re.match(r"(?:With|For|As) (R\d+)\b", row.here)
            assert (other[1] if other else row.hunk) in findings, row.hunk


@pytest.mark.parametrize(("path", "name"), named_tests(), ids=lambda part: str(part).rpartition("/")[2])
def test_a_named_test_is_there_and_one_target_runs_it(path: str, name: str) -> None:
    assert is_defined(path, name)
    marker = target(path, name)
    if marker is not None:
        rule, folder = TARGETS[marker]
        recipe = re.search(rf"^{rule}:.*((?:\n\t.+)+)", (ROOT / "Makefile").read_text(), re.M)
        assert recipe is not None
        assert re.search(rf"-m \"?{marker}\b.* {folder}\b", recipe[1])
        assert path.startswith(f"{folder}/")


def excuses(path: str, name: str) -> set[str]:
    """Return what may skip a test or expect it to fail: markers, also of its file, and calls."""
    (test,) = [node for node in tree(path).body if getattr(node, "name", None) == name]
    called = re.findall(r"\bpytest\.(\w+)\(", ast.unparse(test))
    return {each for each in {*markers(path, name), *called} if re.search("skip|xfail", each)}


@pytest.mark.parametrize(
    ("path", "name"),
    [found for found in named_tests() if target(*found) is None],
    ids=lambda part: str(part).rpartition("/")[2],
)
def test_a_named_test_of_make_test_is_collected_and_not_skipped(path: str, name: str) -> None:
    """Check collection only: the run that this test is part of shows whether it passes."""
    assert name.startswith("test_")
    assert Path(path).name.startswith("test_")
    assert not excuses(path, name)


@pytest.mark.soak
@pytest.mark.timeout(900)  # dozens of tests, in a process that may have to share the processor
def test_the_named_tests_pass(tmp_path: Path) -> None:
    """Those of ``make test``, in one process; a test that is only skipped proves nothing."""
    wanted = [f"{path}::{name}" for path, name in named_tests() if target(path, name) is None]
    result = tmp_path / "result.xml"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={result}"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *wanted],
        cwd=ROOT,
        env=outer,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"
        for case in ET.parse(result).iter("testcase")
        if len(case) == 0
    }
    assert set(wanted) - passed <= NEEDS_IPV6


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("backends/npu/anygauge_npu/device.py", "NpuDevice", True),
        ("backends/npu/anygauge_npu/device.py", "NpuDevice.type", True),
        ("backends/npu/anygauge_npu/device.py", "NpuDevice.color", False),
        ("backends/npu/anygauge_npu/plugin.py", "NPU", True),
        ("backends/npu/anygauge_npu/nowhere.py", "NPU", False),
    ],
)
def test_a_symbol_is_looked_up(path: str, name: str, found: bool) -> None:
    assert is_defined(path, name) is found


def test_the_target_of_a_test_is_told_by_its_markers() -> None:
    assert target("tests/sglang/test_sglang_on_npu.py", "test_sglangs_parser_takes_them") == "sglang"
    assert target("tests/meta/test_npu_patches.py", "test_every_hunk_has_one_row") is None


def test_there_is_no_patch_file() -> None:
    own = (
        "core",
        "hooks",
        "models",
        "backends",
        "docker",
        "docs",
        "examples",
        "bench",
        "tests",
        "requirements",
    )
    found = [
        path for folder in own for path in (ROOT / folder).rglob("*") if path.suffix in (".patch", ".diff")
    ]
    assert not [*found, *ROOT.glob("*.patch"), *ROOT.glob("*.diff")]
