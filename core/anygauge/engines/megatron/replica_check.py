"""Check that ranks with the same weights and gradients have the same bits: at the start, after a load, and in
training.

Ranks compare checksums through the rendezvous store (:class:`HostExchange`), never through collectives: where
a gather returns a rank's own part, every rank looks like the others.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from anygauge.distributed.process_groups import host_exchange
from anygauge.engines.agreement import majority, named_ranks, other_files
from anygauge.engines.megatron.ranks import is_shared
from anygauge.engines.megatron.reduction_check import wrong_sums
from anygauge.engines.megatron.weights.mapping import TensorRule, copied_embedding
from anygauge.weight_sync.checksum import digests
from anygauge.wording import listed
from anygauge_hooks.errors import CollectiveError, RankMismatchError, ReplicaError

__all__ = ["ReplicaCheck", "check_ranks_agree", "fingerprints"]

BYTES_AT_ONCE = 4 * 2**30
"""Bytes of weights and gradients that one check reads; of more, each check takes another part."""
CHUNK = 2**20
"""Elements of a tensor that are widened to int64 at a time, for a fingerprint."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes."""
_ODD = 0x2545F4914F6CDD1D
"""Any large odd number."""
NORM = "gradient norm"
NORM_TOLERANCE = 1e-5
"""Relative: groups that each have the whole model may add up the squares in another order."""
TENSOR = "tensor"
"""The kind of group whose ranks share what tensor parallelism does not split."""
ENDS = "pipeline ends"
"""The kind of group whose ranks, of other stages, have the same embedding."""
_REPAIR = (
    "The step changed no weight, and checkpoints from before it stay as they are. Look for a faulty device, "
    "or a communication library that computes wrongly, on the hosts of these ranks; then resume from a "
    "checkpoint."
)
_REPAIR_REDUCTION = (
    "The step changed no weight, but steps since the last check may have been wrong. Look for a "
    "communication library that computes wrongly on the hosts of these ranks; then resume from a "
    "checkpoint from before these steps."
)
Checksums = Mapping[str, Mapping[str, int]]
"""Checksums by :attr:`_Replica.key` and name."""


@dataclass(frozen=True, slots=True)
class _Replica:
    """A tensor that the ranks of a group hold alike."""

    kind: str
    """Kind of the group."""
    first: int
    """First rank of the group, which tells it from others of its kind."""
    name: str
    tensor: Tensor
    is_gradient: bool = False

    @property
    def key(self) -> str:
        """Name of all that is compared together: the same on the ranks of the group, and on no other."""
        return f"{'gradients' if self.is_gradient else 'weights'} {self.kind} {self.first}"


# -------------------------------------------------------------------------
# When
# -------------------------------------------------------------------------


def check_ranks_agree(
    tensors: Mapping[str, Tensor],
    rules: Sequence[TensorRule],
    role: str = "",
    directory: str = "model.path",
) -> None:
    """Check that ranks with the same parameters have the same values. Every rank calls it.

    Megatron's own seeding leaves data-parallel ranks with different weights on an accelerator.

    :param tensors: Tensors of this rank, by canonical name.
    :param rules: Rules of the whole model.
    :param role: Whose weights they are, where they are not the model's own.
    :param directory: Where each rank has read them.
    :raises RankMismatchError: Some differ; on every rank, with the same text.
    """
    checksums, _ = _checksums(list(_replicas(tensors, rules)), summed=fingerprints)
    different, _ = _differences(checksums)
    if different:
        of_role = f" of the {role}" if role else ""
        raise RankMismatchError(
            f"Ranks start with different weights{of_role}: {different}.", hint=other_files(directory)
        )


class ReplicaCheck:
    """Compares replicas in the first step of a process, and in each ``every``-th step after that.

    :param tensors: Tensors of this rank, by canonical name.
    :param rules: Rules of the whole model.
    :param stored: Parameters and buffers: what the tensors are, or are views of.
    :param gradients: Reduced gradients that this rank has, with their parameters.
    :param is_sharded: Whether a data-parallel rank has the reduced gradients of its shard alone.
    :param deterministic: Whether two ranks that compute the same get the same bits.
    :param every: Steps from one check to the next; 0 never checks.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        rules: Sequence[TensorRule],
        *,
        stored: Iterable[Tensor],
        gradients: Iterable[tuple[Tensor, Tensor]] = (),
        is_sharded: bool = False,
        deterministic: bool = False,
        every: int,
    ) -> None:
        self._every = every if dist.get_world_size() > 1 else 0
        self._steps: Counter[str] = Counter()
        self._turn = 0
        self._before = "at the start"
        owners = {tensor.data_ptr(): tensor for tensor in stored}
        whole = list(_whole(_replicas(tensors, rules), owners)) if self._every else []
        self._weights = [each for each in whole if deterministic or _stays_equal(each)]
        reduced = {id(parameter): gradient for parameter, gradient in gradients} if self._every else {}
        self._gradients = [
            replace(weight, tensor=reduced[id(weight.tensor)], is_gradient=True)
            for weight in self._weights
            if id(weight.tensor) in reduced and (not is_sharded or weight.kind == TENSOR)
        ]

    def is_due(self, role: str) -> bool:
        """Count a step or a pass of a role, and return whether it must be checked."""
        is_due = self.is_next(role)
        self._steps[role] += 1
        return is_due

    def is_next(self, role: str) -> bool:
        """Return whether the next step or pass of a role must be checked."""
        return self._every > 0 and self._steps[role] % self._every == 0

    def check_step(self, step: int, norm: Tensor, sums: str) -> float:
        """Compare weights, gradients and their norm before a weight update; return the norm on the host.

        :param sums: Sums of gradients before and after their reduction, from a ``ReductionCheck``.
        :raises ReplicaError: They differ; on every rank, with the same text.
        :raises CollectiveError: A reduction changed a sum; on every rank, with the same text.
        """
        checksums, number = _checksums(self._next_part([*self._weights, *self._gradients]), norm)
        different, wrong = _differences(checksums, number, sums)
        self._conclude(f"in optimizer step {step}", different)
        if wrong:
            raise CollectiveError(
                f"A reduction of gradients gives a wrong result in optimizer step {step}: {wrong}.",
                hint=_REPAIR_REDUCTION,
            )
        return number

    def check_weights(self, role: str) -> None:
        """Compare the weights of a role that is not trained.

        :raises ReplicaError: They differ; on every rank, with the same text.
        """
        checksums, _ = _checksums(self._next_part(self._weights))
        different, _ = _differences(checksums)
        self._conclude(f"in pass {self._steps[role]} of the {role}", different)

    def _next_part(self, replicas: Sequence[_Replica]) -> Sequence[_Replica]:
        self._turn += 1
        return _part(replicas, self._turn)

    def _conclude(self, when: str, different: str) -> None:
        if different:
            raise ReplicaError(
                f"Replicas differ {when}: {different}. They were equal {self._before}.",
                hint=_REPAIR,
            )
        self._before = when


# -------------------------------------------------------------------------
# Which
# -------------------------------------------------------------------------


def _part(replicas: Sequence[_Replica], turn: int) -> Sequence[_Replica]:
    """Return what a check reads: all in turn, and always what stages with other numbers of parts share."""
    parts = max(1, math.ceil(sum(each.tensor.nbytes for each in replicas) / BYTES_AT_ONCE))
    return [each for place, each in enumerate(replicas) if place % parts == turn % parts or each.kind == ENDS]


def _replicas(tensors: Mapping[str, Tensor], rules: Sequence[TensorRule]) -> Iterator[_Replica]:
    """Yield the tensors that several ranks hold alike, once for each group that does."""
    for kind, names, group in _kinds(tensors, rules):
        if is_shared(group):
            first = dist.get_process_group_ranks(group)[0]
            yield from (_Replica(kind, first, name, tensors[name]) for name in names)


def _kinds(
    tensors: Mapping[str, Tensor], rules: Sequence[TensorRule]
) -> Iterator[tuple[str, Sequence[str], Any]]:
    declared = {rule.canonical: rule.declared for rule in rules}
    experts = {name for name in tensors if name in declared and declared[name].experts}
    dense = [name for name in tensors if name not in experts]
    yield "data", dense, parallel_state.get_data_parallel_group(with_context_parallel=True)
    yield "expert data", sorted(experts), parallel_state.get_expert_data_parallel_group()
    whole = [name for name in dense if name not in declared or declared[name].split_dim is None]
    yield TENSOR, whole, parallel_state.get_tensor_model_parallel_group()
    copied = copied_embedding(rules)
    if copied is not None and copied in tensors:
        yield ENDS, [copied], parallel_state.get_embedding_group(check_initialized=False)


def _whole(replicas: Iterable[_Replica], owners: Mapping[int, Tensor]) -> Iterator[_Replica]:
    """Yield what is stored: a stack of experts once, under the name of its first one.

    A model may have thousands of experts, and each tensor takes a kernel.
    """
    for each in replicas:
        if (owner := owners.get(each.tensor.data_ptr())) is not None:
            yield replace(each, tensor=owner)


def _stays_equal(weight: _Replica) -> bool:
    """Return whether rounding cannot tell copies apart in time.

    Where each tensor-parallel rank computes the whole gradient of its copy, as in towers or without sequence
    parallelism, kernels that add up in no fixed order let the copies drift, which is no error.
    """
    if weight.kind != TENSOR or not isinstance(weight.tensor, nn.Parameter):
        return True
    is_summed = "q_layernorm" in weight.name or "k_layernorm" in weight.name
    return is_summed or bool(getattr(weight.tensor, "sequence_parallel", False))


# -------------------------------------------------------------------------
# Comparison
# -------------------------------------------------------------------------


def _checksums(
    replicas: Sequence[_Replica],
    norm: Tensor | None = None,
    summed: Callable[[Sequence[Tensor]], Tensor] = digests,
) -> tuple[Checksums, float]:
    """Return the checksums of tensors, and a norm. The host waits for the device once."""
    tensors = {id(each.tensor): each.tensor for each in replicas}
    numbers = [summed(list(tensors.values()))] if tensors else []
    if norm is not None:
        numbers.append(norm.detach().float().reshape(1).view(torch.int32).long())
    values = torch.cat(numbers).cpu() if numbers else torch.zeros(0, dtype=torch.int64)
    by_tensor = dict(zip(tensors, values.tolist(), strict=False))
    checksums: dict[str, dict[str, int]] = {}
    for each in replicas:
        checksums.setdefault(each.key, {})[each.name] = by_tensor[id(each.tensor)]
    return checksums, math.nan if norm is None else float(values[-1:].int().view(torch.float32))


def _differences(checksums: Checksums, norm: float = 0.0, sums: str = "[]") -> tuple[str, str]:
    """Return what differs between ranks, with those that are not with the most, and which sum is wrong.

    Every rank calls it.
    """
    exchange = host_exchange()
    totals = {
        key: blake2b(repr(each).encode(), digest_size=16).hexdigest() for key, each in checksums.items()
    }
    report = json.dumps([json.dumps([totals, norm]), sums])
    keys, wrong = json.loads(exchange.decide(report, _judged))
    if not keys:
        return "", wrong
    return exchange.decide(json.dumps([{key: checksums.get(key, {}) for key in keys}, norm]), _named), wrong


def _judged(reports: Sequence[str]) -> str:
    checksums, sums = zip(*map(json.loads, reports), strict=True)
    return json.dumps([json.loads(_differing_keys(checksums)), wrong_sums(sums)])


def _differing_keys(reports: Sequence[str]) -> str:
    by_key: dict[str, set[str]] = {}
    norms = []
    for totals, norm in map(json.loads, reports):
        norms.append(norm)
        for key, total in totals.items():
            by_key.setdefault(key, set()).add(total)
    keys = sorted(key for key, totals in by_key.items() if len(totals) > 1)
    return json.dumps(keys if _are_equal(norms) else [*keys, NORM])


def _are_equal(norms: Sequence[float]) -> bool:
    first = norms[0]
    return all(
        math.isclose(norm, first, rel_tol=NORM_TOLERANCE) or (math.isnan(norm) and math.isnan(first))
        for norm in norms
    )


def _named(reports: Sequence[str]) -> str:
    """Return the tensors that differ, each with its ranks."""
    ranks = [json.loads(report) for report in reports]
    different = []
    for key in ranks[0][0]:
        prefix = "the gradient of " if key.startswith("gradients") else ""
        checksums = {rank: by_key[key] for rank, (by_key, _) in enumerate(ranks) if by_key[key]}
        for name in next(iter(checksums.values()), {}):
            values = [each.get(name) for each in checksums.values()]
            if odd := [
                rank for rank, value in zip(checksums, values, strict=True) if value != majority(values)
            ]:
                different.append(f"{prefix}{name} ({named_ranks(odd)})")
    if NORM in ranks[0][0]:
        norms = (f"rank {rank}: {norm:g}" for rank, (_, norm) in enumerate(ranks))
        different.append(f"the {NORM} ({listed(list(norms))})")
    return listed(list(dict.fromkeys(different)))


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return for each tensor a number that changes with any of its bits and with their order; int64 ``[n]``.

    A sum of the elements' bits as integers, each times an odd number of its place, modulo 2 ** 64: exact, so
    that every kind of device gives the same one. A change of one element always changes it.
    """
    device = tensors[0].device
    largest = max(tensor.numel() for tensor in tensors)
    factors = _factors(min(largest, CHUNK)).to(device)
    return torch.stack([_fingerprint(tensor.detach(), factors).to(device) for tensor in tensors])


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
