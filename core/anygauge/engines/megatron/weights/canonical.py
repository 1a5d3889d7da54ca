"""Canonical names of a built model's tensors, wherever its modules keep them.

Canonical names are Transformer Engine's, with global indices of layers and experts. Three things make them
differ from the names that a module has: layers count from 0 in each pipeline stage, a layer keeps as modules
the norms that Transformer Engine fuses, and experts are stored in more ways than one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from anygauge.engines.megatron.weights.mapping import EMBEDDING, OUTPUT
from anygauge.engines.megatron.weights.sharding import CanonicalTensors, global_expert

__all__ = ["canonical_tensors"]

_GROUPED = re.compile(r"((linear_fc[12])\.(?:weight|bias))(\d+)")
"""An expert of Transformer Engine's grouped linears."""
_SEQUENTIAL = re.compile(r"local_experts\.(\d+)\.(.+)")
"""A tensor of one of Megatron's sequential experts."""


def canonical_tensors(chunks: Sequence[nn.Module], expert_rank: int = 0) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of the model chunks of a rank.

    A last stage whose output layer is tied to an embedding elsewhere has a copy of that, under its name.

    :param expert_rank: Position of this rank among those that divide the experts.
    :returns: Tensors by canonical name, in the model's order: those of the modules, or views of them.
    """
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        for name, tensor in _tensors(chunk, expert_rank):
            assert name not in tensors, f"two tensors are called {name}"
            tensors[name] = tensor
    return tensors


def _tensors(module: nn.Module, expert_rank: int) -> Iterator[tuple[str, Tensor]]:
    # isinstance looks for the method in every module, which takes twenty times as long
    if issubclass(type(module), CanonicalTensors):
        yield from cast(CanonicalTensors, module).canonical_tensors().items()
        return
    for name, tensor in _below(module, expert_rank):
        yield _renamed(module, name, expert_rank), tensor


def _below(module: nn.Module, expert_rank: int) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    temporary = module._non_persistent_buffers_set
    yield from ((name, each) for name, each in module.named_buffers(recurse=False) if name not in temporary)
    for name, child in module.named_children():
        # A layer knows its number in the whole model; in the list of its stage it has another one.
        number = getattr(child, "layer_number", None)
        place = str(number - 1) if name.isdigit() and isinstance(number, int) else name
        yield from ((f"{place}.{inner}", tensor) for inner, tensor in _tensors(child, expert_rank))


def _renamed(module: nn.Module, name: str, expert_rank: int) -> str:
    experts = getattr(module, "num_local_experts", None)
    if isinstance(experts, int):
        match = _GROUPED.fullmatch(name)
        if match and not isinstance(getattr(module, match[2]), CanonicalTensors):
            return f"{match[1]}{global_expert(int(match[3]), expert_rank, experts)}"
        if match := _SEQUENTIAL.fullmatch(name):
            return f"{match[2]}{global_expert(int(match[1]), expert_rank, experts)}"
    if name == OUTPUT and getattr(module, "share_embeddings_and_output_weights", False):
        return EMBEDDING
    for stored, canonical in _fused_norms(module).items():
        if name.startswith(stored):
            return canonical + name.removeprefix(stored)
    return name


def _fused_norms(module: nn.Module) -> Mapping[str, str]:
    """Return the prefixes that a layer's spec renames in its checkpoints."""
    submodules = getattr(module, "submodules_config", None)
    return getattr(submodules, "sharded_state_dict_keys_map", None) or {}
