"""Media of a micro-batch whose tokens are divided among ranks, on the stage that has the towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from anygauge.engines.media import MediaBatch, MediaReader, tower_batches
from anygauge.engines.megatron.layers.context_parallel import SequenceParts
from anygauge_hooks.media import Media

__all__ = ["StageReader", "media_batch"]


@dataclass(frozen=True, slots=True)
class StageReader(MediaReader):
    """Source of media, and their preparation on this rank."""

    is_first_stage: bool
    """Whether this rank has the towers."""
    part: int = 0
    parts: int = 1
    """Under sequence parallelism, of how many equal parts of its tokens this rank has which."""


def media_batch(
    shown: Sequence[Sequence[Media]], parts: SequenceParts, reader: StageReader, device: torch.device
) -> MediaBatch | None:
    """Return the inputs of all towers for packed samples; ``None`` for text, and on ranks without towers.

    :param shown: Media of each sample.
    :param parts: How the tokens are divided among ranks.
    """
    if not any(shown) or not reader.is_first_stage:
        return None
    starts = accumulate(parts.lengths, initial=0)
    return tower_batches(shown, starts, reader, device, partial(_own, parts=parts, reader=reader))


def _own(rows: Tensor, source: Tensor, parts: SequenceParts, reader: StageReader) -> tuple[Tensor, Tensor]:
    """Return those that are of this rank, whose tokens are a slice of its context-parallel part."""
    size = len(parts.own_rows) // reader.parts
    local = parts.local(rows) - reader.part * size
    own = ((local >= 0) & (local < size) & (parts.local(rows) >= 0)).nonzero().squeeze(1)
    return local.index_select(0, own), source.index_select(0, own)
