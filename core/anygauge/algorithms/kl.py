"""KL divergences: estimated from sampled tokens, and of a teacher's top-k tokens for distillation.

Monte Carlo estimators of KL(policy || reference) from tokens that the policy sampled: John Schulman,
"Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. With
``d = log reference(x) - log policy(x)`` the estimators are ``k1 = -d``, ``k2 = d^2 / 2`` and
``k3 = exp(d) - 1 - d``.

As terms of a loss they are differentiated at fixed samples. The gradient of ``k2`` is then an unbiased
estimate of the gradient of KL(policy || reference), that of ``k3`` one of the gradient of
KL(reference || policy), and that of ``k1`` is zero in expectation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KlType", "kl_divergence", "top_k_kl"]

KlType = Literal["k1", "k2", "k3", "low_var_kl"]

_MAX_LOG_RATIO = 20.0
_MAX_LOW_VAR_KL = 10.0


def kl_divergence(log_probs: Tensor, reference_log_probs: Tensor, kl_type: KlType) -> Tensor:
    """Return the estimate of each token, in nats; exactly 0 where the two log-probabilities are equal.

    :param log_probs: ``[T]``, under the policy, floating; carries the gradient.
    :param reference_log_probs: ``[T]``, under the reference.
    :param kl_type: ``"low_var_kl"`` is ``k3`` bounded to 10 nats a token, with no gradient past the bound;
        the others are exact.
    :returns: ``[T]``.
    """
    d = reference_log_probs - log_probs
    match kl_type:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return d.expm1() - d
        case "low_var_kl":
            bounded = d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            return (bounded.expm1() - bounded).clamp(max=_MAX_LOW_VAR_KL)
        case _:
            assert_never(kl_type)


def top_k_kl(log_probs_TK: Tensor, teacher_log_probs_TK: Tensor) -> Tensor:
    """Return KL(teacher || policy) with all but the teacher's top-k tokens taken as one.

    ``sum_k p_k (log p_k - log q_k)``, the divergence of the two distributions over ``K`` outcomes, of which
    the last one is all other tokens: a lower bound of that over the vocabulary, 0 for equal policies, and
    exact if there are no others. Its gradient is that of forward KL distillation,
    https://arxiv.org/abs/1503.02531 section 2, without ``[T, V]`` of either model.

    What is left for the others is given and not computed: ``1 - sum_k q_k`` of a policy that is sure of a
    token has no digit that is right.

    :param log_probs_TK: ``[T, K]``, of the policy for those outcomes; carries the gradient.
    :param teacher_log_probs_TK: ``[T, K]``, of the teacher.
    :returns: ``[T]``, in nats.
    """
    return (teacher_log_probs_TK.exp() * (teacher_log_probs_TK - log_probs_TK)).sum(1)
