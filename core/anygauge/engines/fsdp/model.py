"""A model of transformers, sharded by FSDP2, with what is computed of its outputs inside of one forward."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.initialization import no_init_weights

from anygauge.config import Config
from anygauge.config.modalities import modalities, weight_expressions
from anygauge.engines.base import torch_dtype
from anygauge.engines.forbidden import logprob_without, top_k_without
from anygauge.engines.freezing import check_learns, frozen_tensors
from anygauge.engines.fsdp.attention import register_attention
from anygauge.engines.fsdp.layers import TableLayers, find_table_layers
from anygauge.engines.fsdp.lora import Adapters, add_adapters
from anygauge.engines.fsdp.master_weights import MasterWeights, replace_parameters
from anygauge.engines.fsdp.nf4 import Nf4Shard, quantize_layers
from anygauge.engines.fsdp.towers import Towers, take_out
from anygauge.engines.fsdp.weights import (
    StoredNames,
    base_shards,
    load_weights,
    local_shards,
    stored_names,
    warn_of_unused,
)
from anygauge.engines.lora.layers import log_frozen_experts
from anygauge.engines.media import freeze
from anygauge.kernels.linear_logprob import linear_topk
from anygauge.kernels.reference import logits_logprob
from anygauge.kernels.table import KernelTable
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.kernels import VocabParallelLogprob
from anygauge_hooks.media import MediaSpec
from anygauge_hooks.models import ModelSpec, text_config, transformers_model

__all__ = ["Outputs", "ShardedModel", "build_model", "decoder_layers"]

SCORE = "score"
"""Name of a classification model's layer in transformers; with one label it is a value head."""

Compute = Callable[["Outputs"], Any]


class ShardedModel(nn.Module):
    """The root of what FSDP shards: a transformers model, and for a critic its value head.

    :param model: A language model, on the meta device but for its buffers.
    :param is_multimodal: Whether it is one part of a model with towers.
    """

    def __init__(
        self, model: Any, kernels: LogProbKernels, *, is_critic: bool, is_multimodal: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.is_multimodal = is_multimodal
        self.kernels = kernels
        self.is_packed = True
        """Whether the samples of a micro-batch lie end to end; otherwise each has a row."""
        self.logit_scale: float | None = 1.0
        """The logits are this times hidden states times the output layer's weight; ``None`` where they are
        something else, and the model's own."""
        self.is_critic = is_critic
        self.unused: Sequence[str] = ()
        """Patterns of tensors that the family's checkpoints have and its models do not."""
        self.output_name = _output_name(model)
        decoder = set(self.decoder.modules())
        self.blocks = decoder_layers(model)
        """Modules that are sharded by themselves: decoder layers, and those of towers."""
        self.layers = [layer for layer in self.blocks if layer in decoder]
        self.towers: Towers | None = None
        self.forbidden: Sequence[int] = ()
        """Tokens that are never sampled: log-probabilities are those among the others."""
        self.names: Mapping[str, StoredNames] = {}
        """Where the checkpoint of the model has its tensors."""
        self.adapters = Adapters()
        self.quantized: Sequence[Nf4Shard] = ()
        """Frozen weights that are no parameters, because they are in 4 bits."""
        self.keeps_gathered = False
        """Whether FSDP keeps gathered weights and whole gradients until a step's last micro-batch."""
        self.table_layers = TableLayers()
        """Modules that may take kernels of the table."""
        self.masters: MasterWeights | None = None
        """The weights that are trained, where one rank holds the model; otherwise FSDP has them."""
        if is_critic:
            _drop_output_layer(model, self.output_name)
            hidden = model.config.get_text_config().hidden_size
            self.score = nn.Linear(hidden, 1, bias=False, device="meta")

    @property
    def decoder(self) -> Any:
        """Return the module from tokens, or their embeddings, to the last hidden states."""
        return self.model.get_decoder() if self.is_multimodal else self.model.base_model

    def trained(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the weight of a parameter that an optimizer updates and a checkpoint has."""
        return parameter if self.masters is None else self.masters.of(parameter)

    def weights_changed(self) -> None:
        """Let the model compute with weights that something else than the optimizer has written."""
        if self.masters is not None:
            self.masters.write_copies()

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Say whether a micro-batch is the last one of an optimizer step."""
        if self.keeps_gathered:
            sharded: Any = self
            sharded.set_reshard_after_backward(is_last)
            sharded.set_requires_gradient_sync(is_last)

    def free_gathered(self) -> None:
        """Free weights that passes without gradients have gathered."""
        if self.keeps_gathered:
            sharded: list[Any] = [*self.blocks, self]
            for module in sharded:
                module.reshard()

    def take_gradients(self) -> None:
        """Keep the gradients of a micro-batch for the optimizer."""
        if self.masters is not None:
            self.masters.take_gradients()

    def forward(self, inputs: Mapping[str, Any], rows: Tensor, compute: Compute) -> Any:
        """Return what is computed of the model's outputs, while the weights of the output layer are whole.

        :param inputs: Keyword arguments of the model.
        :param rows: ``[R]``, int64: the wanted positions, over all rows of the input.
        """
        return compute(Outputs(self, dict(inputs), rows))


@dataclass(frozen=True, slots=True)
class LogProbKernels:
    """The ops that compute log-probabilities, from hidden states or from logits."""

    fused: Callable[..., tuple[Tensor, Tensor]] | None
    """``None`` if logits of a whole micro-batch are wanted."""
    from_logits: VocabParallelLogprob


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a model for some positions of a micro-batch, each computed when asked for."""

    root: ShardedModel
    inputs: dict[str, Any]
    rows: Tensor

    def hidden(self) -> Tensor:
        """Return the last hidden states ``[R, H]``, the input of the output layer."""
        inputs = dict(self.inputs)
        media = inputs.pop("media", None)
        if media is not None and self.root.towers is not None:
            inputs |= self.root.towers.embed(inputs.pop("input_ids"), media)
        states: Tensor = self.root.decoder(**inputs, use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, self.rows)

    def logits(self) -> Tensor:
        """Return the logits ``[R, V]`` as the model computes them."""
        model: Any = self.root.model
        few = len(self.inputs["input_ids"]) == 1 and "logits_to_keep" in signature(model.forward).parameters
        options = {"logits_to_keep": self.rows} if few else {}
        logits: Tensor = model(**self.inputs, use_cache=False, **options).logits
        return logits[0] if few else logits.flatten(0, 1).index_select(0, self.rows)

    def values(self) -> Tensor:
        """Return the values ``[R]`` of a critic, float32."""
        return F.linear(self.hidden().float(), self.root.score.weight.float())[:, 0].clone()

    def log_probs(
        self, targets: Tensor, temperature: float, *, entropy_grad: bool, rest: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the shape of ``targets`` and entropies ``[R]``, float32.

        :param targets: ``[R]`` or ``[R, N]``, int64.
        :param rest: Whether the log-probability of all others is one more column.
        """
        return self._log_probs(self._head(), targets, temperature, entropy_grad=entropy_grad, rest=rest)

    def top_k(self, count: int, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the ids ``[R, K]`` of the top-k tokens, and log-probabilities ``[R, K + 2]``.

        The first of these are of the targets, the last of all that are neither.

        :param targets: ``[R]``, int64.
        """
        head, forbidden = self._head(), self.root.forbidden
        more = count + len(forbidden)
        if self.root.logit_scale is None:
            ids = head.topk(more, dim=1).indices
        else:
            ids = linear_topk(head, self._weight, more, None)
        ids = top_k_without(ids, count, forbidden)
        columns = torch.cat((targets[:, None], ids), 1)
        return ids, self._log_probs(head, columns, temperature, entropy_grad=False, rest=True)[0]

    @property
    def _weight(self) -> Tensor:
        weight: Tensor = self.root.model.get_output_embeddings().weight
        return weight

    def _head(self) -> Tensor:
        """Return hidden states whose product with the output layer's weight are the logits, or logits."""
        if self.root.logit_scale is None:
            return self.logits()
        hidden = self.hidden()
        return hidden if self.root.logit_scale == 1 else hidden * self.root.logit_scale

    def _log_probs(
        self, head: Tensor, targets: Tensor, temperature: float, *, entropy_grad: bool, rest: bool
    ) -> tuple[Tensor, Tensor]:
        kernels, call = self.root.kernels, None
        if self.root.logit_scale is not None and kernels.fused is not None:
            call = partial(kernels.fused, head, self._weight)
        else:
            logits = head if self.root.logit_scale is None else F.linear(head, self._weight)
            call = partial(logits_logprob, kernels.from_logits, logits)
        log_probs, entropy = logprob_without(
            call, targets, temperature, None, self.root.forbidden, entropy_grad=entropy_grad, rest=rest
        )
        return log_probs.clone(), entropy  # FSDP's hook on an output would be lost with a view


# -------------------------------------------------------------------------
# Building
# -------------------------------------------------------------------------


def build_model(
    config: Config,
    context: WorkerContext,
    kernels: KernelTable,
    spec: ModelSpec,
    hf: Mapping[str, Any],
    mesh: DeviceMesh,
    *,
    is_critic: bool = False,
    trains: bool = True,
) -> ShardedModel:
    """Build the model of ``model.path``, shard it over ranks if there are several, and load its weights.

    A collective.

    :param spec: Its family.
    :param hf: Its Hugging Face config.
    :param mesh: The ranks; its last dimension shards the model.
    :param is_critic: Whether it has a value head for an output layer.
    :param trains: Whether it gets gradients.
    :raises ConfigError: transformers cannot build it, or it takes no media of the run's kinds.
    :raises WeightMappingError: The weights do not fit it.
    """
    dtype = torch_dtype(config)
    register_attention(kernels)
    is_multimodal = spec.media is not None and bool(spec.media.towers(hf))
    model = _build(config, spec, hf, has_towers=is_multimodal)
    logprob = LogProbKernels(
        kernels.resolve("linear_logprob", dtype=dtype) if config.train.fused_loss else None,
        kernels.resolve("vocab_parallel_logprob", dtype=dtype),
    )
    root = ShardedModel(model, logprob, is_critic=is_critic, is_multimodal=is_multimodal)
    root.requires_grad_(trains).eval()  # dropout and noise of routers are for pretraining
    if not trains:
        for parameter in root.parameters():
            parameter.data = parameter.data.to(dtype)
    left_out: Sequence[str] = ()
    if spec.media is not None:
        left_out = _choose_towers(root, spec.media, hf, config)
    elif trains:
        freeze(root, config.train.freeze, towers=())
    root.table_layers = find_table_layers(model, kernels, context.device.torch_device)
    lora = config.train.lora
    if lora.is_on and trains:
        root.adapters = add_adapters(root, lora, dtype)
        log_frozen_experts(lora, config.model.path)
        if lora.base is not None:
            root.quantized = quantize_layers(root, dtype, context.device.torch_device)
    unused = [*left_out, *spec.unused_weights(hf)]
    root.unused = [f"^{re.escape(prefix)}" for prefix in unused]
    if trains and (expressions := weight_expressions(config)):
        _freeze_weights(root, expressions, config.model.path)
    if trains and config.train.freeze:
        check_learns(config.train.freeze, root.parameters())
    if config.train.recompute == "full" and trains:
        for layer in root.blocks:
            _recompute(layer)
    sharded = is_sharded(mesh)
    if sharded:
        root.keeps_gathered = not config.train.parallel.reshard_after_forward
        _shard(root, dtype, mesh)
    _materialize(root, context.device.torch_device, sharded=sharded)
    if not sharded:
        root.masters = MasterWeights(root, dtype)
    root.names = load_weights(root, config.model.path)
    if not is_critic:  # whose policy has said the same
        warn_of_unused(config.model.path, unused, spec.carried_weights(hf))
    if root.adapters.layers:
        _start_adapters(root, config)
    root.weights_changed()
    return root


def is_sharded(mesh: DeviceMesh) -> bool:
    """Return whether FSDP wraps the model. One rank would gather, cast and reduce for nothing."""
    return mesh.size() > 1


def _choose_towers(root: ShardedModel, media: MediaSpec, hf: Mapping[str, Any], config: Config) -> list[str]:
    """Keep the towers of the run's media, frozen as the config says.

    :returns: How the names of the others' tensors begin.
    """
    kinds = modalities(config)
    left_out = take_out(root.model, media, hf, kinds)
    towers = [tower for tower in media.towers(hf) if tower.kinds & kinds]
    root.forbidden = tuple(media.forbidden(hf))
    root.towers = Towers(root.model, towers, hf) if towers else None
    if any(parameter.requires_grad for parameter in root.parameters()):
        freeze(root, config.train.freeze, towers)
    return left_out


def _freeze_weights(root: ShardedModel, expressions: Collection[str], directory: Path) -> None:
    """Freeze weights by the names that the checkpoint has. A collective.

    :raises ConfigError: See :func:`~anygauge.engines.freezing.frozen_tensors`.
    """
    stored = stored_names(root, directory)
    parameters = {
        shard.name: shard.tensor for shard in base_shards(root) if isinstance(shard.tensor, nn.Parameter)
    }
    names = {
        name: [each for expert in stored[name].experts for each in expert] if name in stored else [name]
        for name in parameters
    }
    for name in frozen_tensors(expressions, names, may_lack=root.is_critic):
        parameters[name].requires_grad_(False)


def _start_adapters(root: ShardedModel, config: Config) -> None:
    """Give adapters their first values, those of ``train.lora.path`` if there is one. A collective."""
    shards, path = local_shards(root), config.train.lora.path
    root.adapters.start(shards, config.run.seed)
    if path is not None:
        root.adapters.read(shards, path)


def _build(config: Config, spec: ModelSpec, hf: Mapping[str, Any], *, has_towers: bool) -> Any:
    """Return the model, with parameters on the meta device and buffers of their values."""
    path, trusted = config.model.path, config.model.trust_remote_code
    hook = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]  # it may return one
    try:
        with no_init_weights(), torch.device("cpu"):
            model = _from_family(spec, hf) or _from_transformers(path, trusted, has_towers=has_towers)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot build the model of {path}: {error}",
            hint="train.engine = 'fsdp' takes what AutoModelForCausalLM does, and AutoModelForMultimodalLM "
            "of families with media; one that needs Python files of its own also needs "
            "model.trust_remote_code = true.",
        ) from error
    finally:
        hook.remove()
    model.tie_weights()
    return model


def _from_family(spec: ModelSpec, hf: Mapping[str, Any]) -> Any | None:
    """Return the model of a family that transformers has no class for."""
    own = transformers_model(spec)
    return None if own is None else own.build(text_config(hf), torch.float32)


def _from_transformers(path: Path, trusted: bool, *, has_towers: bool) -> Any:
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
    config = getattr(config, "thinker_config", config)  # of a model that speaks, what it thinks with
    auto = AutoModelForMultimodalLM if has_towers else AutoModelForCausalLM
    return auto.from_config(
        config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trusted
    )


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Replace a parameter that is registered by one without values."""
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _output_name(model: Any) -> str:
    """Return the name of the output layer."""
    output = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is output)


def _drop_output_layer(model: Any, name: str) -> None:
    """Remove the output layer, which a critic does not have."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, None)


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a transformers model, in order: the modules that it never splits."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        lists: list[Any] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        layers = list(max(lists, key=len, default=()))
    inside = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if id(layer) not in inside]


def _recompute(layer: Any) -> None:
    """Have a layer computed again in the backward pass."""
    forward = layer.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    layer.forward = recomputed


def _shard(root: ShardedModel, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    """Shard every layer, and what is left in the root.

    Gradients are summed over ranks, never averaged: the loss carries each token's weight in the mean of the
    whole step.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for module in (*root.blocks, root):
        sharded: Any = fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=not root.keeps_gathered
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _materialize(root: nn.Module, device: torch.device, *, sharded: bool) -> None:
    """Give the parameters memory on the device; buffers keep their values."""
    if not sharded:
        replace_parameters(root, lambda parameter: torch.empty_like(parameter, device=device))
        for module in root.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        return
    values = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=device)
    for name, buffer in root.named_buffers():
        buffer.copy_(values[name])
