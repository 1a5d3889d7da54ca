"""Weight update: norm of all gradients, clipping, AdamW, and the model's copies of the weights.

Megatron does each of these over one tensor after another, and reads every norm back to the host. Here the
norms are taken together and read once. A :class:`FusedOptimizer` does all the rest in its step, and then no
gradient is written. One that takes remainders too has float32 weights without their upper halves, which the
model has: 2 bytes for each, not 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from anygauge.kernels.remainders import split
from anygauge_hooks.optimizers import FusedOptimizer

__all__ = ["Update"]

_TINY = 1e-6
"""Added to the norm that a limit is divided by, as Megatron does."""


@dataclass(frozen=True, slots=True)
class _Shards:
    """Parameters that one of Megatron's optimizers updates, by parameter group."""

    gradients: Sequence[Sequence[Tensor]]
    copies: Sequence[Sequence[Tensor | None]]
    """Model copies of the weights, where the main weights are no view of them."""
    counted: Sequence[Tensor]
    """The gradients of which the norm is."""


class Update:
    """Updates the weights of a rank from its main gradients.

    :param limit: Limit of the norm of all gradients; 0 clips nothing.
    """

    def __init__(self, optimizer: MegatronOptimizer, limit: float, device: torch.device) -> None:
        self._optimizer = optimizer
        self._limit = limit
        self._device = device
        self._parts: list[Any] = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        shards_of_parts = [_shards(part) for part in self._parts]
        self._shards = [each for each in shards_of_parts if each is not None]
        self._takes_all = bool(shards_of_parts) and len(self._shards) == len(shards_of_parts)
        if self._takes_all:
            for part, shards in zip(self._parts, self._shards, strict=True):
                if part.optimizer.takes_remainders:
                    _keep_remainders(part, shards.copies)

    def begin(self) -> None:
        """Clear the gradients of the previous step in Megatron's buffers."""
        if not self._takes_all:
            self._optimizer.zero_grad()

    def norm(self) -> Tensor:
        """Return the norm of all gradients, on the device. A collective; the gradients are all there."""
        if not self._takes_all:
            self._optimizer.prepare_grads()
        total = torch.zeros((), device=self._device)
        for part, counted in zip(self._parts, self._counted(), strict=True):
            squares = torch.zeros((), device=self._device)
            if counted:
                squares += torch.stack(torch._foreach_norm(list(counted), 2, torch.float32)).square().sum()
            dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
            total += squares
        self._prepare()
        return total.sqrt()

    def _prepare(self) -> None:
        """Have the optimizers find what the step will read: the device is still at the gradients."""
        for part, shards in zip(self._parts, self._shards, strict=True) if self._takes_all else ():
            part.optimizer.prepare(shards.gradients, shards.copies)

    def _counted(self) -> Iterator[Sequence[Tensor]]:
        if self._takes_all:
            yield from (shards.counted for shards in self._shards)
        else:
            yield from (part.get_main_grads_for_grad_norm() for part in self._parts)

    def reduced_gradients(self, chunks: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameters with the part of their gradients that this rank has reduced."""
        if hasattr(self._parts[0], "model_param_gbuf_map"):
            for part in self._parts:
                groups = (*part.model_fp32_groups, *part.model_float16_groups)
                yield from ((weight, _gradient(part, weight)) for group in groups for weight in group)
        else:
            yield from ((weight, weight.main_grad) for chunk in chunks for weight in chunk.params_with_grad)

    def step(self, norm: float) -> None:
        """Update the weights.

        :param norm: Result of :meth:`norm`, on the host.
        """
        scale = min(1.0, self._limit / (norm + _TINY)) if self._limit > 0 else 1.0
        if not self._takes_all:
            self._scale(scale)
            self._optimizer.step_with_ready_grads()
            return
        for part, shards in zip(self._parts, self._shards, strict=True):
            part.optimizer.step_from(shards.gradients, scale, shards.copies)
        self._gather()

    def _gather(self) -> None:
        """Give every rank the new weights, once: parts share chunks, which have the weights of all."""
        apart = [part for part in self._parts if not part.ddp_config.overlap_param_gather]
        for chunk in {id(chunk): chunk for part in apart for chunk in part.model_chunks}.values():
            chunk.start_param_sync()

    def _scale(self, scale: float) -> None:
        for part in self._parts if scale < 1 else ():
            grads = [weight.grad for weight in part.get_parameters()]
            if gradients := [each.detach() for each in grads if each is not None]:
                torch._foreach_mul_(gradients, scale)


def _shards(part: Any) -> _Shards | None:
    """Return what the inner optimizer of a part takes with its step; ``None`` if it does not."""
    is_fused = isinstance(getattr(part, "optimizer", None), FusedOptimizer)
    if not is_fused or not hasattr(part, "shard_fp32_groups"):
        return None
    gradients: list[list[Tensor]] = []
    copies: list[list[Tensor | None]] = []
    counted: list[Tensor] = []
    kinds = zip(part.model_fp32_groups, part.model_float16_groups, part.optimizer.param_groups, strict=True)
    for wide, narrow, group in kinds:
        mine = [_gradient(part, parameter) for parameter in (*wide, *narrow)]
        gradients.append(mine)
        copies.append([*[None] * len(wide), *(_copy(part, parameter) for parameter in narrow)])
        counted += [each for main, each in zip(group["params"], mine, strict=True) if _is_counted(part, main)]
    if any(each.dtype != torch.float32 for group in gradients for each in group):
        return None
    return _Shards(gradients, copies, counted)


def _keep_remainders(part: Any, copies: Sequence[Sequence[Tensor | None]]) -> None:
    """Turn what a part updates into what its copies lack.

    A tensor stays the same object, by which the optimizer and Megatron know it. Megatron would take its
    numbers for weights: without the list of them, each of its methods that copies weights or gradients fails.
    """
    groups = zip(part.optimizer.param_groups, copies, strict=True)
    pairs = [pair for group, theirs in groups for pair in zip(group["params"], theirs, strict=True)]
    narrow = [(main, copy) for main, copy in pairs if copy is not None]
    for main, copy in narrow:
        weights, main.data = split(main.data)
        copy.copy_(weights)
    if narrow:
        del part.shard_fp32_from_float16_groups


def _gradient(part: Any, parameter: Any) -> Tensor:
    own = part._get_model_param_range_map(parameter)["param"]
    gradient: Tensor = parameter.main_grad.view(-1)[own.start : own.end]
    return gradient


def _copy(part: Any, parameter: Any) -> Tensor:
    """Return this rank's part of what the ranks gather after a step."""
    own = part._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
    buffer, _, bucket = part.model_param_gbuf_map[parameter]
    copy: Tensor = part.buffers[buffer].buckets[bucket].param_data.view(-1)[own.start : own.end]
    return copy


def _is_counted(part: Any, main: Tensor) -> bool:
    """Return whether no other rank or tensor has the same gradient."""
    return bool(param_is_not_shared(main)) and bool(
        param_is_not_tensor_parallel_duplicate(main, part.tp_group)
    )
