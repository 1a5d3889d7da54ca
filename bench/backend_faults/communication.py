"""Faults of collectives that numbers of one kind, one group or one way to call them show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backend_faults.collectives import (
    REDUCE,
    WHOLE,
    Body,
    cast,
    changed_output,
    collective,
    on_copy,
    operation,
    reduced,
)
from backend_faults.fault import Fault

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def _is_mean(group: Any, *given: Any) -> bool:
    return any(getattr(options, "reduceOp", None) == AVG for options in given)


def _is_part(group: Any, *given: Any) -> bool:
    return group.size() < dist.get_world_size()


def _is_async(group: Any, *given: Any) -> bool:
    return any(getattr(options, "asyncOp", False) for options in given)


def _has(*dtypes: torch.dtype) -> Callable[..., bool]:
    return lambda group, *given: any(x.dtype in dtypes for x in _tensors(given))


def _has_offset(group: Any, *given: Any) -> bool:
    return any(x.storage_offset() for x in _tensors(given))


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [x for part in given for x in _tensors(part)] if isinstance(given, list | tuple) else []


def _in_the_world(run: Any, group: Any, *given: Any) -> Any:
    return run.func(dist.group.WORLD, *given, **run.keywords)


def _unfilled(run: Any, group: Any, output: Tensor, *given: Any) -> Any:
    return run(output.clone(), *given)


def _rounded(output: Tensor) -> Tensor:
    return output.copy_(output.bfloat16()) if output.dtype == torch.float32 else output


def _first_call_again() -> Body:
    """Send what the first tensor at an address held, as a recorded graph without a copy does."""
    kept: dict[Any, Tensor] = {}

    def body(run: Any, group: Any, tensors: Any, *options: Any) -> Any:
        for x in tensors:
            x.copy_(kept.setdefault((x.data_ptr(), x.shape, x.dtype), x.clone()))
        return run(tensors, *options)

    return body


def _integers_as_float(run: Any, group: Any, output: Tensor, given: Tensor, *rest: Any) -> Any:
    return run(output, given.float().to(given.dtype), *rest)


def _own(group: Any, output: Tensor, given: Tensor) -> None:
    output.copy_(given.view(group.size(), -1)[group.rank()].view_as(output))


FAULTS: Sequence[Fault] = (
    collective(
        "average_is_sum",
        "all_reduce sums where AVG was asked for",
        REDUCE,
        operation(lambda op: SUM),
        _is_mean,
    ),
    collective(
        "group_ignored", "all_reduce in a group reduces over all ranks", REDUCE, _in_the_world, _is_part
    ),
    collective(
        "broadcast_in_group_ignored",
        "broadcast in a group leaves each rank its own data",
        ("broadcast",),
        on_copy,
        _is_part,
    ),
    collective(
        "group_unreduced",
        "all_reduce in a group that is not all ranks leaves each rank its own data",
        REDUCE,
        on_copy,
        _is_part,
    ),
    collective(
        "infinity_hidden",
        "all_reduce replaces infinity and NaN by numbers, which hides an overflow",
        REDUCE,
        reduced(lambda group, x, own: x.nan_to_num_() if x.is_floating_point() else None),
    ),
    collective(
        "offset_unreduced",
        "all_reduce of a part of a buffer that does not begin at its start does nothing",
        REDUCE,
        on_copy,
        _has_offset,
    ),
    collective(
        "first_data_again",
        "all_reduce sends the data of the first call at an address",
        REDUCE,
        _first_call_again(),
    ),
    collective(
        "bfloat16_unreduced",
        "all_reduce of bfloat16 leaves each rank its own data",
        REDUCE,
        on_copy,
        _has(torch.bfloat16),
    ),
    collective(
        "int32_unreduced",
        "all_reduce of int32 leaves each rank its own data",
        REDUCE,
        on_copy,
        _has(torch.int32),
    ),
    collective(
        "broadcast_int64_as_float",
        "broadcast sends int64 as float32",
        ("broadcast",),
        cast(torch.float32, (torch.int64,)),
        _has(torch.int64),
    ),
    collective(
        "broadcast_async_early",
        "an asynchronous broadcast reports completion too early",
        ("broadcast",),
        on_copy,
        _is_async,
    ),
    collective(
        "gather_single_bfloat16",
        "all_gather_into_tensor sends float32 as bfloat16",
        WHOLE["gather"],
        changed_output(lambda group, output, given: _rounded(output)),
        _has(torch.float32),
    ),
    collective(
        "gather_single_async_early",
        "an asynchronous all_gather_into_tensor reports completion too early",
        WHOLE["gather"],
        _unfilled,
        _is_async,
    ),
    collective(
        "gather_single_int64_as_float",
        "all_gather_into_tensor sends int64 as float32",
        WHOLE["gather"],
        _integers_as_float,
        _has(torch.int64),
    ),
    collective(
        "scatter_bfloat16",
        "reduce_scatter_tensor returns float32 rounded to bfloat16",
        WHOLE["scatter"],
        changed_output(lambda group, output, given: _rounded(output)),
        _has(torch.float32),
    ),
    collective(
        "scatter_async_early",
        "an asynchronous reduce_scatter_tensor reports completion too early",
        WHOLE["scatter"],
        _unfilled,
        _is_async,
    ),
    collective(
        "scatter_in_group_unreduced",
        "reduce_scatter_tensor in a group gives each rank its own part",
        WHOLE["scatter"],
        changed_output(_own),
        _is_part,
    ),
    collective(
        "exchange_bfloat16",
        "all_to_all_single sends float32 as bfloat16",
        WHOLE["exchange"],
        changed_output(lambda group, output, given: _rounded(output)),
        _has(torch.float32),
    ),
    collective(
        "exchange_in_group",
        "all_to_all_single in a group returns what it was given",
        WHOLE["exchange"],
        changed_output(
            lambda group, output, given: output.copy_(given) if output.shape == given.shape else None
        ),
        _is_part,
    ),
)
