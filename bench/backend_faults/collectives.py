"""Faults of collectives, as a backend's process group makes them: every rank has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from backend_faults.fault import Fault, noted, other_answer, reached, unchanged

WHOLE = {
    "gather": ("all_gather_single", "_allgather_base"),
    "scatter": ("reduce_scatter_single", "_reduce_scatter_base"),
    "exchange": ("all_to_all_single", "alltoall_base"),
}
"""Methods of process groups on whole tensors, with their older names."""

Body = Callable[..., Any]
"""``body(run, group, *arguments)``: ``run`` is the vendor's own method."""

When = Callable[..., bool]
"""``when(group, *arguments)``: whether a call is one that the fault is about."""

_patched: set[str] = set()


def always(group: Any, *given: Any) -> bool:
    """Return true for every call."""
    return True


def collective(name: str, statement: str, methods: Sequence[str], body: Body, when: When = always) -> Fault:
    """Return a fault of methods of every process group whose tensors are on the backend's device."""
    install = partial(_install, name, methods, body, when)
    hooks = "prepare_worker make_device"
    return Fault(f"collectives.{name}", statement, hooks, unchanged, install)


def _install(name: str, methods: Sequence[str], body: Body, when: When, arguments: SimpleNamespace) -> None:
    if name in _patched or getattr(arguments, "phase", "after_config") == "before_vendor_import":
        return  # a vendor's library may not be imported yet; make_device comes later
    _patched.add(name)
    device_type = arguments.backend.device_type
    for method in filter(partial(hasattr, dist.ProcessGroup), methods):
        own = getattr(dist.ProcessGroup, method)
        setattr(dist.ProcessGroup, method, _broken(own, body, when, device_type))


def _broken(own: Callable[..., Any], body: Body, when: When, device_type: str) -> Callable[..., Any]:
    def method(group: Any, *given: Any, **named: Any) -> Any:
        elsewhere = bool(given) and _device(given[0]) not in (None, device_type)
        if elsewhere or not when(group, *given):
            return own(group, *given, **named)
        reached()
        return body(partial(own, group, **named), group, *given)

    return method


def _device(argument: Any) -> str | None:
    while isinstance(argument, list | tuple) and argument:
        argument = argument[0]
    return argument.device.type if isinstance(argument, Tensor) else None


class _Done(dist.Work):
    def wait(self, *given: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def waited(work: Any) -> _Done:
    """Wait; return other work, since some work of gloo writes its result, or receives, in each wait."""
    work.wait()
    return _Done()


# -------------------------------------------------------------------------
# All-reduce
# -------------------------------------------------------------------------


def on_copy(run: Any, group: Any, tensors: Any, *options: Any) -> Any:
    """Reduce copies, and leave the tensors as they are."""
    return run([x.clone() for x in tensors], *options)


def reduced(keep: Callable[[Any, Tensor, Tensor], None]) -> Body:
    """Change the result, given the group, the result and what this rank had."""

    def body(run: Any, group: Any, tensors: Any, *options: Any) -> Any:
        before = [x.clone() for x in tensors]
        work = waited(run(tensors, *options))
        for after, own in zip(tensors, before, strict=True):
            keep(group, after, own)
        return work

    return body


def _from(start: Callable[[int], int]) -> Body:
    """Leave the elements from one on unreduced."""

    def keep(group: Any, after: Tensor, own: Tensor) -> None:
        first = start(after.numel())
        after.view(-1)[first:] = own.view(-1)[first:]

    return reduced(keep)


def _pairs(run: Any, group: Any, tensors: Any, *options: Any) -> Any:
    """Reduce over pairs of ranks alone."""
    if group.size() < 3 or options[0].reduceOp != SUM:
        return run(tensors, *options)
    (own,) = tensors
    parts = [torch.empty_like(own) for _ in range(group.size())]
    waited(group.allgather([parts], [own], AllgatherOptions()))
    first = group.rank() // 2 * 2
    work = waited(run([own.clone()], *options))
    own.copy_(torch.stack(parts[first : first + 2]).sum(0))
    return work


def operation(change: Callable[[Any], Any]) -> Body:
    """Reduce by another operation."""

    def body(run: Any, group: Any, tensors: Any, options: Any) -> Any:
        options.reduceOp = change(options.reduceOp)
        return run(tensors, options)

    return body


def async_on_copy(run: Any, group: Any, tensors: Any, options: Any) -> Any:
    """Leave the tensors as they are where the call is asynchronous."""
    return (on_copy if options.asyncOp else lambda run, _, *x: run(*x))(run, group, tensors, options)


def cast(dtype: torch.dtype, of: tuple[torch.dtype, ...]) -> Body:
    """Send tensors of some dtypes in the precision of another."""

    def body(run: Any, group: Any, tensors: Any, *options: Any) -> Any:
        for x in tensors:
            x.copy_(x.to(dtype)) if x.dtype in of else None
        return run(tensors, *options)

    return body


SUM, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
REDUCE = ("allreduce",)

REDUCTIONS = [
    collective("unreduced", "all_reduce leaves each rank its own data", REDUCE, on_copy),
    collective(
        "async_unreduced",
        "an asynchronous all_reduce reports completion too early",
        REDUCE,
        async_on_copy,
    ),
    collective("half_reduced", "all_reduce reduces the first half", REDUCE, _from(lambda n: (n + 1) // 2)),
    collective(
        "odd_unreduced",
        "all_reduce leaves the last of an odd number out",
        REDUCE,
        _from(lambda n: n // 2 * 2 or n),
    ),
    collective(
        "few_unreduced",
        "all_reduce of less than 4 elements does nothing",
        REDUCE,
        _from(lambda n: n if n > 3 else 0),
    ),
    collective("large_unreduced", "all_reduce stops at 2^20 elements", REDUCE, _from(lambda n: 1 << 20)),
    collective("pairs", "all_reduce of four ranks reduces over pairs", REDUCE, _pairs),
    collective(
        "mean",
        "all_reduce returns the mean of floating-point tensors",
        REDUCE,
        reduced(lambda group, x, own: x.is_floating_point() and x.div_(group.size())),
    ),
    collective(
        "max_is_sum",
        "all_reduce sums where MAX was asked for",
        REDUCE,
        operation(lambda op: SUM if op == MAX else op),
    ),
    collective(
        "min_is_max",
        "all_reduce takes MAX where MIN was asked for",
        REDUCE,
        operation(lambda op: MAX if op == MIN else op),
    ),
    collective(
        "bfloat16", "all_reduce sends float32 as bfloat16", REDUCE, cast(torch.bfloat16, (torch.float32,))
    ),
    collective(
        "int64_as_float", "all_reduce sends int64 as float32", REDUCE, cast(torch.float32, (torch.int64,))
    ),
    collective(
        "float64_as_float",
        "all_reduce sends float64 as float32",
        REDUCE,
        cast(torch.float32, (torch.float64,)),
    ),
    collective(
        "bool_unreduced",
        "all_reduce does nothing for uint8 and bool",
        REDUCE,
        reduced(lambda group, x, own: x.copy_(own) if x.dtype in (torch.uint8, torch.bool) else None),
    ),
    collective(
        "last_rank_lacks",
        "the last rank of an all_reduce keeps its own data",
        REDUCE,
        reduced(lambda group, x, own: x.copy_(own) if group.rank() == group.size() - 1 else None),
    ),
    collective(
        "stale_result",
        "a second all_reduce of a shape returns the result of the first",
        REDUCE,
        reduced(lambda group, x, own: _stale(group, x)),
    ),
]

_results: dict[Any, Tensor] = {}


def _stale(group: Any, x: Tensor) -> None:
    x.copy_(_results.setdefault((group.group_name, x.shape, x.dtype), x.clone()))


# -------------------------------------------------------------------------
# Others
# -------------------------------------------------------------------------


def _root(change: Callable[[int, int], int]) -> Body:
    def body(run: Any, group: Any, tensors: Any, options: Any) -> Any:
        options.rootRank = change(options.rootRank, group.size())
        return run(tensors, options)

    return body


def changed_output(change: Callable[[Any, Tensor, Tensor], None]) -> Body:
    """Change what a method on whole tensors wrote, given the group, the output and the input."""

    def body(run: Any, group: Any, output: Tensor, given: Tensor, *rest: Any) -> Any:
        work = waited(run(output, given, *rest))
        change(group, output, given)
        return work

    return body


def _gathered(change: Callable[[list[Tensor]], None]) -> Body:
    def body(run: Any, group: Any, outputs: Any, *rest: Any) -> Any:
        work = waited(run(outputs, *rest))
        change(outputs[0])
        return work

    return body


def _rotate(parts: list[Tensor]) -> None:
    for part, value in zip(parts, [x.clone() for x in (*parts[1:], parts[0])], strict=True):
        if part.shape == value.shape:
            part.copy_(value)


def _own_part(group: Any, output: Tensor, given: Tensor) -> None:
    output.copy_(given.view(group.size(), -1)[group.rank()].view_as(output))


def _rotated(group: Any, output: Tensor, given: Tensor) -> None:
    parts = output.view(group.size(), -1)
    parts.copy_(parts.roll(1, 0))


def _even(run: Any, group: Any, output: Tensor, given: Tensor, takes: Any, gives: Any, *rest: Any) -> Any:
    """Exchange parts of one size, as far as the sizes allow."""
    work = waited(run(output, given, takes, gives, *rest))
    if takes and len(set(takes)) > 1:
        output.copy_(output.flip(0))
    return work


def _even_rotated(
    run: Any, group: Any, output: Tensor, given: Tensor, takes: Any, gives: Any, *rest: Any
) -> Any:
    work = waited(run(output, given, takes, gives, *rest))
    if not takes:
        _rotated(group, output, given)
    return work


OTHERS = [
    collective(
        "broadcast_from_0",
        "broadcast takes rank 0 of the group for every root",
        ("broadcast",),
        _root(lambda root, n: 0),
    ),
    collective("broadcast_nothing", "broadcast leaves each rank its own data", ("broadcast",), on_copy),
    collective(
        "broadcast_half",
        "broadcast sends the first half",
        ("broadcast",),
        _from(lambda n: (n + 1) // 2),
    ),
    collective(
        "reduce_to_0",
        "reduce takes rank 0 of the group for every root",
        ("reduce",),
        _root(lambda root, n: 0),
    ),
    collective("gather_order", "all_gather begins with the next rank", ("allgather",), _gathered(_rotate)),
    collective(
        "gather_own",
        "all_gather gives the first part for all",
        ("allgather",),
        _gathered(
            lambda parts: (
                [part.copy_(parts[0]) for part in parts[1:] if part.shape == parts[0].shape] and None
            )
        ),
    ),
    collective(
        "gather_single_order",
        "all_gather_into_tensor begins with the last rank",
        WHOLE["gather"],
        changed_output(_rotated),
    ),
    collective(
        "gather_input_cleared",
        "all_gather_into_tensor clears its input",
        WHOLE["gather"],
        changed_output(
            lambda group, output, given: given.zero_() if given.data_ptr() != output.data_ptr() else None
        ),
    ),
    collective(
        "scatter_unreduced",
        "reduce_scatter_tensor gives each rank its own part",
        WHOLE["scatter"],
        changed_output(_own_part),
    ),
    collective(
        "scatter_mean",
        "reduce_scatter_tensor divides by the number of ranks",
        WHOLE["scatter"],
        changed_output(
            lambda group, output, given: output.div_(group.size()) if output.is_floating_point() else None
        ),
    ),
    collective(
        "scatter_input_overwritten",
        "reduce_scatter_tensor uses its input as a buffer",
        WHOLE["scatter"],
        changed_output(lambda group, output, given: given.view(-1)[output.numel() :].zero_()),
    ),
    collective(
        "exchange_uneven", "all_to_all_single mixes up parts of different sizes", WHOLE["exchange"], _even
    ),
    collective(
        "exchange_order",
        "all_to_all_single begins with the last rank",
        WHOLE["exchange"],
        _even_rotated,
    ),
    collective(
        "received_halved",
        "recv fills the first half of a tensor",
        ("recv",),
        lambda run, group, tensors, *rest: _received_half(run, tensors, *rest),
    ),
    collective(
        "barrier_at_once", "barrier does not wait", ("barrier",), lambda run, group, *options: _Done()
    ),
]


def _received_half(run: Any, tensors: Any, *rest: Any) -> Any:
    before = tensors[0].clone()
    work = waited(run(tensors, *rest))
    half = before.numel() // 2
    tensors[0].view(-1)[half:] = before.view(-1)[half:]
    return work


# -------------------------------------------------------------------------
# The hooks of process groups
# -------------------------------------------------------------------------


def _group_fault(name: str, statement: str, hook: str, change: Any, before: Any = None) -> Fault:
    return Fault(f"groups.{name}", statement, hook, change, before)


_communicators: dict[Any, Any] = {}


def _long_wait(a: SimpleNamespace) -> None:
    reached()
    a.options.timeout = timedelta(hours=10)


def _one_of_one(a: SimpleNamespace) -> None:
    reached()
    a.options.group_rank, a.options.group_size = 0, 1


GROUPS = [
    _group_fault(
        "no_options",
        "make_process_group_options answers nothing",
        "make_process_group_options",
        noted(lambda x, a: None),
    ),
    _group_fault(
        "options_dict",
        "make_process_group_options returns a dict",
        "make_process_group_options",
        noted(lambda x, a: {"timeout": a.timeout_s}),
    ),
    _group_fault(
        "options_timeout",
        "make_process_group_options drops the timeout",
        "make_process_group_options",
        other_answer("make_process_group_options", shown={"timeout_s": 1.0}, taken={"timeout_s": 36000.0}),
    ),
    _group_fault(
        "no_communicator", "make_communicator returns nothing", "make_communicator", noted(lambda x, a: None)
    ),
    _group_fault(
        "communicator_timeout",
        "make_communicator drops the timeout",
        "make_communicator",
        unchanged,
        _long_wait,
    ),
    _group_fault(
        "communicator_of_one",
        "make_communicator makes a group of one rank",
        "make_communicator",
        unchanged,
        _one_of_one,
    ),
    _group_fault(
        "communicator_kept",
        "make_communicator returns the first object again after a release",
        "make_communicator",
        noted(lambda x, a: _communicators.setdefault(a.options.group_size, x)),
    ),
]

FAULTS: Sequence[Fault] = (*REDUCTIONS, *OTHERS, *GROUPS)
