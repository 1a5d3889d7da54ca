"""Which releases of NVIDIA's stack belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

__all__ = ["DRIVER_OF_CUDA", "INSTALL", "numbers", "runs_on", "suffices"]

DRIVER_OF_CUDA: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest Linux driver by major release of CUDA: any minor release runs on it.

From the table of minor version compatibility in the release notes of the CUDA toolkit 13.0.
"""
INSTALL = (
    "install a torch that is built for CUDA: in a clone of anygauge, pip install -r requirements/cuda.txt, "
    "or https://pytorch.org/get-started/locally"
)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a release.

    >>> numbers("580.95.05"), numbers("13.0")
    ((580, 95, 5), (13, 0))
    """
    return tuple(map(int, re.findall(r"\d+", text)))


def suffices(driver: str, cuda: str) -> bool | None:
    """Return whether a driver is new enough for a CUDA; ``None`` if the table does not have it.

    >>> suffices("580.95.05", "13.0"), suffices("550.54.15", "13.0"), suffices("550.54.15", "12.8")
    (True, False, True)
    """
    oldest = DRIVER_OF_CUDA.get(numbers(cuda)[0])
    return None if oldest is None else numbers(driver) >= numbers(oldest)


def runs_on(built_for: Iterable[str], capability: tuple[int, int]) -> bool:
    """Return whether code that was built for some architectures runs on a GPU of a compute capability.

    Machine code runs on later GPUs of its own generation; an architecture's own (``sm_90a``) on it alone, and
    intermediate code (``compute_90``) on all later ones.

    >>> runs_on(["sm_80", "sm_90"], (9, 0)), runs_on(["sm_80"], (8, 9)), runs_on(["sm_90"], (12, 0))
    (True, True, False)
    >>> runs_on(["sm_75", "compute_90"], (12, 0)), runs_on(["sm_90a"], (9, 0)), runs_on(["sm_100a"], (10, 3))
    (True, True, False)
    """
    return any(_runs(name, capability) for name in built_for)


def _runs(name: str, capability: tuple[int, int]) -> bool:
    kind, _, text = name.partition("_")
    digits = re.match(r"\d+", text)
    if digits is None:
        return False
    number = digits[0]
    own = (int(number[:-1]), int(number[-1]))
    if text.endswith("a"):
        return own == capability
    return own <= capability if kind == "compute" else own[0] == capability[0] and own <= capability
