"""Log-probabilities among the tokens that a policy may sample: placeholders of media are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["logprob_without", "top_k_without"]


def logprob_without(
    logprob: Callable[..., tuple[Tensor, Tensor]],
    targets: Tensor,
    temperature: float,
    group: Any | None,
    forbidden: Sequence[int],
    *,
    entropy_grad: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the shape of ``targets`` and entropies ``[R]``, float32.

    :param logprob: Function of targets, temperature, group and options that returns them for all tokens.
    :param targets: ``[R]`` or ``[R, N]``, int64.
    :param forbidden: Tokens that are never sampled.
    """
    options["entropy_grad"] = entropy_grad
    if not forbidden:
        return logprob(targets, temperature, group, **options)
    columns = targets if targets.dim() == 2 else targets.unsqueeze(1)
    others = targets.new_tensor(forbidden).expand(len(targets), -1)
    all_log_probs, entropy = logprob(torch.cat((columns, others), 1), temperature, group, **options)
    log_probs, entropy = _without(all_log_probs, entropy, columns.shape[1], len(forbidden), entropy_grad)
    return (log_probs if targets.dim() == 2 else log_probs.squeeze(1)), entropy


def top_k_without(ids: Tensor, count: int, forbidden: Sequence[int]) -> Tensor:
    """Return the ids ``[R, count]`` of the top-k tokens.

    :param ids: ``[R, count + len(forbidden)]``, int64, of all tokens.
    :param forbidden: Tokens that are never sampled.
    """
    if not forbidden:
        return ids
    is_forbidden = torch.isin(ids, ids.new_tensor(forbidden))
    return ids.gather(1, is_forbidden.byte().argsort(stable=True, dim=1))[:, :count]


def _without(
    log_probs: Tensor, entropy: Tensor, num_targets: int, count: int, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropy of what is left when some tokens are never drawn.

    :param log_probs: ``[R, num_targets + count, ...]``: of targets, of those tokens, and further ones.
    :param entropy: ``[R]``, of all tokens.
    """
    gone = log_probs[:, num_targets : num_targets + count]
    share = gone.exp().sum(1)
    left = torch.log1p(-share)
    kept = torch.cat((log_probs[:, :num_targets], log_probs[:, num_targets + count :]), 1) - left.unsqueeze(1)
    if not entropy_grad:
        gone, share, left = gone.detach(), share.detach(), left.detach()
    return kept, (entropy + (gone.exp() * gone).sum(1)) / (1 - share) + left
