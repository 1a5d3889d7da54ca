"""Training checkpoints: state is copied at once, written in the background and restored exactly.

Each rank keeps the pieces of the parameters that its optimizer updates, with the optimizer's state for them,
under canonical names and with the part of the whole parameter that they are; ranks that divide the model in
another way can read them. Megatron's own way through ``state_dict`` is not taken: without Apex it fails
before the first step, and afterwards it gives all parameters one ``step`` tensor, which Adam then advances
once for each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from anygauge.engines.agreement import on_every_rank
from anygauge.engines.background_save import (
    BackgroundSave,
    ToHost,
    group_settings,
    hex_state,
    restore_rng,
    rng_state,
    unhex_state,
)
from anygauge.engines.checkpoint_files import (
    FORMAT,
    WEIGHT,
    Piece,
    PieceReader,
    RankFile,
    check_dtype,
    key,
    open_pieces,
)
from anygauge.engines.lora.base import check_base
from anygauge.engines.megatron.checkpoints.shards import (
    MAIN,
    LocalTensor,
    Shard,
    TensorSlice,
    kept_parts,
    optimizer_shards,
    part_state,
)
from anygauge.engines.megatron.model import Policy
from anygauge.engines.megatron.process_groups import parallel_sizes
from anygauge.engines.megatron.replica_check import check_ranks_agree
from anygauge.engines.megatron.scope import make_scope
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.types import Device

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)


class Checkpointer(BackgroundSave):
    """Saves and restores the training state of one rank.

    :param policy: The model whose weights are trained.
    :param base: Facts of the frozen base of its adapters; empty without adapters.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
        context: WorkerContext,
        base: Mapping[str, Any],
    ) -> None:
        super().__init__(context.device)
        self._base = base
        self._policy = policy
        self._optimizer = optimizer
        self._schedule = schedule
        self._context = context

    def check(self) -> None:
        """Check that the engine's state can be saved.

        :raises CheckpointError: A tensor, or what the optimizer keeps, has a form that no file has.
        """
        for part, shard in kept_parts(self._policy.kept(), self._optimizer):
            for kind, value in part_state(part, shard, joined=False)[0].items():
                check_dtype(key(kind, part.held.name), value)

    def _copy(self, to_host: ToHost) -> tuple[RankFile, dict[str, Tensor]]:
        pieces: list[Piece] = []
        tensors: dict[str, Tensor] = {}
        for part, shard in kept_parts(self._policy.kept(), self._optimizer):
            state, scalars = part_state(part, shard)
            copied = {key(kind, part.held.name): value for kind, value in state.items()}
            tensors |= {name: to_host(name, value) for name, value in copied.items()}
            pieces.append(
                Piece(
                    name=part.held.name,
                    region=part.held.region,
                    start=part.start,
                    end=part.end,
                    kinds=list(state),
                    scalars=scalars,
                )
            )
        description = RankFile(
            format=FORMAT,
            rank=self._context.rank,
            world_size=self._context.world_size,
            layout=parallel_sizes(),
            device=self._context.device.type,
            pieces=pieces,
            schedule=self._schedule.state_dict(),
            groups=[group_settings(group) for group in self._optimizer.param_groups],
            rng=_rng_state(self._context.device),
            base=self._base,
        )
        return description, tensors

    def load(self, directory: Path) -> None:
        """Restore a checkpoint, also one of another parallel layout.

        With another layout or type of device, the random generators keep the state that they have. A
        collective. Tensors are read one after another, when all that the files say of them is checked.

        :raises CheckpointError: It does not fit or cannot be read; on every rank, and nothing was changed.
        :raises RankMismatchError: Ranks have read different weights; on every rank.
        """
        with on_every_rank(self._checked(directory), directory) as reader:
            self._apply(reader)

    @contextmanager
    def _checked(self, directory: Path) -> Iterator[PieceReader]:
        with open_pieces(directory) as reader:
            self._check(reader)
            yield reader

    def _check(self, reader: PieceReader) -> None:
        """Raise unless the checkpoint has all that this rank needs, in the form that it needs it."""
        check_base(self._base, reader.files[0].base)
        held = self._policy.kept()
        self._check_model(reader, held)
        self._check_groups(reader)
        for each in held:
            _check_stored(reader, WEIGHT, each.whole, each.tensor.dtype)
        for shard in optimizer_shards(held, self._optimizer):
            kept = [(_kinds(reader, part), reader.scalars(*part.key)) for part in shard.parts]
            if any(each != kept[0] for each in kept):
                names = " and ".join(part.held.name for part in shard.parts)
                raise CheckpointError(
                    f"The optimizer took different steps on {names}.",
                    hint="Resume from an earlier checkpoint.",
                )
            for part in shard.parts:
                for kind in _kinds(reader, part):
                    reader.dtype(kind, *part.key)
                if shard.is_copy:
                    _check_stored(reader, MAIN, part, torch.float32)

    def _check_model(self, reader: PieceReader, held: Sequence[LocalTensor]) -> None:
        wanted = {each.name: each.region.shape for each in held}
        stored = reader.shapes
        everywhere = {rule.canonical for rule in self._policy.kept_rules} | wanted.keys()
        odd = everywhere ^ stored.keys() | {n for n in wanted if stored.get(n) != wanted[n]}
        if odd:
            first = min(odd)
            shape = wanted.get(first, "elsewhere" if first in everywhere else None)
            raise CheckpointError(
                f"The checkpoint is of another model: {len(odd)} parameters differ "
                f"({first} is {stored.get(first)}, the model's {shape}).",
                hint="Has the directory of model.path changed since the run began?",
            )

    def _check_groups(self, reader: PieceReader) -> None:
        if not self._is_same_layout(reader):
            if len(_steps(reader)) > 1:
                raise CheckpointError(
                    f"The optimizer's groups of parameters took different steps: {sorted(_steps(reader))}.",
                    hint="Load it with the layout that wrote it.",
                )
            return
        stored, groups = len(reader.files[self._context.rank].groups), len(self._optimizer.param_groups)
        if stored != groups:
            raise CheckpointError(
                f"The checkpoint has {stored} groups of parameters, and the optimizer has {groups}.",
                hint="Load it with the settings of the run.",
            )

    def _is_same_layout(self, reader: PieceReader) -> bool:
        """Return whether each rank has what the rank of its number had."""
        return len(reader.files) == self._context.world_size and reader.files[0].layout == parallel_sizes()

    def _apply(self, reader: PieceReader) -> None:
        """Change the engine; one parameter at a time is on the host."""
        held = self._policy.kept()
        for each in held:
            weight = _needed(reader.read(WEIGHT, *each.whole.key))
            each.tensor.detach().copy_(weight.view(each.tensor.shape))
        # Now, since gathering the weights afterwards would make them equal.
        check_ranks_agree(self._policy.tensors, self._policy.all_rules, directory="the checkpoint")
        for shard in optimizer_shards(held, self._optimizer):
            if shard.is_copy:
                for part in shard.parts:
                    shard.restore(part, _needed(reader.read(MAIN, *part.key)))
            _restore(shard, reader)
        self._restore_settings(reader)
        self._restore_rng(reader)

    def _restore_settings(self, reader: PieceReader) -> None:
        """Restore the schedule and what changes of the groups, which are not the same in all layouts."""
        self._schedule.num_steps = reader.files[0].schedule["num_steps"]
        groups = self._optimizer.param_groups
        if self._is_same_layout(reader):
            for group, settings in zip(groups, reader.files[self._context.rank].groups, strict=True):
                group.update(settings)
            return
        self._schedule.step(0)
        for step in _steps(reader):
            for group in groups:
                group["step"] = step

    def _restore_rng(self, reader: PieceReader) -> None:
        rank, here = self._context.rank, self._context.device.type
        if reader.files[0].device != here:
            if rank == 0:
                made_on = reader.files[0].device
                logger.warning("the checkpoint was made on %s, this is %s: the bits differ", made_on, here)
        elif self._is_same_layout(reader):
            _restore_rng(self._context.device, reader.files[rank].rng)


def _check_stored(reader: PieceReader, kind: str, part: TensorSlice, dtype: torch.dtype) -> None:
    stored = reader.dtype(kind, *part.key)
    if stored != dtype:
        name = part.held.name
        raise CheckpointError(
            f"The checkpoint has {stored or 'none'} for the {kind} of {name}, the engine needs {dtype}.",
            hint="Load it with the train.dtype and [train.megatron] of the run.",
        )


def _kinds(reader: PieceReader, part: TensorSlice) -> list[str]:
    """Return the names of the optimizer's state for a part."""
    return sorted(reader.kinds(*part.key) - {WEIGHT, MAIN})


def _steps(reader: PieceReader) -> set[int]:
    return {group["step"] for file in reader.files for group in file.groups if "step" in group}


def _needed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "it was checked"
    return tensor


def _restore(shard: Shard, reader: PieceReader) -> None:
    """Give the optimizer its state for a shard; every number becomes a tensor of its own."""
    shard.inner.state.pop(shard.main, None)
    first = shard.parts[0]
    kinds, scalars = _kinds(reader, first), reader.scalars(*first.key)
    if not kinds and not scalars:
        return
    # torch keeps the numbers on the host, unless its kernel reads them itself.
    on_device = shard.inner.defaults.get("fused") or shard.inner.defaults.get("capturable")
    device = shard.main.device if on_device else torch.device("cpu")
    state = {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in scalars.items()}
    for kind in kinds:
        dtype = reader.dtype(kind, *first.key)
        state[kind] = torch.empty(shard.main.shape, dtype=dtype, device=shard.main.device)
        for part in shard.parts:
            state[kind].view(-1)[part.inside].copy_(_needed(reader.read(kind, *part.key)))
    shard.inner.state[shard.main] = state


def _rng_state(device: Device) -> dict[str, Any]:
    """Return the state of every random generator, Megatron's among them."""
    with make_scope(device):
        tracked = get_cuda_rng_tracker().get_states()
    return {**rng_state(device), "tracker": {name: hex_state(state) for name, state in tracked.items()}}


def _restore_rng(device: Device, state: Mapping[str, Any]) -> None:
    restore_rng(device, state)
    with make_scope(device):
        get_cuda_rng_tracker().set_states({n: unhex_state(each) for n, each in state["tracker"].items()})
