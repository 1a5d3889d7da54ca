"""Environment and config defaults of CPU workers."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge_hooks.types import AcceleratorIds, ConfigChange

__all__ = [
    "HIDDEN_ACCELERATORS",
    "HIDDEN_EXTENSIONS",
    "WORKER_SLOT",
    "config_defaults",
    "declare_missing_operators",
    "hide_extensions",
    "local_device",
    "prepare_imports",
]

WORKER_SLOT = "anygauge_cpu"
"""Scheduler resource: one unit is the slot of one worker. Not a core: three workers of one core each would
never start on a host with two."""

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

HIDDEN_ACCELERATORS: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
    # torch must not load an accelerator's extension either: one without its driver breaks ``import torch``
    AUTOLOAD: "0",
}
"""Hides the accelerators of a host that has some, whether or not their backend plugins are installed: device
names that Megatron writes literally must find no device that they could land on."""


HIDDEN_EXTENSIONS = ("torch_npu",)
"""Packages that other libraries import wherever they are installed, and that fail without their driver or
change torch with it. Transformers imports this one with every model."""

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
DESCRIBED = {"nms": _BOXES, "qnms": _BOXES}
"""Operators that torchvision describes whether or not it could load them. Declared, they still compute
nothing."""


def hide_extensions() -> None:
    """Let this process take vendors' extensions of torch for packages that are not installed.

    One that has been imported already stays.
    """
    # otherwise ``import torch`` looks for them and fails, since they are not to be found
    os.environ[AUTOLOAD] = HIDDEN_ACCELERATORS[AUTOLOAD]
    for name in HIDDEN_EXTENSIONS:
        absent: Any = None  # what the import system takes for a module that cannot be found
        sys.modules.setdefault(name, absent)


def declare_missing_operators() -> bool:
    """Declare what an installed torchvision describes and cannot load; return whether there is any.

    The wheels of PyPI are built for CUDA. Beside a torch for the CPU their library does not load, and then
    ``import torchvision`` fails at the first operator that it describes, and transformers and SGLang with it.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    import torch

    if _loads(Path(next(iter(spec.submodule_search_locations))) / "_C.so"):
        return False
    missing = [name for name in DESCRIBED if not hasattr(torch.ops.torchvision, name)]
    for name in missing:
        torch.library.define(f"torchvision::{name}", DESCRIBED[name])
    return bool(missing)


def _loads(library: Path) -> bool:
    import torch

    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except (ImportError, OSError):
        return False
    return True


def prepare_imports() -> None:
    """Let this process import torch, transformers and SGLang whatever lies beside them.

    Vendors' extensions of torch are hidden, and a torchvision that was built for another torch imports.
    """
    hide_extensions()
    declare_missing_operators()


def local_device(ray_ids: AcceleratorIds, environ: Mapping[str, str]) -> int:
    """Return 0: a host is one device."""
    del ray_ids, environ
    return 0


def config_defaults() -> Sequence[ConfigChange]:
    """Return the keys that this backend fills in."""
    reason = "bfloat16 is emulated on most processors"
    return [ConfigChange(path="train.dtype", value="float32", reason=reason)]
