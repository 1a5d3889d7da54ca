"""Fused operations that a backend may implement, and their definitions.

Every op has a plain-torch reference in ``anygauge.kernels.reference`` and a row in the conformance suite.
An op is resolved once per module, when the module is built, from static facts; a step makes no hook call.

Every kernel promises, unless its op says otherwise:

* Tensors may have any strides, and begin at any element of their memory.
* Inputs, incoming gradients, settings of torch and, but for ``advances_rng``, random states stay as they are.
* A call keeps no tensor, and no later call sees anything of it.
* The output has the same bits without a gradient and in inference mode.
* Where an input is NaN, an output is, but for the choice of experts.
* Equal calls have equal bits while ``torch.are_deterministic_algorithms_enabled()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "KERNEL_FACTS",
    "KERNEL_OPS",
    "AddRmsNorm",
    "CausalConv1d",
    "GatedDeltaRule",
    "GroupedMatmul",
    "KernelImpl",
    "KernelLookup",
    "KernelOp",
    "LayerNorm",
    "LinearLogprob",
    "PrefersKernels",
    "QkNormRotary",
    "RmsNorm",
    "RotaryEmbedding",
    "Swiglu",
    "TokenPermute",
    "TokenUnpermute",
    "Tolerance",
    "TopkRouter",
    "VarlenAttention",
    "VocabParallelLogprob",
]

KernelOp = Literal[
    "add_rms_norm",
    "causal_conv1d",
    "gated_delta_rule",
    "grouped_matmul",
    "layer_norm",
    "linear_logprob",
    "qk_norm_rotary",
    "rms_norm",
    "rotary_embedding",
    "swiglu",
    "token_permute",
    "token_unpermute",
    "topk_router",
    "varlen_attention",
    "vocab_parallel_logprob",
]
KERNEL_OPS: tuple[KernelOp, ...] = get_args(KernelOp)

KERNEL_FACTS: Mapping[KernelOp, Sequence[str]] = {
    **dict.fromkeys(KERNEL_OPS, ()),
    "causal_conv1d": ("width",),
    "gated_delta_rule": ("head_dim", "value_dim"),
    "qk_norm_rotary": ("head_dim", "unit_angles"),
    "rotary_embedding": ("head_dim", "unit_angles"),
    "token_permute": ("experts", "topk"),
    "token_unpermute": ("topk",),
    "topk_router": (
        *("experts", "topk", "score_function", "pre_softmax"),
        *("num_groups", "group_topk", "has_expert_bias"),
    ),
    "varlen_attention": ("head_dim", "value_dim", "causal", "return_lse", "has_window", "has_sinks"),
}
"""Facts about each op, beside its dtype, that are known when a module is built and that ``KernelImpl.limits``
may name. Tensors come with any strides, so no fact describes a layout. ``unit_angles`` says whether cosines
and sines are within [-1, 1], as they are but for YaRN's factor."""

Tolerance = tuple[float, float]
"""Relative and absolute tolerance against the float64 reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelImpl:
    """One implementation of an op."""

    op: KernelOp
    fn: Callable[..., Any]
    source: str
    """Origin, for the capability table: ``"torch.nn.functional.rms_norm"``."""
    dtypes: Sequence[str] = ("float32", "bfloat16")
    """Names of the torch dtypes that it accepts."""
    limits: Mapping[str, Sequence[Any]] | None = None
    """Allowed values of facts that ``KERNEL_FACTS`` has for the op: ``{"head_dim": range(1, 257), "causal":
    (True,)}``. A fact that is not listed is not limited."""
    tolerance: Mapping[str, Tolerance] | None = None
    """Tolerances by dtype name; ``None`` takes the conformance suite's own."""
    tolerance_reason: str = ""
    """Why a tolerance is wider than the suite's. Without it the suite fails; with it the suite's report and
    ``anygauge hooks`` print both. The suite has a limit that no reason lifts."""
    advances_rng: bool = False
    """Whether a call advances the random state of the device, as an operator does that has a dropout which is
    not used. That of the host, and what a call computes, are never concerned."""
    priority: int = 0
    """Precedence where several plugins serve an op: the highest that accepts the static facts is taken."""
    requires: Sequence[str] = ()
    """Top-level modules that its function imports. Where one is not installed the kernel is left out, and
    ``anygauge hooks`` says so."""
    tiles: bool = False
    """Only for ``linear_logprob``: ``fn()`` returns a :class:`anygauge_hooks.tiles.TileMath`, and the core
    does the rest."""


class KernelLookup(Protocol):
    """The kernels of a run's backend."""

    def resolve(self, op: KernelOp, *, dtype: str | torch.dtype, **facts: Any) -> Callable[..., Any]:
        """Return the function that serves an op.

        :param op: A name of ``KERNEL_OPS``.
        :param dtype: The dtype of the activations.
        :param facts: Further values of ``KERNEL_FACTS`` known when the module is built: ``head_dim=64``.
        :returns: A function with the signature of the op's Protocol.
        """


@runtime_checkable
class PrefersKernels(Protocol):
    """A provider of layer modules that brings kernels for the modules that it leaves to the engine."""

    def preferred_kernels(self) -> Iterable[KernelImpl]:
        """Return kernels that the engine's modules prefer to those of the table."""


class RmsNorm(Protocol):
    """Root mean square norm, https://arxiv.org/abs/1910.07467 equation 4."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``x / rms(x) * weight`` with the reduction over the last dimension in float32.

        :param x: ``[..., D]``, float32 or bfloat16.
        :param weight: ``[D]``, the dtype of ``x``.
        :param eps: Added to the mean square.
        :returns: ``[..., D]``, the dtype of ``x``.
        """


class AddRmsNorm(Protocol):
    """Residual addition and norm of a layer, with a single gradient for the stream.

    Where nobody serves it, it is made of an addition and ``rms_norm`` of the same table.
    """

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``residual + x``, rounded to its dtype, and its norm as :class:`RmsNorm` returns it.

        :param x: ``[..., D]``, float32 or bfloat16.
        :param weight: ``[D]``, the dtype of ``x``.
        :param eps: Added to the mean square.
        :param residual: Tensor with the shape and dtype of ``x``. ``None`` adds nothing.
        :returns: ``[..., D]`` twice, the dtype of ``x``. The first may share the
            memory of ``x`` where there is no ``residual``.
        """


class LayerNorm(Protocol):
    """Layer norm over the last dimension, https://arxiv.org/abs/1607.06450 equation 4."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Return ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, the mean and variance in float32.

        It is for vision towers; none of the text models has one.

        :param x: ``[..., D]``, float32 or bfloat16.
        :param weight: ``[D]``, the dtype of ``x``.
        :param bias: ``[D]``, the dtype of ``x``.
        :param eps: Added to the variance.
        :returns: ``[..., D]``, the dtype of ``x``.
        """


class RotaryEmbedding(Protocol):
    """Rotary position embedding, https://arxiv.org/abs/2104.09864 section 3.4, in the half-rotated layout."""

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by the angles of their positions.

        There is one layout for every model: where the pairs of a model are neighbors, the engine has moved
        them into halves, and positions of images are in the angles already.

        :param q: ``[T, H, D]``.
        :param k: ``[T, K, D]``.
        :param cos: ``[T, R]``, float32, with ``R <= D``; the dimensions past ``R`` are left as they are. A
            family may have multiplied cosines and sines, as YaRN does.
        :param sin: ``[T, R]``, float32.
        :returns: The rotated ``q`` and ``k``, in their dtypes.
        """


class QkNormRotary(Protocol):
    """Fused split, query and key norms and rotary embedding between projection and attention.

    Where nobody serves it, it is made of ``rms_norm`` and ``rotary_embedding`` of the same table.
    """

    def __call__(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normalized and then rotated, and values.

        :param qkv: ``[T, K, G + 2, D]``: for each key head its ``G`` query heads, itself and its values.
        :param q_weight: ``[D]``, the dtype of ``qkv``, of :class:`RmsNorm`.
        :param k_weight: ``[D]``.
        :param cos: ``[T, R]``, float32, with ``R <= D``, as for :class:`RotaryEmbedding`.
        :param sin: ``[T, R]``, float32.
        :param eps: Epsilon of the norms.
        :returns: ``[T, K G, D]``, ``[T, K, D]`` and ``[T, K, D]``. The last may share the memory of ``qkv``.
        """


class Swiglu(Protocol):
    """SiLU-gated linear unit, https://arxiv.org/abs/2002.05202 equation 5."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``.

        :param gate_up: ``[..., 2 F]``: gate in the first half, up in the second.
        :returns: ``[..., F]``.
        """


class VarlenAttention(Protocol):
    """Scaled dot-product attention over sequences packed back to back."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int],
        scale: float,
        *,
        causal: bool,
        key_lengths: Sequence[int] | None = None,
        return_lse: bool = False,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend within each packed sequence.

        Where the keys of a query are attended to in parts, the parts' outputs, each times the exponential of
        its log-sum-exp, add up to the whole.

        :param q: ``[T, H, D]``.
        :param k: ``[S, K, D]`` with ``H % K == 0``; query head ``h`` reads key head ``h // (H / K)``.
        :param v: ``[S, K, E]``.
        :param lengths: Host integers, each >= 0, that sum to ``T``.
        :param scale: Multiplies the scores.
        :param causal: Whether a token sees only itself and what is before it in its sequence.
        :param key_lengths: Host integers that sum to ``S``. ``None`` says that they are ``lengths``. If
            causal, none is below its entry in ``lengths``, and the queries of a sequence are its last tokens,
            as they are for a part of it under context parallelism. If not, a sequence with queries has a key.
        :param return_lse: Whether the log-sum-exp of the scaled scores of each query is a second output,
            ``[T, H]``, float32, in nats. It carries no gradient. The engine does not ask for it: it is for
            context parallelism by parts, and for use outside of the engine.
        :param window: How many of the last tokens a token sees, itself among them; at least 1. Only if
            causal. ``None`` has no limit.
        :param sinks: ``[H]``, the dtype of ``q``: a further score of each head, which is not scaled. It joins
            the sum of the softmax and has no value, as in https://arxiv.org/abs/2508.10925. It is part of the
            log-sum-exp, so of several parts one alone is given sinks. ``None`` has none.
        :returns: ``[T, H, E]``, the dtype of ``q``.
        """


class VocabParallelLogprob(Protocol):
    """Log-probability of given tokens and entropy, from logits that may be split over the vocabulary."""

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        group: Any | None,
        *,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return ``log softmax(logits / temperature)[targets]`` and the entropy of that distribution.

        The logits may be overwritten.

        :param logits: ``[T, V / tp]``, any floating dtype; computed in float32.
        :param targets: ``[T]``, int64, global vocabulary ids.
        :param temperature: Above 0.
        :param group: The tensor-parallel process group that splits the vocabulary, or ``None`` for one rank.
        :param entropy_grad: Whether the entropy carries a gradient.
        :returns: Log-probabilities ``[T]`` and entropies ``[T]`` in nats, float32.
        """


class LinearLogprob(Protocol):
    """The output layer, log-probability and entropy in one, which needs no logits of all tokens at once."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        group: Any | None,
        *,
        entropy_grad: bool,
        vocab_size: int | None = None,
        rest: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute ``vocab_parallel_logprob`` of the logits ``hidden @ weight.T``.

        Where the weight has a ``main_grad``, its gradient is added to that and ``grad_added_to_main_grad``
        is set, as Megatron's own linears do; autograd then gets a gradient that nobody reads, which lets the
        hooks on the weight run.

        :param hidden: ``[T, H]``, whole on every rank of the group. Its gradient is summed over the group.
        :param weight: ``[V / tp, H]``, the dtype of ``hidden``.
        :param targets: ``[T]`` or ``[T, N]``, int64, global vocabulary ids.
        :param temperature: Above 0.
        :param group: The tensor-parallel process group that splits the vocabulary, or ``None`` for one rank.
        :param entropy_grad: Whether the entropy carries a gradient.
        :param vocab_size: Size of the vocabulary, where the whole weight has more rows. Those are padding and
            take no part. ``None`` says that there are none.
        :param rest: Whether the log-probability of all tokens that are no target of the row is one more
            column, -1e4 where there are none. Of ``[T, N]`` targets.
        :returns: Log-probabilities of the shape of ``targets`` and entropies ``[T]`` in nats, float32.
        """


class GroupedMatmul(Protocol):
    """A matrix product per expert, of tokens that are sorted by expert."""

    def __call__(self, x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Return ``x[i] @ weight[e].T`` for the tokens ``i`` of each expert ``e``.

        :param x: ``[T, K]``, sorted by expert.
        :param weight: ``[E, N, K]``, the dtype of ``x``.
        :param tokens_per_expert: ``[E]``, int64, on any device; sums to ``T``. An expert may have none.
        :returns: ``[T, N]``, the dtype of ``x``.
        """


class TopkRouter(Protocol):
    """The choice of experts and their weights, https://arxiv.org/abs/2101.03961 section 2.1.

    Groups and a bias are those of DeepSeek-V3, https://arxiv.org/abs/2412.19437 section 2.1.2.
    """

    def __call__(
        self,
        logits: Tensor,
        topk: int,
        *,
        score_function: Literal["softmax", "sigmoid"],
        pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        expert_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the weights of the experts of each token, and which they are.

        The experts with the highest scores are chosen. For ``sigmoid`` a score is the sigmoid of the logit,
        and the weights are the scores of the chosen over their sum plus 1e-20, or the score itself if
        ``topk`` is 1. For ``softmax`` the weights are the softmax over the logits of the chosen, or, with
        ``pre_softmax``, the softmax over all logits as it is.

        Which of experts with equal scores is chosen, and in which order the chosen come, is not said.

        :param logits: ``[T, E]``, float32 or bfloat16; computed in float32.
        :param topk: Experts per token, ``K``.
        :param score_function: How logits become scores, for the choice and for the weights.
        :param pre_softmax: Applies to ``softmax`` alone.
        :param num_groups: Divides ``E``: so many groups of neighboring experts are there.
        :param group_topk: Divides ``K`` and is at most ``num_groups``: the experts of a token are chosen from
            so many groups. A group counts the sum of its ``K / group_topk`` highest scores. Both or neither
            are given.
        :param scaling_factor: Multiplies the weights.
        :param expert_bias: ``[E]``, float32, of ``sigmoid`` alone: added to the scores for the choice, of
            groups too, and not in the weights. It gets no gradient.
        :returns: Weights ``[T, K]``, the dtype of ``logits``, and expert numbers ``[T, K]``, int64.
        """


class TokenPermute(Protocol):
    """Copies of tokens, one per chosen expert, sorted by expert: the input of the experts."""

    def __call__(
        self, tokens: Tensor, probs: Tensor, routing_map: Tensor, topk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the copies, their weights, and where each token's copies went.

        The rows of an expert are in the order of the tokens. The gradient of a token is the sum over its
        copies, in float32.

        :param tokens: ``[T, H]``.
        :param probs: ``[T, E]``, float32 or the dtype of ``tokens``. What is not chosen gets gradient 0.
        :param routing_map: ``[T, E]``, bool, with exactly ``topk`` experts per token.
        :param topk: ``K``, a host integer, so that the number of rows needs no look at the map.
        :returns: The tokens ``[T K, H]`` and their weights ``[T K]``, in the dtypes that they had, and
            ``rows [T, K]``, int32 or int64: which rows a token's copies are, in ascending order.
        """


class TokenUnpermute(Protocol):
    """The sum of the experts' outputs for each token."""

    def __call__(self, permuted: Tensor, rows: Tensor) -> Tensor:
        """Return ``sum_k permuted[rows[t, k]]`` for each token ``t``, summed in float32.

        :param permuted: ``[T K, H]``.
        :param rows: ``[T, K]``, int32 or int64, of :class:`TokenPermute`: each row once.
        :returns: ``[T, H]``, the dtype of ``permuted``.
        """


class CausalConv1d(Protocol):
    """Depthwise causal convolution with SiLU over packed sequences, https://arxiv.org/abs/2312.00752."""

    def __call__(self, x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return ``silu(sum_w weight[c, w] * x[t - W + 1 + w, c])`` within each sequence.

        :param x: ``[T, C]``.
        :param weight: ``[C, W]``.
        :param lengths: Host integers, each >= 0, that sum to ``T``; before a sequence there are zeros.
        :returns: ``[T, C]``, the dtype of ``x``.
        """


class GatedDeltaRule(Protocol):
    """The gated delta rule, https://arxiv.org/abs/2412.06464 equation 10, over packed sequences."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], scale: float
    ) -> Tensor:
        """Return ``scale S_t q_t`` with ``S_t = exp(g_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T``.

        The state ``S`` is zero at the start of each sequence. Queries and keys are given normalized.

        :param q: ``[T, H, D]``.
        :param k: ``[T, H, D]``.
        :param v: ``[T, H, E]``.
        :param g: ``[T, H]``, float32, at most 0: logarithm of the decay.
        :param beta: ``[T, H]``, float32, in (0, 1).
        :param lengths: Host integers, each >= 0, that sum to ``T``.
        :param scale: Multiplies the output.
        :returns: ``[T, H, E]``, the dtype of ``v``; computed in float32.
        """
