"""Whether this host can run the CUDA backend, and why not."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from anygauge_cuda.env import VISIBLE_DEVICES
from anygauge_hooks.types import Availability

__all__ = ["probe"]

_DRIVER = Path("/proc/driver/nvidia/version")
_INSTALL_TORCH = "Install a CUDA build of torch: https://pytorch.org/get-started/locally"


def probe() -> Availability:
    """Return whether torch was built for CUDA and finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return Availability(ok=False, reason="torch is not installed", hint="pip install 'anygauge[cuda]'")
    import torch

    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
        return Availability(ok=False, reason=reason, hint=_INSTALL_TORCH)
    count = torch.cuda.device_count()
    if count == 0:
        return _no_device()
    if not torch.cuda.is_available():
        return Availability(
            ok=False,
            reason=f"the driver cannot run CUDA {torch.version.cuda}, which torch {torch.__version__} needs",
            hint="Update the NVIDIA driver, or install a torch built for an older CUDA.",
        )
    return Availability(ok=True, reason=f"{count} x {torch.cuda.get_device_name(0)}")


def _no_device() -> Availability:
    """Tell hidden GPUs from a missing driver and from a host without GPUs."""
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None and _DRIVER.exists():
        reason = f"{VISIBLE_DEVICES}={visible!r} hides every GPU"
        return Availability(ok=False, reason=reason, hint=f"unset {VISIBLE_DEVICES}")
    if not _DRIVER.exists():
        hint = "Install the driver and run nvidia-smi; in a container, start it with access to the GPUs."
        return Availability(ok=False, reason="no NVIDIA driver is loaded", hint=hint)
    hint = "Run nvidia-smi: it must list a GPU."
    return Availability(ok=False, reason="the NVIDIA driver reports no GPU", hint=hint)
