"""Check that ranks agree on model config and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from pydantic import TypeAdapter
from torch import Tensor

from anygauge.config import Config
from anygauge.config.roles import as_language_model
from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.megatron.weights.hf import read_config, reading_config
from anygauge.engines.megatron.weights.mapping import TensorRule, copied_embedding
from anygauge_hooks.errors import AnygaugeError, RankMismatchError
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.types import LoadedPlugins

__all__ = ["check_configs_agree", "check_ranks_agree"]

SHOWN = 5
"""Tensors or keys that an error names."""
TABLES = ("run", "algorithm", "train", "rollout")
"""Tables of the resolved config that determine how a model is built and trained."""
CHUNK = 2**20
"""Elements of a tensor that are widened to int64 at a time."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes."""
_ODD = 0x2545F4914F6CDD1D
"""Any large odd number."""
_DIGEST = TypeAdapter(str)
_FACTS = TypeAdapter(dict[str, str] | None)
_NAMES = TypeAdapter(list[str])


# -------------------------------------------------------------------------
# Configs
# -------------------------------------------------------------------------


def check_configs_agree(config: Config, plugins: LoadedPlugins) -> None:
    """Check that all ranks build the same model. A collective of all ranks.

    Paths may differ: each host has its own cache.

    :raises RankMismatchError: Something differs, or only some ranks can read it; on every rank.
    :raises AnygaugeError: This rank cannot read it.
    """
    facts, problem = None, None
    try:
        facts = dict(_facts(config, plugins))
    except AnygaugeError as error:
        problem = error
    facts_of_ranks = [facts]
    if len(set(all_gather_values(hashlib.blake2b(repr(facts).encode()).hexdigest(), _DIGEST))) > 1:
        facts_of_ranks = all_gather_values(facts, _FACTS)
    if problem is not None:
        raise problem
    if len(facts_of_ranks) > 1:
        raise RankMismatchError(_difference(facts_of_ranks), hint=_hint("model"))


def _difference(facts_of_ranks: Sequence[Mapping[str, str] | None]) -> str:
    """Return the differences between ranks, or the ranks that cannot read the model."""
    if unread := [rank for rank, facts in enumerate(facts_of_ranks) if facts is None]:
        return f"The model cannot be read by {_named(unread)}; this rank could."
    read = [facts for facts in facts_of_ranks if facts is not None]
    by_key = {key: [facts.get(key, "nothing") for facts in read] for facts in read for key in facts}
    different = [_odd_value(key, values) for key, values in by_key.items() if len(set(values)) > 1]
    return f"Ranks start with different configs: {_shown(different)}."


def _facts(config: Config, plugins: LoadedPlugins) -> Iterator[tuple[str, str]]:
    """Yield keys and values of the config, of the model's and of what its family makes of that."""
    for name in TABLES:
        yield from _leaves(name, getattr(config, name).model_dump())
    directory = config.model.path
    hf = read_config(directory)
    yield from _leaves("config.json", hf)
    hf = as_language_model(hf)
    spec = plugins.model(hf.get("architectures") or ())
    yield "family", spec.name
    with reading_config(directory):
        yield from _leaves(f"family {spec.name}", megatron_model(spec).transformer_config(hf))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif not isinstance(value, Path) and not callable(value):  # what a function prints has its address
        yield name, repr(value)


def _odd_value(key: str, values: Sequence[str]) -> str:
    """Return a key with the ranks and values that are not with the most."""
    usual = _most(values)
    odd = [rank for rank, value in enumerate(values) if value != usual]
    return f"{key} ({_named(odd)}: {values[odd[0]]}, others: {usual})"


# -------------------------------------------------------------------------
# Weights
# -------------------------------------------------------------------------


def check_ranks_agree(tensors: Mapping[str, Tensor], rules: Sequence[TensorRule], role: str = "") -> None:
    """Check that ranks with the same parameters have the same values. A collective.

    Megatron's own seeding leaves data-parallel ranks with different weights on an accelerator.

    :param tensors: Tensors of this rank, by canonical name.
    :param rules: Rules of the whole model.
    :param role: Whose weights they are, where they are not the model's own.
    :raises RankMismatchError: Some differ; on every rank, with the same text.
    """
    device = next(iter(tensors.values())).device
    prints = _fingerprints(tensors, device)
    mine = [text for names, group in _replicas(tensors, rules) for text in _odd(prints, names, group, device)]
    told = all_gather_values(mine, _NAMES)
    different = list(dict.fromkeys(chain.from_iterable(told)))
    if different:
        of_role = f" of the {role}" if role else ""
        raise RankMismatchError(
            f"Ranks start with different weights{of_role}: {_shown(different)}.", hint=_hint(role or "model")
        )


def _replicas(
    tensors: Mapping[str, Tensor], rules: Sequence[TensorRule]
) -> Iterator[tuple[list[str], dist.ProcessGroup]]:
    """Yield the names of tensors and the ranks that hold them alike."""
    declared = {rule.canonical: rule.declared for rule in rules}
    experts = [name for name in tensors if name in declared and declared[name].experts]
    dense = [name for name in tensors if name not in set(experts)]
    yield dense, parallel_state.get_data_parallel_group(with_context_parallel=True)
    yield experts, parallel_state.get_expert_data_parallel_group()
    whole = [name for name in dense if name not in declared or declared[name].split_dim is None]
    yield whole, parallel_state.get_tensor_model_parallel_group()
    copied = copied_embedding(rules)
    if copied is not None and copied in tensors:
        ends = parallel_state.get_embedding_group(check_initialized=False)
        if ends is not None and ends != dist.GroupMember.NON_GROUP_MEMBER:
            yield [copied], ends


def _odd(
    prints: Mapping[str, Tensor], names: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> Iterator[str]:
    """Yield the tensors that ranks of a group do not agree on, with those that are not with the most."""
    if not names or dist.get_world_size(group) == 1:
        return
    mine = torch.stack([prints[name] for name in names]).to(device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    values, ranks = torch.stack(gathered, dim=1).cpu(), dist.get_process_group_ranks(group)
    for row in (values != values[:, :1]).any(1).nonzero().flatten().tolist():
        by_rank = values[row].tolist()
        usual = _most(by_rank)
        odd = [rank for rank, value in zip(ranks, by_rank, strict=True) if value != usual]
        yield f"{names[row]} ({_named(odd)})"


def _fingerprints(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return for each tensor a number that changes with any of its bits and with their order; int64.

    A sum of the elements' bits as integers, each times an odd number of its place, modulo 2 ** 64: exact, so
    that every kind of device gives the same one. A change of one element always changes it.
    """
    largest = max(tensor.numel() for tensor in tensors.values())
    factors = _factors(min(largest, CHUNK)).to(device)
    return {name: _fingerprint(tensor.detach(), factors) for name, tensor in tensors.items()}


def _fingerprint(tensor: Tensor, factors: Tensor) -> Tensor:
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros([], dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        total = total * _ODD + (chunk * factors[: len(chunk)]).sum()
    return total


def _factors(count: int) -> Tensor:
    """Return odd numbers ``[count]``, int64, that look like random ones.

    Made of their places, by the mixing step of https://doi.org/10.1145/2660193.2660195 section 4, lest they
    depend on a generator.
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64))


# -------------------------------------------------------------------------
# Messages
# -------------------------------------------------------------------------


def _most(values: Sequence[Any]) -> Any:
    """Return the value of most ranks; where as many have one as another, that of the first."""
    return max(dict.fromkeys(values), key=values.count)


def _hint(section: str) -> str:
    return f"Every rank must read the same files: is {section}.path the same directory on each node?"


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _shown(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
