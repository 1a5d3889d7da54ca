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
    "KernelImpl",
    "KernelOp",
    "RmsNorm",
    "RotaryEmbedding",
    "Swiglu",
    "Tolerance",
    "VarlenAttention",
    "VocabParallelLogprob",
]

KernelOp = Literal["rms_norm", "rotary_embedding", "swiglu", "varlen_attention", "vocab_parallel_logprob"]
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
    ) -> Tensor:
        """Attend within each packed sequence.

        :param q: ``[T, H, D]``.
        :param k: ``[T, K, D]`` with ``H % K == 0``; query head ``h`` reads key head ``h // (H / K)``.
        :param v: ``[T, K, D]``.
        :param lengths: Host integers, each >= 0, that sum to ``T``.
        :param scale: Multiplies the scores.
        :param causal: Whether a token sees only itself and what is before it in its sequence.
        :returns: ``[T, H, D]``.
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
