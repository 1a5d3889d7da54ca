"""Cases of norms, rotations and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anygauge.testing.conformance.kernel_cases.case import MANY, USUAL, Case, normal, shape_name

__all__ = ["CASES", "qkv_of", "rotary_of"]


def rms_norm_case(*shape: int, eps: float, magnitude: float = 1.0) -> Case:
    return Case(
        op="rms_norm",
        name=f"{shape_name(shape)}-{eps:g}-{magnitude:g}",
        tensors=lambda: (magnitude * normal(*shape), normal(shape[-1])),
        differentiable=2,
        arguments=(eps,),
        rounded_once=("outputs",),
    )


def uneven_rows() -> Case:
    """Return a case with a row of zeros, and others from a thousandth to a thousand."""

    def tensors() -> tuple[Tensor, ...]:
        magnitudes = torch.logspace(-3, 3, 24, dtype=torch.float64)
        magnitudes[7] = 0
        return magnitudes[:, None] * normal(24, 48), normal(48)

    case = rms_norm_case(24, 48, eps=1e-4)
    return replace(case, name="uneven-rows", tensors=tensors)


def add_norm_case(*shape: int, eps: float, adds: bool = True) -> Case:
    """Return a case that adds a residual, or one that has none."""

    def tensors() -> tuple[Tensor, ...]:
        return (normal(*shape), normal(shape[-1]), *((normal(*shape),) if adds else ()))

    return Case(
        op="add_rms_norm",
        name=f"{shape_name(shape)}-{eps:g}-{'sum' if adds else 'alone'}",
        tensors=tensors,
        differentiable=2 + adds,
        arguments=(eps,),
        keyword="residual" if adds else None,
    )


def layer_norm_case(*shape: int, eps: float, magnitude: float = 1.0, shift: float = 0.0) -> Case:
    return Case(
        op="layer_norm",
        name=f"{shape_name(shape)}-{eps:g}-{magnitude:g}-{shift:g}",
        tensors=lambda: (magnitude * normal(*shape) + shift, normal(shape[-1]), normal(shape[-1])),
        differentiable=3,
        arguments=(eps,),
        rounded_once=("outputs",),
    )


def rotary_factors(tokens: int, rotary: int, magnitude: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, multiplied as YaRN does."""
    drawn = 6 * torch.rand(tokens, rotary, dtype=torch.float64)
    return magnitude * drawn.cos(), magnitude * drawn.sin()


def rotary_case(
    tokens: int, heads: int, key_heads: int, width: int, rotary: int, magnitude: float = 1.0
) -> Case:
    return Case(
        op="rotary_embedding",
        name=f"{tokens}-{heads}-{key_heads}-{width}-{rotary}-{magnitude:g}",
        tensors=lambda: (
            normal(tokens, heads, width),
            normal(tokens, key_heads, width),
            *rotary_factors(tokens, rotary, magnitude),
        ),
        differentiable=2,
        facts={"head_dim": width, "unit_angles": magnitude <= 1},
    )


def rotary_of(facts: Mapping[str, Any]) -> Case:
    """Return a case with these facts."""
    width = facts["head_dim"]
    return rotary_case(9, 4, 2, width, width - width % 2, 1.0 if facts["unit_angles"] else 1.35)


def qkv_case(
    tokens: int,
    groups: int,
    group: int,
    width: int,
    rotary: int,
    *,
    eps: float = 0.2,
    magnitude: float = 1.0,
) -> Case:
    """Return a case of ``group`` query heads for each of ``groups`` key heads."""
    return Case(
        op="qk_norm_rotary",
        name=f"{tokens}-{groups}-{group}-{width}-{rotary}-{eps:g}-{magnitude:g}",
        tensors=lambda: (
            normal(tokens, groups, group + 2, width),
            normal(width),
            normal(width),
            *rotary_factors(tokens, rotary, magnitude),
        ),
        differentiable=3,
        arguments=(eps,),
        facts={"head_dim": width, "unit_angles": magnitude <= 1},
    )


def qkv_of(facts: Mapping[str, Any]) -> Case:
    """Return a case with these facts."""
    width = facts["head_dim"]
    return qkv_case(9, 2, 3, width, width - width % 2, magnitude=1.0 if facts["unit_angles"] else 1.35)


def swiglu_case(*shape: int, magnitude: float = 2.0) -> Case:
    return Case(
        op="swiglu",
        name=f"{shape_name(shape)}-{magnitude:g}",
        tensors=lambda: (magnitude * normal(*shape),),
        differentiable=1,
    )


# Epsilon is seen where it is as large as the mean square, or nearly.
CASES = [
    rms_norm_case(7, 64, eps=0.3),
    rms_norm_case(0, 8, eps=0.1),
    rms_norm_case(1, 8, eps=0.3),
    rms_norm_case(64, eps=0.7),
    rms_norm_case(5, 3, 33, eps=0.5),
    rms_norm_case(300, 128, eps=1e-2),
    rms_norm_case(16, 64, eps=1e-6, magnitude=1e-3),
    rms_norm_case(16, 64, eps=1e-5, magnitude=3e-3),
    rms_norm_case(40, 720, eps=1e-6, magnitude=1e3),
    rms_norm_case(3, 18_432, eps=0.2),
    uneven_rows(),
    replace(rms_norm_case(*USUAL, eps=0.4), in_one_dtype=True),
    replace(rms_norm_case(MANY, 16, eps=0.05), in_one_dtype=True),
    add_norm_case(5, 3, 33, eps=0.3),
    add_norm_case(0, 8, eps=0.1),
    add_norm_case(1, 8, eps=0.1),
    add_norm_case(40, 720, eps=1e-5),
    replace(add_norm_case(*USUAL, eps=0.2), in_one_dtype=True),
    replace(add_norm_case(MANY, 16, eps=0.5), in_one_dtype=True),
    add_norm_case(0, 8, eps=0.1, adds=False),
    add_norm_case(1, 8, eps=1.5, adds=False),
    add_norm_case(5, 3, 33, eps=0.3, adds=False),
    add_norm_case(9, 720, eps=1e-3, adds=False),
    layer_norm_case(7, 64, eps=0.3),
    layer_norm_case(0, 8, eps=0.1),
    layer_norm_case(1, 8, eps=0.1),
    layer_norm_case(64, eps=0.7),
    layer_norm_case(5, 3, 33, eps=1e-2),
    layer_norm_case(300, 128, eps=0.5),
    layer_norm_case(16, 64, eps=1e-6, magnitude=1e-3),
    layer_norm_case(16, 64, eps=0.1, shift=8.0),
    layer_norm_case(3, 18_432, eps=0.2),
    replace(layer_norm_case(*USUAL, eps=0.4), in_one_dtype=True),
    replace(layer_norm_case(MANY, 16, eps=0.05), in_one_dtype=True),
    rotary_case(19, 4, 2, 32, 32),
    rotary_case(0, 2, 2, 8, 8),
    rotary_case(1, 2, 1, 8, 8),
    rotary_case(19, 4, 4, 24, 16),
    rotary_case(7, 3, 1, 128, 64),
    rotary_case(6, 6, 2, 80, 80, 0.7),
    rotary_case(5, 5, 1, 64, 2),
    rotary_case(19, 4, 2, 32, 32, 1.35),
    rotary_case(4, 40, 8, 256, 128, 1.2),
    replace(rotary_case(MANY, 2, 1, 8, 4), in_one_dtype=True),
    qkv_case(19, 2, 4, 32, 32),
    qkv_case(0, 1, 1, 8, 8),
    qkv_case(1, 2, 1, 8, 8, eps=1.0),
    qkv_case(19, 3, 2, 24, 16, eps=0.05),
    qkv_case(40, 1, 5, 128, 128, eps=1e-3),
    qkv_case(6, 4, 1, 80, 40),
    qkv_case(3, 8, 8, 256, 64),
    qkv_case(19, 2, 4, 32, 32, magnitude=1.35),
    replace(qkv_case(USUAL[0], 2, 4, 64, 64), in_one_dtype=True),
    replace(qkv_case(MANY, 1, 2, 8, 4), in_one_dtype=True),
    swiglu_case(7, 66),
    swiglu_case(0, 4),
    swiglu_case(1, 2),
    swiglu_case(2, 5, 128),
    swiglu_case(46),
    swiglu_case(9, 40, magnitude=30.0),
    swiglu_case(3, 36_864),
    replace(swiglu_case(*USUAL), in_one_dtype=True),
    replace(swiglu_case(MANY, 32), in_one_dtype=True),
]
