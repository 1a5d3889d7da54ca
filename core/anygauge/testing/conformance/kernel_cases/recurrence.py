"""Cases of the convolution and of the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anygauge.testing.conformance.kernel_cases.case import CHUNKS, RAGGED, Case, normal

__all__ = ["CASES", "convolution_of", "delta_of"]


def convolution_case(name: str, lengths: Sequence[int], channels: int = 24, width: int = 4) -> Case:
    return Case(
        op="causal_conv1d",
        name=name,
        tensors=lambda: (normal(sum(lengths), channels), normal(channels, width)),
        differentiable=2,
        arguments=(tuple(lengths),),
        facts={"width": width},
    )


def convolution_of(facts: Mapping[str, Any]) -> Case:
    """Return a case with these facts."""
    return convolution_case("facts", (9, 0, facts["width"] + 3, 1), 7, facts["width"])


def delta_case(
    name: str,
    lengths: Sequence[int],
    heads: int = 3,
    width: int = 16,
    value_width: int = 24,
    *,
    decay: float = 1.0,
    scale: float = 0.4,
    spread: float = 0.0,
) -> Case:
    """Return a case whose states are multiplied with ``exp(-decay)`` per token, on average.

    :param spread: If not 0, all keys are near one, at about this distance before they are normalized.
    """
    tokens = sum(lengths)

    def tensors() -> tuple[Tensor, ...]:
        q, k = (torch.nn.functional.normalize(normal(tokens, heads, width), dim=-1) for _ in range(2))
        if spread:
            k = torch.nn.functional.normalize(k[:1] + spread * k, dim=-1)
        g = -2 * decay * torch.rand(tokens, heads, dtype=torch.float64)
        beta = torch.rand(tokens, heads, dtype=torch.float64)
        return q, k, normal(tokens, heads, value_width), g, beta

    return Case(
        op="gated_delta_rule",
        name=name,
        tensors=tensors,
        differentiable=5,
        arguments=(tuple(lengths), scale),
        facts={"head_dim": width, "value_dim": value_width},
        wide=(3, 4),
    )


def delta_of(facts: Mapping[str, Any]) -> Case:
    """Return a case with these facts."""
    return delta_case("facts", (5, 0, 18), 2, facts["head_dim"], facts["value_dim"], scale=1.3)


LENGTHS: Mapping[str, Sequence[int]] = {
    "ragged": RAGGED,
    "none": (),
    "empty": (0, 0),
    "one": (1,),
    "chunks": CHUNKS,
}

CASES = [
    *(convolution_case(name, lengths) for name, lengths in LENGTHS.items()),
    convolution_case("narrow", RAGGED, 7, 2),
    convolution_case("wide", RAGGED, 5, 7),
    convolution_case("no-past", (3, 1, 5), 6, 1),
    convolution_case("many-channels", (4, 3), 2100, 3),
    convolution_case("many-sequences", (1, 2, 0) * 25, 3),
    replace(convolution_case("large", (4200, 61_800, 9), 16), in_one_dtype=True),
    *(delta_case(name, lengths) for name, lengths in LENGTHS.items()),
    delta_case("forgets", (70, 5), decay=30.0, scale=2.0),
    delta_case("keeps", (64, 65), decay=1e-3),
    delta_case("alike-keys", (130, 7), 2, decay=1e-3, spread=0.5),  # U is small beside its terms
    delta_case("narrow-values", (5, 0, 17), width=32, value_width=8, scale=1.0),
    delta_case("wide-heads", (5, 66), 2, 128, 64),
    delta_case("wide-values", (130, 3), 1, 128, 256),
    delta_case("many-heads", (9, 4), 33, 8, 8),
    delta_case("many-sequences", (1, 2, 0) * 12, 2, 8, 8),
    replace(delta_case("long", (4200, 3), 1, 8, 256, decay=1e-2), in_one_dtype=True),
]
