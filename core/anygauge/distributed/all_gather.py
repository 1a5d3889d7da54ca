"""All-gather of plain values, without pickle.

Torch's object collectives unpickle what a peer sends, and the ports of gloo authenticate nobody. Here a value
travels as JSON in a tensor and must be of the type that was asked for.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from anygauge_hooks.errors import RankMismatchError

__all__ = ["all_gather_values", "plain_objects"]

LONGEST = 64 * 2**20
"""Bytes of one value."""

SHOWN = 500
"""Characters of an error about what another rank sent."""

T = TypeVar("T")


def all_gather_values(mine: T, kind: TypeAdapter[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, by rank. A collective.

    :param kind: Type of the values: what another rank sends is checked against it.
    :param group: Ranks that take part; ``None`` takes all.
    :raises RankMismatchError: A rank has sent something else.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    values = []
    for rank, data in enumerate(_all_gather_bytes(kind.dump_json(mine), group)):
        try:
            values.append(kind.validate_json(data))
        except ValidationError as error:
            raise _malformed(rank, str(error)[:SHOWN]) from None
    return values


def _all_gather_bytes(mine: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    device = c10d._get_object_coll_device(group)  # the one that torch's object collectives use
    sizes = [int(each) for each in _all_gather(torch.tensor([len(mine)]), device, group)]
    for rank, size in enumerate(sizes):
        if not 0 <= size <= LONGEST:
            raise _malformed(rank, f"a length of {size}, and at most {LONGEST} is taken")
    padded = torch.frombuffer(bytearray(mine.ljust(max(sizes))), dtype=torch.uint8)
    parts = _all_gather(padded, device, group)
    return [part.numpy().tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]


def _all_gather(mine: Tensor, device: str, group: dist.ProcessGroup | None) -> list[Tensor]:
    mine = mine.to(device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.cpu() for part in parts]


def _malformed(rank: int, why: str) -> RankMismatchError:
    return RankMismatchError(
        f"Rank {rank} of a group sent no value of the expected type: {why}.", hint=_OTHER_CODE
    )


_OTHER_CODE = (
    "Its process runs other code, or something else has connected in its place. Use the same packages on "
    "every node; docs/security.md lists who reaches the ports of collectives."
)


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts, and lists, tuples, sets and dicts of them; calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RankMismatchError(
            f"A rank sent {module}.{name} instead of plain data, so it was not loaded.",
            hint=_OTHER_CODE,
        )


@contextmanager
def plain_objects() -> Iterator[None]:
    """Let torch's object collectives load plain data only, inside.

    For libraries that call them where no argument asks for another way.
    """
    torch_module: Any = c10d
    unpickler, torch_module._unpickler = torch_module._unpickler, _PlainUnpickler
    try:
        yield
    finally:
        torch_module._unpickler = unpickler
