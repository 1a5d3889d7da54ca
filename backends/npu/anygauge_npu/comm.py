"""Communication between NPUs."""

from __future__ import annotations

from typing import Any

__all__ = ["communicator"]


def communicator(options: Any, own: Any) -> Any:
    """Return what a process group of this backend is made of: what torch-npu has registered to make it.

    :param options: Torch's, for any backend: store, rank, size, timeout, name and members.
    :param own: ``ProcessGroupHCCL.Options``, or ``None``.
    """
    from torch.distributed import Backend

    return Backend._plugins["HCCL"].creator_fn(options, own)
