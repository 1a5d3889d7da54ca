"""Input checks for Triton kernels, which would otherwise read and write past the end of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from anygauge_hooks.errors import KernelInputError

__all__ = ["check_lengths", "check_rope", "check_shape", "refuse"]


def refuse(op: str, given: str, hint: str) -> NoReturn:
    """Raise the error of a call.

    :param op: Name of the kernel op.
    :param given: Description of the input, as the rest of a sentence.
    :raises KernelInputError: Always.
    """
    raise KernelInputError(f"{op} got {given}.", hint=hint)


def check_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int], meaning: str) -> None:
    """Refuse a tensor of another shape.

    :param meaning: The shape in words of the contract: ``"[T, H]"``.
    :raises KernelInputError: It has another shape.
    """
    if tensor.shape != torch.Size(shape):
        refuse(op, f"{name} of shape {list(tensor.shape)}, not {list(shape)}", f"{name} is {meaning}.")


def check_rope(op: str, cos: Tensor, sin: Tensor, tokens: int, width: int) -> None:
    """Refuse cosines and sines that are not those of the tokens, or that halves of a head do not have.

    :param width: Size of a head.
    :raises KernelInputError: They are so.
    """
    angles = cos.shape[-1]
    check_shape(op, "cos", cos, (tokens, angles), "[T, R]")
    check_shape(op, "sin", sin, cos.shape, "[T, R]")
    if angles % 2 or angles > width:
        refuse(op, f"{angles} angles", f"Give an even number, at most {width}.")


def check_lengths(op: str, lengths: Sequence[int], tokens: int) -> None:
    """Refuse lengths of sequences that are not those of the tokens.

    :raises KernelInputError: One is negative, or they do not sum to the tokens.
    """
    if sum(lengths) != tokens or min(lengths, default=0) < 0:
        refuse(op, f"lengths that sum to {sum(lengths)}, and {tokens} tokens", "They sum to the tokens.")
