"""GPU meters read through NVML, the driver's library. Missing values are left out."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Meters", "find_gpu"]

_UTILIZATION_SAMPLES = 1
_POLICIES = {"power_capped": 0, "thermal_slowed": 1}
"""Reasons for which the driver lowers clocks, by NVML's number."""
_TEMPERATURE_OF_GPU = 0
_CLOCK_OF_MULTIPROCESSORS = 1


def find_gpu(uuid: str) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a GPU; ``None`` without NVML, or if it does not know the GPU.

    :param uuid: Without the prefix that tells a GPU from a part of one (MIG).
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    for prefix in ("GPU-", "MIG-"):
        try:
            return nvml, nvml.nvmlDeviceGetHandleByUUID(f"{prefix}{uuid}")
        except nvml.NVMLError:
            continue
    return None


class Meters:
    """The meters of one GPU. What grows while time passes is told as a mean since the last reading.

    :param nvml: The module ``pynvml``.
    :param gpu: Its handle.
    """

    def __init__(self, nvml: Any, gpu: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._gpu, self._clock = nvml, gpu, clock
        self._sampled_us = 0
        self._counts: Mapping[str, float] = {}
        self._at = 0.0

    def read(self) -> dict[str, float]:
        """Return the known values of ``anygauge_hooks.types.Device.meters``."""
        values = {
            "utilization": self._utilization(),
            "temperature": self._query("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU),
            "clock": self._query("nvmlDeviceGetClockInfo", _CLOCK_OF_MULTIPROCESSORS),
        }
        return {**{name: value for name, value in values.items() if value is not None}, **self._rates()}

    def _utilization(self) -> float | None:
        """Return the mean of the samples since the last call, which the driver keeps for some seconds."""
        answer = self._call("nvmlDeviceGetSamples", _UTILIZATION_SAMPLES, self._sampled_us)
        samples = [] if answer is None else [each for each in answer[1] if each.timeStamp > self._sampled_us]
        if not samples:
            return None
        self._sampled_us = max(each.timeStamp for each in samples)
        return float(sum(each.sampleValue.uiVal for each in samples) / len(samples) / 100)

    def _rates(self) -> dict[str, float]:
        now, before = self._clock(), self._at
        counts, last = self._totals(), self._counts
        self._at, self._counts = now, counts
        if now <= before:
            return {}
        rates = {name: (counts[name] - last[name]) / (now - before) for name in counts if name in last}
        # the driver adds to its counts in steps, which may be longer than the time since the last reading
        return {name: min(rate, 1.0) if name in _POLICIES else rate for name, rate in rates.items()}

    def _totals(self) -> dict[str, float]:
        """Return joules and seconds since the driver was loaded."""
        energy_mj = self._query("nvmlDeviceGetTotalEnergyConsumption")
        totals = {} if energy_mj is None else {"power": energy_mj / 1e3}
        for name, policy in _POLICIES.items():
            status = self._call("nvmlDeviceGetViolationStatus", policy)
            if status is not None:
                totals[name] = status.violationTime / 1e9
        return totals

    def _query(self, function: str, *arguments: Any) -> float | None:
        answer = self._call(function, *arguments)
        return None if answer is None else float(answer)

    def _call(self, function: str, *arguments: Any) -> Any | None:
        try:
            return getattr(self._nvml, function)(self._gpu, *arguments)
        except (self._nvml.NVMLError, AttributeError):  # of older GPUs, of parts of one, of older packages
            return None
