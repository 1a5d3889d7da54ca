"""Communication between NPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from anygauge_npu.env import BUFFER, WORKER

__all__ = ["communicator", "group_options"]

SMALL_BUFFER_MB = 32
"""Buffer of the default group, which carries agreements and barriers; large tensors go through Megatron's
groups."""


def communicator(options: Any, hccl_options: Any) -> Any:
    """Return torch-npu's registered communicator of a process group.

    :param options: Torch's, for any backend: store, rank, size, timeout, name and members.
    :param hccl_options: ``ProcessGroupHCCL.Options``, or ``None``.
    """
    from torch.distributed import Backend

    return Backend._plugins["HCCL"].creator_fn(options, hccl_options)


def group_options(group_name: str, timeout_s: float) -> Any:
    """Return the options of a group, ``ProcessGroupHCCL.Options``.

    :param group_name: ``"default"`` gets for each of its two buffers 32 MB, or what ``HCCL_BUFFSIZE`` gives
        the other groups if that is less.
    :param timeout_s: Seconds until torch-npu gives a collective up on the host. Nothing reads ``op_timeout``,
        the other limit that the options have: work takes this one (``ProcessGroupHCCL.cpp`` of Ascend/pytorch
        at commit 9e73e708ab9350d203475609f36f8a43f6a0c2ab and on branch v2.10.0).
    """
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    if group_name == "default" and _others_buffer_mb() > SMALL_BUFFER_MB:
        options.hccl_config = {"hccl_buffer_size": SMALL_BUFFER_MB}
    return options


def _others_buffer_mb() -> int:
    """Return the megabytes of each buffer of the groups without options of their own."""
    text = os.environ.get(BUFFER, "").strip()
    return int(text) if text.isdecimal() else int(WORKER[BUFFER])
