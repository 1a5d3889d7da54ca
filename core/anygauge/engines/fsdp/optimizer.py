"""Optimizer over this rank's shards: the backend's AdamW, the norm of all gradients, clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.config.schema import Train
from anygauge.engines.fsdp.master_weights import MasterWeights
from anygauge.engines.fsdp.weights import LocalShard, local
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.optimizers import FusedOptimizer

__all__ = ["ShardedOptimizer"]

_TINY = 1e-6
"""Added to the norm that a limit is divided by, as Megatron does."""


class ShardedOptimizer:
    """AdamW over flat views of this rank's float32 weights, whose gradients FSDP has summed over ranks.

    :param shards: Those that learn. Matrices and embeddings decay; norms and biases do not.
    """

    def __init__(
        self,
        shards: Sequence[LocalShard],
        train: Train,
        context: WorkerContext,
        masters: MasterWeights | None = None,
    ) -> None:
        """Make the optimizer of the config.

        :param masters: Where one rank holds the model.
        """
        self._masters = masters
        self._gradients: list[list[Tensor]] = []
        """Flat gradients by group, from :meth:`norm` to :meth:`step`."""
        self._copies: list[list[Tensor | None]] = []
        self._limit = train.clip_grad
        by_decay = {decays: [s for s in shards if (s.tensor.dim() > 1) == decays] for decays in (True, False)}
        self._groups = [group for group in by_decay.values() if group]
        self._is_first_copy = all(shard.is_first_copy for shard in shards)
        self.mains = {shard.name: shard.local.view(-1) for shard in shards}
        groups = [
            {
                "params": [self.mains[shard.name] for shard in group],
                "weight_decay": train.weight_decay if group is by_decay[True] else 0.0,
            }
            for group in self._groups
        ]
        options: dict[str, Any] = {
            "lr": train.lr,
            "betas": train.adam_betas,
            "eps": train.adam_eps,
            "weight_decay": train.weight_decay,
        }
        given = context.plugins.first(
            "make_optimizer", backend=context.backend, param_groups=groups, **options
        )
        self.inner: Any = torch.optim.AdamW(groups, **options) if given is None else given

    def begin(self) -> None:
        """Drop the gradients of the step before."""
        self._gradients = []
        for shard in self._shards():
            shard.tensor.grad = None

    def norm(self) -> Tensor:
        """Return the norm of all gradients, on the device. A collective; the gradients are all there."""
        self._gradients = [[self._gradient(shard) for shard in group] for group in self._groups]
        flat = [each for group in self._gradients for each in group]
        squares = torch.stack(torch._foreach_norm(flat, 2, torch.float32)).square().sum()
        if not self._is_first_copy:
            squares.zero_()
        dist.all_reduce(squares)
        if isinstance(self.inner, FusedOptimizer):  # while the device computes
            self._copies = [[self._copy(shard) for shard in group] for group in self._groups]
            self.inner.prepare(self._gradients, self._copies)
        return squares.sqrt()

    def step(self, norm: float, lr: float) -> None:
        """Update the weights, after :meth:`norm`.

        :param norm: Result of :meth:`norm`, on the host.
        """
        for group in self.inner.param_groups:
            group["lr"] = lr
        scale = min(1.0, self._limit / (norm + _TINY)) if self._limit > 0 else 1.0
        gradients, self._gradients = self._gradients, []
        if isinstance(self.inner, FusedOptimizer):
            self.inner.step_from(gradients, scale, self._copies)
            return
        for group, own in zip(self._groups, gradients, strict=True):
            for shard, gradient in zip(group, own, strict=True):
                self.mains[shard.name].grad = gradient
        if scale < 1:
            torch._foreach_mul_([each for group in gradients for each in group], scale)
        self.inner.step()
        self.inner.zero_grad()
        if self._masters is not None:
            self._masters.write_copies()

    def state(self) -> Iterator[Tensor]:
        """Yield what the optimizer keeps beside the weights."""
        for state in self.inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _gradient(self, shard: LocalShard) -> Tensor:
        """Return a gradient, flat; zeros for a weight that had no part in the step."""
        gradient: Any = shard.tensor.grad
        if gradient is None:
            return torch.zeros_like(self.mains[shard.name])
        flat: Tensor = local(gradient).view(-1)
        return flat

    def _copy(self, shard: LocalShard) -> Tensor | None:
        """Return what the model computes with, flat, where the optimizer writes it."""
        copy = None if self._masters is None else self._masters.copy_of(shard.tensor)
        return None if copy is None else copy.detach().view(-1)

    def _shards(self) -> Iterator[LocalShard]:
        for group in self._groups:
            yield from group
