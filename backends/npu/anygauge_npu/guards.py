"""Input checks for the operators of torch-npu.

The wheel's own host code lets most wrong calls through to CANN, which answers with a number or not at all.
The limits are those of torch-npu's documentation, and of CANN's for the kernel that is reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from anygauge_hooks.errors import KernelInputError

__all__ = ["DTYPES", "check_dtypes", "check_lengths", "check_shape", "check_size", "dtype_name", "refuse"]

DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")
"""Dtypes of every fused floating-point operator."""


def refuse(op: str, given: str, hint: str) -> NoReturn:
    """Raise the error of a call.

    :param op: Name of the kernel op.
    :param given: Description of the input, as the rest of a sentence.
    :raises KernelInputError: Always.
    """
    raise KernelInputError(f"{op} got {given}.", hint=hint)


def check_dtypes(op: str, **tensors: Tensor) -> None:
    """Refuse a dtype that no operator has, and tensors of different dtypes."""
    for name, tensor in tensors.items():
        _check_tensor(op, name, tensor)
    first = next(iter(tensors))
    dtype = dtype_name(tensors[first])
    if dtype not in DTYPES:
        refuse(op, f"{first} in {dtype}", f"The NPU's operator takes {', '.join(DTYPES)}.")
    for name, tensor in tensors.items():
        if tensor.dtype != tensors[first].dtype:
            refuse(op, f"{first} in {dtype} and {name} in {dtype_name(tensor)}", "Give both one dtype.")


def check_shape(op: str, name: str, tensor: Tensor, wanted: Sequence[int | None], meaning: str) -> None:
    """Refuse a tensor whose shape differs from the one wanted, where ``None`` is any size.

    :param meaning: The shape in the words of the op: ``"[T, H, D]"``.
    """
    _check_tensor(op, name, tensor)
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(wanted) and all(w is None or w == s for w, s in zip(wanted, sizes, strict=True))
    if not fits:
        shown = ", ".join("any" if size is None else str(size) for size in wanted)
        refuse(op, f"{name} of shape {list(sizes)}", f"{name} is {meaning}: here [{shown}].")


def check_size(op: str, what: str, size: int, least: int, most: int) -> None:
    """Refuse a size that the operator's documentation excludes."""
    if not least <= size <= most:
        refuse(op, f"{what} {size}", f"The NPU's operator takes {least} to {most}.")


def check_lengths(op: str, name: str, lengths: Any, tokens: int, tensor: str) -> tuple[int, ...]:
    """Return the lengths of packed sequences, after refusing those that do not make up the tokens.

    :param tensor: Name of the tensor that has the tokens.
    """
    if isinstance(lengths, Tensor):
        refuse(op, f"{name} as a tensor", "Pass host integers: reading a tensor would wait for the device.")
    if not isinstance(lengths, Iterable):
        refuse(op, f"{name} {lengths!r}", "Pass one length per sequence, host integers.")
    sizes = tuple(lengths)
    if any(type(size) is not int or size < 0 for size in sizes):
        refuse(op, f"{name} {list(sizes)}", "Each is the length of one sequence, an integer of at least 0.")
    if sum(sizes) != tokens:
        refuse(
            op,
            f"{name} that sum to {sum(sizes)}; {tensor} has {tokens} tokens",
            "Every token belongs to one sequence: pass one length per sequence.",
        )
    return sizes


def _check_tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        refuse(op, f"{name} of type {type(value).__name__}", "Pass a tensor.")


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype without ``torch.`` before it."""
    return str(tensor.dtype).removeprefix("torch.")
