"""Faults of the kernel table: log-probs and experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backend_faults import kernel_table as op
from backend_faults.fault import Fault
from backend_faults.kernel_parts import low, misread, through, with_grad
from backend_faults.kernel_table import Body

# -------------------------------------------------------------------------
# Log-probs
# -------------------------------------------------------------------------


def _alone(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Take the vocabulary of this rank for the whole."""
    if a.group is None:
        return call()
    width = (a.logits if hasattr(a, "logits") else a.weight).shape[-1 if hasattr(a, "logits") else 0]
    return call(group=None, targets=(a.targets - width * dist.get_rank(a.group)).clamp(0, width - 1))


def _unsummed(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Give the hidden states this rank's part of the gradient."""
    size = 1 if a.group is None else dist.get_world_size(a.group)
    return call(hidden=with_grad(a.hidden, lambda g: g / size))


def _main_grad(change: Callable[[Tensor, Tensor], None]) -> Body:
    """Change ``main_grad`` after backward has added to it, given what it was before the call."""

    def body(call: Callable[..., Any], a: SimpleNamespace) -> Any:
        main = getattr(a.weight, "main_grad", None)
        if main is None or not a.hidden.requires_grad:
            return call()
        before = main.clone()

        def afterwards(grad: Tensor) -> Tensor:
            change(main, before)
            return grad

        return call(hidden=with_grad(a.hidden, afterwards))

    return body


def _mark_missing(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    def unmark(grad: Tensor) -> Tensor:
        if hasattr(a.weight, "main_grad"):
            a.weight.grad_added_to_main_grad = False
        return grad

    return call(hidden=with_grad(a.hidden, unmark))


LOGPROBS = [
    op.vocab_parallel_logprob(
        "temperature_ignored",
        "vocab_parallel_logprob takes 1 for every temperature",
        lambda call, a: call(temperature=1.0),
    ),
    op.vocab_parallel_logprob(
        "entropy_at_temperature_1",
        "the entropy of vocab_parallel_logprob is that at temperature 1",
        lambda call, a: (call(logits=a.logits.clone())[0], call(temperature=1.0)[1]),
    ),
    op.vocab_parallel_logprob("group_ignored", "vocab_parallel_logprob normalizes each rank alone", _alone),
    op.vocab_parallel_logprob(
        "entropy_without_gradient",
        "the entropy of vocab_parallel_logprob never carries a gradient",
        lambda call, a: call(entropy_grad=False),
    ),
    op.vocab_parallel_logprob(
        "entropy_with_gradient",
        "the entropy of vocab_parallel_logprob always carries a gradient",
        lambda call, a: call(entropy_grad=True),
    ),
    op.vocab_parallel_logprob(
        "entropy_in_bits",
        "the entropy of vocab_parallel_logprob is in bits",
        lambda call, a: ((y := call())[0], y[1] / math.log(2)),
    ),
    op.vocab_parallel_logprob(
        "dtype_of_logits",
        "vocab_parallel_logprob returns the dtype of the logits",
        lambda call, a: tuple(y.to(a.logits.dtype) for y in call()),
    ),
    op.vocab_parallel_logprob(
        "large_logits",
        "vocab_parallel_logprob clips logits at 80, because it does not subtract the largest",
        lambda call, a: call(logits=a.logits.clamp(max=80)),
    ),
    op.vocab_parallel_logprob(
        "first_targets",
        "vocab_parallel_logprob reads targets as int32 with a stride: each second one is 0",
        lambda call, a: call(targets=a.targets * (torch.arange(len(a.targets), device=a.targets.device) % 2)),
    ),
    op.linear_logprob(
        "temperature_ignored",
        "linear_logprob takes 1 for every temperature",
        lambda call, a: call(temperature=1.0),
    ),
    op.linear_logprob(
        "vocab_size_ignored",
        "linear_logprob counts padded rows of the vocabulary",
        lambda call, a: call(vocab_size=None),
    ),
    op.linear_logprob("group_ignored", "linear_logprob normalizes each rank alone", _alone),
    op.linear_logprob(
        "hidden_gradient_unsummed",
        "the gradient of linear_logprob's hidden states is not summed over the group",
        _unsummed,
    ),
    op.linear_logprob(
        "main_grad_not_added",
        "linear_logprob says that it added the gradient to main_grad and did not",
        _main_grad(lambda main, before: main.copy_(before)),
    ),
    op.linear_logprob(
        "main_grad_overwritten",
        "linear_logprob writes its gradient over main_grad instead of adding it",
        _main_grad(lambda main, before: main.sub_(before)),
    ),
    op.linear_logprob(
        "main_grad_twice",
        "linear_logprob adds its gradient to main_grad twice",
        _main_grad(lambda main, before: main.mul_(2).sub_(before)),
    ),
    op.linear_logprob(
        "main_grad_rounded",
        "linear_logprob rounds what is in main_grad to bfloat16",
        _main_grad(lambda main, before: main.copy_(low(main))),
    ),
    op.linear_logprob(
        "main_grad_unmarked",
        "linear_logprob adds to main_grad and does not set grad_added_to_main_grad",
        _mark_missing,
    ),
    op.linear_logprob(
        "entropy_without_gradient",
        "the entropy of linear_logprob never carries a gradient",
        lambda call, a: call(entropy_grad=False),
    ),
    op.linear_logprob(
        "one_target",
        "linear_logprob gives every target of a row the log-probability of the first",
        lambda call, a: (
            call(targets=a.targets[:, :1].expand_as(a.targets)) if a.targets.dim() == 2 else call()
        ),
    ),
    op.linear_logprob(
        "rest_of_all",
        "the rest of linear_logprob is the log-probability of all tokens, targets too",
        lambda call, a: ((y := call())[0] * _last_column_off(y[0], a), y[1]),
    ),
    op.linear_logprob(
        "full_logits",
        "linear_logprob makes the logits of all tokens at once",
        lambda call, a: ((a.hidden.detach() @ a.weight.detach().t()), call())[1],
    ),
]


def _last_column_off(logprobs: Tensor, a: SimpleNamespace) -> Tensor:
    keep = torch.ones_like(logprobs)
    if a.rest:
        keep[:, -1] = 0
    return keep


# -------------------------------------------------------------------------
# Experts
# -------------------------------------------------------------------------


def _empty_expert_skipped(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Give the tokens to the first experts, as if no expert before them were empty."""
    counts = a.tokens_per_expert
    order = torch.argsort((counts == 0).to(torch.int8), stable=True)
    return call(tokens_per_expert=counts[order])


EXPERTS = [
    op.grouped_matmul(
        "empty_expert_skipped",
        "grouped_matmul leaves experts without tokens out and moves the others up",
        _empty_expert_skipped,
    ),
    op.grouped_matmul(
        "counts_overwritten",
        "grouped_matmul turns tokens_per_expert into offsets in place",
        lambda call, a: (call(), a.tokens_per_expert.copy_(a.tokens_per_expert.cumsum(0)))[0],
    ),
    op.grouped_matmul(
        "weight_gradient_of_last",
        "grouped_matmul gives the last expert's weight no gradient",
        lambda call, a: call(weight=torch.cat((a.weight[:-1], a.weight[-1:].detach()))),
    ),
    op.grouped_matmul(
        "transposed_weight",
        "grouped_matmul reads a square weight that is not contiguous as if it were",
        lambda call, a: call(weight=misread(a.weight)),
    ),
    op.grouped_matmul(
        "large_expert",
        "grouped_matmul gives an expert 128 tokens at most",
        lambda call, a: (y := call()) * _within(128, a.tokens_per_expert.to(y.device))[:, None],
    ),
    op.topk_router(
        "always_softmax",
        "topk_router takes softmax for every score function",
        lambda call, a: call(score_function="softmax", expert_bias=None),
    ),
    op.topk_router(
        "pre_softmax_ignored", "topk_router ignores pre_softmax", lambda call, a: call(pre_softmax=False)
    ),
    op.topk_router(
        "groups_ignored",
        "topk_router chooses from all groups",
        lambda call, a: call(num_groups=None, group_topk=None),
    ),
    op.topk_router(
        "scaling_ignored", "topk_router ignores scaling_factor", lambda call, a: call(scaling_factor=None)
    ),
    op.topk_router("bias_ignored", "topk_router ignores expert_bias", lambda call, a: call(expert_bias=None)),
    op.topk_router(
        "bias_in_weights",
        "the weights of topk_router have the bias in them",
        lambda call, a: (
            (y := call())[0] + (0 if a.expert_bias is None else a.expert_bias[y[1]].to(y[0].dtype)),
            y[1],
        ),
    ),
    op.topk_router(
        "int32_choice",
        "topk_router returns expert numbers as int32",
        lambda call, a: ((y := call())[0], y[1].int()),
    ),
    op.topk_router(
        "float32_weights",
        "topk_router returns float32 weights for bfloat16 logits",
        lambda call, a: through(call(), lambda w: w.float()),
    ),
    op.topk_router(
        "weights_without_gradient",
        "the weights of topk_router carry no gradient",
        lambda call, a: through(call(), lambda w: w.detach() + 0 * a.logits.sum().to(w.dtype)),
    ),
    op.topk_router(
        "one_of_one_normalized",
        "the weight of a single sigmoid expert is divided by itself",
        lambda call, a: through(
            call(),
            lambda w: (
                w / w.detach() * (a.scaling_factor or 1)
                if a.topk == 1 and a.score_function == "sigmoid"
                else w
            ),
        ),
    ),
    op.token_permute(
        "rows_as_chosen",
        "the rows of token_permute are not in ascending order",
        lambda call, a: (*(y := call())[:2], y[2].flip(1)),
    ),
    op.token_permute(
        "weights_by_token",
        "token_permute returns the weights in the order of the tokens",
        lambda call, a: ((y := call())[0], a.probs.masked_select(a.routing_map), y[2]),
    ),
    op.token_permute(
        "weights_without_gradient",
        "token_permute gives the weights no gradient",
        lambda call, a: call(probs=a.probs.detach()),
    ),
    op.token_permute(
        "weights_cast",
        "token_permute returns weights in the dtype of the tokens",
        lambda call, a: ((y := call())[0], y[1].to(a.tokens.dtype), y[2]),
    ),
    op.token_permute(
        "gradient_mean",
        "the gradient of a token is the mean over its copies",
        lambda call, a: call(tokens=with_grad(a.tokens, lambda g: g / a.topk)),
    ),
    op.token_unpermute(
        "mean",
        "token_unpermute returns the mean of the experts' outputs",
        lambda call, a: call() / a.rows.shape[1],
    ),
    op.token_unpermute(
        "bfloat16_sum",
        "token_unpermute sums in the dtype of its input",
        lambda call, a: sum(a.permuted[a.rows[:, k].long()] for k in range(a.rows.shape[1])),
    ),
    op.token_unpermute(
        "rows_sorted",
        "token_unpermute takes the rows of a token to be neighbors",
        lambda call, a: call(rows=torch.arange(a.rows.numel(), device=a.rows.device).view_as(a.rows)),
    ),
]


def _within(limit: int, counts: Tensor) -> Tensor:
    """Return 1 for the first tokens of each expert and 0 for those past a limit."""
    ranks = torch.arange(int(counts.sum()), device=counts.device)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return (ranks - starts < limit).to(torch.int8)


FAULTS: Sequence[Fault] = (*LOGPROBS, *EXPERTS)
