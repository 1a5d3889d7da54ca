"""Vision and audio towers of a transformers model: features in the places of their placeholder tokens.

Contents become a tower's inputs by the same function as in the Megatron engine and in the embedded rollout
engine, and positions are the family's own, so that all of them compute the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from anygauge.engines.host_lengths import take_lengths
from anygauge.engines.media import MediaBatch, TowerBatch, module_names
from anygauge_hooks.errors import ConfigError, MediaMismatchError
from anygauge_hooks.media import Content, MediaKind, MediaSpec, TowerSpec

__all__ = ["Tower", "Towers", "take_out"]


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower of a model that was built."""

    spec: TowerSpec
    hf: Mapping[str, Any]
    module: nn.Module

    def features(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the features of packed contents, and those of each level, ``[N, H]``.

        :param inputs: Result of ``TowerSpec.inputs``.
        """
        given = dict(inputs)
        take_lengths(given)
        return self.spec.outputs(self.module(**given))

    def smallest(self, device: torch.device, count: int = 1) -> Mapping[str, Any]:
        """Return the inputs of some contents that are as small as they can be, and differ in their values."""
        return self.spec.inputs(
            self.hf, [_patterned(self.spec.blank(self.hf), i) for i in range(count)], device
        )


def _patterned(content: Content, number: int) -> Content:
    """Return a content of other values: those of a blank one hide an attention that mixes contents."""
    pattern = torch.arange(content.data.size) * (37 + 2 * number) % 251
    data = pattern.reshape(content.data.shape).numpy().astype(content.data.dtype)
    return content._replace(data=data if content.kind != "audio" else data / 251)


class Towers:
    """The towers of a model, run over a micro-batch.

    :param model: Model of transformers.
    :param specs: Those of the run's media.
    :raises ConfigError: The model has no module of a tower's name.
    """

    def __init__(self, model: Any, specs: Sequence[TowerSpec], hf: Mapping[str, Any]) -> None:
        self._model = model
        self._towers = [Tower(spec, hf, _owner(model, spec.name).get_submodule(spec.name)) for spec in specs]

    def __iter__(self) -> Iterator[Tower]:
        return iter(self._towers)

    def embed(self, ids: Tensor, media: MediaBatch) -> dict[str, Any]:
        """Return the keyword arguments of the decoder that stand for tokens and media.

        :param ids: ``[B, T]``, int64.
        :param media: Inputs of the towers, whose rows are among all ``B * T``.
        """
        embedded = self._model.get_input_embeddings()(ids)
        flat, deep = embedded.flatten(0, 1), {}
        for tower in self._towers:
            part = media.get(tower.spec.name)
            if part is None and not self._takes_part(tower):
                continue
            rows, source, (main, levels) = _features(tower, part, ids.device)
            flat = flat.index_copy(0, rows, F.embedding(source, main).to(flat.dtype))
            if levels:
                shown = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
                deep = {
                    "visual_pos_masks": shown.index_fill(0, rows, value=True).view(ids.shape),
                    "deepstack_visual_embeds": [F.embedding(source, level) for level in levels],
                }
        return {"inputs_embeds": flat.view_as(embedded), **deep}

    def _takes_part(self, tower: Tower) -> bool:
        """Return whether a tower runs without media: ranks gather weights and sum gradients together."""
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in tower.module.parameters())
        return learns or dist.get_world_size() > 1


def _features(
    tower: Tower, part: TowerBatch | None, device: torch.device
) -> tuple[Tensor, Tensor, tuple[Tensor, Sequence[Tensor]]]:
    """Return the rows of features in ascending order, which feature each gets, and all features.

    :param part: ``None`` for a blank content, whose features no row gets.
    """
    if part is None:
        nowhere = torch.empty(0, dtype=torch.int64, device=device)
        return nowhere, nowhere, tower.features(tower.smallest(device))
    main, levels = tower.features(part.inputs)
    if len(main) != part.count:
        raise MediaMismatchError(
            f"The tower {tower.spec.name!r} made {len(main)} features, for {part.count} placeholders.",
            hint="The processor of the model's family counts placeholders differently from its tower.",
        )
    rows, order = part.rows.sort()  # the decoder adds further features in the order of their places
    return rows, part.source.index_select(0, order), (main, levels)


def take_out(model: Any, media: MediaSpec, hf: Mapping[str, Any], kinds: Collection[MediaKind]) -> list[str]:
    """Remove the towers that a run has no media for, and return how their tensors' names begin.

    :raises ConfigError: There is no tower for a kind.
    """
    specs = media.towers(hf)
    if unseen := set(kinds).difference(*(tower.kinds for tower in specs)):
        raise ConfigError(
            f"The run has {', '.join(sorted(unseen))}, and {type(model).__name__} has no tower for it.",
            hint="Use a model that has one, or leave it out of data.multimodal_keys and model.modalities.",
        )
    unused = [tower for tower in specs if not tower.kinds & set(kinds)]
    for tower in unused:
        for name in module_names(tower):
            setattr(_owner(model, name), name, None)
    return [prefix for tower in unused for prefix in tower.hf_prefixes]


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module that has a tower of this name."""
    for owner in model.modules():
        if name in dict(owner.named_children()):
            return owner
    raise ConfigError(
        f"{type(model).__name__} has no tower {name!r}.",
        hint="transformers has changed; take a version in the range that pyproject.toml names.",
    )
