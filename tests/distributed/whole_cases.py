"""A family of another package whose model is its own: Qwen3's decoder inside another module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import checkpoint_cases  # type: ignore[import-not-found]
import parallel_worker  # type: ignore[import-not-found]

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.megatron import LayerKind, megatron_model, with_megatron
from anygauge_hooks.models import ModelSpec

OWNER = "language_model"


class Package:
    """A package that registers the family."""

    @hookimpl
    def register_models(self) -> list[ModelSpec]:
        base: ModelSpec = load_plugins().get("register_models", "qwen3")
        family = replace(base, name="whole", architectures=("WholeForCausalLM",))
        model = megatron_model(base)
        whole = replace(
            model,
            layers=lambda hf: [LayerKind(build=build_layer)] * hf["num_hidden_layers"],
            weight_rules=lambda hf: [
                replace(rule, canonical=f"{OWNER}.{rule.canonical}") for rule in model.weight_rules(hf)
            ],
            build=build_model,
            output_owner=OWNER,
        )
        return [with_megatron(family, whole)]


def build_layer(provider: Any, config: Any) -> Any:
    from anygauge.engines.megatron.layers.spec import layer_spec

    return layer_spec(provider, LayerKind(), config)


def build_model(*, config: Any, hf: Mapping[str, Any], decoder: Any, **ends: Any) -> Any:
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import MegatronModule

    from anygauge.engines.megatron.weights.sharding import padded_vocab

    class Whole(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.pre_process, self.post_process = ends["pre_process"], ends["post_process"]
            self.vp_stage = ends["vp_stage"]
            self.share_embeddings_and_output_weights = hf["tie_word_embeddings"]
            self.language_model = GPTModel(
                config,
                decoder,
                vocab_size=padded_vocab(hf["vocab_size"], config.tensor_model_parallel_size),
                max_sequence_length=hf["max_position_embeddings"],
                share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
                position_embedding_type="none",
                parallel_output=True,
                **ends,
            )

        def set_input_tensor(self, tensor: Any) -> None:
            self.language_model.set_input_tensor(tensor)

        def shared_embedding_or_output_weight(self) -> Any:
            return self.language_model.shared_embedding_or_output_weight()

        def forward(self, **inputs: Any) -> Any:
            return self.language_model(**inputs)

    return Whole()


def train(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Return what :func:`parallel_worker.train` does."""
    with registered(context):
        return parallel_worker.train(config, context, case)


def saved(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Return what :func:`checkpoint_cases.saved` does."""
    with registered(context):
        return checkpoint_cases.saved(config, context, case)


def resumed(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Return what :func:`checkpoint_cases.resumed` does."""
    with registered(context):
        return checkpoint_cases.resumed(config, context, case)


@contextmanager
def registered(context: WorkerContext) -> Iterator[None]:
    """Let the family be known."""
    context.plugins.register(Package(), "whole")
    try:
        yield
    finally:
        context.plugins.manager.unregister(name="whole")
