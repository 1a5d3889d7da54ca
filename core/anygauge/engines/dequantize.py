"""Dequantization: write the bfloat16 model of a published FP8 checkpoint.

Such a checkpoint has float8 weights and a scale for each block of a weight (DeepSeek-V3, arXiv:2412.19437,
section 3.3; Qwen3-FP8), for each of its rows, or for all of it (compressed-tensors). A weight is the product
of the two. The tensors of one file are in memory at a time, and no model is built, so a host without an
accelerator converts models of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.engines.hf_directory import (
    PREDICTION_HEADS,
    TensorReader,
    config_of_weights,
    open_tensors,
    read_config,
    write_directory,
)
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.models import text_config

__all__ = ["block_size", "dequantize", "to_bfloat16"]

METHODS = ("fp8", "compressed-tensors")
"""Values of ``quant_method`` whose float8 weights have their scales beside them."""
SCALES = ("_scale_inv", "_scale")
"""How the name of a scale ends, after that of its weight. ``_scale_inv`` is a factor, not an inverse."""
UNUSED = ("input_scale", "activation_scale", "output_scale", ".k_scale", ".v_scale", ".q_scale")
"""How the names of scales of activations end, which weights do not need."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PACKED = (torch.int8, torch.uint8, torch.int32)
"""Types of matrices of packed weights, such as those of 4 bits."""


def to_bfloat16(
    source: Path, target: Path, *, check: bool = False, tell: Callable[[int, int], None] = lambda *_: None
) -> dict[str, int]:
    """Write a Hugging Face directory with the weights of an FP8 directory in bfloat16.

    Tensors that are not quantized are written as they are.

    :param target: Must not exist or be empty; appears only when it is complete.
    :param check: Read both sides again and compare them bit by bit.
    :param tell: Called before each tensor with its number, from 1 on, and their count.
    :returns: How many tensors were dequantized, and left out because only activations need them.
    :raises CheckpointError: The source is not quantized, or in a way that is not supported; a scale is
        missing or does not fit; ``target`` exists or cannot be written, or was written wrong.
    """
    config = read_config(source)
    block = block_size(config, source)
    with open_tensors(source) as reader:
        names = sorted(reader.names)
        quantized = [name for name in names if reader.dtype(name) in FLOAT8]
        scales = {name: _scale_of(name, reader, source) for name in quantized}
        dropped = {*scales.values(), *(name for name in names if name.endswith(UNUSED))}
        _check_left(reader, [name for name in names if name not in dropped], scales, source)
        kept = [name for name in names if name not in dropped]

        def weights() -> Iterator[tuple[str, Tensor]]:
            for number, name in enumerate(kept, 1):
                tell(number, len(kept))
                yield name, _weight(reader, name, scales, block, source)

        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        checked = (lambda written: _compare(written, weights())) if check else None
        write_directory(target, source, weights(), torch.bfloat16, changes=_heads(config), check=checked)
    return {"dequantized": len(quantized), "left out": len(dropped) - len(quantized)}


def dequantize(weight: Tensor, scale: Tensor, block: Sequence[int] | None) -> Tensor:
    """Return the product of a weight and its scales, ``[..., M, N]``, bfloat16.

    :param weight: ``[..., M, N]``, float8.
    :param scale: ``[..., ceil(M / block[0]), ceil(N / block[1])]`` with blocks, else ``[..., M, 1]``,
        ``[..., M]`` or one number.
    :param block: Rows and columns of a block; ``None`` without blocks.
    :raises ValueError: Their shapes do not fit.
    """
    scale = scale.float()
    if scale.numel() == 1:
        return (weight.float() * scale.reshape(())).to(torch.bfloat16)
    if block is not None:
        for dim, size in zip((-2, -1), block, strict=True):
            if scale.shape[dim] != math.ceil(weight.shape[dim] / size):
                raise ValueError(f"{tuple(scale.shape)} scales of blocks of {list(block)}")
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    elif scale.shape == weight.shape[:-1]:
        scale = scale[..., None]
    if scale.shape[:-1] != weight.shape[:-1] or scale.shape[-1] not in (1, weight.shape[-1]):
        raise ValueError(f"{tuple(scale.shape)} scales")
    return (weight.float() * scale).to(torch.bfloat16)


def block_size(config: Mapping[str, Any], source: Path) -> Sequence[int] | None:
    """Return rows and columns of the blocks of a config's ``quantization_config``.

    :returns: ``None`` if scales are those of rows, or of whole weights.
    :raises CheckpointError: There is no such key, or its method is another.
    """
    quantization = config.get("quantization_config") or text_config(config).get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in METHODS or not isinstance(quantization, Mapping):
        raise CheckpointError(
            f"{source} has no FP8 weights that can be dequantized: quant_method is {method!r} in its "
            f"config.json, and must be one of {', '.join(METHODS)}.",
            hint="A model that is not quantized can be trained as it is.",
        )
    block = quantization.get("weight_block_size", _block_structure(quantization))
    if block is None:
        return None
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(
            f"{source / 'config.json'} has weight_block_size = {block!r}, not two numbers above 0.",
            hint="Download the file again.",
        )
    return list(block)


def _block_structure(quantization: Mapping[str, Any]) -> Any:
    """Return the blocks of the first group of layers in a config of compressed-tensors; ``None`` without."""
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights.get("block_structure") if isinstance(weights, Mapping) else None


def _heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys that count multi-token prediction heads, which are written with the other weights."""
    own = {key: config[key] for key in PREDICTION_HEADS if key in config}
    text = config.get("text_config")
    if isinstance(text, Mapping) and (inside := _heads(text)):
        return {**own, "text_config": {**config_of_weights(text, torch.bfloat16), **inside}}
    return own


def _scale_of(name: str, reader: TensorReader, source: Path) -> str:
    names = [name + end for end in SCALES if name + end in reader.names]
    if not names:
        raise CheckpointError(
            f"{source} has no scale of {name}, which is {reader.dtype(name)}: looked for "
            f"{' and '.join(name + end for end in SCALES)}.",
            hint="Download the directory again, or write it in bfloat16 with the program that made it.",
        )
    return names[0]


def _check_left(reader: TensorReader, names: Sequence[str], scales: Collection[str], source: Path) -> None:
    """Check that nothing that is written as it is has packed weights."""
    packed = [
        name
        for name in names
        if name not in scales and reader.dtype(name) in PACKED and len(reader.shape(name)) > 1
    ]
    if packed:
        raise CheckpointError(
            f"{source} has weights of a format that cannot be dequantized here: {packed[0]} is "
            f"{reader.dtype(packed[0])}, with {len(packed) - 1} others.",
            hint="Write it in bfloat16 with the program that made it.",
        )


def _weight(
    reader: TensorReader, name: str, scales: Mapping[str, str], block: Sequence[int] | None, source: Path
) -> Tensor:
    if name not in scales:
        return reader(name)
    scale = reader(scales[name])
    try:
        if not bool(scale.float().isfinite().all()):
            raise ValueError("scales that are not finite")
        return dequantize(reader(name), scale, block)
    except (ValueError, IndexError) as error:
        raise CheckpointError(
            f"{source}: {name} of shape {list(reader.shape(name))} has {error}.",
            hint="Download the directory again.",
        ) from error


def _compare(target: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
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
