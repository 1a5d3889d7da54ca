"""``quantization_config`` of a Hugging Face ``config.json``: which quantized weights can be read, and how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from anygauge_hooks.models import text_config

__all__ = ["fp8_block", "quantization"]

METHODS = ("fp8", "compressed-tensors")
"""Values of ``quant_method`` whose float8 weights have their scales beside them."""


def quantization(hf: Mapping[str, Any]) -> Any:
    """Return the ``quantization_config`` of a model; ``None`` if its weights are not quantized."""
    return text_config(hf).get("quantization_config")


def fp8_block(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of FP8 weights that have one scale each.

    :returns: ``None`` if scales are those of rows, or of whole weights.
    :raises ValueError: The weights are not quantized, or in a way that is not understood.
    """
    config = quantization(hf)
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or method not in METHODS:
        raise ValueError(f"quant_method is {method!r}, and must be one of {', '.join(METHODS)}")
    if config.get("transform_config"):
        raise ValueError("its transform_config turns weights, which is not supported")
    blocks = {*_blocks(config)}
    if len(blocks) > 1:
        names = sorted("none" if block is None else "x".join(map(str, block)) for block in blocks)
        raise ValueError(f"its groups of layers have different blocks: {', '.join(names)}")
    return next(iter(blocks), None)


def _blocks(config: Mapping[str, Any]) -> Iterator[tuple[int, int] | None]:
    if config.get("weight_block_size") is not None:
        yield _pair("weight_block_size", config["weight_block_size"])
    for block in _blocks_of_groups(config):
        yield None if block is None else _pair("block_structure", block)


def _blocks_of_groups(config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the blocks of each group of layers in a config of compressed-tensors.

    :raises ValueError: A group's weights are no 8-bit floats.
    """
    groups = config.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits, kind = weights.get("num_bits", 8), weights.get("type", "float")
        if (bits, kind) != (8, "float"):
            raise ValueError(f"its {name} has weights of {bits} bits and type {kind!r}, not 8 and 'float'")
        yield weights.get("block_structure")


def _pair(key: str, block: Any) -> tuple[int, int]:
    """Return rows and columns of a block, which compressed-tensors also writes as ``"128x128"``."""
    is_text = isinstance(block, str) and re.fullmatch(r"\d+x\d+", block)
    sizes = [int(size) for size in block.split("x")] if is_text else block
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"its {key} is {block!r}, not two numbers above 0")
    rows, columns = sizes
    return rows, columns
