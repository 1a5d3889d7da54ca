"""The first rank of a layout without the others: its memory and its own work, on one device.

Torch's ``fake`` process group answers every collective at once and moves nothing between ranks. What a rank
would receive is filled with what it sends, so that shapes, routing and numbers are plausible; sums lack the
parts of the others. The engine would notice: its tests of the communication library are left out, and
``train.replica_check_every`` must be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from anygauge.distributed import known_results, process_groups

__all__ = ["init_lone_group", "replace_exchanges"]


def replace_exchanges() -> None:
    """Replace the collectives whose outputs a fake group leaves as they are, and the tests that notice.

    Call it before an engine is imported.
    """
    known_results.check_known_results = lambda *_: None
    dist.all_gather_into_tensor = _filled(dist.all_gather_into_tensor)
    dist.all_to_all_single = _filled(dist.all_to_all_single)
    dist.reduce_scatter_tensor = _filled(dist.reduce_scatter_tensor)


def init_lone_group(world_size: int) -> None:
    """Initialize the default process group as the first of ``world_size`` ranks; no other starts."""
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=world_size)
    process_groups._exchanges[:] = [process_groups.HostExchange(dist.HashStore(), 0, 1)]


def _filled(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that first fills its output with its input, repeated or cut off, or with zeros.

    An output that has its input inside is left as it is.
    """

    def run(output: Tensor, input: Tensor, *args: Any, **options: Any) -> Any:
        if output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr():
            given = input.detach().reshape(-1) if input.numel() else input.new_zeros(1)
            for part in output.detach().view(-1).split(given.numel()):
                part.copy_(given[: part.numel()])
        return collective(output, input, *args, **options)

    return run
