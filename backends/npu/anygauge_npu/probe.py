"""Whether this host can run the NPU backend, and why not."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution

from anygauge_hooks.types import Availability
from anygauge_npu.env import AUTOLOAD, VISIBLE_DEVICES
from anygauge_npu.releases import INSTALL, mismatch

__all__ = ["probe"]

CANN_LIBRARIES = ("libascendcl.so", "libhccl.so")
"""Without any of them torch-npu does not load, and neither does torch while torch-npu is installed."""
_CANN_HINT = (
    "Install CANN and source its set_env.sh in this shell. To use another backend meanwhile, "
    f"set {AUTOLOAD}=0 or uninstall torch-npu: it breaks `import torch` without CANN."
)


def probe() -> Availability:
    """Return whether torch-npu is installed, fits torch, finds CANN, loads, and sees an NPU.

    What can be told without importing torch is told first: an import that fails leaves half of torch behind.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return Availability(ok=False, reason="torch-npu is not installed", hint=INSTALL)
    return _mismatch() or _no_cann() or _load_failure() or _devices()


def _mismatch() -> Availability | None:
    """Compare the releases: torch-npu is built against one release of torch."""
    try:
        torch, npu = distribution("torch"), distribution("torch-npu")
    except PackageNotFoundError as error:
        return Availability(ok=False, reason=f"{error.name} is not installed", hint=INSTALL)
    reason = mismatch(npu, torch)
    return None if reason is None else Availability(ok=False, reason=reason, hint=INSTALL)


def _no_cann() -> Availability | None:
    """Load what torch-npu needs of CANN first."""
    for name in CANN_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            return Availability(ok=False, reason=f"CANN is missing or too old ({error})", hint=_CANN_HINT)
    return None


def _load_failure() -> Availability | None:
    """Import torch-npu, which loads the rest of CANN."""
    try:
        with _autoload_restored():
            importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        text = " ".join(_root_cause(error).split())
        if "cannot open shared object file" in text or "undefined symbol" in text:
            return Availability(ok=False, reason=f"CANN is missing or too old ({text})", hint=_CANN_HINT)
        return Availability(ok=False, reason=f"torch-npu does not load ({text})", hint=INSTALL)
    return None


@contextmanager
def _autoload_restored() -> Iterator[None]:
    """Undo what torch-npu leaves behind where its import fails: torch then loads no extension any more."""
    before = os.environ.get(AUTOLOAD)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(AUTOLOAD, None)
        else:
            os.environ[AUTOLOAD] = before


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def _devices() -> Availability:
    from anygauge_npu.device import vendor_module

    npu = vendor_module()
    count = npu.device_count()
    if count:
        return Availability(ok=True, reason=f"{count} x {npu.get_device_name(0)}")
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None:
        reason = f"{VISIBLE_DEVICES}={visible!r} hides every NPU"
        return Availability(ok=False, reason=reason, hint=f"unset {VISIBLE_DEVICES}")
    hint = "Run npu-smi info: it must list one; a container needs /dev/davinci* and /dev/davinci_manager."
    return Availability(ok=False, reason="CANN finds no NPU", hint=hint)
