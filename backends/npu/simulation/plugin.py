"""Installs the simulated kernels in every process of a run that the launcher has started."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping

from anygauge_hooks import hookimpl
from anygauge_hooks.types import Phase, PluginInfo

__all__ = ["LAUNCHED"]

LAUNCHED, SOC = "SIMULATED_NPU_DEVICES", "SIMULATED_NPU_SOC"
"""The launcher sets them: the number of simulated devices, and what they say they are."""

_log = logging.getLogger("anygauge_npu.simulation")


@hookimpl
def describe_plugin() -> PluginInfo:
    """Serve the NPU backend alone."""
    return PluginInfo(contract_version=1, backends=("npu",))


@hookimpl(wrapper=True)
def prepare_worker(phase: Phase) -> Iterator[None]:
    """Say what this is; install kernels once the NPU backend has loaded torch-npu, or refuse a real one."""
    is_ours = LAUNCHED in os.environ and phase == "before_vendor_import"
    if is_ours:
        _log.warning(_devices())
    yield
    if is_ours:
        from simulation.simulated import install

        install()


@hookimpl
def report_environment() -> Mapping[str, str] | None:
    """Say that NPUs are simulated."""
    return {"npu": _devices()} if LAUNCHED in os.environ else None


def _devices() -> str:
    return f"SIMULATED: {os.environ[LAUNCHED]} x {os.environ[SOC]}, no hardware, no CANN"
