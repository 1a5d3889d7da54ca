"""State of this process that a hook leaves as it is, unless its contract says otherwise."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path

import numpy as np
import torch

from anygauge_hooks.types import Device

__all__ = ["rng_untouched", "settings", "state_untouched", "unusual_settings"]


@contextmanager
def rng_untouched(device: Device) -> Iterator[None]:
    """Check that the block draws no random number and seeds nothing, on the host or on the device."""
    for _ in range(2):  # away from what a seed begins with
        _draw(device)
    before = _generators(device)
    yield
    assert _generators(device) == before


@contextmanager
def state_untouched() -> Iterator[None]:
    """Check that the block leaves the process's settings and environment as they are."""
    before = settings(), dict(os.environ)
    yield
    assert (settings(), dict(os.environ)) == before


@contextmanager
def unusual_settings(directory: Path) -> Iterator[None]:
    """Let the process have settings that nobody chooses by default."""
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with chdir(directory), torch.enable_grad():
        try:
            torch.set_num_threads(before[0] + 1)
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("high")
            torch.set_deterministic_debug_mode("warn")
            yield
        finally:
            torch.set_num_threads(before[0])
            torch.set_default_dtype(before[1])
            torch.set_float32_matmul_precision(before[2])
            torch.set_deterministic_debug_mode("default")


def settings() -> Mapping[str, object]:
    """Return the settings of torch and of Python that a whole process shares."""
    return {
        "directory": os.getcwd(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "logging": (logging.root.level, *logging.root.handlers),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def _draw(device: Device) -> None:
    random.random()
    np.random.random()
    torch.rand(1)
    torch.rand(1, device=device.torch_device)


def _generators(device: Device) -> Mapping[str, object]:
    return {
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "device": device.get_rng_state().tolist(),
    }
