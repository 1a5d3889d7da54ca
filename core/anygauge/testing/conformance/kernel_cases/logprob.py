"""Cases of log-probabilities, from logits and from hidden states."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anygauge.testing.conformance.kernel_cases.case import Case, normal

__all__ = ["CASES", "linear_logprob_case"]

VOCABULARY = 151_937


def logprob_case(
    tokens: int,
    vocab: int,
    temperature: float,
    *,
    entropy_grad: bool,
    masked: int = 0,
    offset: float = 0.0,
    magnitude: float = 3.0,
) -> Case:
    """Return a case whose last ``masked`` logits are minus infinity."""

    def tensors() -> tuple[Tensor, ...]:
        logits = magnitude * normal(tokens, vocab) + offset
        logits[:, vocab - masked :] = -torch.inf
        targets = torch.randint(vocab - masked, (tokens,))
        targets[:1], targets[1:2] = 0, vocab - masked - 1
        return logits, targets

    name = f"{tokens}x{vocab}-{temperature}-{masked}-{offset:g}-{magnitude:g}"
    return Case(
        op="vocab_parallel_logprob",
        name=f"{name}-{'grad' if entropy_grad else 'plain'}",
        tensors=tensors,
        differentiable=1,
        arguments=(temperature, None),
        options={"entropy_grad": entropy_grad},
        wide_outputs=(0, 1),
        exact_outputs=(0, 1),
    )


def linear_logprob_case(
    tokens: int,
    width: int,
    vocab: int,
    temperature: float,
    *,
    entropy_grad: bool,
    count: int = 0,
    padding: int = 0,
    rest: bool = False,
) -> Case:
    """Return a case of ``count`` targets for each token, or a vector for 0, and a weight with padding.

    :param rest: Whether all other tokens are asked for. The targets are then the most probable ones.
    """

    def tensors() -> tuple[Tensor, ...]:
        targets = torch.randint(vocab, (tokens, count) if count else (tokens,))
        targets[:1], targets[1:2] = 0, vocab - 1
        hidden, weight = normal(tokens, width), normal(vocab + padding, width) / width**0.5
        if rest:
            targets = (hidden @ weight[:vocab].t()).topk(count, dim=1).indices
        return hidden, weight, targets

    name = f"{tokens}x{width}x{vocab}-{temperature}-{count}-{padding}-{'grad' if entropy_grad else 'plain'}"
    options = {"entropy_grad": entropy_grad, "vocab_size": vocab if padding else None}
    return Case(
        op="linear_logprob",
        name=f"{name}-rest" if rest else name,
        tensors=tensors,
        differentiable=2,
        arguments=(temperature, None),
        options={**options, "rest": True} if rest else options,
        wide_outputs=(0, 1),
    )


CASES = [
    logprob_case(37, 50, 0.7, entropy_grad=True),
    logprob_case(37, 50, 1.6, entropy_grad=False),
    logprob_case(0, 8, 1.5, entropy_grad=True),
    logprob_case(1, 8, 0.6, entropy_grad=False),
    logprob_case(3, 1, 0.6, entropy_grad=True),
    logprob_case(40, 2001, 1.3, entropy_grad=True),
    logprob_case(9, 40, 0.5, entropy_grad=False, masked=8),
    logprob_case(9, 40, 0.5, entropy_grad=True, masked=8),
    logprob_case(9, 40, 1.0, entropy_grad=True, offset=60.0),
    logprob_case(9, 40, 0.8, entropy_grad=False, offset=-200.0),
    logprob_case(9, 40, 1.4, entropy_grad=True, magnitude=40.0),
    replace(logprob_case(7, VOCABULARY, 0.6, entropy_grad=True), in_one_dtype=True),
    replace(logprob_case(5000, 9, 2.5, entropy_grad=False), in_one_dtype=True),
    linear_logprob_case(20, 16, 40, 1.3, entropy_grad=True, count=5, padding=3),
    linear_logprob_case(37, 24, 50, 0.7, entropy_grad=True),
    linear_logprob_case(37, 24, 50, 1.6, entropy_grad=False),
    linear_logprob_case(0, 8, 8, 1.5, entropy_grad=True),
    linear_logprob_case(1, 8, 8, 0.6, entropy_grad=False, padding=5),
    linear_logprob_case(37, 24, 61, 0.9, entropy_grad=False, padding=7),
    linear_logprob_case(100, 16, 1500, 1.2, entropy_grad=True, padding=36),
    linear_logprob_case(20, 16, 40, 0.7, entropy_grad=True, count=5, padding=3, rest=True),
    linear_logprob_case(37, 16, 700, 1.7, entropy_grad=False, count=2, rest=True),
    linear_logprob_case(6, 16, 5, 1.7, entropy_grad=True, count=5, rest=True),
    linear_logprob_case(9, 16, 40, 0.8, entropy_grad=False, count=1),
    replace(linear_logprob_case(1100, 64, 1500, 0.8, entropy_grad=True, padding=12), in_one_dtype=True),
    replace(linear_logprob_case(7, 8, VOCABULARY, 0.6, entropy_grad=True), in_one_dtype=True),
    replace(linear_logprob_case(5000, 8, 20, 2.5, entropy_grad=False, padding=4), in_one_dtype=True),
]
