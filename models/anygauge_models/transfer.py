"""Arrays of the host on their way to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike
    from torch import Tensor

__all__ = ["on_device"]


def on_device(array: ArrayLike, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of an array on a device, for which neither waits.

    Memory that is not pinned is copied when all that the device has to do before is done, and the host stands
    still until then.

    :param array: May be one that must not be written to.
    """
    import torch

    copy = torch.tensor(array, dtype=dtype)
    return copy if device.type == copy.device.type else copy.pin_memory().to(device, non_blocking=True)
