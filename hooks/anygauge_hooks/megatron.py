"""Megatron's annex of the contract: how its train engine builds models.

The engine's plugin adds the hooks of this module (``PluginInfo.hookspecs``); nothing neutral imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

from anygauge_hooks import hookspec
from anygauge_hooks.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.kernels import KernelLookup
    from anygauge_hooks.media import TowerSpec
    from anygauge_hooks.models import ModelSpec
    from anygauge_hooks.settings import RunConfig
    from anygauge_hooks.types import BackendSpec, Device

__all__ = [
    "MEGATRON",
    "REDIRECTED",
    "Compose",
    "LayerKind",
    "MegatronModel",
    "ScopeMap",
    "ScopedDevice",
    "Transform",
    "WeightRule",
    "get_spec_provider",
    "make_jit_fuser",
    "megatron_model",
    "scope_map_of",
    "with_megatron",
]

MEGATRON: Final = "megatron"
"""Name of the train engine, and of its entry in ``ModelSpec.engines``."""

REDIRECTED: Final = (
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "empty_cache",
    "get_rng_state",
    "is_available",
    "manual_seed",
    "manual_seed_all",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
)
"""Functions of CUDA, by name, that a :class:`ScopeMap` stands in for."""

Transform = Literal["copy", "concat", "interleave", "deinterleave"]
"""How Hugging Face tensors become one canonical tensor:

``copy``
    One tensor, unchanged.
``concat``
    One under another along dimension 0, such as gate above up.
``interleave``
    Each is cut into ``groups`` equal parts along dimension 0, and the parts are put group by group: with
    ``q, k, v`` projections, a group's queries, its key, its value.
``deinterleave``
    Each consists of ``groups`` groups, which have a share of every part, and the parts are put one under
    another: heads that each hold their query, key and value, or, with one row of each, rows of gate and of up
    in turns. ``sections`` are the parts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """One canonical tensor and the Hugging Face tensors that it is made of.

    ``{layer}`` in a name stands for the layer index, ``{expert}`` for the global index of an expert.

    Example::

        WeightRule(canonical="decoder.layers.{layer}.mlp.linear_fc1.weight",
                   hf=("model.layers.{layer}.mlp.gate_proj.weight",
                       "model.layers.{layer}.mlp.up_proj.weight"),
                   transform="concat", sections=((1024,), (1024,)), split_dim=0)
    """

    canonical: str
    """Transformer Engine's parameter name."""
    hf: tuple[str, ...]
    transform: Transform = "copy"
    sections: tuple[tuple[int, ...], ...] = ()
    """For each Hugging Face tensor, the sizes along ``split_dim`` of the parts that it consists of. With
    ``copy`` and ``concat`` tensor parallelism splits each part by itself, so that every rank has its share of
    gate and of up. All transforms but ``copy`` need it; without it a tensor is one part."""
    groups: int = 1
    """Groups, for ``interleave`` and ``deinterleave``. Tensor parallelism gives whole groups to a rank."""
    split_dim: int | None = None
    """Dimension of the canonical tensor that tensor parallelism splits; ``None`` replicates. With
    ``{expert}`` it is what expert tensor parallelism splits."""
    layers: tuple[int, ...] | None = None
    """Layers that have the tensor; ``None`` for all."""
    experts: int = 0
    """Number of experts, where ``{expert}`` is in the canonical name. Where it is not in the Hugging Face
    names, those tensors are stacks ``[experts, ...]`` of what the rule describes."""
    transposed: bool = False
    """Whether the matrices of such stacks are transposed in checkpoints."""
    pads_vocab: bool = False
    """Whether dimension 0 is the vocabulary, which is padded to a multiple of the ranks that split it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Modules of one decoder layer. Sizes and switches are fields of the transformer config.

    Example::

        LayerKind(attention="latent", mlp="moe")
    """

    attention: Literal["self", "gated", "latent", "gated_delta"] = "self"
    """``self`` has grouped queries; ``gated`` multiplies its output with a gate that comes with the queries;
    ``latent`` compresses keys and values; ``gated_delta`` is a linear recurrence."""
    rotary: bool | Literal["local"] = True
    """Whether queries and keys turn with the position; ``"local"``: by :attr:`MegatronModel.local_rotary`."""
    window: int | None = None
    """How many of the last tokens a token sees, itself among them; ``None`` for all. Of ``self`` and
    ``gated`` attention."""
    wide_qk_norm: bool = False
    """Whether all queries of a token are normalized as one, and all keys, by weights of their width. Of
    ``self`` attention whose config has no ``qk_layernorm``; not with tensor parallelism."""
    mlp: Literal["dense", "moe"] = "dense"
    pre_norms: bool = True
    """Whether the inputs of attention and MLP are normalized."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalized too, before they are added."""
    build: Callable[..., Any] | None = None
    """``build(provider, config)`` returns Megatron's module spec of a layer that none of these describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModel:
    """How Megatron builds a family of models: its entry in ``ModelSpec.engines``."""

    transformer_config: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Function from the Hugging Face config, a mapping, to fields of Megatron's ``TransformerConfig``."""
    weight_rules: Callable[[Mapping[str, Any]], Sequence[WeightRule]]
    """Function from the Hugging Face config to the mapping of every weight."""
    rotary: Callable[[Mapping[str, Any], Tensor], tuple[Tensor, Tensor]]
    """From the Hugging Face config and positions ``[T]`` (int64) to ``cos, sin`` ``[T, R]``, float32.

    A model with images takes positions ``[3, T]`` of time, height and width too."""
    local_rotary: Callable[[Mapping[str, Any], Tensor], tuple[Tensor, Tensor]] | None = None
    """The same for layers whose :attr:`LayerKind.rotary` is ``"local"``; ``None`` if there are none."""
    embedding_scale: Callable[[Mapping[str, Any]], float] | None = None
    """Function from the Hugging Face config to the factor of the embeddings; ``None`` for 1."""
    layers: Callable[[Mapping[str, Any]], Sequence[LayerKind]]
    """Function from the Hugging Face config to the kind of each layer, in order."""
    build: Callable[..., Any] | None = None
    """``build(config=, hf=, decoder=, pre_process=, post_process=, vp_stage=)`` returns the whole model,
    where it is more than embedding, decoder and output layer; ``decoder`` is the spec of the layers. A family
    with media is called with ``compose=`` too, a :class:`Compose`. The model is a
    ``MegatronModule`` with what Megatron asks every model for: ``model_type``, ``pre_process``,
    ``post_process``, ``vp_stage``, ``share_embeddings_and_output_weights``,
    ``shared_embedding_or_output_weight()`` and ``set_input_tensor()``."""
    output_owner: str = ""
    """Path from the model to the module whose ``output_layer`` the loss or a critic's head replaces, such as
    ``language_model``; empty for the model itself. It has Megatron's ``post_process`` on every stage."""


class Compose(Protocol):
    """Argument of :attr:`MegatronModel.build` for a family with media: makes Megatron models with towers."""

    def __call__(
        self, towers: Sequence[TowerSpec], transformer_config: Any, decoder: Any, **ends: Any
    ) -> Any:
        """Return this stage of a model.

        :param towers: Towers of the family, except those of which a run has no media.
        :param transformer_config: Megatron's ``TransformerConfig``.
        :param decoder: The spec of its layers.
        :param ends: ``pre_process``, ``post_process`` and ``vp_stage``.
        """

    def held(self, name: str, model: Any) -> Any:
        """Return a model whose only part is a model: what :attr:`MegatronModel.output_owner` names.

        :param name: Name of the part.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeMap:
    """How Megatron, which names one vendor's device literally, is redirected to another device."""

    device_type: str
    """The ``torch.device`` type that stands for the named one."""
    functions: Mapping[str, Any]
    """Replacements for functions of the vendor's torch module, by name: exactly :data:`REDIRECTED`."""
    tensor_types: Mapping[str, Sequence[str]]
    """Legacy tensor type names by dtype (``fp32``, ``fp16``, ``bf16``), for Megatron's type tests."""
    has_index: bool = True
    """Whether ``device:1`` keeps its index; a host has only one device."""
    has_pinned_memory: bool = True
    """Whether ``pin_memory=True`` means anything for this device; it is dropped otherwise."""
    is_accelerator: bool = True
    """Whether tensors on this device answer that they are on the accelerator."""


@runtime_checkable
class ScopedDevice(Protocol):
    """A :class:`~anygauge_hooks.types.Device` to which Megatron's literal device names are redirected."""

    scope_map: ScopeMap | None
    """How they are redirected; ``None`` if a library has made them mean this device in the whole process."""


def scope_map_of(device: Device) -> ScopeMap | None:
    """Return how Megatron's literal device names are redirected, or ``None`` if they mean the device."""
    return device.scope_map if isinstance(device, ScopedDevice) else None


def megatron_model(spec: ModelSpec) -> MegatronModel:
    """Return the engine's entry of a family.

    :raises ConfigError: It has none.
    """
    model = spec.engines.get(MEGATRON)
    if isinstance(model, MegatronModel):
        return model
    raise ConfigError(
        f"The {spec.name} family has no MegatronModel in ModelSpec.engines; it has "
        f"{', '.join(sorted(spec.engines)) or 'no entry'}.",
        hint='Choose another train.engine, or add engines={"megatron": MegatronModel(...)} to the family.',
    )


def with_megatron(spec: ModelSpec, model: MegatronModel) -> ModelSpec:
    """Return a family with another entry of the engine."""
    return replace(spec, engines={**spec.engines, MEGATRON: model})


# -------------------------------------------------------------------------
# Hooks
# -------------------------------------------------------------------------


@hookspec(firstresult=True)
def get_spec_provider(backend: BackendSpec, kernels: KernelLookup, config: RunConfig) -> Any | None:
    """Return the provider of Megatron module classes.

    Called once per process, when the engine is built.

    :param backend: The backend of the run.
    :param kernels: The kernels of the backend.
    :param config: The run's config, read-only; ``train.provider`` names what the user chose.
    :returns: An object with methods of ``anygauge.engines.megatron.layers.provider.SpecProvider``, all of
        them or some; or ``None``.

    First result: the engine's own modules, bound to the kernel table, stand for what is not answered.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def make_jit_fuser(backend: BackendSpec) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return the decorator that Megatron applies to its fusible functions.

    Called once per process, before the first megatron import.

    :param backend: The backend of the run.
    :returns: A decorator, or ``None`` for the identity.

    First result: the backend's plugin decides; no answer means the identity.

    .. versionadded:: 0.1
    """
