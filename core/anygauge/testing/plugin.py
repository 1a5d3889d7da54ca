"""Pytest plugin of the conformance suite, loaded in every pytest run of the environment.

It therefore imports neither torch nor the project before a fixture needs them, and it claims the short
``--backend`` only in a run of the suite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from anygauge.kernels.table import KernelTable
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec, Device

SUITE = "anygauge.testing.conformance"
MODEL_SUITE = "anygauge.testing.model_conformance"
NOT_CHECKED = "NOT CHECKED: "
"""The beginning of what the suite says of a skipped test."""
ROLE = "conformance"
REPORTED = "anygauge_report"
"""Property of a test whose value the suite prints at the end."""

_OPTION = {"dest": "anygauge_backend", "metavar": "NAME", "help": "backend that the conformance suite tests"}
_MODEL = {
    "dest": "anygauge_model",
    "metavar": "PACKAGE",
    "help": "model family that the conformance suite tests: its name, or a module with register_models",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--anygauge-backend`` and ``--anygauge-model``."""
    parser.getgroup("anygauge").addoption("--anygauge-backend", default="cpu", **_OPTION)
    parser.getgroup("anygauge").addoption("--anygauge-model", **_MODEL)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: Sequence[str]) -> None:
    """Add ``--backend`` and ``--model`` where a suite was named on the command line."""
    if _is_of_suite(args):
        parser.getgroup("anygauge").addoption("--backend", default="cpu", **_OPTION)
    if any(argument.startswith(MODEL_SUITE) for argument in args):
        parser.getgroup("anygauge").addoption("--model", **_MODEL)


def _is_of_suite(args: Sequence[str]) -> bool:
    return any(argument.startswith((SUITE, MODEL_SUITE)) for argument in args)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the files that are tested: an installed wheel comes before what PYTHONPATH has."""
    if not _is_of_suite(config.invocation_params.args):
        return []
    from anygauge.plugins import BACKENDS_GROUP, PLUGINS_GROUP

    chosen = config.getoption("anygauge_backend")
    lines = [f"backend under test: {chosen}", f"anygauge: {_file_of('anygauge')}"]
    for group in (BACKENDS_GROUP, PLUGINS_GROUP):
        lines += [f"{group} {entry.name}: {_file_of(entry.module)}" for entry in entry_points(group=group)]
    return lines


def _file_of(module: str) -> str:
    try:
        spec = find_spec(module)
    except ImportError as error:
        return f"not importable ({error})"
    return (spec and spec.origin) or "not importable"


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's marker."""
    config.addinivalue_line("markers", "conformance: what every backend must pass")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the backend declares and what was not checked, whatever the options of the report."""
    declared, missed = _declared(terminalreporter), _not_checked(terminalreporter)
    if declared:
        terminalreporter.section("what the backend declares")
        terminalreporter.write("".join(f"{line}\n" for line in declared))
    for reason, count in sorted(missed.items()):
        terminalreporter.write_line(f"{NOT_CHECKED}{reason} ({count} tests)", yellow=True)


def _declared(terminalreporter: pytest.TerminalReporter) -> list[str]:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    return [value for name, value in properties if name == REPORTED]


def _not_checked(terminalreporter: pytest.TerminalReporter) -> Counter[str]:
    skipped = terminalreporter.stats.get("skipped", ())
    parts = [report.longrepr[2].partition(NOT_CHECKED) for report in skipped]
    return Counter(reason for _, found, reason in parts if found)


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    """Return every installed plugin."""
    from anygauge.plugins import load_plugins

    return load_plugins()


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest, plugins: Plugins) -> BackendSpec:
    """Return the backend under test. One that was asked for and cannot run here is an error, not a skip."""
    from anygauge.plugins import select_backend

    spec, _ = select_backend(plugins, request.config.getoption("anygauge_backend"))
    return spec


@pytest.fixture(scope="session")
def device(plugins: Plugins, backend: BackendSpec) -> Device:
    """Return the device object of the backend under test."""
    plugins.prepare_worker(backend, ROLE, "before_vendor_import")
    return plugins.make_device(backend, 0)


@pytest.fixture(scope="session")
def kernels(plugins: Plugins, backend: BackendSpec, device: Device) -> KernelTable:
    """Return the kernel table of the backend under test: what ``register_kernels`` gives."""
    from anygauge.kernels.table import resolve_kernels

    return resolve_kernels(plugins, backend)
