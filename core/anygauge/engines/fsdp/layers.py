"""Layers of transformers' models with the kernels of the backend's table, where both compute the same.

A layer is recognized by its parts, never by its name, and a copy of it with random weights decides: its
results in float32, from transformers' code and from the table's kernels, must be equal.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from anygauge.engines.fsdp.attention import ATTENTION
from anygauge.engines.norms import bind_norm, is_norm
from anygauge.kernels.table import KernelTable

__all__ = ["TableLayers", "find_table_layers"]

PROBE = f"{ATTENTION}_probe"
"""Name of an attention function that keeps its arguments, for comparisons."""
TOLERANCE = 1e-4
"""Largest relative error of a row, in float32."""
ROWS = 24
"""Rows of the inputs that are compared."""
_IGNORED = ("dropout", "position_ids", "output_attentions", "use_cache")
"""Arguments of an attention function that :mod:`anygauge.engines.fsdp.attention` does not read."""
_SCALE = "attention_scaling"
"""How transformers ends the name of the factor of cosines and sines."""

_log = logging.getLogger(__name__)


Results = tuple[Sequence[Tensor], str]
"""Outputs of a module, and facts that it passes on."""


class Pattern(Protocol):
    """A kind of layer that has kernels in the table."""

    def matches(self, module: Any) -> bool:
        """Return whether a module has the parts of such a layer."""

    def bind(self, module: Any, kernels: KernelTable, dtype: torch.dtype) -> None:
        """Let a module compute with the kernels for a dtype. Its class changes, its parameters stay."""

    def results(self, module: Any, generator: torch.Generator) -> Results:
        """Return what a module computes from random inputs."""


@dataclass(frozen=True, slots=True)
class TableLayers:
    """Modules of a model that compute the same with kernels of the table."""

    modules: Sequence[tuple[Any, Pattern]] = ()

    def bind(self, kernels: KernelTable, dtype: torch.dtype) -> Callable[[], None]:
        """Let the modules take the kernels for a dtype.

        :returns: A function that gives them back their own classes.
        """
        kinds: list[tuple[Any, Any]] = [(module, type(module)) for module, _ in self.modules]
        for module, pattern in self.modules:
            pattern.bind(module, kernels, dtype)

        def restore() -> None:
            for module, kind in kinds:
                module.__class__ = kind

        return restore


def find_table_layers(model: nn.Module, kernels: KernelTable, device: torch.device) -> TableLayers:
    """Return the modules of a model that compute the same with kernels of the table. Binds none.

    :param model: Its parameters may be on the meta device.
    :param device: Where copies of the modules are compared.
    """
    AttentionInterface.register(PROBE, _probe)
    patterns: Sequence[Pattern] = (_Norm(), _Mlp(), _Attention(model))
    known: dict[Any, bool] = {}
    chosen: list[tuple[Any, Pattern]] = []
    refused: Counter[str] = Counter()
    for module in model.modules():
        pattern = next((each for each in patterns if each.matches(module)), None)
        if pattern is None:
            continue
        kind = _description(module)
        if kind not in known:
            known[kind] = _is_same(module, pattern, kernels, device)
        if known[kind]:
            chosen.append((module, pattern))
        else:
            refused[type(module).__name__] += 1
    for name, count in refused.items():
        text = "%s: %d layers keep transformers' own code, whose results differ from those of the kernels"
        _log.info(text, name, count)
    return TableLayers(chosen)


def _description(module: nn.Module) -> Any:
    """Return what tells modules apart that may compute differently; the number of a layer is a part of it."""
    facts = {n: v for n, v in vars(module).items() if isinstance(v, int | float | str | None)}
    buffers = [name for name, _ in module.named_buffers()]
    return type(module), repr(module), repr((buffers, sorted(facts.items())))


@torch.no_grad()
def _is_same(module: nn.Module, pattern: Pattern, kernels: KernelTable, device: torch.device) -> bool:
    """Return whether a module with random weights computes the same with the kernels, in float32."""
    if list(module.buffers()):
        return False
    own = _copy(module).to_empty(device=device).float()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in own.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    bound = _copy(own)
    pattern.bind(bound, kernels, torch.float32)
    try:
        results = [pattern.results(each, torch.Generator(device).manual_seed(1)) for each in (own, bound)]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        _log.debug("%s does not run like the layers that it resembles: %s", type(module).__name__, error)
        return False
    (expected, facts), (tensors, other_facts) = results
    return facts == other_facts and all(map(_are_close, tensors, expected))


def _copy(module: Any) -> Any:
    """Return a module of its own memory, with the same config."""
    config = getattr(module, "config", None)
    return deepcopy(module, {id(config): config})


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Return whether all rows are equal but for rounding."""
    if one.shape != other.shape:
        return False
    errors = (one - other).norm(dim=-1) / other.norm(dim=-1)
    return bool((errors <= TOLERANCE).all())  # false for what is not a number


# -------------------------------------------------------------------------
# Layers
# -------------------------------------------------------------------------


class _Joined(torch.autograd.Function):
    """Products of an input with two matrices, side by side in one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        """Return ``[..., F + G]``.

        :param x: ``[..., H]``.
        :param one: ``[F, H]``.
        :param other: ``[G, H]``.
        """
        rows = x.reshape(-1, x.shape[-1])
        joined = rows.new_empty(len(rows), len(one) + len(other))
        torch.mm(rows, one.t(), out=joined[:, : len(one)])
        torch.mm(rows, other.t(), out=joined[:, len(one) :])
        ctx.save_for_backward(rows, one, other)
        return joined.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the matrices."""
        rows, one, other = ctx.saved_tensors
        shape = *grads[0].shape[:-1], rows.shape[-1]
        first, second = grads[0].reshape(len(rows), -1).split((len(one), len(other)), 1)
        x = (first @ one).addmm_(second, other).view(shape) if ctx.needs_input_grad[0] else None
        weights = ((first, ctx.needs_input_grad[1]), (second, ctx.needs_input_grad[2]))
        return x, *(grad.t() @ rows if needed else None for grad, needed in weights)


def _joined(x: Tensor, one: Any, other: Any) -> Tensor:
    """Return the outputs of two linear layers side by side."""
    # adapters are hooks, and a layer with a weight in 4 bits has a forward of its own
    if any(
        layer.bias is not None or layer._forward_hooks or "weight" not in layer._parameters
        for layer in (one, other)
    ):
        return torch.cat((one(x), other(x)), -1)
    y: Tensor = _Joined.apply(x, one.weight, other.weight)
    return y


class _TableMlp:
    """A gated MLP whose activation is the kernel of the table."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    activate: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of the shape of ``x``."""
        y: Tensor = self.down_proj(self.activate(_joined(x, self.gate_proj, self.up_proj)))
        return y


class _RotaryCache:
    """Cosines and sines of a pass in float32, which all layers of a model share."""

    def __init__(self) -> None:
        self._known: tuple[Any, Any] | None = None

    def of(self, embeddings: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[T, R]`` of transformers' own ``[1, T, R]``."""
        if self._known is None or self._known[0] is not embeddings[0]:
            cos, sin = (each[0].float() for each in embeddings)
            self._known = embeddings[0], (cos, sin)
        known: tuple[Tensor, Tensor] = self._known[1]
        return known


class _TableAttention:
    """An attention layer that rotates packed queries and keys with the kernel of the table."""

    config: Any
    head_dim: int
    scaling: float
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    rotate: Callable[..., tuple[Tensor, Tensor]]
    angles: _RotaryCache

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Return the layer's output ``[1, T, H]``, and what the attention function returns beside it."""
        name = self.config._attn_implementation
        is_packed = position_embeddings[0].shape[:2] == (1, hidden_states.shape[1])
        if not (is_packed and name.startswith(ATTENTION)):
            own: Any = super()
            result: tuple[Tensor, Any] = own.forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **options,
            )
            return result
        shape = len(hidden_states[0]), -1, self.head_dim
        q, k, v = (each(hidden_states).view(shape) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self._prepared(q, k, *self.angles.of(position_embeddings))
        output, more = AttentionInterface()[name](
            self,
            *(each[None].transpose(1, 2) for each in (q, k, v)),
            attention_mask,
            scaling=self.scaling,
            sliding_window=getattr(self, "sliding_window", None),
            **options,
        )
        return self.o_proj(output.flatten(2)), more

    def _prepared(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized and rotated queries and keys, ``[T, H, D]``."""
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return self.rotate(q, k, cos, sin)


# -------------------------------------------------------------------------
# Patterns
# -------------------------------------------------------------------------


class _Norm:
    """RMS norms and layer norms."""

    def matches(self, module: Any) -> bool:
        return is_norm(module) and module.weight.dim() == 1

    def bind(self, module: Any, kernels: KernelTable, dtype: torch.dtype) -> None:
        bind_norm(module, kernels, dtype)

    def results(self, module: Any, generator: torch.Generator) -> Results:
        """Return norms of rows down to ones so small that epsilon matters."""
        sizes = torch.logspace(-5, 1, ROWS, device=generator.device)[:, None]
        return [module(_random(generator, ROWS, len(module.weight)) * sizes)], ""


class _Mlp:
    """Gated MLPs."""

    def matches(self, module: Any) -> bool:
        return _has_linear(module, "gate_proj", "up_proj", "down_proj")

    def bind(self, module: Any, kernels: KernelTable, dtype: torch.dtype) -> None:
        module.activate = kernels.resolve("swiglu", dtype=dtype)
        _take_class(module, _TableMlp)

    def results(self, module: Any, generator: torch.Generator) -> Results:
        return [module(_random(generator, 1, ROWS, module.gate_proj.in_features))], ""


class _Attention:
    """Attention layers with a rotary embedding.

    :param model: The model, whose buffers say how many dimensions are rotated.
    """

    def __init__(self, model: nn.Module) -> None:
        self._angles = _RotaryCache()
        self._rotated = {2 * len(each) for n, each in model.named_buffers() if n.endswith("inv_freq")}
        scales = (v for each in model.modules() for n, v in vars(each).items() if n.endswith(_SCALE))
        self._unit_angles = all(scale == 1 for scale in scales)

    def matches(self, module: Any) -> bool:
        return (
            _has_linear(module, "q_proj", "k_proj", "v_proj", "o_proj")
            and isinstance(getattr(module, "head_dim", None), int)
            and {"config", "scaling"} <= vars(module).keys()
            and "position_embeddings" in signature(module.forward).parameters
        )

    def bind(self, module: Any, kernels: KernelTable, dtype: torch.dtype) -> None:
        facts = {"head_dim": module.head_dim, "unit_angles": self._unit_angles}
        module.rotate = kernels.resolve("rotary_embedding", dtype=dtype, **facts)
        module.angles = self._angles
        _take_class(module, _TableAttention)

    def results(self, module: Any, generator: torch.Generator) -> Results:
        """Return the output, and all that the attention function is given."""
        rotated = module.head_dim if module.head_dim in self._rotated else min(self._rotated)
        angles = _random(generator, 1, ROWS, rotated // 2).repeat(1, 1, 2)
        x = _random(generator, 1, ROWS, module.q_proj.in_features)
        name, module.config._attn_implementation = module.config._attn_implementation, PROBE
        try:
            output, _ = module(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
        finally:
            module.config._attn_implementation = name
        given, facts = module.probed
        return [output, *given], facts


def _probe(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Keep what an attention function is given, and return the queries."""
    kept = {name: each for name, each in options.items() if each is not None and name not in _IGNORED}
    module.probed = (query, key, value), repr(sorted(kept.items()))
    return query.transpose(1, 2), None


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device)


def _has_linear(module: nn.Module, *names: str) -> bool:
    children = dict(module.named_children())
    return all(isinstance(children.get(name), nn.Linear) for name in names)


def _take_class(module: Any, base: Any) -> None:
    kind: Any = type(module)
    module.__class__ = _subclass(base, kind)


@cache
def _subclass(base: type, kind: type) -> type:
    """Return a class with the methods of the first, then those of the second."""
    return type(f"Table{kind.__name__}", (base, kind), {})
