"""Weight sources of a conversion: a Hugging Face directory, a dist-checkpoint or a run's checkpoint.

All give tensors by the rules of the model's family, whole, under canonical names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from anygauge.engines.checkpoint_files import WEIGHT, PieceReader, Region, open_pieces
from anygauge.engines.dequantize import open_unquantized
from anygauge.engines.hf_directory import TensorReader
from anygauge.engines.megatron.conversion.dist_checkpoint import DistReader
from anygauge.engines.megatron.conversion.paths import is_of_run
from anygauge.engines.megatron.weights.mapping import TensorRule, set_problems, to_canonical
from anygauge.engines.megatron.weights.stacks import straight
from anygauge_hooks.errors import CheckpointError

__all__ = [
    "CanonicalSource",
    "RunReader",
    "WeightSource",
    "open_canonical",
    "open_weights",
    "tensor_names",
]


class RunReader:
    """Reads the weights of a run's own checkpoint, which has no padding."""

    def __init__(self, pieces: PieceReader) -> None:
        self._pieces = pieces
        self._shapes = pieces.shapes
        self._regions = {
            piece.name: _undivided(piece.region) for file in pieces.files for piece in file.pieces
        }

    @property
    def names(self) -> set[str]:
        """Return every tensor's name."""
        return set(self._shapes)

    def problems(self, rules: Sequence[TensorRule]) -> Iterator[str]:
        """Yield tensors that the checkpoint lacks, and tensors that no rule uses."""
        return set_problems({rule.canonical for rule in rules}, self.names)

    def shape(self, rule: TensorRule) -> tuple[int, ...]:
        """Return the shape of a tensor that is there."""
        return self._shapes[rule.canonical]

    def dtype(self, rule: TensorRule) -> torch.dtype:
        """Return the type of a tensor that is there.

        :raises CheckpointError: Some of it is in no file.
        """
        dtype = self._pieces.dtype(WEIGHT, *self._whole(rule))
        assert dtype is not None, "every piece has weights"
        return dtype

    def read(self, rule: TensorRule) -> Tensor:
        """Return a tensor that is there.

        :raises CheckpointError: Some of it is in no file.
        """
        tensor = self._pieces.read(WEIGHT, *self._whole(rule))
        assert tensor is not None, "every piece has weights"
        return tensor.view(self.shape(rule))

    def padding(self, rule: TensorRule) -> Tensor:
        """Return no rows."""
        return self.read(rule)[self.shape(rule)[0] :]

    def parts(self, rule: TensorRule) -> Sequence[Tensor]:
        """Return a tensor that is there."""
        return [self.read(rule)]

    def _whole(self, rule: TensorRule) -> tuple[str, Region, int, int]:
        return rule.canonical, self._regions[rule.canonical], 0, math.prod(self.shape(rule))


def _undivided(region: Region) -> Region:
    size = region.shape[region.dim] if region.shape else 1
    return replace(region, stretches=((0, size),), size=size)


class _HuggingFace:
    """The tensors of a Hugging Face directory, put together by the rules."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

    def parts(self, rule: TensorRule) -> Sequence[Tensor]:
        """Return tensors that make up a canonical one, one under another."""
        reader = self._reader
        tensors = [
            reader(name) if not rule.is_stacked else straight(reader, rule).read(name, (rule.expert or 0,))
            for name in rule.hf
        ]
        if rule.declared.transform in ("interleave", "deinterleave"):
            return [to_canonical(rule.declared, tensors)]
        return tensors


CanonicalSource = RunReader | DistReader
"""A checkpoint of canonical tensors."""
WeightSource = CanonicalSource | _HuggingFace
"""Tensors that are there and fit."""


@contextmanager
def open_canonical(directory: Path) -> Iterator[CanonicalSource]:
    """Open a checkpoint of a run, or a dist-checkpoint.

    :raises CheckpointError: It is torn, or has adapters alone.
    """
    if is_of_run(directory):
        with open_pieces(directory) as pieces:
            if base := pieces.files[0].base:
                raise CheckpointError(
                    f"{directory} has adapters alone, of the weights of {base['path']}.",
                    hint="Take the export of the run, hf/, which has the merged weights.",
                )
            yield RunReader(pieces)
    else:
        yield DistReader(directory)


@contextmanager
def open_weights(directory: Path) -> Iterator[WeightSource]:
    """Open whatever of the three kinds a directory is.

    :raises CheckpointError: It is torn.
    """
    if (directory / "config.json").is_file():
        with open_unquantized(directory) as reader:
            yield _HuggingFace(reader)
    else:
        with open_canonical(directory) as canonical:
            yield canonical


def tensor_names(directory: Path) -> set[str]:
    """Return how tensors are called in whatever of the three kinds a directory is.

    :raises CheckpointError: It is torn.
    """
    if (directory / "config.json").is_file():
        with open_unquantized(directory) as reader:
            return reader.names
    with open_canonical(directory) as canonical:
        return canonical.names
