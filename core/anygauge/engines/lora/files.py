"""Adapters as peft writes and reads them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from anygauge.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX
from anygauge.disk import appearing
from anygauge.engines.agreement import check_facts_agree, on_every_rank
from anygauge.engines.hf_directory import TensorReader
from anygauge.hub.weight_files import open_weight_file
from anygauge.wording import listed
from anygauge_hooks.errors import CheckpointError, WeightMappingError

__all__ = ["AdapterReader", "opened_adapter", "write_adapter"]


class AdapterReader:
    """Tensors of an adapter's file by their names in the model: ``....q_proj.lora_A.weight``."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

    def shape(self, name: str) -> Sequence[int]:
        """Return a tensor's shape without reading it."""
        return self._reader.shape(PEFT_PREFIX + name)

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        """Read a part of a tensor."""
        return self._reader.read(PEFT_PREFIX + name, index)


@contextmanager
def opened_adapter(directory: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[AdapterReader]:
    """Open an adapter that has tensors of these shapes, on all ranks. A collective.

    :param shapes: Shapes of all its tensors, by their names in the model.
    :raises WeightMappingError: Lists the tensors that are missing, unexpected or of a wrong shape.
    :raises RankMismatchError: Ranks have different files.
    """
    with on_every_rank(_open(directory), directory) as source:
        check_facts_agree(lambda: ((name, _fact(source, name)) for name in sorted(source.names)))
        if problems := list(_misfits(source, shapes)):
            raise WeightMappingError(
                f"The adapter of {directory} does not fit the model: {listed(problems)}.",
                hint="Name the model that it was trained on as model.path.",
            )
        yield AdapterReader(source)


@contextmanager
def _open(directory: Path) -> Iterator[TensorReader]:
    with open_weight_file(directory / ADAPTER_WEIGHTS) as handle:
        yield TensorReader(dict.fromkeys(handle.keys(), handle))


def _fact(source: TensorReader, name: str) -> str:
    """Return the shape and digest of a tensor, in which ranks must agree."""
    tensor = source(name).contiguous()
    digest = blake2b(tensor.view(-1).view(torch.uint8).numpy().tobytes(), digest_size=8)
    return f"{list(tensor.shape)} {digest.hexdigest()}"


def _misfits(source: TensorReader, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    by_name = {PEFT_PREFIX + name: list(shape) for name, shape in shapes.items()}
    yield from (f"{name} is missing" for name in by_name if name not in source.names)
    yield from (f"{name} is not known" for name in sorted(source.names - by_name.keys()))
    for name in by_name.keys() & source.names:
        if (there := list(source.shape(name))) != by_name[name]:
            yield f"{name} is {there} and not {by_name[name]}"


def write_adapter(target: Path, tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> None:
    """Write a peft adapter, atomically. A collective; rank 0 writes.

    :param tensors: All that is trained, whole, by the names of the tensors in the model. Every rank takes all
        of them; those of other ranks than 0 are not looked at.
    :param config: Result of :func:`anygauge.config.lora.adapter_config`.
    :raises CheckpointError: It cannot be written.
    """
    is_writer = dist.get_rank() == 0
    held = {PEFT_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors if is_writer}
    if is_writer:
        try:
            with appearing(target) as partial:
                save_file(held, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                (partial / ADAPTER_CONFIG).write_text(f"{json.dumps(config, indent=2)}\n")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{target} cannot be written: {error}.",
                hint="Free space there, or choose another directory; continue the run with --resume.",
            ) from error
    dist.barrier()
