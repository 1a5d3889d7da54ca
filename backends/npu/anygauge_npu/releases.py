"""Which releases of the Ascend stack belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import Distribution
from typing import Literal

from anygauge_hooks.host import refused

__all__ = [
    "CANN_OF_TORCH_NPU",
    "INSTALL",
    "MEGATRON_OF_MINDSPEED",
    "PAIR",
    "Fit",
    "fit",
    "mismatch",
    "number",
    "other_build",
]

CANN_OF_TORCH_NPU: Mapping[str, str] = {
    "2.14.0": "9.2.0",
    "2.13.0": "9.2.0",
    "2.12.0.post3": "9.2.0",
    "2.12.0.post2": "9.1",
    "2.12.0": "9.1.0",
    "2.11.0.post3": "9.2.0",
    "2.11.0.post2": "9.1",
    "2.11.0": "9.1.0",
    "2.10.0.post7": "9.2.0",
    "2.10.0.post6": "9.1",
    "2.10.0.post4": "9.1.0",
    "2.10.0.post2": "9.0.1",
    "2.10.0": "9.0.0",
}
"""CANN that each package of torch-npu was released with; two numbers stand for any patch.

The whole version is the key: the number after ``post`` counts the packages for one torch, and the same number
belongs to other releases of TorchNPU elsewhere. Sources: for CANN 9.2.0 the release notes of TorchNPU 26.2.0
(October 2026), for 2.10.0.post2 versioning_policy.md of vllm-ascend (v0.23.0rc1), and otherwise
COMPATIBILITY.md of Ascend/pytorch after TorchNPU 26.1.1 (1 September 2026).
"""
COMPATIBLE_CANN = ("8.5", "9.0", "9.1", "9.2")
"""CANN that the release notes of TorchNPU 26.2.0 call compatible with every TorchNPU from 7.3 to 26.2."""
BROKEN_BEFORE_ITS_CANN = ("2.12.0", "2.11.0", "2.10.0.post4")
"""TorchNPU 26.1.0, which fails beside CANN 9.0 and older, as the release notes of 26.1.1 say."""
OLDEST_TORCH = (2, 10)

MEGATRON_OF_MINDSPEED: Mapping[str, str] = {"0.16": "0.16"}
"""Release of megatron-core by release of MindSpeed: setup.py and README.md of its branch core_r0.16.0."""

PAIR = ("==2.10.0", ">=2.10.0.post4,<2.10.0.post7")
"""torch and torch-npu for CANN 9.1. PyPI has no post6 for Python 3.12 on x86-64; there, pip takes post4."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index of torch with the suffix that wheels of torch-npu for x86-64 require."""
INSTALL = f"pip install 'torch{PAIR[0]}' 'torch-npu{PAIR[1]}' --extra-index-url {CPU_INDEX}"

Fit = Literal["paired", "compatible", "refused", "unknown"]


def number(text: str, parts: int = 2) -> str:
    """Return the first numbers of a release.

    >>> number("2.10.0.post4+cpu"), number("9.1.0", 3), number("8.3.RC1"), number("9")
    ('2.10', '9.1.0', '8.3', '9')
    """
    return ".".join(re.findall(r"\d+", text)[:parts])


def fit(cann: str, version: str) -> Fit:
    """Return whether a torch-npu was released with a CANN, or is compatible with it by its release notes.

    >>> fit("9.1.1", "2.10.0.post6"), fit("8.5.0", "2.10.0.post6"), fit("9.0.0", "2.10.0.post4")
    ('paired', 'compatible', 'refused')
    >>> fit("8.3.RC1", "2.10.0.post6"), fit("9.1.0", "2.15.0"), fit("9.3.0", "2.10.0.post6")
    ('refused', 'unknown', 'unknown')
    """
    package = version.partition("+")[0]
    own = CANN_OF_TORCH_NPU.get(package)
    if own is None:
        return "unknown"
    if number(cann, own.count(".") + 1) == own:
        return "paired"
    if _numbers(cann) > _numbers(COMPATIBLE_CANN[-1]):
        return "unknown"  # released after these tables
    is_older = _numbers(cann) < _numbers(own)
    is_refused = number(cann) not in COMPATIBLE_CANN or (package in BROKEN_BEFORE_ITS_CANN and is_older)
    return "refused" if is_refused else "compatible"


def mismatch(npu: Distribution, torch: Distribution) -> str | None:
    """Return why a torch-npu cannot be used with a torch, or with anygauge."""
    if _numbers(npu.version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"torch-npu {npu.version} is too old: anygauge needs torch {oldest} or newer"
    is_refused = refused(npu, torch) and not other_build(npu, torch)
    if is_refused or number(torch.version) != number(npu.version):
        return f"torch-npu {npu.version} does not fit torch {torch.version}"
    return None


def other_build(npu: Distribution, torch: Distribution) -> str | None:
    """Return the build of torch that a torch-npu asks for, if another one of the same release is installed.

    On x86-64 that is torch's build for the CPU, ``2.10.0+cpu``. The builds of a release have one interface,
    and the simulated NPU runs with the one for CUDA; nobody has tried it on a real NPU.
    """
    wanted, release = refused(npu, torch), torch.version.partition("+")[0]
    build = wanted and re.fullmatch(rf"==({re.escape(release)}\+\w+)", wanted)
    return build[1] if build else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, number(text).split(".")))
