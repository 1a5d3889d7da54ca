"""Sizes of a model from its ``config.json``: parameters by part, and numbers that a layer keeps per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from anygauge_hooks.errors import ConfigError
from anygauge_hooks.models import text_config

__all__ = ["Attention", "Experts", "Kept", "ModelShape", "read_shape"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Spellings of the number of experts in a ``config.json``."""
_CONTEXT = "max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Widths of an attention layer, in numbers per token."""

    query: int
    """All query heads together."""
    key: int
    """All key heads together."""
    value: int
    """All value heads together."""
    output: int
    """Input of the output projection."""
    heads: int
    parameters: int
    cache: int
    """Numbers of a token in the KV cache of one layer."""
    cache_heads: int
    """Key heads, among which tensor parallelism divides the cache; 1 for latent attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts."""

    count: int
    chosen: int
    """Experts of a token."""
    width: int
    """Intermediate size of an expert."""
    shared_width: int
    """Intermediate size of the experts that all tokens visit; 0 without."""
    layers: int
    """Layers that have experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Numbers that a layer keeps per token for its backward pass."""

    tokens: float
    """Width of what is between the matrices: tensor parallelism divides it by tokens, or not at all."""
    split: float
    """Width of what tensor parallelism divides in any case."""
    recomputed: float
    """Part of ``tokens`` that ``elementwise`` computes again."""
    recomputed_split: float
    """Part of ``split`` that ``elementwise`` computes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a language model. Parameters are counts, not bytes."""

    layers: int
    hidden: int
    vocabulary: int
    is_tied: bool
    """Whether embedding and output layer share their weight."""
    intermediate: int
    """Intermediate size of a dense MLP."""
    attention: Attention
    attention_layers: int
    """Layers with a KV cache; others have a recurrent state."""
    experts: Experts | None = None
    others: int = 0
    """Parameters of other parts, such as a vision tower."""
    context: int | None = None
    """Longest sequence; ``None`` where the model states none."""

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts, without those that all tokens visit."""
        if self.experts is None:
            return 0
        return self.experts.layers * self.experts.count * 3 * self.hidden * self.experts.width

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers without their experts: attention, dense MLPs, routers, shared experts."""
        norms = 2 * self.hidden
        total = self.layers * (self.attention.parameters + norms)
        sparse = 0 if self.experts is None else self.experts.layers
        total += (self.layers - sparse) * 3 * self.hidden * self.intermediate
        if self.experts is not None:
            shared = 3 * self.hidden * self.experts.shared_width
            total += sparse * (self.hidden * self.experts.count + shared)
        return total

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        ends = self.embedding * (1 if self.is_tied else 2) + self.hidden
        return self.layer_parameters + self.expert_parameters + ends + self.others

    @property
    def active_parameters(self) -> int:
        """Parameters of all layers that one token meets."""
        if self.experts is None:
            return self.layer_parameters
        chosen = self.expert_parameters * self.experts.chosen // self.experts.count
        return self.layer_parameters + chosen

    @property
    def cache_numbers(self) -> int:
        """Numbers of one token in the KV cache of all layers."""
        return self.attention_layers * self.attention.cache

    def kept(self) -> Kept:
        """Return what all layers together keep per token."""
        dense, sparse = self.layers, 0
        if self.experts is not None:
            dense, sparse = self.layers - self.experts.layers, self.experts.layers
        around = self._around_attention()
        mlp = _gated(self.intermediate)
        split = self.layers * around.split + dense * mlp.split
        recomputed_split = dense * mlp.recomputed_split
        tokens = self.layers * around.tokens
        if self.experts is not None:
            routed = self._routed(self.experts)
            split += sparse * _gated(self.experts.shared_width).split
            tokens += sparse * routed
        recomputed = self.layers * around.recomputed
        return Kept(tokens=tokens, split=split, recomputed=recomputed, recomputed_split=recomputed_split)

    def _around_attention(self) -> Kept:
        """Return what a layer keeps but for its MLP: two residual sums, their norms, and attention."""
        own = self.attention
        # The projection's output, normalized and rotated copies of queries and keys (values are a view of
        # it), the attention's output, and its log-sum-exp in float32.
        split = (own.query + own.key + own.value) + (own.query + own.key) + own.output + 2 * own.heads
        return Kept(tokens=4 * self.hidden, split=split, recomputed=2 * self.hidden, recomputed_split=0)

    def _routed(self, experts: Experts) -> float:
        """Return what a layer of experts keeps: inputs, both projections, and activations with weights."""
        return experts.chosen * (self.hidden + 4 * experts.width) + 4 * experts.count


def _gated(width: int) -> Kept:
    """Return what a gated MLP keeps: gate and up projection, and the input of the down projection."""
    return Kept(tokens=0, split=3 * width, recomputed=0, recomputed_split=width)


def read_shape(hf: Mapping[str, Any], *, stored_parameters: int | None = None) -> ModelShape:
    """Return the sizes of a model.

    :param hf: Content of its ``config.json``.
    :param stored_parameters: Parameters in its weight files; what the sizes do not explain, such as a vision
        tower, becomes :attr:`ModelShape.others`.
    :raises ConfigError: A size is missing.
    """
    hf = text_config(hf)
    layers, hidden = _size(hf, "num_hidden_layers"), _size(hf, "hidden_size")
    attends = _attention_layers(hf, layers)
    experts = _experts(hf, layers)
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        vocabulary=_size(hf, "vocab_size"),
        is_tied=bool(hf.get("tie_word_embeddings", False)),
        intermediate=_size(hf, "intermediate_size") if experts is None or experts.layers < layers else 0,
        attention=_mixed_attention(hf, hidden, attends / layers),
        attention_layers=attends,
        experts=experts,
        context=_size(hf, _CONTEXT) if hf.get(_CONTEXT) else None,
    )
    return replace(shape, others=max(0, (stored_parameters or 0) - shape.parameters))


def _attention_layers(hf: Mapping[str, Any], layers: int) -> int:
    kinds = hf.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return sum(kind != "linear_attention" for kind in kinds)
    return layers // int(hf["full_attention_interval"]) if "full_attention_interval" in hf else layers


def _mixed_attention(hf: Mapping[str, Any], hidden: int, share: float) -> Attention:
    """Return the attention of a layer, a mean where some layers have linear attention."""
    full = _latent_attention(hf, hidden) if hf.get("kv_lora_rank") else _grouped_attention(hf, hidden, share)
    if share == 1:
        return full
    linear = _linear_attention(hf, hidden)
    mean = {
        name: round(share * getattr(full, name) + (1 - share) * getattr(linear, name))
        for name in ("query", "key", "value", "output", "heads", "parameters")
    }
    return Attention(**mean, cache=full.cache, cache_heads=full.cache_heads)


def _grouped_attention(hf: Mapping[str, Any], hidden: int, share: float) -> Attention:
    heads = _size(hf, "num_attention_heads")
    key_heads = int(hf.get("num_key_value_heads") or heads)
    size = int(hf.get("head_dim") or hidden // heads)
    query, key = heads * size, key_heads * size
    gate = query if share < 1 else 0  # Qwen3.5 has a gate for each query head beside linear attention
    parameters = hidden * (2 * query + 2 * key + gate)
    return Attention(
        query=query + gate,
        key=key,
        value=key,
        output=query,
        heads=heads,
        parameters=parameters,
        cache=2 * key,
        cache_heads=key_heads,
    )


def _latent_attention(hf: Mapping[str, Any], hidden: int) -> Attention:
    """Return DeepSeek's latent attention (https://arxiv.org/abs/2405.04434 section 2.1)."""
    heads, latent = _size(hf, "num_attention_heads"), _size(hf, "kv_lora_rank")
    plain, turned, value = (_size(hf, f"{n}_head_dim") for n in ("qk_nope", "qk_rope", "v"))
    query, rank = heads * (plain + turned), int(hf.get("q_lora_rank") or 0)
    queries = hidden * rank + rank * query if rank else hidden * query
    keys = hidden * (latent + turned) + latent * heads * (plain + value)
    return Attention(
        query=query,
        key=query,
        value=heads * value,
        output=heads * value,
        heads=heads,
        parameters=queries + keys + heads * value * hidden,
        cache=latent + turned,
        cache_heads=1,
    )


def _linear_attention(hf: Mapping[str, Any], hidden: int) -> Attention:
    """Return a gated delta rule (https://arxiv.org/abs/2412.06464), whose state has no cache of tokens."""
    key_heads, heads = _size(hf, "linear_num_key_heads"), _size(hf, "linear_num_value_heads")
    key = key_heads * _size(hf, "linear_key_head_dim")
    value = heads * _size(hf, "linear_value_head_dim")
    parameters = hidden * (2 * key + 2 * value + 2 * heads) + value * hidden
    return Attention(
        query=key,
        key=key,
        value=2 * value,
        output=value,
        heads=heads,
        parameters=parameters,
        cache=0,
        cache_heads=1,
    )


def _experts(hf: Mapping[str, Any], layers: int) -> Experts | None:
    count = next((int(hf[name]) for name in _EXPERTS if hf.get(name)), 0)
    if not count:
        return None
    # gpt-oss and Mixtral have experts in every layer, and one name for their width
    width = _size(hf, "moe_intermediate_size" if "moe_intermediate_size" in hf else "intermediate_size")
    shared = int(hf.get("shared_expert_intermediate_size") or (hf.get("n_shared_experts") or 0) * width)
    kinds = hf.get("mlp_layer_types")
    if isinstance(kinds, list):
        dense = len(kinds) - kinds.count("sparse")
    else:
        dense = int(hf.get("first_k_dense_replace") or len(hf.get("mlp_only_layers") or ()))
    step = int(hf.get("decoder_sparse_step") or 1)
    return Experts(
        count=count,
        chosen=_size(hf, "num_experts_per_tok"),
        width=width,
        shared_width=shared,
        layers=(layers - dense) // step,
    )


def _size(hf: Mapping[str, Any], name: str) -> int:
    value = hf.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        f"The model's config.json has {name} = {value!r}; a plan needs a whole number above 0.",
        hint="Point model.path at a language model whose config.json states its sizes.",
    )
