"""Distillation from a teacher's top-k tokens, in addition to the sampled ones."""

from __future__ import annotations

from torch import Tensor

__all__ = ["top_k_kl"]


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
