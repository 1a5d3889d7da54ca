"""Communication between NPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

__all__ = ["communicator", "group_options"]

SMALL_BUFFER_MB = 32
"""Of the default group, which carries agreements and barriers; large tensors go through Megatron's groups."""


def communicator(options: Any, own: Any) -> Any:
    """Return what a process group of this backend is made of: what torch-npu has registered to make it.

    :param options: Torch's, for any backend: store, rank, size, timeout, name and members.
    :param own: ``ProcessGroupHCCL.Options``, or ``None``.
    """
    from torch.distributed import Backend

    return Backend._plugins["HCCL"].creator_fn(options, own)


def group_options(group_name: str, timeout_s: float) -> Any:
    """Return the options of a group, ``ProcessGroupHCCL.Options``.

    :param group_name: ``"default"`` gets less memory for each of its two buffers than ``HCCL_BUFFSIZE`` gives
        the others, unless the environment says otherwise for all of them.
    :param timeout_s: Seconds until torch-npu gives a collective up on the host.
    """
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    if group_name == "default":
        options.hccl_config = {"hccl_buffer_size": SMALL_BUFFER_MB}
    return options
