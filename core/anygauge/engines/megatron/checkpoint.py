"""What the engine needs to go on exactly where it was: copied at once, written behind its back, read whole.

Each rank keeps the pieces of the parameters that its optimizer updates, with the optimizer's state for them,
under canonical names; any number of data-parallel ranks can read them. Megatron's own way through
``state_dict`` is not taken: without Apex it fails before the first step, and afterwards it gives all
parameters one ``step`` tensor, which Adam then advances once for each of them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
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

WEIGHT, MAIN = "weight", "main"
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

    def save(self, directory: Path) -> None:
        """Copy the state to the host, and start to write it; an earlier write is waited for."""
        if self._write is not None:
            self._write.join()
        pieces, tensors = self._copy()
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
        held = self._host.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = self._context.device.type != "cpu"
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._host[name] = held
        return held.copy_(tensor, non_blocking=True)

    def load(self, directory: Path) -> None:
        """Restore what :meth:`save` of these or other data-parallel ranks wrote.

        With another number of ranks, the random generators keep the state that they have. A collective.

        :raises CheckpointError: It does not fit or cannot be read; on every rank, and nothing was changed.
        """
        apply, problem = None, None
        try:
            with open_pieces(directory) as reader:
                apply = self._read(reader)
        except CheckpointError as error:
            problem = error
        self._agree(directory, problem)
        assert apply is not None
        apply()

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

    def _read(self, reader: PieceReader) -> Callable[[], None]:
        """Return what changes the engine, with all that it needs read and checked."""
        self._check(reader)
        weights = [
            (parameter, self._weight(reader, name, parameter)) for name, parameter in self._parameters.items()
        ]
        states = [(shard, *self._read_state(reader, shard)) for shard in self._shards()]

        def apply() -> None:
            for parameter, weight in weights:
                parameter.data.copy_(weight.view(parameter.shape))
            for shard, main, state in states:
                _restore(shard, main, state)
            for group, settings in zip(self._optimizer.param_groups, reader.files[0].groups, strict=True):
                group.update(settings)
            self._schedule.num_steps = reader.files[0].schedule["num_steps"]
            if len(reader.files) == self._context.world_size:
                _restore_rng(self._context.device, reader.files[self._context.rank].rng)

        return apply

    def _check(self, reader: PieceReader) -> None:
        wanted = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if reader.shapes != wanted:
            names = sorted(n for n in {*wanted, *reader.shapes} if wanted.get(n) != reader.shapes.get(n))
            first = f"{names[0]} is {reader.shapes.get(names[0])}, the model's {wanted.get(names[0])}"
            raise CheckpointError(
                f"The checkpoint is of another model: {len(names)} parameters differ ({first}).",
                hint="Has the directory of model.path changed since the run began?",
            )
        file, groups = reader.files[0], len(self._optimizer.param_groups)
        here = self._context.device.type
        if file.device != here or len(file.groups) != groups:
            raise CheckpointError(
                f"The checkpoint was made on {file.device} with {len(file.groups)} parameter groups; this is "
                f"{here} with {groups}.",
                hint="Resume with the backend and the settings of the run.",
            )

    def _weight(self, reader: PieceReader, name: str, parameter: Tensor) -> Tensor:
        return _needed(reader.read(WEIGHT, name, 0, parameter.numel()), WEIGHT, name, parameter.dtype)

    def _read_state(self, reader: PieceReader, shard: Shard) -> tuple[Tensor | None, dict[str, Any]]:
        part = (shard.name, shard.start, shard.end)
        main = (
            _needed(reader.read(MAIN, *part), MAIN, shard.name, shard.main.dtype) if shard.is_copy else None
        )
        state: dict[str, Any] = {}
        for kind in sorted(reader.kinds(*part) - {WEIGHT, MAIN}):
            state[kind] = reader.read(kind, *part)
        return main, state | dict(reader.scalars(*part))


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

    def join(self) -> None:
        """Wait for the end, however it came."""
        self._thread.join()

    def done(self) -> bool:
        """Return whether it has ended.

        :raises CheckpointError: The disk refused.
        """
        if self._thread.is_alive():
            return False
        if isinstance(self._error, OSError):
            raise CheckpointError(
                f"The checkpoint cannot be written: {self._error}.",
                hint="Make room, or give the run a directory that every worker may write to.",
            ) from self._error
        if self._error is not None:
            raise self._error
        return True


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


def _needed(tensor: Tensor | None, kind: str, name: str, dtype: torch.dtype) -> Tensor:
    if tensor is None or tensor.dtype != dtype:
        found = "none" if tensor is None else str(tensor.dtype)
        raise CheckpointError(
            f"The checkpoint has {found} for the {kind} of {name}, the engine needs {dtype}.",
            hint="Resume with the train.dtype and [train.megatron] of the run.",
        )
    return tensor


def _restore(shard: Shard, main: Tensor | None, state: Mapping[str, Any]) -> None:
    """Give the optimizer its state for a shard; every number becomes a tensor of its own."""
    assert shard.inner is not None
    if main is not None:
        shard.main.data.copy_(main.view(shard.main.shape))
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
