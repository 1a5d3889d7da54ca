"""``bench/backend_mutations.py`` calls a fault caught for one reason alone: a test that passed fails."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SUITE = """
import os

def test_elsewhere():
    raise ValueError("elsewhere")

def test_likely():
    assert "BROKEN" not in os.environ, "by the fault"

def test_hangs():
    while "BROKEN" in os.environ: ...
"""


@pytest.fixture(autouse=True, scope="module")
def bench() -> Iterator[None]:
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


@pytest.fixture
def script() -> Any:
    return importlib.import_module("backend_mutations")


@pytest.fixture
def suite() -> Any:
    return importlib.import_module("backend_faults.suite")


@pytest.fixture
def results() -> Any:
    return importlib.import_module("backend_faults.results")


@pytest.fixture
def fault() -> Any:
    made = importlib.import_module("backend_faults.fault").Fault
    return made("swiglu.half", "swiglu is half", "register_kernels", lambda answer, a: answer)


def of_runs(suite: Any, *runs: Any, reaches: bool = True) -> Callable[..., Any]:
    """Return a suite that ends as given, one after the other."""
    left = list(runs)

    def run(environment: Any, words: Any, only: str = "") -> Any:
        if reaches and "BACKEND_FAULT_REACHED" in environment:
            Path(environment["BACKEND_FAULT_REACHED"]).touch()
        return left.pop(0)

    return run


@pytest.mark.parametrize(
    ("status", "test", "reaches", "outcome"),
    [
        (0, "", True, "escaped"),
        (0, "", False, "not reached"),
        (1, "test_kernels.py::test_x[swiglu]", True, "caught"),
        (2, "test_swiglu.py", True, "caught"),
        (1, "test_kernels.py::test_x[swiglu]", False, "unclear"),
        (1, "", True, "unclear"),
        (3, "test_kernels.py::test_x[swiglu]", True, "unclear"),
        (5, "", True, "unclear"),
        (-11, "", True, "caught"),
        (None, "", True, "caught"),
    ],
)
def test_a_fault_is_caught_by_a_failed_test_a_crash_or_a_hang(
    status: int | None,
    test: str,
    reaches: bool,
    outcome: str,
    script: Any,
    suite: Any,
    fault: Any,
    tmp_path: Path,
) -> None:
    run = of_runs(suite, suite.Run(status, test), reaches=reaches)
    assert script.run_fault(run, tmp_path, fault, "key", None).outcome == outcome


@pytest.mark.parametrize(("again", "outcome"), [(0, "unclear"), (1, "caught")])
def test_a_test_that_the_fault_does_not_point_to_must_fail_twice(
    again: int, outcome: str, script: Any, suite: Any, fault: Any, tmp_path: Path
) -> None:
    test = "test_device.py::test_peak"
    run = of_runs(suite, suite.Run(1, test), suite.Run(again, test if again else ""))
    assert script.run_fault(run, tmp_path, fault, "key", None).outcome == outcome


def test_a_call_goes_on_with_what_the_store_lacks(
    script: Any, results: Any, fault: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run_one(fault: Any, key: str, catcher: str | None) -> Any:
        ran.append((fault and fault.name, key, catcher))
        return results.Result(
            fault.name if fault else "", "caught" if fault else "escaped", "test_a", key=key
        )

    def call(version: str, **options: Any) -> Any:
        keys = SimpleNamespace(of=lambda fault, outcome="": version)
        return script.run_all([fault], keys, results.Store(tmp_path / "store"), run_one, 1, **options)

    assert call("1", minutes=0) == []
    assert call("1") == call("1") == call("1", minutes=0)
    assert ran == [(None, "1", None), ("swiglu.half", "1", None)]
    assert [result.outcome for result in call("2")] == ["caught"]
    assert ran[2:] == [(None, "2", None), ("swiglu.half", "2", "test_a")]
    assert "swiglu.half" in capsys.readouterr().out


def test_what_likely_tests_catch_alone_counts_in_a_whole_call(
    script: Any, results: Any, fault: Any, tmp_path: Path
) -> None:
    """Run the whole suite for a fault that passed them, because another test may catch it."""
    outcomes = iter(["escaped", "escaped", "caught", "unused"])

    def run_one(fault: Any, key: str, catcher: str | None) -> Any:
        return results.Result(fault.name if fault else "", next(outcomes), key=key)

    def call(name: str, *, quick: bool) -> list[Any]:
        keys, store = results.Keys("cpu", quick=quick), results.Store(tmp_path / "store")
        faults = [importlib.import_module("backend_faults.catalog").find(name)]
        return [one.outcome for one in script.run_all(faults, keys, store, run_one, 1)]

    assert call("swiglu.gelu", quick=True) == ["escaped"]
    assert call("swiglu.gelu", quick=False) == ["caught"]
    assert call("swiglu.gelu", quick=True) == ["caught"]
    assert next(outcomes) == "unused"


def test_a_suite_that_fails_without_a_fault_says_nothing(script: Any, results: Any, fault: Any) -> None:
    ran = []

    def run_one(fault: Any, key: str, catcher: str | None) -> Any:
        ran.append(fault)
        return results.Result("", "caught", "test_a", "why")

    store = results.Store(None)
    assert script.run_all([fault], SimpleNamespace(of=lambda fault, outcome="": ""), store, run_one, 1) == []
    assert (ran, store.results) == ([None], [])


def test_keys_depend_on_suite_and_fault(results: Any) -> None:
    catalog = importlib.import_module("backend_faults.catalog")
    keys = results.Keys("cpu")
    ops, devices = catalog.find("swiglu.interleaved"), catalog.find("device.index_text")
    assert (
        len({keys.of(None), keys.of(ops), keys.of(devices), keys.of(catalog.find("groups.no_options"))}) == 4
    )
    assert keys.of(ops) == results.Keys("cpu").of(ops)


def test_the_table_counts_what_was_reached(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "EXPLAINED", {("cpu", "swiglu.b"): "it is none here"})
    monkeypatch.setattr(results, "STRANGER", {"swiglu: a": "swiglu.a"})
    outcomes = {"swiglu.a": "caught", "swiglu.b": "escaped", "device.c": "not reached", "device.d": "escaped"}
    made = [results.Result(*one) for one in outcomes.items()]
    lines = [*results.markdown(made, "cpu", {name: f"{name} breaks" for name in outcomes})]
    assert lines[4:8] == [
        "| `device` | 2 | 1 | 0 | 1 |",
        "| `swiglu` | 2 | 2 | 1 | 1 |",
        "| all | 4 | 3 | 1 | 2 |",
        "| the stranger's | 1 | 1 | 1 | 0 |",
    ]
    assert lines[-2:] == [
        "- `swiglu.b`: swiglu.b breaks. It is none here.",
        "- `device.d`: device.d breaks. Not explained.",
    ]
    assert [one.fault for one in results.unexplained(made, "cpu")] == ["device.d"]


def test_likely_tests_run_first_and_those_of_the_kernels_last(suite: Any) -> None:
    tests = [
        f"anygauge/testing/{name}" for name in ("test_kernels.py::x[swiglu]", "test_kernels.py::y", "b::z")
    ]
    items = [SimpleNamespace(nodeid=test) for test in tests]
    suite.FirstFailure(["swiglu"]).pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [tests[0], tests[2], tests[1]]
    suite.FirstFailure(["swiglu"], quick=True).pytest_collection_modifyitems(few := [*items])
    assert [item.nodeid for item in few] == [tests[0]]
    suite.FirstFailure(only="test_kernels.py::y").pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [tests[1]]


def test_a_run_ends_at_the_first_failure_or_at_its_limit(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    monkeypatch.setattr(suite, "processes", lambda backend: multiprocessing.get_context("spawn"))
    run = partial(suite.run_suite, "cpu", suite=str(tmp_path))
    broken = {"BROKEN": "1"}
    ended = run(broken, ["likely"], limit_s=60)
    assert (ended.failed, ended.test, ended.error.partition("\n")[0]) == (
        True,
        "test_suite.py::test_likely",
        "AssertionError: by the fault",
    )
    assert run({}, only="test_suite.py::test_likely", limit_s=60).passed
    hung = run(broken, only="test_suite.py::test_hangs", limit_s=0.5)
    assert (hung.failed, hung.status) == (True, None)
