"""Training checkpoints: this rank's shards with the optimizer's state for them, restored exactly.

The files are those of the Megatron engine, under Hugging Face names: ranks that shard the model in another
way can read them, and nothing is unpickled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.engines.agreement import on_every_rank
from anygauge.engines.background_save import BackgroundSave, ToHost, group_settings, restore_rng, rng_state
from anygauge.engines.checkpoint_files import (
    FORMAT,
    WEIGHT,
    Piece,
    PieceReader,
    RankFile,
    Region,
    key,
    open_pieces,
)
from anygauge.engines.fsdp.optimizer import ShardedOptimizer
from anygauge.engines.fsdp.weights import LocalShard
from anygauge.engines.lora.base import check_base
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import CheckpointError

__all__ = ["Checkpointer"]

LAYOUT: Mapping[str, int] = {"fsdp": 1}
"""How each rank's file says that it has rows of every parameter."""

_log = logging.getLogger(__name__)


class Checkpointer(BackgroundSave):
    """Saves and restores the training state of one rank.

    :param shards: All of the model, or those that are trained beside a frozen base.
    :param base: Facts of that base; empty without one.
    """

    def __init__(
        self,
        shards: Sequence[LocalShard],
        optimizer: ShardedOptimizer,
        context: WorkerContext,
        base: Mapping[str, Any],
    ) -> None:
        super().__init__(context.device)
        self._base = base
        self._shards = shards
        self._optimizer = optimizer
        self._context = context
        self.step = 0
        """Optimizer steps that were taken."""

    def _copy(self, to_host: ToHost) -> tuple[RankFile, dict[str, Tensor]]:
        pieces: list[Piece] = []
        tensors: dict[str, Tensor] = {}
        for shard in self._kept():
            kinds, scalars = self._state(shard)
            tensors |= {key(kind, shard.name): to_host(key(kind, shard.name), kinds[kind]) for kind in kinds}
            region = _region(shard)
            pieces.append(
                Piece(
                    name=shard.name,
                    region=region,
                    start=0,
                    end=region.elements,
                    kinds=list(kinds),
                    scalars=scalars,
                )
            )
        description = RankFile(
            format=FORMAT,
            rank=self._context.rank,
            world_size=self._context.world_size,
            layout=LAYOUT,
            device=self._context.device.type,
            pieces=pieces,
            schedule={"num_steps": self.step},
            groups=[group_settings(group) for group in self._optimizer.inner.param_groups],
            rng=rng_state(self._context.device),
            base=self._base,
        )
        return description, tensors

    def _kept(self) -> Iterator[LocalShard]:
        """Yield what this rank writes: rows that no rank before it has."""
        for shard in self._shards:
            if shard.local.numel() and shard.is_first_copy:
                yield shard

    def _state(self, shard: LocalShard) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the tensors of a piece by kind, flat, and its numbers."""
        main = self._optimizer.mains.get(shard.name)
        kinds, scalars = {WEIGHT: shard.local.reshape(-1)}, {}
        state = {} if main is None else self._optimizer.inner.state.get(main, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                kinds[name] = value.view(-1)
            else:
                scalars[name] = float(value)
        return kinds, scalars

    def load(self, directory: Path) -> None:
        """Restore a checkpoint, also one of another number of ranks. A collective.

        With another number of ranks or type of device, the random generators keep the state that they have.

        :raises CheckpointError: It does not fit or cannot be read; on every rank, and nothing was changed.
        """
        with on_every_rank(self._checked(directory), directory) as reader:
            for shard in self._shards:
                self._restore(shard, reader)
            self._restore_settings(reader)

    @contextmanager
    def _checked(self, directory: Path) -> Iterator[PieceReader]:
        with open_pieces(directory) as reader:
            check_base(self._base, reader.files[0].base)
            wanted = {shard.name: tuple(shard.tensor.shape) for shard in self._shards}
            stored = {name: tuple(shape) for name, shape in reader.shapes.items()}
            if odd := {n for n in wanted.keys() | stored.keys() if wanted.get(n) != stored.get(n)}:
                first = min(odd)
                raise CheckpointError(
                    f"The checkpoint is of another model: {len(odd)} parameters differ "
                    f"({first} is {stored.get(first)}, the model's {wanted.get(first)}).",
                    hint="Has the directory of model.path changed since the run began?",
                )
            for shard in self._shards:
                self._check_shard(reader, shard)
            yield reader

    def _check_shard(self, reader: PieceReader, shard: LocalShard) -> None:
        if not shard.local.numel():
            return
        dtype = reader.dtype(WEIGHT, *_part(shard))
        if dtype != shard.tensor.dtype:
            raise CheckpointError(
                f"The checkpoint has {dtype or 'none'} for {shard.name}, the engine needs "
                f"{shard.tensor.dtype}.",
                hint="Load it with the settings of the run.",
            )
        for kind in _kinds(reader, shard):
            reader.dtype(kind, *_part(shard))  # raises if some of it is in no file

    def _restore(self, shard: LocalShard, reader: PieceReader) -> None:
        if not shard.local.numel():
            return
        part = _part(shard)
        shard.local.view(-1).copy_(_needed(reader.read(WEIGHT, *part)))
        main, inner = self._optimizer.mains.get(shard.name), self._optimizer.inner
        if main is None:
            return
        inner.state.pop(main, None)
        kinds, scalars = _kinds(reader, shard), reader.scalars(*part)
        if not kinds and not scalars:
            return
        # torch keeps the numbers on the host, unless its kernel reads them itself.
        on_device = inner.defaults.get("fused") or inner.defaults.get("capturable")
        device = main.device if on_device else torch.device("cpu")
        state = {n: torch.tensor(v, dtype=torch.float32, device=device) for n, v in scalars.items()}
        for kind in kinds:
            state[kind] = _needed(reader.read(kind, *part)).to(main.device)
        inner.state[main] = state

    def _restore_settings(self, reader: PieceReader) -> None:
        context = self._context
        own = reader.files[context.rank if len(reader.files) == context.world_size else 0]
        self.step = int(own.schedule["num_steps"])
        for group, settings in zip(self._optimizer.inner.param_groups, own.groups, strict=True):
            group.update(settings)
        if own.device != context.device.type:
            if context.rank == 0:
                here = context.device.type
                _log.warning("the checkpoint was made on %s, this is %s: the bits differ", own.device, here)
        elif own.rank == context.rank:
            restore_rng(context.device, own.rng)


def _region(shard: LocalShard) -> Region:
    """Return the rows that this rank has."""
    if not shard.tensor.dim():
        return Region.whole(())
    first, last = shard.rows
    return Region(shape=tuple(shard.tensor.shape), dim=0, stretches=((first, last),), size=last - first)


def _part(shard: LocalShard) -> tuple[str, Region, int, int]:
    """Return the key of a shard for a reader of pieces."""
    region = _region(shard)
    return shard.name, region, 0, region.elements


def _kinds(reader: PieceReader, shard: LocalShard) -> list[str]:
    """Return the names of the optimizer's state for a shard."""
    return sorted(reader.kinds(*_part(shard)) - {WEIGHT}) if shard.local.numel() else []


def _needed(tensor: Any) -> Tensor:
    assert isinstance(tensor, Tensor), "it was checked"
    return tensor
