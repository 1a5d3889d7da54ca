"""What the engine needs to go on exactly where it was: copied at once, written behind its back, read whole.

Each rank keeps the pieces of the parameters that its optimizer updates, with the optimizer's state for them,
under canonical names; any number of data-parallel ranks can read them. Megatron's own way through
``state_dict`` is not taken: without Apex it fails before the first step, and afterwards it gives all
parameters one ``step`` tensor, which Adam then advances once for each of them.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from anygauge.engines.megatron.checkpoint_files import (
    FORMAT,
    Piece,
    PieceReader,
    RankFile,
    check_dtype,
    key,
    open_pieces,
    write_rank,
)
from anygauge.engines.megatron.mapping import canonical_name
from anygauge.engines.megatron.scope import make_scope
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.types import Device

__all__ = ["Checkpointer", "Shard", "optimizer_shards"]

logger = logging.getLogger(__name__)

WEIGHT, MAIN = "weight", "main"
STUCK_S = 60.0
"""Longest wait for an earlier write, which should have ended long ago."""
CHANGING = ("lr", "weight_decay", "step")
"""Settings of a parameter group that change while it trains."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a parameter that this rank's optimizer updates."""

    name: str
    """Canonical."""
    start: int
    end: int
    parameter: Tensor
    """The model's, whole."""
    main: Tensor
    """What the optimizer updates: a view of the parameter, or a float32 copy of the part."""
    inner: torch.optim.Optimizer | None
    """``None`` for what is not trained."""

    @property
    def is_copy(self) -> bool:
        """Return whether the optimizer has a copy of its own, in another precision."""
        return self.main.dtype != self.parameter.dtype

    @property
    def weight(self) -> Tensor:
        """The model's values, flat."""
        return self.parameter.detach().view(-1)[self.start : self.end]


def optimizer_shards(optimizer: MegatronOptimizer, names: Mapping[Tensor, str]) -> Iterator[Shard]:
    """Yield what the optimizer of this rank updates.

    :param names: Canonical names of the model's parameters.
    :raises CheckpointError: The optimizer keeps its weights where they cannot be read.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        updated = {main for group in part.optimizer.param_groups for main in group["params"]}
        for parameter, start, end, main in _shards_of(part):
            if main not in updated:
                raise CheckpointError(
                    f"{type(part.optimizer).__name__} keeps its weights apart, so no checkpoint can be made.",
                    hint="Leave the offload and precision-aware options of [train.megatron] out, or set "
                    "save.every to none.",
                )
            yield Shard(names[parameter], start, end, parameter, main, part.optimizer)


def _shards_of(part: Any) -> Iterator[tuple[Tensor, int, int, Tensor]]:
    """Yield parameter, first and last element, and what the inner optimizer holds for them."""
    if hasattr(part, "shard_fp32_groups"):
        halves = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        wholes = zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)
        for parameters, mains in (*halves, *wholes):
            for parameter, main in zip(parameters, mains, strict=True):
                own = part._get_model_param_range_map(parameter)["param"]
                yield parameter, own.start, own.end, main
        return
    pairs = [(main, main) for group in part.optimizer.param_groups for main in group["params"]]
    if hasattr(part, "fp32_from_float16_groups"):
        halves = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
        pairs = [pair for models, mains in halves for pair in zip(models, mains, strict=True)]
        pairs += [(main, main) for group in part.fp32_from_fp32_groups for main in group]
    for parameter, main in pairs:
        yield parameter, 0, parameter.numel(), main


class Checkpointer:
    """Saves and restores the training state of one rank.

    Host buffers of a save are kept for the next one.

    :param model: The model whose weights are trained.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
        context: WorkerContext,
    ) -> None:
        self._parameters = _stored(model)
        self._optimizer = optimizer
        self._schedule = schedule
        self._context = context
        self._host: dict[str, Tensor] = {}
        self._write: _Write | None = None
        self._refused: str | None = None
        """Why the last save did not begin."""

    def save(self, directory: Path) -> None:
        """Copy the state to the host, and start to write it; an earlier write is waited for.

        :raises CheckpointError: The state is of a kind that no checkpoint can hold.
        """
        if self._write is not None and not self._write.join(STUCK_S):
            self._refused = f"the write before has not ended after {STUCK_S} s more"
            return
        self._refused = None
        try:
            pieces, tensors = self._copy()
        except (MemoryError, RuntimeError) as error:
            self._refused = f"there is no room on the host for a copy: {error}"
            return
        self._context.device.synchronize()
        description = RankFile(
            format=FORMAT,
            rank=self._context.rank,
            world_size=self._context.world_size,
            device=self._context.device.type,
            pieces=pieces,
            schedule=self._schedule.state_dict(),
            groups=[_settings(group) for group in self._optimizer.param_groups],
            rng=_rng_state(self._context.device),
        )
        self._write = _Write(lambda: write_rank(directory, description, tensors))

    def written(self) -> bool:
        """Return whether the last save is on disk.

        :raises CheckpointError: It could not be written.
        """
        if self._refused is not None:
            raise CheckpointError(
                f"The checkpoint cannot be written: {self._refused}.",
                hint="Give the workers more host memory, or the run a faster disk.",
            )
        return self._write is None or self._write.done()

    def _shards(self) -> Iterator[Shard]:
        yield from optimizer_shards(self._optimizer, {p: name for name, p in self._parameters.items()})

    def _copy(self) -> tuple[list[Piece], dict[str, Tensor]]:
        pieces: list[Piece] = []
        tensors: dict[str, Tensor] = {}
        for shard, state, scalars in self._kept():
            copied = {key(kind, shard.name): value for kind, value in state.items()}
            tensors |= {name: self._to_host(name, value) for name, value in copied.items()}
            pieces.append(
                Piece(
                    name=shard.name,
                    start=shard.start,
                    end=shard.end,
                    shape=list(shard.parameter.shape),
                    kinds=list(state),
                    scalars=scalars,
                )
            )
        return pieces, tensors

    def _kept(self) -> Iterator[tuple[Shard, dict[str, Tensor], dict[str, float]]]:
        """Yield what this rank has to keep: no two ranks keep the same element."""
        first = parallel_state.get_data_parallel_rank() == 0
        if first or not _is_replicated(self._optimizer):
            for shard in self._shards():
                yield shard, *_state(shard)
        for name, parameter in self._parameters.items() if first else ():
            if not parameter.requires_grad:
                shard = Shard(name, 0, parameter.numel(), parameter, parameter, None)
                yield shard, *_state(shard)

    def _to_host(self, name: str, tensor: Tensor) -> Tensor:
        check_dtype(name, tensor)
        held = self._host.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = self._context.device.type != "cpu"
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._host[name] = held
        return held.copy_(tensor, non_blocking=True)

    def load(self, directory: Path) -> None:
        """Restore what :meth:`save` of these or other data-parallel ranks wrote.

        With another number of ranks or type of device, the random generators keep the state that they have. A
        collective. Tensors are read one after another, when all that the files say of them is checked.

        :raises CheckpointError: It does not fit or cannot be read; on every rank, and nothing was changed.
        """
        with ExitStack() as stack:
            reader, problem = None, None
            try:
                reader = stack.enter_context(open_pieces(directory))
                self._check(reader)
            except CheckpointError as error:
                problem = error
            self._agree(directory, problem)
            assert reader is not None
            self._apply(reader)

    def _agree(self, directory: Path, problem: CheckpointError | None) -> None:
        ok = torch.tensor([problem is None], dtype=torch.int32, device=self._context.device.torch_device)
        found = [torch.empty_like(ok) for _ in range(self._context.world_size)]
        dist.all_gather(found, ok)
        failed = [rank for rank, each in enumerate(found) if not each.item()]
        if problem is not None:
            raise problem
        if failed:
            raise CheckpointError(
                f"Ranks {failed} cannot load {directory}; this rank could.",
                hint="Every host must see the same files. The log of such a rank says more.",
            )

    def _check(self, reader: PieceReader) -> None:
        """Raise unless the checkpoint has all that this rank needs, in the form that it needs it."""
        self._check_layout(reader)
        for name, parameter in self._parameters.items():
            _check_stored(reader, WEIGHT, name, (0, parameter.numel()), parameter.dtype)
        for shard in self._shards():
            part = (shard.start, shard.end)
            reader.scalars(shard.name, *part)
            for kind in reader.kinds(shard.name, *part) - {WEIGHT, MAIN}:
                reader.dtype(kind, shard.name, *part)
            if shard.is_copy:
                _check_stored(reader, MAIN, shard.name, part, shard.main.dtype)

    def _check_layout(self, reader: PieceReader) -> None:
        wanted = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if reader.shapes != wanted:
            names = sorted(n for n in {*wanted, *reader.shapes} if wanted.get(n) != reader.shapes.get(n))
            first = f"{names[0]} is {reader.shapes.get(names[0])}, the model's {wanted.get(names[0])}"
            raise CheckpointError(
                f"The checkpoint is of another model: {len(names)} parameters differ ({first}).",
                hint="Has the directory of model.path changed since the run began?",
            )
        found, groups = len(reader.files[0].groups), len(self._optimizer.param_groups)
        if found != groups:
            raise CheckpointError(
                f"The checkpoint has {found} groups of parameters, and the optimizer has {groups}.",
                hint="Resume with the settings of the run.",
            )

    def _apply(self, reader: PieceReader) -> None:
        """Change the engine; one parameter at a time is on the host."""
        for name, parameter in self._parameters.items():
            weight = _needed(reader.read(WEIGHT, name, 0, parameter.numel()))
            parameter.data.copy_(weight.view(parameter.shape))
        for shard in self._shards():
            part = (shard.name, shard.start, shard.end)
            if shard.is_copy:
                shard.main.data.copy_(_needed(reader.read(MAIN, *part)).view(shard.main.shape))
            kinds = sorted(reader.kinds(*part) - {WEIGHT, MAIN})
            _restore(shard, {kind: reader.read(kind, *part) for kind in kinds} | dict(reader.scalars(*part)))
        for group, settings in zip(self._optimizer.param_groups, reader.files[0].groups, strict=True):
            group.update(settings)
        self._schedule.num_steps = reader.files[0].schedule["num_steps"]
        self._restore_rng(reader)

    def _restore_rng(self, reader: PieceReader) -> None:
        rank, here = self._context.rank, self._context.device.type
        if reader.files[0].device != here:
            if rank == 0:
                made_on = reader.files[0].device
                logger.warning("the checkpoint was made on %s, this is %s: the bits differ", made_on, here)
        elif len(reader.files) == self._context.world_size:
            _restore_rng(self._context.device, reader.files[rank].rng)


class _Write:
    """A function that runs in a thread of its own."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        # No write of a run that has failed may keep its process alive.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: done() raises it
            self._error = error

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, however it came, and return whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def done(self) -> bool:
        """Return whether it has ended.

        :raises CheckpointError: It failed, for whatever reason: a run goes on without the save.
        """
        if self._thread.is_alive():
            return False
        if self._error is None:
            return True
        hint = "The log of the rank says more."
        if isinstance(self._error, OSError):
            hint = "Make room, or give the run a directory that every worker may write to."
        reason = self._error if isinstance(self._error, OSError) else repr(self._error)
        raise CheckpointError(f"The checkpoint cannot be written: {reason}.", hint=hint) from self._error


def _stored(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by canonical name, each once."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {
        canonical_name(name): each for name, each in {**dict(model.named_parameters()), **buffers}.items()
    }


def _is_replicated(optimizer: MegatronOptimizer) -> bool:
    """Return whether each rank updates every parameter, in the same way."""
    return not any(
        hasattr(part, "shard_fp32_groups") for part in getattr(optimizer, "chained_optimizers", [optimizer])
    )


def _state(shard: Shard) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors of a shard by kind, flat, and the numbers that the optimizer keeps for it."""
    tensors = {WEIGHT: shard.weight}
    if shard.is_copy:
        tensors[MAIN] = shard.main.detach().view(-1)
    scalars: dict[str, float] = {}
    kept = shard.inner.state.get(shard.main, {}) if shard.inner else {}
    for name, value in kept.items():
        if isinstance(value, Tensor) and value.dim() == 0:
            scalars[name] = value.item()
        elif isinstance(value, Tensor) and value.numel() == shard.end - shard.start:
            tensors[name] = value.view(-1)
        else:
            raise CheckpointError(
                f"{type(shard.inner).__name__} keeps {name} of {shard.name} in an unknown form.",
                hint="A state is a tensor like the weight, or one number.",
            )
    return tensors, scalars


def _check_stored(
    reader: PieceReader, kind: str, name: str, part: tuple[int, int], dtype: torch.dtype
) -> None:
    found = reader.dtype(kind, name, *part)
    if found != dtype:
        raise CheckpointError(
            f"The checkpoint has {found or 'none'} for the {kind} of {name}, the engine needs {dtype}.",
            hint="Resume with the train.dtype and [train.megatron] of the run.",
        )


def _needed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "it was checked"
    return tensor


def _restore(shard: Shard, state: Mapping[str, Any]) -> None:
    """Give the optimizer its state for a shard; every number becomes a tensor of its own."""
    assert shard.inner is not None
    shard.inner.state.pop(shard.main, None)
    if not state:
        return
    # torch keeps the numbers on the host, unless its kernel reads them itself.
    on_device = shard.inner.defaults.get("fused") or shard.inner.defaults.get("capturable")
    device = shard.main.device if on_device else torch.device("cpu")
    shard.inner.state[shard.main] = {
        name: value.view(shard.main.shape).to(shard.main.device, copy=True)
        if isinstance(value, Tensor)
        else torch.tensor(value, dtype=torch.float32, device=device)
        for name, value in state.items()
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in CHANGING if name in group}


def _rng_state(device: Device) -> dict[str, Any]:
    """Return the state of every random generator, as JSON can write it."""
    version, internal, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    words = legacy["state"]
    with make_scope(device):
        tracked = get_cuda_rng_tracker().get_states()
    return {
        "python": [version, list(internal), gauss],
        "numpy": {**legacy, "state": {**words, "key": words["key"].tolist()}},
        "torch": _hex(torch.get_rng_state()),
        "device": _hex(device.get_rng_state()),
        "tracker": {name: _hex(state) for name, state in tracked.items()},
    }


def _restore_rng(device: Device, state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    words = state["numpy"]["state"]
    key_words = np.array(words["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**words, "key": key_words}})
    torch.set_rng_state(_unhex(state["torch"]))
    device.set_rng_state(_unhex(state["device"]))
    with make_scope(device):
        get_cuda_rng_tracker().set_states({name: _unhex(each) for name, each in state["tracker"].items()})


def _hex(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _unhex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
