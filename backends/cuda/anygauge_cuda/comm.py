"""Communication between GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

__all__ = ["communicator", "group_options"]

FEW_BLOCKS = 4
"""Thread blocks of the default group, which carries agreements and barriers; large tensors go through the
train engines' own groups. The memory of a communicator grows with the thread blocks that it may use."""


def communicator(options: Any, nccl_options: Any) -> Any:
    """Return torch's communicator of a process group.

    :param options: Torch's, for any backend: store, rank, size, timeout, name and members.
    :param nccl_options: ``ProcessGroupNCCL.Options``, or ``None``.
    """
    from torch.distributed import ProcessGroupNCCL

    nccl_options = ProcessGroupNCCL.Options() if nccl_options is None else nccl_options
    nccl_options._timeout = options.timeout
    nccl_options.group_name = options.group_id
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    return ProcessGroupNCCL(options.store, options.group_rank, options.group_size, nccl_options)


def group_options(group_name: str, timeout_s: float) -> Any:
    """Return the options of a group, ``ProcessGroupNCCL.Options``.

    Whether communicators are made without blocking, and whether their streams come before those of kernels,
    is the user's choice by torch's own variables: ``TORCH_NCCL_USE_COMM_NONBLOCKING`` and
    ``TORCH_NCCL_HIGH_PRIORITY``.

    :param group_name: ``"default"`` gets few thread blocks.
    :param timeout_s: Seconds until torch's watchdog ends the process, with the collective's name in its log.
    """
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    if group_name == "default":
        options.config.max_ctas = FEW_BLOCKS
    return options
