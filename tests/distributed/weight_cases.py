"""Rank programs for the tests of loading and gathering weights, with tensors and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.config import Config
from anygauge.engines.megatron.weights.gathering import plan_gathering
from anygauge.engines.megatron.weights.loading import load_weights
from anygauge.engines.megatron.weights.mapping import TensorRule, canonical_shape, expand_rules
from anygauge.engines.megatron.weights.sharding import ShardPosition, local_shape
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import WeightMappingError
from anygauge_hooks.megatron import WeightRule

LAYERS, EXPERTS, VOCAB = 4, 4, 5
LAYER = "decoder.layers.{layer}."


def make_rules() -> list[TensorRule]:
    """Return rules of every kind, with an output layer that is tied to the embedding."""
    rules = [
        WeightRule(canonical="embedding.word_embeddings.weight", hf=("embed",), split_dim=0, pads_vocab=True),
        WeightRule(
            canonical=LAYER + "qkv",
            hf=("q.{layer}", "k.{layer}", "v.{layer}"),
            transform="interleave",
            sections=((8,), (4,), (4,)),
            groups=2,
            split_dim=0,
        ),
        WeightRule(canonical=LAYER + "norm", hf=("n.{layer}",)),
        WeightRule(canonical=LAYER + "down", hf=("d.{layer}",), split_dim=1),
        WeightRule(
            canonical=LAYER + "experts.linear_fc1.weight{expert}",
            hf=("gu.{layer}",),
            sections=((4, 4),),
            split_dim=0,
            experts=EXPERTS,
        ),
    ]
    return expand_rules(rules, LAYERS, VOCAB)


def make_tensors() -> dict[str, Tensor]:
    """Return what a Hugging Face directory of these rules holds; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, 3)}
    for layer in range(LAYERS):
        shapes |= {f"q.{layer}": (8, 3), f"k.{layer}": (4, 3), f"v.{layer}": (4, 3), f"n.{layer}": (3,)}
        shapes |= {f"d.{layer}": (3, 8), f"gu.{layer}": (EXPERTS, 8, 3)}
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


class Source:
    """Tensors in memory for a checkpoint."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> Sequence[int]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        return self._tensors[name][index]


def make_place(rank: int, world: int, sizes: dict[str, int]) -> tuple[ShardPosition, int]:
    """Return where a rank stands, and its stage."""
    tensor, stages = sizes.get("tensor", 1), sizes.get("stages", 1)
    expert, expert_tensor = sizes.get("expert", 1), sizes.get("expert_tensor", 1)
    stage, inside = divmod(rank, world // stages)
    place = ShardPosition(
        tensor=tensor,
        tensor_rank=inside % tensor,
        expert_tensor=expert_tensor,
        expert_tensor_rank=inside % expert_tensor,
        expert=expert,
        expert_rank=inside // expert_tensor % expert,
        stages=stages,
    )
    return place, stage


def empty_tensors(
    rules: Sequence[TensorRule], tensors: dict[str, Tensor], place: ShardPosition, stage: int
) -> dict[str, Tensor]:
    """Return what a rank stores, of no numbers yet."""
    stored = {}
    for rule in rules:
        parts = rule.canonical.split(".")
        is_here = (
            int(parts[2]) * place.stages // LAYERS == stage
            if "layers" in parts
            else stage in (0, place.stages - 1)
        )
        is_mine = rule.expert is None or rule.expert * place.expert // EXPERTS == place.expert_rank
        if is_here and is_mine:
            shapes = [tensors[name].shape for name in rule.hf]
            shape = local_shape(rule.declared, canonical_shape(rule, shapes), place.ways(rule.declared))
            stored[rule.canonical] = torch.full(shape, float("nan"))
    return stored


def load_and_gather(
    config: Config, context: WorkerContext, case: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[int, dict[str, Tensor]], list[int]]:
    """Return the whole tensors, what is gathered of them on every rank, what on the first, and what on each
    rank that sends what it holds; and by which ranks.
    """
    rules, tensors = make_rules(), make_tensors()
    place, stage = make_place(context.rank, context.world_size, case["sizes"])
    stored = empty_tensors(rules, tensors, place, stage)
    load_weights(stored, rules, Source(tensors), place)
    group = make_replica_group(context, case["sizes"])
    gathering = plan_gathering(stored, rules, place, group)
    return (
        tensors,
        dict(gathering.weights(stored)),
        dict(gathering.weights(stored, on_every_rank=False)),
        {sender: dict(gathering.sent_by(sender, stored)) for sender in gathering.senders},
        list(gathering.ranks),
    )


def make_replica_group(context: WorkerContext, sizes: dict[str, int]) -> Any:
    """Return the group of this rank's copy of the model."""
    stages = sizes.get("stages", 1)
    stage = context.world_size // stages
    width = max(sizes.get("tensor", 1), sizes.get("expert", 1) * sizes.get("expert_tensor", 1))
    copies = [
        [first + place * stage + inside for place in range(stages) for inside in range(width)]
        for first in range(0, stage, width)
    ]
    return dist.new_subgroups_by_enumeration(copies)[0]


def refuse(config: Config, context: WorkerContext, case: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return the errors of a rank that holds too little and of one that reads too little.

    :returns: With whether all that this rank stores is as it was.
    """
    rules, tensors = make_rules(), make_tensors()
    place, stage = make_place(context.rank, context.world_size, case["sizes"])
    stored = empty_tensors(rules, tensors, place, stage)
    is_odd = context.rank == context.world_size - 1
    lost = {name: each for name, each in stored.items() if not (is_odd and name.endswith("norm"))}
    absent = {name: each for name, each in tensors.items() if not (is_odd and name == "q.3")}
    wrong = {**tensors, "d.3": tensors["d.3"][:, :6]} if is_odd else tensors
    found = []
    for held, there in ((lost, tensors), (stored, absent), (stored, wrong)):
        text = ""
        try:
            load_weights(held, rules, Source(there), place)
        except WeightMappingError as error:
            text = str(error)
        found.append((text, all(bool(each.isnan().all()) for each in stored.values())))
    return found
