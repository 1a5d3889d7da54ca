"""Coordinates of ranks in Megatron's order, for tests that divide a model without its process groups."""

from __future__ import annotations

from dataclasses import dataclass

from anygauge.distributed.layout import Layout

__all__ = ["Coordinates", "coordinates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Coordinates of a rank in each parallel dimension, from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Return where a rank stands."""
    sizes = layout.parallel
    stage, inside = divmod(rank, layout.stage_ranks)
    rest, tensor = divmod(inside, sizes.tensor)
    data, context = divmod(rest, sizes.context)
    expert_rest, expert_tensor = divmod(inside, sizes.expert_tensor)
    return Coordinates(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=stage,
        expert=expert_rest % sizes.expert,
        expert_tensor=expert_tensor,
    )
