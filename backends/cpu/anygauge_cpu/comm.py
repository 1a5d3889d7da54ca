"""Communication between processes of hosts."""

from __future__ import annotations

from typing import Any

__all__ = ["communicator"]


def communicator(options: Any, group_options: Any) -> Any:
    """Return torch's communicator of a process group.

    :param options: Torch's, for any backend: store, rank, size and timeout.
    :param group_options: Unused: this backend has none.
    """
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # its type stub has another constructor
    return gloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
