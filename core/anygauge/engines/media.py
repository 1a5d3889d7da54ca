"""Media of a micro-batch: distinct contents, positions, and the tokens that take their features."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anygauge.config.modalities import TOWERS
from anygauge.data.batch import ranges
from anygauge.device import on_device
from anygauge_hooks.errors import MediaMismatchError
from anygauge_hooks.media import Content, Media, MediaKind, MediaSpec, MediaStore, TowerSpec

__all__ = [
    "MediaBatch",
    "MediaReader",
    "TowerBatch",
    "freeze",
    "media_positions",
    "module_names",
    "tower_batches",
]


@dataclass(frozen=True, slots=True)
class TowerBatch:
    """Inputs of one tower for a micro-batch. ``N`` features, ``n`` tokens of this rank."""

    inputs: Mapping[str, Any]
    """Keyword arguments, from ``TowerSpec.inputs``."""
    count: int
    """``N``."""
    rows: Tensor
    """``[n]``, int64: which of this rank's tokens get a feature."""
    source: Tensor
    """``[n]``, int64: which feature each of them gets."""


MediaBatch = Mapping[str, TowerBatch]
"""Inputs of the towers for a micro-batch, by name; a tower without inputs is absent."""

Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From rows and sources of all tokens to those of this rank."""


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Source of media, and their preparation."""

    spec: MediaSpec
    hf: Mapping[str, Any]
    store: MediaStore | None

    @property
    def towers(self) -> Sequence[TowerSpec]:
        """Return the towers of the model."""
        return self.spec.towers(self.hf)

    def content(self, media: Media) -> Content:
        """Return a content.

        :raises MediaMismatchError: It is not there.
        """
        try:
            if self.store is not None:
                return self.store.get(media.key)
        except KeyError:
            pass
        raise MediaMismatchError(
            f"The {media.kind} {media.source or media.key} of a sample is not in the store of the host.",
            hint="The media of the sample were dropped too early, or the worker has no store.",
        )


def media_positions(
    sequences: Sequence[Tensor], shown: Sequence[Sequence[Media]], reader: MediaReader
) -> Tensor | None:
    """Return the positions of packed tokens, ``[3, T]``, int64; ``None`` for those of text.

    :param sequences: Tokens of each sample.
    :param shown: Media of each sample.
    :raises MediaMismatchError: Placeholders and media differ.
    """
    holders = np.array(reader.spec.forbidden(reader.hf), dtype=np.int64)
    for tokens, media in zip(sequences, shown, strict=True):
        _check(tokens, media, holders)
    if not any(shown):
        return None
    positions = [
        reader.spec.positions(reader.hf, len(tokens), media)
        if media
        else np.broadcast_to(np.arange(len(tokens), dtype=np.int64), (3, len(tokens)))
        for tokens, media in zip(sequences, shown, strict=True)
    ]
    return torch.from_numpy(np.concatenate(positions, axis=1))


def _check(tokens: Tensor, shown: Sequence[Media], holders: Any) -> None:
    """Refuse a sample that has placeholders without media, or media elsewhere."""
    held = np.isin(tokens.numpy(), holders)
    taken = np.zeros(len(held), dtype=np.int64)
    for media in shown:
        for start, count in media.spans:
            taken[start : start + count] += 1
    if np.array_equal(held.astype(np.int64), taken):
        return
    names = ", ".join(media.source or media.key for media in shown) or "none"
    wanted = sum(media.num_tokens for media in shown)
    elsewhere = ", in other places" if held.sum() == wanted else ""
    raise MediaMismatchError(
        f"A sample of {len(held)} tokens has {int(held.sum())} placeholders, and its media ({names}) have "
        f"{wanted}{elsewhere}.",
        hint="Each placeholder stands for one feature: what makes samples adds media with their tokens.",
    )


def freeze(model: nn.Module, parts: Collection[str], towers: Sequence[TowerSpec]) -> None:
    """Freeze parts of a model.

    :param parts: Those of ``train.freeze``.
    """
    frozen = [
        tower for tower in towers if any(tower.kinds & TOWERS[part] for part in TOWERS if part in parts)
    ]
    names, frozen_names = (set().union(*map(module_names, each)) for each in (towers, frozen))
    for name, parameter in model.named_parameters():
        owners = names.intersection(name.split("."))
        if owners & frozen_names or ("language" in parts and not owners):
            parameter.requires_grad_(False)


def module_names(tower: TowerSpec) -> set[str]:
    """Return the names of a tower's modules in a model: its own, and a projector's beside it."""
    return {tower.name, *(prefix.removesuffix(".").rpartition(".")[2] for prefix in tower.hf_prefixes)}


def tower_batches(
    shown: Sequence[Sequence[Media]],
    starts: Iterable[int],
    reader: MediaReader,
    device: torch.device,
    choose: Choose = lambda rows, source: (rows, source),
) -> MediaBatch:
    """Return the inputs of all towers for the samples of a micro-batch.

    :param shown: Media of each sample.
    :param starts: Row of each sample's first token, among the tokens of the micro-batch.
    :param choose: Which of them are this rank's.
    :raises MediaMismatchError: The model has no tower for a kind of media, or a content is not there.
    """
    placed = [each.moved(by) for media, by in zip(shown, starts, strict=False) for each in media]
    _check_kinds({media.kind for media in placed}, reader.towers)
    seen = {tower: [media for media in placed if media.kind in tower.kinds] for tower in reader.towers}
    return {
        tower.name: _tower_batch(tower, each, reader, device, choose) for tower, each in seen.items() if each
    }


def _check_kinds(kinds: set[MediaKind], towers: Sequence[TowerSpec]) -> None:
    if unseen := kinds.difference(*(tower.kinds for tower in towers)):
        raise MediaMismatchError(
            f"Samples have {', '.join(sorted(unseen))}, for which the model has no tower.",
            hint="Name the kind in model.modalities, if the model's family takes it.",
        )


def _tower_batch(
    tower: TowerSpec,
    placed: Sequence[Media],
    reader: MediaReader,
    device: torch.device,
    choose: Choose,
) -> TowerBatch:
    """Return the batch of a tower.

    :param placed: Media with spans among the packed tokens.
    """
    distinct = list({media.key: media for media in placed}.values())
    ends = list(accumulate(media.num_tokens for media in distinct))
    first = {media.key: end - media.num_tokens for media, end in zip(distinct, ends, strict=True)}
    spans = [span for media in placed for span in media.spans]
    rows = ranges(torch.tensor([start for start, _ in spans]), tuple(count for _, count in spans))
    counts = tuple(media.num_tokens for media in placed)
    source = ranges(torch.tensor([first[media.key] for media in placed]), counts)
    rows, source = choose(rows, source)
    return TowerBatch(
        inputs=tower.inputs(reader.hf, [reader.content(media) for media in distinct], device),
        count=ends[-1],
        rows=on_device(rows, device),
        source=on_device(source, device),
    )
