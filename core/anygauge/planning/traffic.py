"""Bytes that a training rank exchanges with others: gradients, weights, hidden states, keys, tokens.

A gather or a scatter among ``n`` ranks moves ``(n - 1) / n`` of the whole to each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anygauge.planning.batches import Batches
from anygauge.planning.layout import Layout
from anygauge.planning.memory import FLOAT, itemsize
from anygauge.planning.shape import ModelShape

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["gathered_bytes", "token_bytes", "update_bytes"]

EXPOSED_BACKWARD = 0.5
"""Exchanges of hidden states that a backward pass waits for, as a part of those of a forward pass. It makes
1.5 times as many, and the products of the weights' gradients hide two thirds of them."""


def update_bytes(config: Config, layout: Layout) -> float:
    """Return the bytes of an update: gradients to the ranks that own a part, and their new weights to all."""
    dense, experts = layout.rank.trained(config)
    moved = dense * _of_others(layout.optimizer_shards) + experts * _of_others(layout.expert_shards)
    return (FLOAT + itemsize(config)) * moved


def gathered_bytes(config: Config, layout: Layout, batches: Batches, *, trains: bool) -> float:
    """Return the bytes of a mini-batch of the FSDP engine.

    Each micro-batch gathers weights, again for a backward pass, and reduces its gradients in float32. Without
    ``reshard_after_forward`` the first one gathers them for all.

    :param trains: Whether there is a backward pass.
    """
    parallel, count = config.train.parallel, batches.micro_batches
    weights = itemsize(config) * (layout.rank.total - layout.rank.packed)
    gathers = count * (2 if trains else 1) if parallel.reshard_after_forward else 1
    gradients = count * FLOAT * sum(layout.rank.trained(config)) if trains else 0.0
    return (gathers * weights + gradients) * _of_others(layout.workers // parallel.replicate)


def token_bytes(config: Config, shape: ModelShape, layout: Layout, *, trains: bool) -> float:
    """Return the bytes that the layers exchange for each token of a data-parallel rank while nothing runs.

    :param trains: Whether there is a backward pass.
    """
    again = config.train.recompute if trains else "none"
    sparse = 0 if shape.experts is None else shape.experts.layers
    forwards = 2.0 if again == "full" else 1.0
    size = itemsize(config)
    # around attention and around a dense MLP: gathered before, scattered after
    around = 2 * (2 * shape.layers - sparse) * (forwards + (EXPOSED_BACKWARD if trains else 0.0))
    ends = 5 if trains else 2  # of the embedding and the loss
    hidden = size * (around + ends) * shape.hidden * _of_others(layout.tensor) / layout.context
    of_attention = size * (2.0 if again in ("full", "selective") else 1.0) + (FLOAT if trains else 0.0)
    heads = shape.attention.key + shape.attention.value
    keys = shape.attention_layers * of_attention * heads / layout.tensor * _of_others(layout.context)
    routed = 0.0
    if shape.experts is not None:
        # to the experts and back
        there = 2 * shape.experts.chosen * shape.hidden * (forwards + (1.0 if trains else 0.0))
        routed = size * sparse * there * _of_others(layout.expert) / (layout.tensor * layout.context)
    return (hidden + keys + routed) / layout.pipeline


def _of_others(ranks: int) -> float:
    return 1 - 1 / ranks
