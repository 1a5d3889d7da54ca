"""Towers: which of them a model builds, their kernels, and how they run over a micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anygauge.engines.host_lengths import lengths_of, take_lengths
from anygauge.engines.norms import bind_norm
from anygauge.kernels.table import KernelTable
from anygauge_hooks.errors import MediaMismatchError
from anygauge_hooks.media import MediaKind, TowerSpec
from anygauge_hooks.megatron import WeightRule, megatron_model, with_megatron
from anygauge_hooks.models import ModelSpec

__all__ = ["Tower", "bind", "build_tower", "recompute", "with_modalities"]

ATTENTION = "anygauge_flash"
"""The table's attention among those of transformers, which packs sequences for names with "flash" in them."""

_lengths: ContextVar[Sequence[int] | None] = ContextVar("lengths", default=None)
"""Lengths of the sequences that a tower attends within, set while it runs."""


# -------------------------------------------------------------------------
# Which
# -------------------------------------------------------------------------


def with_modalities(spec: ModelSpec, kinds: Collection[MediaKind]) -> ModelSpec:
    """Return a family with only the towers for these modalities.

    Their tensors are then unused in checkpoints.
    """
    media, model = spec.media, megatron_model(spec)
    if media is None:
        return spec

    def built(hf: Mapping[str, Any]) -> list[TowerSpec]:
        return [tower for tower in media.towers(hf) if tower.kinds & set(kinds)]

    def left_out(hf: Mapping[str, Any]) -> list[TowerSpec]:
        return [tower for tower in media.towers(hf) if not tower.kinds & set(kinds)]

    def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
        names = tuple(f"{model.output_owner}.{tower.name}.".lstrip(".") for tower in left_out(hf))
        return [rule for rule in model.weight_rules(hf) if not rule.canonical.startswith(names)]

    def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
        return (*spec.unused_weights(hf), *(each for tower in left_out(hf) for each in tower.hf_prefixes))

    return replace(
        with_megatron(spec, replace(model, weight_rules=weight_rules)),
        unused_weights=unused_weights,
        media=replace(media, towers=built),
    )


# -------------------------------------------------------------------------
# What they compute with
# -------------------------------------------------------------------------


class _Patches:
    """A convolution of inputs that are one patch each, as the product of matrices that it is."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return the outputs ``[N, out, 1, ...]``."""
        if input.shape[2:] != self.kernel_size:
            return super().forward(input)  # type: ignore[misc]
        outputs = F.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return outputs.view(*outputs.shape, *[1] * len(self.kernel_size))


class Patches2d(_Patches, nn.Conv2d):
    """Patch embedding of images: two dimensions."""


class Patches3d(_Patches, nn.Conv3d):
    """Patch embedding of video: three dimensions."""


_PATCHES: Mapping[type, type] = {nn.Conv2d: Patches2d, nn.Conv3d: Patches3d}


class PackedAttention:
    """Attention of a vision tower over packed frames: rotated by the table, where transformers widens all."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        """Return the output ``[T, H]``."""
        angles = given.get("position_embeddings")
        lengths = lengths_of(given.get("cu_seqlens")) or _lengths.get()
        if angles is None or lengths is None:
            return super().forward(hidden_states, *args, **given)  # type: ignore[misc]
        qkv = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = qkv.unbind(1)
        query, key = self.rotate(query, key, *(each.float() for each in angles))
        output = self.attend(query, key, value, tuple(lengths), self.scaling, causal=False)
        projected: Tensor = self.proj(output.flatten(1))
        return projected


@cache
def _packed(kind: type[Any]) -> type[Any]:
    """Return a class of attention that is ours over that of a model."""
    return type(f"Packed{kind.__name__}", (PackedAttention, kind), {})


def _is_vision(attention: Any) -> bool:
    """Return whether a module does nothing else than :class:`PackedAttention` between its two linears."""
    named = {name for name, _ in attention.named_children()}
    return named == {"qkv", "proj"} and "position_embeddings" in signature(attention.forward).parameters


def bind(tower: nn.Module, kernels: KernelTable, dtype: torch.dtype) -> None:
    """Let attention, norms and patches of a module of transformers take their kernels from the table."""
    for module in tower.modules():
        bind_norm(module, kernels, dtype)
        # In float32 the order of a convolution's sums is kept, which is that of transformers.
        if type(module) in _PATCHES and dtype != torch.float32 and _is_plain(module):
            module.__class__ = _PATCHES[type(module)]
        if isinstance(getattr(module, "head_dim", None), int) and hasattr(module, "config"):
            _bind_attention(module, kernels, dtype)


def _bind_attention(module: Any, kernels: KernelTable, dtype: torch.dtype) -> None:
    _register_attention()
    module.config._attn_implementation = ATTENTION
    facts = {"dtype": dtype, "head_dim": module.head_dim}
    module.attend = kernels.resolve(
        "varlen_attention",
        causal=False,
        value_dim=module.head_dim,
        return_lse=False,
        has_window=False,
        has_sinks=False,
        **facts,
    )
    if _is_vision(module):
        module.rotate = kernels.resolve("rotary_embedding", unit_angles=True, **facts)
        kind: Any = type(module)
        module.__class__ = _packed(kind)


def _is_plain(convolution: Any) -> bool:
    return convolution.kernel_size == convolution.stride and convolution.groups == 1


def _register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence, or within each of a batch that is not packed.

    :param query: ``[B, heads, T, D]``; as are the others, with heads of their own.
    :returns: ``[B, T, heads, D]``, and no weights.
    """
    assert attention_mask is None, "a tower's sequences are packed"
    batch, _heads, tokens, _size = query.shape
    lengths = _lengths.get() if batch == 1 else None
    packed = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    output: Tensor = module.attend(*packed, tuple(lengths or (tokens,) * batch), scaling, causal=False)
    return output.unflatten(0, (batch, tokens)), None


def recompute(tower: Any) -> None:
    """Let a module of transformers compute its layers again in the backward pass."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # before transformers 5.23
    enable = next((getattr(tower, name) for name in names if hasattr(tower, name)), None)
    if enable is not None:
        enable({"use_reentrant": False, "context_fn": _same_lengths})


def _same_lengths() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds a layer now, and what surrounds it when it is computed again."""
    return nullcontext(), _attending(_lengths.get())


@contextmanager
def _attending(lengths: Sequence[int] | None) -> Iterator[None]:
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


# -------------------------------------------------------------------------
# How they run
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower that was built."""

    spec: TowerSpec
    hf: Mapping[str, Any]
    module: nn.Module

    @property
    def is_learning(self) -> bool:
        """Return whether a pass over it leaves gradients."""
        return torch.is_grad_enabled() and any(each.requires_grad for each in self.module.parameters())

    def features(self, inputs: Mapping[str, Any], count: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the features of packed contents, and those of each level, ``[N, H]``.

        :param inputs: Result of ``TowerSpec.inputs``.
        :param count: How many placeholders the contents have.
        :raises MediaMismatchError: There are more features, or fewer.
        """
        given = dict(inputs)
        lengths = take_lengths(given)
        with _attending(lengths), nullcontext() if self.is_learning else torch.no_grad():
            main, levels = self.spec.outputs(self.module(**given))
        if len(main) != count:
            raise MediaMismatchError(
                f"The tower {self.spec.name!r} made {len(main)} features, for {count} placeholders.",
                hint="The processor of the model's family counts placeholders differently from its tower.",
            )
        return main, levels

    def blank(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the features of the smallest content, so that all weights take part in a micro-batch."""
        device = next(self.module.parameters()).device
        inputs = dict(self.spec.inputs(self.hf, [self.spec.blank(self.hf)], device))
        with _attending(take_lengths(inputs)):
            return self.spec.outputs(self.module(**inputs))


def build_tower(
    spec: TowerSpec, hf: Mapping[str, Any], kernels: KernelTable, dtype: torch.dtype, *, recomputes: bool
) -> Tower:
    """Build a tower, with kernels of the table.

    :param recomputes: Whether its layers are computed again in the backward pass.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module = spec.build(hf)
    finally:
        torch.set_default_dtype(before)
    bind(module, kernels, dtype)
    if recomputes:
        recompute(module)
    return Tower(spec, hf, module)
