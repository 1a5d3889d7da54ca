"""Installs the simulated kernels in every process of a run that the launcher has started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from anygauge_hooks import hookimpl
from anygauge_hooks.types import BackendSpec, Phase

__all__ = ["LAUNCHED"]

LAUNCHED = "SIMULATED_NPU_DEVICES"
"""The launcher sets it: the number of simulated devices."""


@hookimpl(trylast=True)
def prepare_worker(backend: BackendSpec, phase: Phase) -> None:
    """Install the kernels after the NPU backend has loaded torch-npu; refuse a real one."""
    if LAUNCHED in os.environ and backend.name == "npu" and phase == "before_vendor_import":
        from simulation.simulated import install

        install()


@hookimpl
def report_environment() -> Mapping[str, str] | None:
    """Say that NPUs are simulated."""
    count = os.environ.get(LAUNCHED)
    return None if count is None else {"npu": f"SIMULATED: {count} devices without hardware or CANN"}
