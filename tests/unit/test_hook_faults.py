"""Faults of hooks in ``bench/backend_faults`` change what they wrap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import anygauge_cpu.plugin
from anygauge.testing.conformance.process_state import rng_untouched, settings, unusual_settings
from anygauge_cpu.device import CpuDevice

BENCH = Path(__file__).parents[2] / "bench"
CPU = anygauge_cpu.plugin.CPU


def of_hooks(*hooks: str) -> list[Any]:
    sys.path.insert(0, str(BENCH))
    try:
        catalog = importlib.import_module("backend_faults.catalog")
        return [fault for fault in catalog.faults() if fault.hook in hooks]
    finally:
        sys.path.remove(str(BENCH))


@pytest.mark.parametrize("fault", of_hooks("adjust_config", "check_config"), ids=lambda fault: fault.name)
def test_a_fault_of_a_config_shows(fault: Any) -> None:
    answers = [[*anygauge_cpu.plugin.adjust_config()]] if fault.hook == "adjust_config" else []
    try:
        faulty = fault.change(answers, SimpleNamespace(config=None, backend=CPU))
    except RuntimeError:
        return  # the fault itself
    assert faulty != answers


@pytest.mark.parametrize("fault", of_hooks("prepare_worker"), ids=lambda fault: fault.name)
def test_a_fault_of_preparing_a_worker_shows(fault: Any, tmp_path: Path) -> None:
    device = CpuDevice()
    arguments = SimpleNamespace(backend=CPU, role="actor", phase="after_config", config=None, log=None)
    with pytest.raises((AssertionError, AttributeError, TypeError)), unusual_settings(tmp_path):
        check_unchanged(lambda: fault.change(None, arguments), device)


def check_unchanged(call: Callable[[], object], device: CpuDevice) -> None:
    before = settings()
    with rng_untouched(device):
        call()
    assert settings() == before


@pytest.mark.parametrize("fault", of_hooks("make_communicator"), ids=lambda fault: fault.name)
def test_a_fault_of_a_communicator_shows(fault: Any) -> None:
    limits = {"group_rank": 0, "group_size": 2, "timeout": timedelta(seconds=60)}
    given, own = SimpleNamespace(**limits), [object(), object()]
    arguments = SimpleNamespace(backend=CPU, options=given, group_options=None)
    if fault.before is not None:
        fault.before(arguments)
    made = [fault.change(each, arguments) for each in own]
    assert vars(given) != limits or made != own
