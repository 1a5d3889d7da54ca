"""Which releases of the Ascend stack belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import Distribution

from anygauge_hooks.host import refused

__all__ = [
    "CANN_OF_TORCH_NPU",
    "INSTALL",
    "MEGATRON_OF_MINDSPEED",
    "PAIR",
    "fits",
    "number",
    "pair",
    "torch_wanted",
]

CANN_OF_TORCH_NPU: Mapping[str, tuple[str, ...]] = {
    "2.12": ("9.1",),
    "2.11": ("9.1",),
    "2.10": ("9.1",),
    "2.9": ("8.5", "9.0", "9.1"),
    "2.8": ("8.3", "8.5", "9.0"),
    "2.7": ("8.3", "8.5", "9.0", "9.1"),
}
"""Releases of CANN by release of torch-npu; a later build of one may want a later CANN.

From COMPATIBILITY.md of Ascend/pytorch at commit 031eec5ca64bd2a5a02de212f5f0c30dfb392213, which has neither
2.13 nor 2.14.
"""
MEGATRON_OF_MINDSPEED: Mapping[str, str] = {"0.16": "0.16"}
"""Release of megatron-core by release of MindSpeed: setup.py and README.md of its branch core_r0.16.0."""

PAIR = ("2.10.0", "2.10.0.post4")
"""torch and torch-npu of docker/versions.env, for which there is a CANN."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where torch with the suffix is that wheels of torch-npu for x86-64 ask for."""


def number(text: str, parts: int = 2) -> str:
    """Return the first numbers of a release.

    >>> number("2.10.0.post4+cpu"), number("9.1.0", 3), number("8.3.RC1"), number("9")
    ('2.10', '9.1.0', '8.3', '9')
    """
    return ".".join(re.findall(r"\d+", text)[:parts])


def pair(torch: str, npu: str) -> str:
    """Return the command that installs a torch-npu with its torch, on both architectures.

    >>> pair("==2.9.*", "2.9.0")
    "pip install 'torch==2.9.*' 'torch-npu==2.9.0' --extra-index-url https://download.pytorch.org/whl/cpu"
    """
    return f"pip install 'torch{torch}' 'torch-npu=={npu}' --extra-index-url {CPU_INDEX}"


def fits(cann: str, torch_npu: str) -> bool | None:
    """Return whether a release of CANN serves one of torch-npu; ``None`` if the table does not have it.

    >>> fits("9.1.0", "2.10.0.post4"), fits("8.5.0", "2.10.0"), fits("9.1.0", "2.13.0")
    (True, False, None)
    """
    known = CANN_OF_TORCH_NPU.get(number(torch_npu))
    return None if known is None else number(cann) in known


def torch_wanted(npu: Distribution, torch: Distribution) -> str | None:
    """Return which torch a torch-npu is built against, ``"==2.10.*"``, if it is not the one that is there."""
    minor = number(npu.version)
    return refused(npu, torch) or (None if number(torch.version) == minor else f"=={minor}.*")


INSTALL = (
    f"{pair(f'=={PAIR[0]}', PAIR[1])}, beside CANN {CANN_OF_TORCH_NPU[number(PAIR[1])][-1]} "
    '(docs/npu.md, "Without a container")'
)
