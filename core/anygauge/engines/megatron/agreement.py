"""Whether data-parallel ranks hold the same weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge_hooks.errors import RankMismatchError

__all__ = ["check_ranks_agree"]


def check_ranks_agree(parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Compare the parameters of all ranks of a group. A collective.

    Megatron's own seeding leaves data-parallel ranks with different weights on an accelerator.

    :raises RankMismatchError: Some differ; on every rank.
    """
    mine = torch.stack([_fingerprint(parameter) for parameter in parameters.values()])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    same = torch.stack(found).eq(mine).all(dim=0).tolist()
    different = [name for name, agrees in zip(parameters, same, strict=True) if not agrees]
    if different:
        more = f" and {len(different) - 5} more" if len(different) > 5 else ""
        raise RankMismatchError(
            f"Data-parallel ranks start with different weights: {', '.join(different[:5])}{more}.",
            hint="Every rank must read the same files: is model.path the same directory on each node?",
        )


def _fingerprint(parameter: Tensor) -> Tensor:
    """Return a number that changes with the values of a parameter and with their order; float32.

    Needs no copy of the parameter in another precision, however large it is.
    """
    rows = torch.nan_to_num(parameter.detach()).reshape(-1, parameter.shape[-1])
    across = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
    down = torch.linspace(1, 2, rows.shape[0], device=rows.device)
    return (rows @ across).float() @ down
