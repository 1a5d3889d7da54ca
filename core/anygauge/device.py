"""What ``torch.accelerator`` lacks and every layer above needs of the device of a process."""

from __future__ import annotations

import random

import numpy as np

from anygauge_hooks.types import Device

__all__ = ["seed_everything"]


def seed_everything(device: Device, seed: int) -> None:
    """Seed Python, NumPy, torch on the host, and torch on the device.

    Megatron's own seeding reaches the device's generator alone. Weights are initialised on the host, and
    data-parallel ranks that were not seeded there start from different weights without a word.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    device.seed(seed)
