"""Builds the Megatron model of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from anygauge.config import Config
from anygauge.engines.megatron.hf import open_tensors, read_config
from anygauge.engines.megatron.mapping import canonical_name, expand_rules, from_canonical, load_parameters
from anygauge.engines.megatron.options import MegatronOptions, megatron_options
from anygauge.engines.megatron.spec import KernelSpecProvider, decoder_spec
from anygauge.kernels.table import KernelTable, resolve_kernels
from anygauge.plugins import Plugins
from anygauge_hooks.models import ModelSpec, WeightRule
from anygauge_hooks.types import BackendSpec, Device

__all__ = ["Policy", "build_policy", "initialize_parallel"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A built model and what its family declares about it."""

    model: GPTModel
    kernels: KernelTable
    options: MegatronOptions
    spec: ModelSpec
    hf: Mapping[str, Any]
    """The Hugging Face config."""
    rules: tuple[WeightRule, ...]
    """Expanded."""

    @property
    def rotary(self) -> Any:
        """From positions ``[T]`` to cosines and sines."""
        return partial(self.spec.rotary, self.hf)

    def load(self, directory: Path) -> None:
        """Copy the weights of a Hugging Face directory into the model.

        :raises WeightMappingError: They do not fit; nothing was copied.
        """
        tied = self.spec.model_options(self.hf)["tie_embeddings"]
        with open_tensors(directory) as tensors:
            load_parameters(
                dict(self.model.named_parameters()),
                self.rules,
                tensors,
                self.options.transformer.num_query_groups,
                ignored={"lm_head.weight"} if tied else set(),
            )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its Hugging Face name."""
        stored = {canonical_name(name): p.detach() for name, p in self.model.named_parameters()}
        groups = self.options.transformer.num_query_groups
        heads = self.options.transformer.num_attention_heads // groups
        for rule in self.rules:
            yield from zip(rule.hf, from_canonical(rule, stored[rule.canonical], groups, heads), strict=True)


def initialize_parallel(seed: int, timeout_s: float) -> None:
    """Make Megatron's process groups and seed its random state; torch's default group exists already.

    :param timeout_s: Of every collective.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=timeout_s / 60)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def build_policy(
    config: Config, plugins: Plugins, backend: BackendSpec, device: Device, *, load: bool = True
) -> Policy:
    """Build the model of ``config.model.path`` on the device.

    :param load: Whether to read the directory's weights; without, they are undefined.
    """
    directory = config.model.path
    hf = read_config(directory)
    spec: ModelSpec = plugins.model(hf.get("architectures") or ())
    options = megatron_options(config, spec.transformer_config(hf))
    kernels = resolve_kernels(plugins, backend)
    policy = Policy(
        model=_build(spec, hf, options, plugins, backend, kernels),
        kernels=kernels,
        options=options,
        spec=spec,
        hf=hf,
        rules=tuple(expand_rules(spec.weight_rules(hf), options.transformer.num_layers)),
    )
    if load:
        policy.load(directory)
    policy.model.to(device.torch_device)
    return policy


def _build(
    spec: ModelSpec,
    hf: Mapping[str, Any],
    options: MegatronOptions,
    plugins: Plugins,
    backend: BackendSpec,
    kernels: KernelTable,
) -> GPTModel:
    provider = plugins.first("get_spec_provider", backend=backend, kernels=kernels)
    sizes = spec.model_options(hf)
    return GPTModel(
        options.transformer,
        decoder_spec(provider or KernelSpecProvider(kernels), options.transformer.num_layers),
        vocab_size=sizes["vocab_size"],
        max_sequence_length=sizes["max_sequence_length"],
        share_embeddings_and_output_weights=sizes["tie_embeddings"],
        position_embedding_type="none",  # core attention applies positions
        parallel_output=True,
    )
