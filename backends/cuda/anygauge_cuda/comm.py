"""Communication between GPUs."""

from __future__ import annotations

from typing import Any

__all__ = ["communicator"]


def communicator(options: Any, own: Any) -> Any:
    """Return what a process group of this backend is made of.

    :param options: Torch's, for any backend: store, rank, size, timeout, name and members.
    :param own: ``ProcessGroupNCCL.Options``, or ``None``.
    """
    from torch.distributed import ProcessGroupNCCL

    own = ProcessGroupNCCL.Options() if own is None else own
    own._timeout = options.timeout
    own.group_name = options.group_id
    own.global_ranks_in_group = options.global_ranks_in_group
    return ProcessGroupNCCL(options.store, options.group_rank, options.group_size, own)
