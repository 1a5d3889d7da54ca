"""Adapters and the frozen weights that they belong to: which these are, and how a model computes without.

A checkpoint of adapters names its base by a checksum, which does not depend on how ranks divide the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.config.lora import LoraSettings
from anygauge_hooks.errors import CheckpointError

__all__ = ["AdapterState", "check_base", "checksum", "first_values", "index_sum", "log_sizes"]

_log = logging.getLogger(__name__)
_INDICES = 0x9E3779B97F4A7C15
"""2 ** 64 over the golden ratio: the odd factor between the indices of a checksum."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AdapterState:
    """Whether a model computes with its adapters, and what these are on.

    :param settings: ``None`` for a model that trains all weights.
    """

    def __init__(self, settings: LoraSettings | None = None) -> None:
        self.settings = settings
        self.is_on = True
        """Whether the model computes with them."""
        self.checksum = ""
        """Checksum of the base weights, set when the adapters get their first values."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute without its adapters."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def description(self, base: str) -> Mapping[str, Any]:
        """Return what a checkpoint of the adapters says of the weights that they belong to.

        :param base: Directory of these.
        """
        if self.settings is None:
            return {}
        scale = {"rank": self.settings.rank, "alpha": self.settings.alpha}
        return {"path": base, "checksum": self.checksum, **scale}


def check_base(here: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Check that a checkpoint's adapters belong to the weights that the model has, wherever these are by now.

    :param here: :meth:`AdapterState.description` of the model.
    :param stored: The same of the checkpoint.
    :raises CheckpointError: They do not.
    """
    one, other = ({name: value for name, value in each.items() if name != "path"} for each in (here, stored))
    if one != other:
        raise CheckpointError(
            f"The checkpoint is of {_described(stored)}; the engine has {_described(here)}.",
            hint="Restore model.path, train.dtype and [train.lora] as they were when the run began.",
        )


def _described(base: Mapping[str, Any]) -> str:
    if not base:
        return "a model without adapters"
    return (
        f"adapters of rank {base['rank']} and alpha {base['alpha']} on {base['path']} (checksum "
        f"{base['checksum']})"
    )


def checksum(facts: Sequence[object], sums: Tensor) -> str:
    """Return a checksum of weights that does not depend on how many ranks share them. A collective.

    :param facts: Names, dtypes and shapes of the weights.
    :param sums: ``[n]``, int64: of each weight what :func:`index_sum` gives for this rank's part of it.
    """
    dist.all_reduce(sums)
    return blake2b(repr((facts, sums.tolist())).encode(), digest_size=8).hexdigest()


def index_sum(part: Tensor, indices: Tensor) -> Tensor:
    """Return a sum of the bits of some slices of a weight, int64 ``[]``.

    Each slice is summed up as integers and counts an odd number of times, modulo 2 ** 64, so one changed
    element always changes it.

    :param part: ``[n, ...]``, contiguous.
    :param indices: ``[n]``, int64: where in the weight the slices are.
    """
    slices = part.view(_WORDS[part.element_size()]).view(len(indices), -1).sum(1, dtype=torch.int64)
    return (slices * (indices * (_INDICES - 2**64 - 1) + 1)).sum()


def first_values(shape: Sequence[int], seed: str) -> Tensor:
    """Return the first values of a ``lora_A`` on the host: those of peft's distribution.

    They are the same wherever they are drawn, on any number of ranks and by any engine.

    :param shape: ``[rank, in]``.
    """
    number = int.from_bytes(blake2b(seed.encode(), digest_size=8).digest(), "big") >> 1
    generator = torch.Generator().manual_seed(number)
    bound = shape[1] ** -0.5
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def log_sizes(layers: int, trained: int, total: int) -> None:
    """Log how much of a model is trained, on rank 0.

    :param layers: Number of layers with an adapter.
    """
    if dist.get_rank() == 0:
        text = "LoRA: %d layers have adapters; %s of %s parameters are trained"
        _log.info(text, layers, f"{trained:,}", f"{total:,}")
