"""Dequantization: read a published FP8 checkpoint in bfloat16, or write it as a bfloat16 checkpoint.

Such a checkpoint has float8 weights and a scale for each block of a weight (DeepSeek-V3, arXiv:2412.19437,
section 3.3; Qwen3-FP8), for each of its rows, or for all of it (compressed-tensors). A weight is the product
of the two. Parts are dequantized as they are read, and no model is built, so a host without an accelerator
converts models of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.engines.hf_directory import (
    PREDICTION_HEADS,
    TensorReader,
    config_of_weights,
    open_files,
    open_tensors,
    read_config,
    write_directory,
)
from anygauge.hub.quantization import fp8_block, quantization
from anygauge_hooks.errors import CheckpointError

__all__ = ["Fp8Reader", "compare_weights", "dequantize", "open_unquantized", "to_bfloat16"]

SCALES = ("_scale_inv", "_scale")
"""How the name of a scale ends, after that of its weight. ``_scale_inv`` is a factor, not an inverse."""
UNUSED = ("input_scale", "activation_scale", "output_scale", ".k_scale", ".v_scale", ".q_scale")
"""How the names of scales of activations end, which weights do not need."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PACKED = (torch.int8, torch.uint8, torch.int32)
"""Types of matrices of packed weights, such as those of 4 bits."""


# -------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------


@contextmanager
def open_unquantized(directory: Path) -> Iterator[TensorReader]:
    """Open all safetensors files of a directory; FP8 weights are read in bfloat16, others as they are.

    :raises CheckpointError: They cannot be read, or are quantized in a way that is not supported.
    """
    config = directory / "config.json"
    hf = read_config(directory) if config.is_file() else {}
    if quantization(hf) is None:
        with open_tensors(directory) as reader:
            yield reader
    else:
        with open_fp8(directory, hf) as reader:
            yield reader


@contextmanager
def open_fp8(directory: Path, hf: Mapping[str, Any]) -> Iterator[Fp8Reader]:
    """Open an FP8 directory.

    :param hf: Its ``config.json``.
    :raises CheckpointError: It is none, or cannot be read.
    """
    try:
        block = fp8_block(hf)
    except ValueError as error:
        raise CheckpointError(
            f"{directory} has no FP8 weights that can be dequantized: of its config.json, {error}.",
            hint="A model that is not quantized can be trained as it is; take that one.",
        ) from error
    with open_files(directory) as files:
        yield Fp8Reader(files, block, directory)


class Fp8Reader(TensorReader):
    """Reads the tensors of an FP8 directory in bfloat16, each from its own file; scales are none of them.

    :param block: Rows and columns of the blocks; ``None`` without blocks.
    :raises CheckpointError: A scale is missing, or weights are packed.
    """

    def __init__(self, files: Mapping[str, Any], block: tuple[int, int] | None, directory: Path) -> None:
        super().__init__(files)
        self._block = block
        self._directory = directory
        self.scales: dict[str, str] = {}
        """Names of scales by those of their weights."""
        quantized = [name for name in sorted(files) if super(Fp8Reader, self).dtype(name) in FLOAT8]
        self.scales = {name: self._scale_of(name, files) for name in quantized}
        self.unused = {name for name in files if name.endswith(UNUSED)} - {*self.scales.values()}
        """Names of scales that only activations need."""
        self._names = {*files} - {*self.scales.values()} - self.unused
        self._check_unpacked()

    def _scale_of(self, name: str, files: Mapping[str, Any]) -> str:
        names = [name + end for end in SCALES if name + end in files]
        if not names:
            raise CheckpointError(
                f"{self._directory} has no scale of {name}, which is {super().dtype(name)}: looked for "
                f"{' and '.join(name + end for end in SCALES)}.",
                hint="Download the directory again, or write it in bfloat16 with the program that made it.",
            )
        return names[0]

    def _check_unpacked(self) -> None:
        matrices = (name for name in sorted(self._names) if len(self.shape(name)) > 1)
        if packed := [name for name in matrices if self.dtype(name) in PACKED]:
            raise CheckpointError(
                f"{self._directory} has weights of a format that cannot be dequantized here: {packed[0]} is "
                f"{self.dtype(packed[0])}, with {len(packed) - 1} others.",
                hint="Write it in bfloat16 with the program that made it.",
            )

    @property
    def names(self) -> set[str]:
        """Return every tensor's name."""
        return self._names

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return torch.bfloat16 if name in self.scales else super().dtype(name)

    def __call__(self, name: str) -> Tensor:
        """Read a tensor."""
        return self._product(name, super().__call__(name), ())

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        """Read a part of a tensor."""
        return self._product(name, super().read(name, index), index)

    def _product(self, name: str, part: Tensor, index: tuple[slice | int, ...]) -> Tensor:
        if name not in self.scales:
            return part
        scale, shape = super().__call__(self.scales[name]), self.shape(name)
        try:
            if not bool(scale.float().isfinite().all()):
                raise ValueError("scales that are not finite")
            return dequantize(part, scale, self._block, shape, index)
        except (ValueError, IndexError) as error:
            raise CheckpointError(
                f"{self._directory}: {name} of shape {list(shape)} has {error}.",
                hint="Download the directory again.",
            ) from error


def dequantize(
    part: Tensor,
    scale: Tensor,
    block: tuple[int, int] | None,
    shape: Sequence[int],
    index: tuple[slice | int, ...] = (),
) -> Tensor:
    """Return the product of a part of a weight and its scales, bfloat16; computed in float32.

    :param part: float8.
    :param scale: Scales of the whole weight: ``[..., ceil(M / block[0]), ceil(N / block[1])]`` with blocks,
        else ``[..., M, 1]``, ``[..., M]`` or one number.
    :param block: Rows and columns of a block; ``None`` without blocks.
    :param shape: ``[..., M, N]``, of the whole weight.
    :param index: Which part of it.
    :raises ValueError: Scales do not fit the weight.
    """
    scale = scale.float()
    is_of_all = block is None or scale.dim() == 0 or math.prod(_counts(shape, block)) == 1
    if scale.numel() == 1 and is_of_all:
        return (part.float() * scale.reshape(())).to(torch.bfloat16)
    rows, columns = block or (1, shape[-1])
    counts = _counts(shape, (rows, columns))
    if block is None:
        scale = scale[..., None] if list(scale.shape) == list(shape[:-1]) else scale
    if list(scale.shape) != counts:
        of_blocks = "" if block is None else f" of blocks of {list(block)}"
        raise ValueError(f"{tuple(scale.shape)} scales{of_blocks}, and not {tuple(counts)}")
    places = (*index, *[slice(None)] * (len(shape) - len(index)))
    row_blocks = torch.arange(shape[-2])[places[-2]] // rows
    column_blocks = torch.arange(shape[-1])[places[-1]] // columns
    scale = scale[places[:-2]][..., row_blocks, :][..., column_blocks]
    return (part.float() * scale).to(torch.bfloat16)


def _counts(shape: Sequence[int], block: tuple[int, int]) -> list[int]:
    """Return the shape of the scales of a weight's blocks."""
    return [*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1])]


# -------------------------------------------------------------------------
# Writing
# -------------------------------------------------------------------------


def to_bfloat16(
    source: Path, target: Path, *, check: bool = False, tell: Callable[[int, int], None] = lambda *_: None
) -> dict[str, int]:
    """Write a Hugging Face directory with the weights of an FP8 directory in bfloat16.

    Tensors that are not quantized are written as they are. The tensors of one file are in memory at a time.

    :param target: Must not exist or be empty; appears only when it is complete.
    :param check: Read both sides again and compare them bit by bit.
    :param tell: Called before each tensor with its number, from 1 on, and their count.
    :returns: How many tensors were dequantized, and left out because only activations need them.
    :raises CheckpointError: The source is not quantized, or in a way that is not supported; a scale is
        missing or does not fit; ``target`` exists or cannot be written, or was written wrong.
    """
    config = read_config(source)
    with open_fp8(source, config) as reader:
        names = sorted(reader.names)

        def weights() -> Iterator[tuple[str, Tensor]]:
            for number, name in enumerate(names, 1):
                tell(number, len(names))
                yield name, reader(name)

        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        checked = (lambda written: compare_weights(written, weights())) if check else None
        write_directory(target, source, weights(), torch.bfloat16, changes=_heads(config), check=checked)
        return {"dequantized": len(reader.scales), "left out": len(reader.unused)}


def _heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys that count multi-token prediction heads, which are written with the other weights."""
    own = {key: config[key] for key in PREDICTION_HEADS if key in config}
    text = config.get("text_config")
    if isinstance(text, Mapping) and (inside := _heads(text)):
        return {**own, "text_config": {**config_of_weights(text, torch.bfloat16), **inside}}
    return own


def compare_weights(target: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Check that a directory has the weights, bit by bit.

    :raises CheckpointError: One differs.
    """
    with open_tensors(target) as written:
        for name, weight in weights:
            if not _is_same(written(name), weight):
                raise CheckpointError(
                    f"{target} has another {name} than was written.",
                    hint="Is the disk sound? Write it again.",
                )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bytes; numbers would not do, since one may be NaN."""
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
