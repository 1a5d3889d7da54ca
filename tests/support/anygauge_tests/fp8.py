"""FP8 directories as they are published, made of small models: float8 weights and a scale for each block."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["BLOCK", "FP8", "Scale", "blocks", "expanded", "quantized"]

BLOCK = (8, 16)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
Scale = Callable[[Tensor], Tensor]


def blocks(weight: Tensor) -> Tensor:
    """Return a scale for each block of a weight; the last blocks may be smaller."""
    rows, columns = (math.ceil(size / block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scale = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * BLOCK[0] :, column * BLOCK[1] :][: BLOCK[0], : BLOCK[1]]
            scale[row, column] = part.abs().max() / 448
    return scale


def expanded(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return the scale of each element, one by one."""
    values = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            values[row, column] = scale[row // BLOCK[0], column // BLOCK[1]]
    return values


def quantized(model: Path, *, end: str = "_scale_inv", scale: Scale = blocks, **config: Any) -> Path:
    """Write the FP8 directory of a model and return it."""
    target = model.parent / "fp8"
    target.mkdir()
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scales = scale(weight.float()).to(torch.bfloat16)
            whole = expanded(scales, weight.shape) if scale is blocks else scales
            weights[name] = (weight.float() / whole.float()).to(torch.float8_e4m3fn)
            weights[name + end] = scales
        else:
            weights[name] = weight
    save_file(weights, target / "model.safetensors")
    for file in model.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_text(file.read_text())
    hf = json.loads((model / "config.json").read_text())
    hf |= {"quantization_config": FP8, "num_nextn_predict_layers": 1, **config}
    (target / "config.json").write_text(json.dumps(hf))
    return target
