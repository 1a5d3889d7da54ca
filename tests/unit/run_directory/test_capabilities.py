"""The capability table of a run is kept, and its absence ends no run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from anygauge.observability.report.run_files import CAPABILITIES_FILE
from anygauge.plugins import Plugins, find_backend, load_plugins
from anygauge.run_directory.capabilities import capabilities, write_capabilities
from anygauge_hooks import hookimpl
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl
from anygauge_hooks.types import BackendSpec


@pytest.fixture
def plugins() -> Plugins:
    return load_plugins(only=["cpu"])


@pytest.fixture
def backend(plugins: Plugins) -> BackendSpec:
    return find_backend(plugins, plugins.named("register_backends"), "cpu")


def test_the_table_is_kept_as_it_is_printed(plugins: Plugins, backend: BackendSpec, tmp_path: Path) -> None:
    write_capabilities(tmp_path, plugins, backend)
    kept = json.loads((tmp_path / CAPABILITIES_FILE).read_text())
    assert kept == json.loads(json.dumps(capabilities(plugins, backend), default=str))
    assert {row["op"] for row in kept["kernels"]} == set(KERNEL_OPS)


def test_a_plugin_that_cannot_list_its_kernels_ends_no_run(
    plugins: Plugins, backend: BackendSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        @hookimpl
        def register_kernels(self, backend: BackendSpec) -> Iterable[KernelImpl]:
            raise ImportError(f"no library for {backend.name}")

    plugins.register(Broken(), "broken")
    with caplog.at_level(logging.WARNING):
        write_capabilities(tmp_path, plugins, backend)
    assert "no library for cpu" in caplog.text
    assert not (tmp_path / CAPABILITIES_FILE).exists()
