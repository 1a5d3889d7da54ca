"""Vision and audio inputs of a transformers model.

Contents become a tower's inputs by the same function as in the trainer, and positions are the family's own,
so that both see the same. Each content is encoded once for a batch, however many prompts show it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from anygauge_hooks.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from anygauge.serving.embedded.sampling import PendingSample
    from anygauge_hooks.media import Content, Media, MediaKind, MediaSpec, MediaStore, TowerSpec
    from anygauge_hooks.models import ModelSpec

__all__ = ["MultimodalContext", "MultimodalTowers"]


class MultimodalContext(NamedTuple):
    """Specs and store that an engine needs to feed media to its model."""

    spec: MediaSpec
    hf: Mapping[str, Any]
    """The Hugging Face config."""
    kinds: Collection[MediaKind]
    """Media kinds of the run; towers of others are left out of the model."""
    store: MediaStore | None
    """``None`` for a run without media."""
    unused: Collection[str] = ()
    """How names of tensors in checkpoints begin that the model does not have."""

    @classmethod
    def of(
        cls, spec: ModelSpec, hf: Mapping[str, Any], kinds: Collection[MediaKind], store: MediaStore | None
    ) -> MultimodalContext:
        """Return the context of a family with media."""
        assert spec.media is not None
        return cls(spec.media, hf, kinds, store, spec.unused_weights(hf))

    def left_out(self) -> list[TowerSpec]:
        """Return the towers that the run does without."""
        return [tower for tower in self.spec.towers(self.hf) if not tower.kinds & set(self.kinds)]


class _Placed(NamedTuple):
    """Positions of a tower's features."""

    places: Tensor
    """``[N]``, ascending, in the flattened prompts."""
    source: Tensor
    """``[N]``: the feature that goes to each."""
    contents: list[Content]
    """Contents that the features are computed from, each once."""
    total: int
    """Number of features."""


class MultimodalTowers:
    """The towers of a model, and where their features go.

    :param model: Model of transformers, with every tower of its class. Towers that the run does not need are
        taken out of it.
    """

    def __init__(self, model: Any, multimodal: MultimodalContext) -> None:
        self._model = model
        self._context = multimodal
        for spec in multimodal.left_out():
            for prefix in spec.hf_prefixes:  # a tower may have a projector beside it
                _take_out(model, prefix.removesuffix(".").rpartition(".")[2])
        self._towers = [
            (spec, _find(model, spec.name))
            for spec in multimodal.spec.towers(multimodal.hf)
            if spec.kinds & set(multimodal.kinds)
        ]

    def check(self, media: Sequence[Media], name: str) -> None:
        """Refuse media that cannot be shown.

        :param name: Name of the prompt.
        :raises RolloutError: A medium is of a kind that the model has no tower for, or not in the store.
        """
        for medium in media:
            if medium.kind not in self._context.kinds:
                raise RolloutError(
                    f"{name} has {medium.kind}, and the run's model takes "
                    f"{', '.join(sorted(self._context.kinds)) or 'only text'}.",
                    hint="Add the kind to model.modalities.",
                )
            if self._context.store is None or not self._context.store.has(medium.key):
                raise RolloutError(
                    f"{name} shows {medium.kind} {medium.key} ({medium.source or 'unknown source'}), which "
                    "is not in the run's store.",
                    hint="Media are dropped when their prompt is done; keep nothing of it for later prompts.",
                )

    def positions(self, row: PendingSample) -> Tensor:
        """Return the positions of a prompt, int64 ``[3, S]``, on the host."""
        positions = self._context.spec.positions(self._context.hf, len(row.tokens), row.media)
        return torch.from_numpy(np.ascontiguousarray(positions))

    def logits(self, rows: Sequence[PendingSample], ids: Tensor, **arguments: Any) -> Tensor:
        """Run prompts, with features in the places of their media.

        :param ids: ``[P, T]``, int64, padded on the left.
        :param arguments: Arguments of the decoder.
        :returns: Logits of the last position ``[P, V]``.
        """
        embedded = self._model.get_input_embeddings()(ids)
        flat = embedded.view(-1, embedded.shape[-1])
        levels: dict[str, Any] = {}
        for spec, module in self._towers:
            placed = self._placed(rows, ids.shape[1], spec.kinds)
            if not placed.total:
                continue
            features, deeper = self._features(spec, module, placed)
            flat.index_copy_(0, placed.places, features.to(flat.dtype))
            if deeper:
                shown = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
                shown.index_fill_(0, placed.places, value=True)
                levels = {"visual_pos_masks": shown.view(ids.shape), "deepstack_visual_embeds": deeper}
        output = self._model.get_decoder()(inputs_embeds=embedded, use_cache=True, **levels, **arguments)
        logits: Tensor = self._model.get_output_embeddings()(output.last_hidden_state[:, -1])
        return logits

    def _placed(self, rows: Sequence[PendingSample], width: int, kinds: Collection[MediaKind]) -> _Placed:
        """Return where features go.

        :param width: Width of the padded prompts.
        """
        firsts: dict[str, int] = {}
        contents: list[Content] = []
        total = 0
        pieces: list[tuple[range, range]] = []
        for number, row in enumerate(rows):
            shift = (number + 1) * width - len(row.tokens)
            for medium in (each for each in row.media if each.kind in kinds):
                if medium.key not in firsts:
                    firsts[medium.key] = total
                    assert self._context.store is not None, "checked before"
                    contents.append(self._context.store.get(medium.key))
                    total += medium.num_tokens
                pieces += _pieces(medium, shift, firsts[medium.key])
        pieces.sort(key=lambda piece: piece[0].start)
        places, source = (
            torch.tensor([place for piece in pieces for place in piece[side]], device=self._model.device)
            for side in (0, 1)
        )
        return _Placed(places, source, contents, total)

    def _features(self, spec: TowerSpec, module: nn.Module, placed: _Placed) -> tuple[Tensor, list[Tensor]]:
        """Return the features of the last layer and of the levels, in the order of their places."""
        inputs = dict(spec.inputs(self._context.hf, placed.contents, self._model.device))
        inputs.pop("lengths", None)
        features, levels = spec.outputs(module(**inputs))
        if len(features) != placed.total:
            raise RolloutError(
                f"The tower {spec.name!r} made {len(features)} features for {placed.total} placeholders.",
                hint="The processor of the model's family counts placeholders differently from its tower.",
            )
        source = placed.source
        return features.index_select(0, source), [level.index_select(0, source) for level in levels]


def _pieces(medium: Media, shift: int, first: int) -> Iterator[tuple[range, range]]:
    """Yield, for each span of a medium, its places and the rows of its features."""
    for start, count in medium.spans:
        yield range(shift + start, shift + start + count), range(first, first + count)
        first += count


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module that has a tower of this name."""
    for owner in model.modules():
        if name in dict(owner.named_children()):
            return owner
    raise RolloutError(
        f"{type(model).__name__} has no tower {name!r}.",
        hint="transformers has changed; take a version in the range that pyproject.toml names.",
    )


def _find(model: nn.Module, name: str) -> nn.Module:
    return _owner(model, name).get_submodule(name)


def _take_out(model: nn.Module, name: str) -> None:
    setattr(_owner(model, name), name, None)
