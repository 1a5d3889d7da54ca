"""Memory budget of the logits that the loss keeps from its forward to its backward pass."""

from __future__ import annotations

import logging

from anygauge_hooks.types import Device

__all__ = ["LossBudget"]

logger = logging.getLogger(__name__)

GIB = 2**30

FREE_SHARE = 10
"""The default budget is the free memory divided by this."""


class LossBudget:
    """Bytes for the logits of a micro-batch that wait for backward.

    :param gib: The budget in GiB; ``None`` takes a tenth of the memory that is free when it is first asked
        for: in the first training pass, when the loss begins and the activations of the model are there.
    """

    def __init__(self, gib: float | None, device: Device) -> None:
        self._device = device
        self._bytes = None if gib is None else int(gib * GIB)

    def __call__(self) -> int:
        """Return the budget in bytes."""
        if self._bytes is None:
            free = _free_memory(self._device)
            self._bytes = free // FREE_SHARE
            logger.info(
                "The loss keeps up to %.2f GiB of logits for its backward pass (train.loss_memory_gib): a "
                "tenth of %.2f GiB that are free on %s.",
                self._bytes / GIB,
                free / GIB,
                self._device.torch_device,
            )
        return self._bytes


def _free_memory(device: Device) -> int:
    """Return the bytes that torch can allocate: of the device, and of blocks that it holds unused."""
    memory = device.memory()
    unused = memory["reserved"] - memory["allocated"] if "reserved" in memory else 0
    return memory.get("free", 0) + unused
