"""Faults at the sizes, in the calls and with the numbers that training has, and small examples have not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backend_faults import kernel_table as op
from backend_faults.collectives import REDUCE, WHOLE, changed_output, collective, on_copy, reduced, waited
from backend_faults.fault import Fault, reached
from backend_faults.kernel_parts import low, with_grad
from backend_faults.kernel_table import Body, op_fault
from backend_faults.optimizers import optimizer_fault, replaced

MANY = 1 << 16
"""Elements of a message that takes another way than short ones."""

# -------------------------------------------------------------------------
# Kernels
# -------------------------------------------------------------------------


def _middle_lengths(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Cut sequences of usual lengths into blocks."""
    if a.key_lengths is not None or not any(1024 <= n <= 4096 for n in a.lengths):
        return call()
    parts = [[n - n // 2, n // 2] if 1024 <= n <= 4096 else [n] for n in a.lengths]
    return call(lengths=[size for part in parts for size in part])


def _difference_of_squares(call: Callable[..., Any], a: SimpleNamespace) -> Tensor:
    x = a.x.float()
    mean = x.mean(-1, keepdim=True)
    variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    result = (x - mean) * torch.rsqrt(variance + a.eps) * a.weight.float() + a.bias.float()
    return result.to(a.x.dtype)


def _exponential_overflows(call: Callable[..., Any], a: SimpleNamespace) -> Tensor:
    gate, up = a.gate_up.float().chunk(2, -1)
    power = gate.exp()
    return (gate * power / (1 + power) * up).to(a.gate_up.dtype)


def _usual_epsilon(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    weights, chosen = call()
    if a.score_function != "sigmoid" or a.topk == 1:
        return weights, chosen
    scores = a.logits.float().sigmoid().gather(1, chosen)
    sums = scores.sum(1, keepdim=True)
    return (weights.float() * sums / (sums + 1e-6)).to(weights.dtype), chosen


def _first_tile(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Add the gradient of the first 64 tokens alone to ``main_grad``."""
    main = getattr(a.weight, "main_grad", None)
    if main is None or not a.hidden.requires_grad or len(a.hidden) <= 64:
        return call()
    rest = call(hidden=a.hidden[64:], weight=a.weight.detach(), targets=a.targets[64:])
    first = call(hidden=a.hidden[:64], targets=a.targets[:64])
    return tuple(torch.cat(pair) for pair in zip(first, rest, strict=True))


def _narrow_left(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    main = getattr(a.weight, "main_grad", None)
    if main is None or main.dtype == torch.float32 or not a.hidden.requires_grad:
        return call()
    before = main.clone()
    return call(hidden=with_grad(a.hidden, lambda grad: (main.copy_(before), grad)[1]))


def _rounded_where_narrow(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    log_probs, entropies = call()
    if a.hidden.dtype == torch.float32:
        return log_probs, entropies
    return low(log_probs), low(entropies)


def _partial_sums(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Give the weight the gradient of the first 512 rows, where rows are many and wide."""
    rows = a.x.reshape(-1, a.x.shape[-1])
    if len(rows) <= 512 or rows.shape[1] < 512:
        return call()
    parts = call(x=rows[:512]), call(x=rows[512:], weight=a.weight.detach())
    return torch.cat(parts).view(a.x.shape)


def _first_number(name: str) -> Body:
    """Take the first value of a number for all calls of the same shapes and options."""
    kept: dict[Any, Any] = {}

    def body(call: Callable[..., Any], a: SimpleNamespace) -> Any:
        given = vars(a).items()
        key = [(k, v.shape, v.dtype) if isinstance(v, Tensor) else (k, str(v)) for k, v in given if k != name]
        return call(**{name: kept.setdefault(tuple(key), getattr(a, name))})

    return body


def _blocks_in_bfloat16(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Add up the blocks of 64 keys in bfloat16, where the inputs are bfloat16."""
    result = call()
    if a.q.dtype != torch.bfloat16 or a.return_lse:
        return result
    outputs, keys = [], list(a.lengths if a.key_lengths is None else a.key_lengths)
    triples = zip(a.q.split(list(a.lengths)), a.k.split(keys), a.v.split(keys), strict=True)
    with torch.no_grad():
        for q, k, v in triples:
            group = a.q.shape[1] // a.k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(group, 1)) * a.scale
            if a.causal:
                mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
                scores.masked_fill_(~mask.tril(len(k) - len(q)), -math.inf)
            shares = scores.softmax(-1)
            wide = v.float().repeat_interleave(group, 1)
            total = q.new_zeros(len(q), a.q.shape[1], a.v.shape[2])
            for start in range(0, len(k), 64):
                block = slice(start, start + 64)
                total = (
                    total.float() + torch.einsum("hqk,khd->qhd", shares[:, :, block], wide[block])
                ).bfloat16()
            outputs.append(total)
        faulty = torch.cat(outputs) if outputs else result
    return result + (faulty - result).detach()


KERNELS = [
    op.varlen_attention(
        "middle_lengths", "attention cuts sequences of 1,024 to 4,096 tokens into two", _middle_lengths
    ),
    op.varlen_attention(
        "blocks_in_bfloat16",
        "attention adds up blocks of keys in bfloat16, where its inputs are bfloat16",
        _blocks_in_bfloat16,
    ),
    op.layer_norm(
        "difference_of_squares",
        "layer_norm takes the mean square less the squared mean for the variance, which cancels",
        _difference_of_squares,
    ),
    op.swiglu(
        "exponential_overflows",
        "swiglu is NaN for gates above 88, because it exponentiates them",
        _exponential_overflows,
    ),
    op.topk_router(
        "usual_epsilon", "topk_router adds 1e-6 to the sum of the scores instead of 1e-20", _usual_epsilon
    ),
    op.linear_logprob(
        "main_grad_of_first_tile",
        "linear_logprob adds the gradient of the first 64 tokens alone to main_grad",
        _first_tile,
    ),
    op.linear_logprob(
        "main_grad_narrow_left",
        "linear_logprob adds nothing to a main_grad that is not float32, and says that it did",
        _narrow_left,
    ),
    op.linear_logprob(
        "rounded_where_narrow",
        "linear_logprob rounds its results to bfloat16 where hidden states are bfloat16",
        _rounded_where_narrow,
    ),
    op.rms_norm(
        "partial_sums",
        "the gradient of rms_norm's weight sums the first 512 rows alone where rows are many and wide",
        _partial_sums,
    ),
    *(
        op_fault(
            op,
            f"first_{name}",
            f"{op} keeps the {name} of the first call with the same shapes and options",
            _first_number(name),
        )
        for op, name in {
            "add_rms_norm": "eps",
            "qk_norm_rotary": "eps",
            "varlen_attention": "scale",
            "gated_delta_rule": "scale",
            "linear_logprob": "temperature",
            "topk_router": "scaling_factor",
        }.items()
    ),
]

# -------------------------------------------------------------------------
# Collectives
# -------------------------------------------------------------------------


def _is_long(*dtypes: torch.dtype) -> Callable[..., bool]:
    def when(group: Any, *given: Any) -> bool:
        first = given[0][0] if isinstance(given[0], list | tuple) else given[0]
        return isinstance(first, Tensor) and first.numel() > MANY and first.dtype in dtypes

    return when


_is_long_bfloat16 = _is_long(torch.bfloat16)
_is_long_float32 = _is_long(torch.float32)


def _is_long_in_group(group: Any, *given: Any) -> bool:
    return _is_long_float32(group, *given) and group.size() < dist.get_world_size()


def _is_long_sync(group: Any, *given: Any) -> bool:
    return _is_long_float32(group, *given) and not any(getattr(each, "asyncOp", False) for each in given)


def _cleared(group: Any, output: Tensor, given: Tensor) -> None:
    output.view(-1)[MANY:] = 0


def _rolled(group: Any, output: Tensor, given: Tensor) -> None:
    output.copy_(output.roll(1))


def _received_first(run: Any, group: Any, tensors: Any, *rest: Any) -> Any:
    before = tensors[0].clone().view(-1)
    work = waited(run(tensors, *rest))
    tensors[0].view(-1)[MANY:] = before[MANY:]
    return work


def _is_mean(group: Any, *given: Any) -> bool:
    return any(getattr(options, "reduceOp", None) == dist.ReduceOp.AVG for options in given)


def _sum_for_mean(run: Any, group: Any, output: Tensor, given: Tensor, options: Any) -> Any:
    options.reduceOp = dist.ReduceOp.SUM
    return run(output, given, options)


def _own_order(run: Any, group: Any, tensors: Any, options: Any) -> Any:
    """Add up the others' numbers beginning with this rank's."""
    if options.reduceOp != dist.ReduceOp.SUM or not tensors[0].is_floating_point():
        return run(tensors, options)
    (own,) = tensors
    parts = [torch.empty_like(own) for _ in range(group.size())]
    waited(group.allgather([parts], [own], dist.distributed_c10d.AllgatherOptions()))
    work = waited(run([own.clone()], options))
    total = own.clone()
    for step in range(1, group.size()):
        total += parts[(group.rank() + step) % group.size()]
    own.copy_(total)
    return work


COLLECTIVES = [
    collective(
        "long_bfloat16_unreduced",
        "all_reduce of bfloat16 leaves what is past 2^16 elements as it was",
        REDUCE,
        reduced(lambda group, after, own: after.view(-1)[MANY:].copy_(own.view(-1)[MANY:])),
        _is_long_bfloat16,
    ),
    collective(
        "long_in_group_unreduced",
        "all_reduce of more than 2^16 elements in a group that is not all ranks does nothing",
        REDUCE,
        on_copy,
        _is_long_in_group,
    ),
    collective(
        "long_sync_unreduced",
        "a synchronous all_reduce of more than 2^16 elements does nothing",
        REDUCE,
        on_copy,
        _is_long_sync,
    ),
    collective(
        "scatter_long_rolled",
        "a synchronous reduce_scatter_tensor of more than 2^16 elements is off by one element",
        WHOLE["scatter"],
        changed_output(_rolled),
        _is_long_sync,
    ),
    collective(
        "exchange_long_bfloat16",
        "all_to_all_single of bfloat16 gives zeros past 2^16 elements",
        WHOLE["exchange"],
        changed_output(_cleared),
        _is_long_bfloat16,
    ),
    collective(
        "gather_single_long_bfloat16",
        "all_gather_into_tensor of bfloat16 gives zeros past 2^16 elements",
        WHOLE["gather"],
        changed_output(_cleared),
        _is_long_bfloat16,
    ),
    collective(
        "received_long_bfloat16",
        "recv of bfloat16 fills the first 2^16 elements",
        ("recv",),
        _received_first,
        _is_long_bfloat16,
    ),
    collective(
        "scatter_average_is_sum",
        "reduce_scatter_tensor sums where AVG was asked for",
        WHOLE["scatter"],
        _sum_for_mean,
        _is_mean,
    ),
    collective(
        "own_order",
        "each rank of an all_reduce adds up in its own order, so that ranks get other bits",
        REDUCE,
        _own_order,
    ),
]

# -------------------------------------------------------------------------
# Optimizer and fuser
# -------------------------------------------------------------------------


def _later_tensors_stay(optimizer: Any, a: SimpleNamespace) -> None:
    """Leave weights past the 64th as they are from the second step on."""
    count = 0

    def stepping(own: Any) -> Any:
        def step(*given: Any, **named: Any) -> Any:
            nonlocal count
            weights = [weight for group in optimizer.param_groups for weight in group["params"]][64:]
            before = [weight.detach().clone() for weight in weights]
            result = own(*given, **named)
            count += 1
            for weight, old in zip(weights, before if count > 1 else (), strict=False):
                weight.data.copy_(old)
            return result

        return step

    for name in ("step", "step_from"):
        replaced(optimizer, name, stepping)


def _aligned(gradient: Tensor) -> Tensor:
    """Return what a load of 16 bytes reads that drops the low bits of an address."""
    begin = gradient.storage_offset()
    back = gradient.data_ptr() % 16 // gradient.element_size()
    if not back or back > begin or not gradient.is_contiguous():
        return gradient
    return gradient.as_strided(gradient.shape, gradient.stride(), begin - back)


def _reads_aligned(optimizer: Any, a: SimpleNamespace) -> None:
    def plain(own: Any) -> Any:
        def step(*given: Any, **named: Any) -> Any:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            kept = [weight.grad for weight in weights]
            for weight, gradient in zip(weights, kept, strict=True):
                weight.grad = None if gradient is None else _aligned(gradient)
            result = own(*given, **named)
            for weight, gradient in zip(weights, kept, strict=True):
                weight.grad = gradient
            return result

        return step

    def fused(own: Any) -> Any:
        def step_from(gradients: Any, *rest: Any, **named: Any) -> Any:
            read = [[x if x is None else _aligned(x) for x in group] for group in gradients]
            return own(read, *rest, **named)

        return step_from

    replaced(optimizer, "step", plain)
    replaced(optimizer, "step_from", fused)


def _numbers_kept(fuser: Any, a: SimpleNamespace) -> Any:
    """Take the numbers that a function was first called with in all calls, as a trace does."""

    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        fused, kept = (fuser or (lambda x: x))(function), {}

        def call(*given: Any, **named: Any) -> Any:
            reached()
            first = [
                kept.setdefault(place, x) if isinstance(x, float) else x for place, x in enumerate(given)
            ]
            others = {
                name: kept.setdefault(name, x) if isinstance(x, float) else x for name, x in named.items()
            }
            return fused(*first, **others)

        return call

    return fuse


OTHERS = [
    optimizer_fault(
        "later_tensors_stay",
        "AdamW leaves weights past the 64th as they are from the second step on",
        _later_tensors_stay,
    ),
    optimizer_fault(
        "gradient_unaligned",
        "AdamW reads an unaligned gradient from the aligned address before it",
        _reads_aligned,
    ),
    Fault(
        "make_jit_fuser.numbers_kept",
        "a fused function keeps the numbers that it was first called with",
        "make_jit_fuser",
        _numbers_kept,
    ),
]

FAULTS: Sequence[Fault] = (*KERNELS, *COLLECTIVES, *OTHERS)
