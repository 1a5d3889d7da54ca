"""Builds this rank's part of the Megatron model of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import TypeAdapter
from torch import Tensor, nn

from anygauge.config import Config
from anygauge.config.modalities import modalities, weight_expressions
from anygauge.config.roles import as_language_model
from anygauge.config.schema import Parallel
from anygauge.distributed.all_gather import all_gather_values
from anygauge.distributed.layout import Layout
from anygauge.engines.agreement import on_every_rank
from anygauge.engines.dequantize import open_unquantized
from anygauge.engines.freezing import check_learns, frozen_tensors
from anygauge.engines.hf_directory import read_config
from anygauge.engines.lora.layers import log_frozen_experts
from anygauge.engines.media import freeze
from anygauge.engines.megatron.checkpoints.shards import LocalTensor, held_tensors
from anygauge.engines.megatron.config_fields import unknown_values
from anygauge.engines.megatron.layers.embedding import replace_embeddings
from anygauge.engines.megatron.layers.modules import CoreAttention
from anygauge.engines.megatron.layers.output import HiddenOutput, output_owner, replace_output_layer
from anygauge.engines.megatron.layers.provider import SpecProvider, complete
from anygauge.engines.megatron.layers.spec import decoder_spec
from anygauge.engines.megatron.layers.value_head import SCORE, ValueHead, ZeroFilled, value_model
from anygauge.engines.megatron.lora import Adapters, Merged, add_adapters
from anygauge.engines.megatron.media.model import Composer
from anygauge.engines.megatron.media.towers import with_modalities
from anygauge.engines.megatron.options import MegatronOptions, megatron_options
from anygauge.engines.megatron.weights.canonical import canonical_tensors
from anygauge.engines.megatron.weights.gathering import Gathering, plan_gathering
from anygauge.engines.megatron.weights.load_report import tell_what_is_lost
from anygauge.engines.megatron.weights.loading import load_weights
from anygauge.engines.megatron.weights.mapping import (
    TensorRule,
    hf_tensors,
    model_rules,
    tied_weights,
    unused_prefixes,
)
from anygauge.engines.megatron.weights.sharding import ShardPosition, padded_vocab
from anygauge.kernels.loss_budget import LossBudget
from anygauge.kernels.table import KernelTable, resolve_kernels
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.kernels import PrefersKernels
from anygauge_hooks.media import MediaKind, TowerSpec
from anygauge_hooks.megatron import MegatronModel, megatron_model
from anygauge_hooks.models import ModelSpec
from anygauge_hooks.types import BackendSpec, Device, LoadedPlugins

__all__ = ["Policy", "build_policy", "initialize_parallel", "rank_position"]

_RANKS = TypeAdapter(list[int])


@dataclass(frozen=True)
class Policy:
    """A built model and what its family declares about it."""

    chunks: Sequence[GPTModel]
    """Model chunks of this rank; several under the interleaved schedule."""
    kernels: KernelTable
    options: MegatronOptions
    spec: ModelSpec
    hf: Mapping[str, Any]
    """The Hugging Face config."""
    rules: tuple[TensorRule, ...]
    """Tensor rules of the whole model, without adapters."""
    position: ShardPosition
    """Position of this rank in the groups that shard tensors."""
    fresh: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Shapes, by Hugging Face name, of what a checkpoint may lack; that starts at 0."""
    adapters: Adapters = field(default_factory=Adapters)

    def rotary(self, positions: Tensor) -> Sequence[Tensor]:
        """Return cosines and sines of positions ``[T]``, and then those of local layers, if others."""
        return _all_rotary(megatron_model(self.spec), self.hf, positions)

    @property
    def output_owner(self) -> str:
        """Path from a chunk to the module that owns the output layer."""
        return megatron_model(self.spec).output_owner

    @property
    def has_towers(self) -> bool:
        """Return whether the model has towers, on its first stage."""
        return bool(_towers(self.spec, self.hf))

    @property
    def can_pack_prefixes(self) -> bool:
        """Return whether samples can share a prompt: a model of text, whose layers all have our attention."""
        kinds = megatron_model(self.spec).layers(self.hf)
        has_attention = all(kind.attention != "gated_delta" and kind.build is None for kind in kinds)
        modules = (named for chunk in self.chunks for named in chunk.named_modules())
        # a provider's own need not know of keys that lie elsewhere
        is_ours = all(
            isinstance(module, CoreAttention) for name, module in modules if name.endswith(".core_attention")
        )
        return has_attention and is_ours and not self.has_towers

    @property
    def forbidden(self) -> Sequence[int]:
        """Return tokens that are never sampled: placeholders of media."""
        return () if self.spec.media is None else self.spec.media.forbidden(self.hf)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers, by canonical name."""
        return canonical_tensors(self.chunks, self.position.expert_rank)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters; stacked experts are one."""
        return [each for chunk in self.chunks for each in chunk.parameters()]

    @property
    def all_rules(self) -> tuple[TensorRule, ...]:
        """Return the rules of :attr:`tensors`, on any rank."""
        return (*self.rules, *self.adapters.rules)

    @property
    def kept_rules(self) -> tuple[TensorRule, ...]:
        """Return the rules of :meth:`kept`, on any rank."""
        return self.adapters.trained_rules or self.rules

    def held(self) -> list[LocalTensor]:
        """Return this rank's tensors with their place in the whole ones."""
        return held_tensors(self.chunks, self.tensors, self.all_rules, self.position)

    def kept(self) -> list[LocalTensor]:
        """Return those that a checkpoint has: all, or what is trained beside a frozen base."""
        trained = {rule.canonical for rule in self.adapters.trained_rules}
        return [each for each in self.held() if not trained or each.name in trained]

    @property
    def base_tensors(self) -> dict[str, Tensor]:
        """This rank's tensors without those of adapters."""
        return {name: tensor for name, tensor in self.tensors.items() if not self.adapters.owns(name)}

    def load(self, directory: Path) -> None:
        """Copy the weights of a Hugging Face directory into the model. A collective.

        :raises WeightMappingError: They do not fit; on every rank, and nothing was copied.
        """
        with on_every_rank(open_unquantized(directory), directory) as source:
            unused = unused_prefixes(self.spec, self.hf)
            filled = ZeroFilled(source, self.fresh)
            tied = tied_weights(self.spec, self.hf)
            load_weights(self.base_tensors, self.rules, filled, self.position, unused=unused, tied=tied)

    def weights(self, *, on_every_rank: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight, whole and merged with its adapter, under its Hugging Face name. A collective.

        :param on_every_rank: Or on rank 0 alone; the others get nothing, and must still iterate.
        """
        stored = Merged(self._detached(), self.adapters)
        if on_every_rank and self.position == ShardPosition():
            yield from hf_tensors((rule, stored[rule.canonical]) for rule in self.rules)
        else:
            yield from self._gathering.weights(stored, on_every_rank=on_every_rank)

    def weights_by_sender(self) -> dict[int, Iterator[tuple[str, Tensor]]]:
        """Return the weights by the rank of the first copy that sends them; the others of it give shards.

        A collective. Every rank iterates each of them, in order; ranks of other copies have no part in them.
        """
        stored = Merged(self._detached(), self.adapters)
        return {sender: self._gathering.sent_by(sender, stored) for sender in self._senders}

    @cached_property
    def _senders(self) -> list[int]:
        return all_gather_values(self._gathering.senders, _RANKS)[0]

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that is trained beside a frozen base, as :meth:`weights` does on rank 0. A collective."""
        tensors, rules = self._detached(), self.adapters.trained_rules
        group = _replica_group(self.position)
        yield from plan_gathering(tensors, rules, self.position, group).weights(tensors, on_every_rank=False)

    @cached_property
    def _gathering(self) -> Gathering:
        return plan_gathering(self._detached(), self.rules, self.position, _replica_group(self.position))

    @cached_property
    def _sent(self) -> dict[str, Tensor]:
        """Cached result of :attr:`tensors`: looking them up takes longer than many a push."""
        return self.tensors

    def _detached(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._sent.items()}


def rank_position() -> ShardPosition:
    """Return where this rank stands in the groups that divide tensors."""
    return ShardPosition(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        stages=parallel_state.get_pipeline_model_parallel_world_size(),
    )


def _replica_group(place: ShardPosition) -> dist.ProcessGroup | None:
    """Return ranks that hold the whole model together, as few as Megatron has a group for; or ``None``."""
    if place.tensor % (experts := place.expert * place.expert_tensor) == 0:
        return parallel_state.get_model_parallel_group()
    if experts % place.tensor == 0:
        return parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return None


def initialize_parallel(seed: int, timeout_s: float, sizes: Parallel | None = None) -> None:
    """Make Megatron's process groups and seed its random state; torch's default group exists already.

    :param timeout_s: Timeout of every collective.
    :param sizes: How the model is divided; ``None`` keeps it whole.
    :raises ConfigError: The sizes do not divide the ranks.
    """
    sizes = sizes or Parallel()
    Layout(dist.get_world_size(), sizes)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=_chunks_per_rank(sizes),
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            distributed_timeout_minutes=timeout_s / 60,
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _chunks_per_rank(sizes: Parallel) -> int | None:
    return sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None


def build_policy(
    config: Config,
    plugins: LoadedPlugins,
    backend: BackendSpec,
    device: Device,
    *,
    load: bool = True,
    is_critic: bool = False,
) -> Policy:
    """Build this rank's part of the model of ``config.model.path`` on the device.

    :param load: Whether to read the directory's weights; without, they are undefined.
    :param is_critic: Whether it has a value head for an output layer.
    """
    directory = config.model.path
    spec, hf = _family_of(config, plugins, is_critic=is_critic)
    model = megatron_model(spec)
    architecture = model.transformer_config(hf)
    if model.build is None and not any(kind.build for kind in model.layers(hf)):
        _check_known(spec.name, architecture)
    options = megatron_options(config, architecture)
    kernels = resolve_kernels(plugins, backend, LossBudget(config.train.loss_memory_gib, device))
    provided = plugins.first("get_spec_provider", backend=backend, kernels=kernels, config=config)
    if isinstance(provided, PrefersKernels):
        kernels = kernels.preferring(config.train.provider or backend.name, provided.preferred_kernels())
    default = SpecProvider(
        kernels,
        unit_angles=_has_unit_rope_scale(model, hf),
        remakes=config.train.recompute in ("elementwise", "selective"),
    )
    together = _composer(spec, hf, kernels, config)
    build = partial(_build, spec, hf, options, complete(provided, default), together)
    stages = _chunks_per_rank(config.train.parallel)
    policy = Policy(
        chunks=[build(vp_stage) for vp_stage in ([None] if stages is None else range(stages))],
        kernels=kernels,
        options=options,
        spec=spec,
        hf=hf,
        rules=tuple(model_rules(spec, hf)),
        position=rank_position(),
        fresh={SCORE: (1, options.transformer.hidden_size)} if is_critic else {},
    )
    for chunk in policy.chunks:
        replace_output_layer(chunk, ValueHead if is_critic else HiddenOutput, model.output_owner)
        replace_embeddings(chunk)
        if model.embedding_scale is not None:
            _scale_embeddings(output_owner(chunk, model.output_owner), model.embedding_scale(hf))
        freeze(chunk, config.train.freeze, _towers(spec, hf))
    if expressions := weight_expressions(config):
        _freeze_weights(policy, expressions, is_critic=is_critic)
    if config.train.freeze:
        check_learns(config.train.freeze, policy.parameters)
    if config.train.lora.is_on:
        policy = _with_adapters(policy, config)
    _mark_split(policy.tensors, policy.all_rules)
    if load:
        _read_weights(policy, directory, is_critic=is_critic)
    for chunk in policy.chunks:
        chunk.to(device.torch_device)
    if load and config.train.lora.is_on:
        log_frozen_experts(config.train.lora, directory)
        path = config.train.lora.path
        policy.adapters.start(policy.held(), policy.position, seed=config.run.seed, path=path)
    return policy


def _family_of(
    config: Config, plugins: LoadedPlugins, *, is_critic: bool
) -> tuple[ModelSpec, Mapping[str, Any]]:
    """Return the family of ``model.path`` and the model's config, with the output layer of its role."""
    hf = read_config(config.model.path)
    hf = as_language_model(hf) if is_critic else hf
    spec: ModelSpec = _with_modalities(plugins.model(hf.get("architectures") or ()), hf, modalities(config))
    return value_model(spec, hf) if is_critic else (spec, hf)


def _read_weights(policy: Policy, directory: Path, *, is_critic: bool) -> None:
    """Load a policy, and warn of weights of the directory that are unused or lose precision."""
    policy.load(directory)
    if is_critic:  # it leaves the policy's head out, and nothing else that the policy does not
        return
    spec, hf, dtype = policy.spec, policy.hf, policy.options.transformer.params_dtype
    unused, carried = spec.unused_weights(hf), spec.carried_weights(hf)
    tell_what_is_lost(directory, policy.base_tensors, policy.rules, unused, carried, dtype)


def _freeze_weights(policy: Policy, expressions: Collection[str], *, is_critic: bool) -> None:
    """Freeze weights by the names that the checkpoint has; all ranks look at those of the whole model.

    :raises ConfigError: See :func:`~anygauge.engines.freezing.frozen_tensors`.
    """
    names: dict[str, list[str]] = {}
    for rule in policy.rules:
        names.setdefault(_stack(rule), []).extend(rule.hf)
    frozen = set(frozen_tensors(expressions, names, may_lack=is_critic))
    tensors = policy.tensors
    # by storage and not by address, which is 0 for all on the meta device
    owners = {parameter.untyped_storage(): parameter for parameter in policy.parameters}
    for rule in policy.rules:
        if rule.canonical in tensors and _stack(rule) in frozen:
            owner = owners.get(tensors[rule.canonical].untyped_storage())
            if owner is not None:  # a buffer has none
                owner.requires_grad_(False)
    _let_recomputed_learn(policy)


def _stack(rule: TensorRule) -> str:
    """Return the name of the tensor that a rule's is in: the experts of a layer are one."""
    return rule.canonical if rule.expert is None else rule.canonical.removesuffix(str(rule.expert))


def _with_adapters(policy: Policy, config: Config) -> Policy:
    """Add the adapters of ``[train.lora]`` to a model, and freeze all other weights."""
    transformer = policy.options.transformer
    adapters = add_adapters(
        policy.chunks,
        policy.tensors,
        policy.rules,
        policy.position,
        config.train.lora,
        tied=tied_weights(policy.spec, policy.hf),
        sequence_parallel=transformer.sequence_parallel,
    )
    _let_recomputed_learn(policy)
    return replace(policy, adapters=adapters)


def _let_recomputed_learn(policy: Policy) -> None:
    """Let recomputed layers after a frozen embedding have gradients."""
    if policy.options.transformer.recompute_granularity == "full":
        for chunk in policy.chunks:
            _let_gradients_pass(output_owner(chunk, policy.output_owner))


def _let_gradients_pass(owner: Any) -> None:
    """Have what a frozen embedding returns ask for a gradient.

    Recomputed layers have none for their weights where their input has none.
    """
    if (embedding := getattr(owner, "embedding", None)) is not None:
        embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
        )


def _scale_embeddings(owner: Any, scale: float) -> None:
    """Multiply what the embedding returns, in its dtype; the output layer that is tied to it is as it is."""
    if (embedding := getattr(owner, "embedding", None)) is not None:
        rounded = torch.tensor(scale, dtype=embedding.word_embeddings.weight.dtype).item()
        embedding.word_embeddings.register_forward_hook(lambda module, inputs, output: output * rounded)


def _composer(spec: ModelSpec, hf: Mapping[str, Any], kernels: KernelTable, config: Config) -> Composer:
    return Composer(
        hf=hf,
        sizes=spec.model_options(hf),
        kernels=kernels,
        built=frozenset(tower.name for tower in _towers(spec, hf)),
        recomputes=config.train.recompute == "full",
    )


def _has_unit_rope_scale(model: MegatronModel, hf: Mapping[str, Any]) -> bool:
    """Return whether cosines and sines are within [-1, 1]: the cosine of 0 is what multiplies both."""
    with torch.device("cpu"):  # values are needed, also where the model is built without any
        cosines = _all_rotary(model, hf, torch.zeros(1, dtype=torch.int64))[::2]
    return all(bool(cos.abs().max() <= 1) for cos in cosines)


def _all_rotary(model: MegatronModel, hf: Mapping[str, Any], positions: Tensor) -> Sequence[Tensor]:
    local = () if model.local_rotary is None else model.local_rotary(hf, positions)
    return *model.rotary(hf, positions), *local


def _check_known(family: str, architecture: Mapping[str, Any]) -> None:
    """Refuse what only modules of the family's own could honor.

    :raises ConfigError: The model that is built here would be another one.
    """
    if unknown := list(unknown_values(architecture)):
        raise ConfigError(
            f"The {family} family sets fields of TransformerConfig to values that no module of the engine "
            f"knows: {'; '.join(unknown)}.",
            hint="Let the family refuse such a checkpoint, or build its layers with LayerKind.build.",
        )


def _build(
    spec: ModelSpec,
    hf: Mapping[str, Any],
    options: MegatronOptions,
    provider: SpecProvider,
    together: Composer,
    vp_stage: int | None,
) -> Any:
    config = options.transformer
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "vp_stage": vp_stage,
    }
    model = megatron_model(spec)
    decoder = decoder_spec(provider, model.layers(hf), config, vp_stage)
    _check_recompute(config, len(decoder.layer_specs))
    if model.build is not None:
        composes = {} if spec.media is None else {"compose": together}
        return model.build(config=config, hf=hf, decoder=decoder, **composes, **ends)
    if towers := _towers(spec, hf):
        return together(towers, config, decoder, **ends)
    sizes = spec.model_options(hf)
    return GPTModel(
        config,
        decoder,
        vocab_size=padded_vocab(sizes["vocab_size"], config.tensor_model_parallel_size),
        max_sequence_length=sizes["max_sequence_length"],
        share_embeddings_and_output_weights=sizes["tie_embeddings"],
        position_embedding_type="none",  # core attention applies positions
        parallel_output=True,
        **ends,
    )


def _check_recompute(config: TransformerConfig, layers: int) -> None:
    """Refuse numbers of layers that Megatron would go beyond the last one with."""
    count = config.recompute_num_layers
    if config.recompute_method == "uniform" and (not count or layers % count):
        raise ConfigError(
            f"train.megatron.recompute_num_layers = {count} does not divide the {layers} layers of a stage.",
            hint='Choose a number that does, or set recompute_method = "block".',
        )


def _towers(spec: ModelSpec, hf: Mapping[str, Any]) -> Sequence[TowerSpec]:
    return () if spec.media is None else spec.media.towers(hf)


def _with_modalities(spec: ModelSpec, hf: Mapping[str, Any], kinds: Collection[MediaKind]) -> ModelSpec:
    """Return the family with the towers of a run alone.

    :raises ConfigError: It has none for a kind.
    """
    if unseen := set(kinds).difference(*(tower.kinds for tower in _towers(spec, hf))):
        raise ConfigError(
            f"The run has {', '.join(sorted(unseen))}, and the {spec.name} model has no tower for it.",
            hint="Use a model that has one, or leave it out of data.multimodal_keys and model.modalities.",
        )
    return with_modalities(spec, kinds)


def _mark_split(tensors: Mapping[str, Tensor], rules: Iterable[TensorRule]) -> None:
    """Mark the parameters of which each tensor-parallel rank has another part.

    Megatron does so while it initializes them, which is left out here. Without the mark the gradient norm
    counts the part of the first rank alone.
    """
    for rule in rules:
        tensor, dim = tensors.get(rule.canonical), rule.declared.split_dim
        if dim is None or not isinstance(tensor, nn.Parameter):
            continue
        if not hasattr(tensor, "partition_dim"):
            set_tensor_model_parallel_attributes(tensor, is_parallel=True, dim=dim, stride=1)
        vars(tensor).update(tensor_model_parallel=True, partition_dim=dim)  # whatever a library's linear says
