"""Monte Carlo estimators of KL(policy || reference) from tokens that the policy sampled.

John Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. With
``d = log reference(x) - log policy(x)`` the estimators are ``k1 = -d``, ``k2 = d^2 / 2`` and
``k3 = exp(d) - 1 - d``.

As terms of a loss they are differentiated at fixed samples. The gradient of ``k2`` is then an unbiased
estimate of the gradient of KL(policy || reference), that of ``k3`` one of the gradient of
KL(reference || policy), and that of ``k1`` is zero in expectation.
"""

from __future__ import annotations

from typing import Literal, assert_never

from torch import Tensor

__all__ = ["KlType", "kl_divergence"]

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
