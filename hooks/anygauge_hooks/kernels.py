"""The fused operations that a backend may implement, and what each must compute.

Every op has a plain-torch reference in ``anygauge.kernels.reference`` and a row in the conformance suite.
An op is resolved once per module, when the module is built, from static facts; a step makes no hook call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KERNEL_OPS",
    "CausalConv1d",
    "GatedDeltaRule",
    "GroupedMatmul",
    "KernelImpl",
    "KernelOp",
    "LinearLogprob",
    "RmsNorm",
    "RotaryEmbedding",
    "Swiglu",
    "Tolerance",
    "VarlenAttention",
    "VocabParallelLogprob",
]

KernelOp = Literal[
    "causal_conv1d",
    "gated_delta_rule",
    "grouped_matmul",
    "linear_logprob",
    "rms_norm",
    "rotary_embedding",
    "swiglu",
    "varlen_attention",
    "vocab_parallel_logprob",
]
KERNEL_OPS: tuple[KernelOp, ...] = get_args(KernelOp)

Tolerance = tuple[float, float]
"""Relative and absolute tolerance against the float64 reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelImpl:
    """One implementation of an op."""

    op: KernelOp
    fn: Callable[..., Any]
    source: str
    """Where it comes from, for the capability table: ``"torch.nn.functional.rms_norm"``."""
    dtypes: Sequence[str] = ("float32", "bfloat16")
    """Names of the torch dtypes that it accepts."""
    limits: Mapping[str, Sequence[Any]] | None = None
    """Allowed values of static facts: ``{"head_dim": (64, 128), "causal": (True,)}``. A fact that is not
    listed is not limited."""
    tolerance: Mapping[str, Tolerance] | None = None
    """By dtype name; ``None`` takes the conformance suite's own."""
    priority: int = 0
    """Where several plugins serve an op, the highest that accepts the static facts is taken."""
    requires: Sequence[str] = ()
    """Top-level modules that its function imports. Where one is not installed the kernel is left out, and
    ``anygauge hooks`` says so."""
    tiles: bool = False
    """Only for ``linear_logprob``: ``fn()`` returns a :class:`anygauge_hooks.tiles.TileMath`, and the core
    does the rest."""


class RmsNorm(Protocol):
    """Root mean square norm, https://arxiv.org/abs/1910.07467 equation 4."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``x / rms(x) * weight`` with the reduction over the last dimension in float32.

        :param x: ``[..., D]``, float32 or bfloat16.
        :param weight: ``[D]``, the dtype of ``x``.
        :returns: ``[..., D]``, the dtype of ``x``.
        """


class RotaryEmbedding(Protocol):
    """Rotary position embedding, https://arxiv.org/abs/2104.09864 section 3.4, in the half-rotated layout."""

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by the angles of their positions.

        :param q: ``[T, H, D]``.
        :param k: ``[T, K, D]``.
        :param cos: ``[T, R]``, float32, with ``R <= D``; the dimensions past ``R`` are left as they are.
        :param sin: ``[T, R]``, float32.
        :returns: The rotated ``q`` and ``k``, in their dtypes.
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
    ) -> Tensor:
        """Attend within each packed sequence.

        :param q: ``[T, H, D]``.
        :param k: ``[S, K, D]`` with ``H % K == 0``; query head ``h`` reads key head ``h // (H / K)``.
        :param v: ``[S, K, E]``.
        :param lengths: Host integers, each >= 0, that sum to ``T``.
        :param scale: Multiplies the scores.
        :param causal: Whether a token sees only itself and what is before it in its sequence.
        :param key_lengths: Host integers that sum to ``S``, none below its entry in ``lengths``; the queries
            of a sequence are then its last tokens, as they are for a part of it under context parallelism.
            ``None`` says that they are ``lengths``.
        :returns: ``[T, H, E]``.
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
    """The output layer, log-probability and entropy in one, without logits of all tokens at any time."""

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
        """Return what ``vocab_parallel_logprob`` returns for the logits ``hidden @ weight.T``.

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

        :param x: ``[T, K]``.
        :param weight: ``[E, N, K]``, the dtype of ``x``.
        :param tokens_per_expert: ``[E]``, int64, on any device; sums to ``T``. An expert may have none.
        :returns: ``[T, N]``, the dtype of ``x``.
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

        The state ``S`` is zero at the start of each sequence. Queries and keys are given normalised.

        :param q: ``[T, H, D]``.
        :param k: ``[T, H, D]``.
        :param v: ``[T, H, E]``.
        :param g: ``[T, H]``, float32, at most 0: logarithm of the decay.
        :param beta: ``[T, H]``, float32, in (0, 1).
        :param lengths: Host integers, each >= 0, that sum to ``T``.
        :param scale: Multiplies the output.
        :returns: ``[T, H, E]``, the dtype of ``v``; computed in float32.
        """
