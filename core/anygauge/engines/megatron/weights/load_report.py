"""Report of checkpoint tensors that the model does not use, logged once by one rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.agreement import on_every_rank
from anygauge.engines.carried_weights import warn_of_left_out
from anygauge.engines.dequantize import open_unquantized
from anygauge.engines.hf_directory import TensorReader
from anygauge.engines.megatron.weights.mapping import TensorRule, left_out
from anygauge.wording import listed

__all__ = ["tell_what_is_lost"]

_NAMES = TypeAdapter(list[str])
_log = logging.getLogger(__name__)


def tell_what_is_lost(
    directory: Path,
    stored: Mapping[str, Tensor],
    rules: Sequence[TensorRule],
    unused: Sequence[str],
    carried: Sequence[str],
    dtype: torch.dtype,
) -> None:
    """Warn of unused tensors, and of tensors that lose precision. A collective.

    Nothing is said of a checkpoint that has no tensor in so few bits: it was asked for.

    :param stored: This rank's tensors, by canonical name.
    :param rules: Rules of the whole model.
    :param unused: How names begin of what the model does not have.
    :param carried: Those that exports have nevertheless.
    :param dtype: Dtype of the model.
    """
    with on_every_rank(open_unquantized(directory), directory) as source:
        rounded = sorted(set().union(*all_gather_values(_rounded(stored, rules, source), _NAMES)))
        if dist.get_rank() != 0:
            return
        warn_of_left_out(directory, left_out(rules, source.names, unused), carried)
        if rounded and any(source.dtype(name).itemsize <= dtype.itemsize for name in source.names):
            count, names = len(rounded), listed(rounded)
            _log.warning("%s: %d tensors are rounded to train.dtype: %s", directory, count, names)


def _rounded(stored: Mapping[str, Tensor], rules: Sequence[TensorRule], source: TensorReader) -> list[str]:
    """Return the Hugging Face names of what this rank holds in fewer bits than the checkpoint."""
    return [
        name
        for rule in rules
        if rule.canonical in stored
        for name in rule.hf
        if source.dtype(name).itemsize > stored[rule.canonical].dtype.itemsize
    ]
