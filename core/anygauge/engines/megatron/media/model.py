"""Multimodal model: a decoder with towers beside its embedding.

Towers are replicated parts of the first pipeline stage: every tensor- and context-parallel rank has them, and
runs them over all contents of its micro-batch. Megatron imports happen here at module level: import this file
only after ``prepare_megatron``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from anygauge.engines.media import MediaBatch
from anygauge.engines.megatron.layers.modules import PackedSequences, await_weights
from anygauge.engines.megatron.layers.spec import first_stage_depth
from anygauge.engines.megatron.media.merge import Features, merge
from anygauge.engines.megatron.media.towers import Tower, build_tower
from anygauge.engines.megatron.weights.sharding import padded_vocab
from anygauge.kernels.table import KernelTable
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.media import TowerSpec

__all__ = ["Composer", "MultimodalModel"]


class MultimodalModel(GPTModel):
    """Megatron's model with towers, which are children of its first stage under their own names."""

    def __init__(self, *args: Any, towers: Sequence[Tower], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._towers = tuple(towers)
        for tower in towers:
            self.add_module(tower.spec.name, tower.module)
        # Weights are gathered, and gradients sent, in the order in which modules were added.
        first = {"embedding", *(tower.spec.name for tower in towers)}
        for name in [name for name in self._modules if name not in first]:
            self._modules[name] = self._modules.pop(name)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        media: MediaBatch | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the stage; the first one puts features in the places of their tokens.

        :param media: Inputs of the towers; ``None`` for a micro-batch of text.
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=input_ids, position_ids=position_ids)
            hidden = self._with_media(hidden, media, packed_seq_params)
        output: Tensor = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=hidden,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )
        return output

    def _with_media(self, hidden: Tensor, media: MediaBatch | None, packed: PackedSequences) -> Tensor:
        packed.deposits = []
        sequence = self.config.sequence_parallel
        sum_over = parallel_state.get_tensor_model_parallel_group() if sequence else None
        for tower in self._towers:
            await_weights(
                tower.module
            )  # a text alone calls none of its modules, and some read others' weights
            features = _features(tower, media, hidden.device)
            if features is not None:
                hidden, deposits = merge(hidden, features, sum_over)
                packed.deposits.append(deposits)
        return hidden


def _features(tower: Tower, media: MediaBatch | None, device: torch.device) -> Features | None:
    """Return a tower's features of a micro-batch.

    One that learns takes part in each, since whoever sums gradients waits for all of them.
    """
    part = None if media is None else media.get(tower.spec.name)
    if part is not None:
        main, levels = tower.features(part.inputs, part.count)
        return Features(main, levels, part.rows, part.source)
    if not tower.is_learning:
        return None
    nowhere = torch.empty(0, dtype=torch.int64, device=device)
    return Features(*tower.blank(), nowhere, nowhere)


class Holder(MegatronModule):
    """A wrapper of one model that looks like that model to Megatron."""

    def __init__(self, name: str, held: Any) -> None:
        super().__init__(held.config)
        self._name = name
        self.add_module(name, held)
        self.model_type, self.vp_stage = held.model_type, held.vp_stage
        self.pre_process, self.post_process = held.pre_process, held.post_process
        self.share_embeddings_and_output_weights = held.share_embeddings_and_output_weights

    def set_input_tensor(self, tensor: Any) -> None:
        """Set the input from the previous pipeline stage."""
        self._modules[self._name].set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the embedding, if the output layer is the same."""
        weight: Tensor | None
        weight = self._modules[self._name].shared_embedding_or_output_weight()
        return weight

    def forward(self, **inputs: Any) -> Any:
        """Run the part."""
        return self._modules[self._name](**inputs)


@dataclass(frozen=True, slots=True)
class Composer:
    """Builds models from a decoder and towers; a family's builder gets it as ``compose``."""

    hf: Mapping[str, Any]
    sizes: Mapping[str, Any]
    """Sizes from ``ModelSpec.model_options``."""
    kernels: KernelTable
    built: frozenset[str]
    """Names of the towers that a run has."""
    recomputes: bool
    """Whether towers compute their layers again in the backward pass."""

    def __call__(
        self,
        towers: Sequence[TowerSpec],
        config: TransformerConfig,
        decoder: Any,
        *,
        pre_process: bool,
        **ends: Any,
    ) -> MultimodalModel:
        """Return this stage of a model.

        :param towers: Towers of the family, except those of which a run has no media.
        :param decoder: The spec of its layers.
        :param ends: ``post_process`` and ``vp_stage``.
        :raises ConfigError: Layers that get further features are not all on the first stage.
        """
        used = [tower for tower in towers if tower.name in self.built]
        _check_levels(self.hf, used, first_stage_depth(config))
        return MultimodalModel(
            config,
            decoder,
            vocab_size=padded_vocab(self.sizes["vocab_size"], config.tensor_model_parallel_size),
            max_sequence_length=self.sizes["max_sequence_length"],
            share_embeddings_and_output_weights=self.sizes["tie_embeddings"],
            position_embedding_type="none",  # core attention applies positions
            parallel_output=True,
            pre_process=pre_process,
            towers=[self._tower(each, config.params_dtype) for each in used] if pre_process else [],
            **ends,
        )

    def held(self, name: str, model: MultimodalModel) -> Holder:
        """Return a model whose only part is a model: what ``MegatronModel.output_owner`` names.

        :param name: Name of the part.
        """
        return Holder(name, model)

    def _tower(self, spec: TowerSpec, dtype: torch.dtype) -> Tower:
        return build_tower(spec, self.hf, self.kernels, dtype, recomputes=self.recomputes)


def _check_levels(hf: Mapping[str, Any], towers: Sequence[TowerSpec], depth: int) -> None:
    for tower in towers:
        if (levels := tower.levels(hf)) > depth:
            raise ConfigError(
                f"The tower {tower.name!r} adds features after the first {levels} layers, and the first "
                f"pipeline stage has {depth}.",
                hint="Lower train.parallel.pipeline or virtual_pipeline, or give the first stage more layers "
                "with train.megatron.pipeline_model_parallel_layout.",
            )
