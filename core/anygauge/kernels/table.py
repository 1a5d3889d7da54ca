"""Kernel table: binds each op of a module to an implementation.

Modules ask once, when they are built, with the static facts that they know (dtype, head size, causal). What
nobody serves is the reference, or an error where the run is strict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from typing import TYPE_CHECKING, Any

from anygauge.kernels.observer import ResolvedKernel, current_observer
from anygauge.plugins import PluginDistribution, plugin_distributions, source_location
from anygauge_hooks import kernels as contract
from anygauge_hooks.errors import DuplicateNameError, PluginError
from anygauge_hooks.kernels import KERNEL_FACTS, KERNEL_OPS, KernelImpl, KernelOp, Tolerance
from anygauge_hooks.types import LoadedPlugins

if TYPE_CHECKING:
    import torch

    from anygauge_hooks.types import BackendSpec

__all__ = [
    "REFERENCE_DTYPES",
    "KernelRow",
    "KernelTable",
    "LeftOutKernel",
    "core_kernels",
    "reference_kernel",
    "resolve_kernels",
]

REFERENCE_DTYPES = ("float32", "bfloat16")
"""The dtypes that a run may have; the reference serves those that no plugin does."""

_CORE = "anygauge"
_LAST = -100
"""Priority of what the core brings: after whatever a plugin has."""

_PARTS: Mapping[KernelOp, tuple[str, Sequence[KernelOp]]] = {
    "add_rms_norm": ("add_and_norm", ("rms_norm",)),
    "qk_norm_rotary": ("by_parts", ("rms_norm", "rotary_embedding")),
}
"""Ops that are made of others where nobody serves them: the function of the references that does it, and the
ops that it is given first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One line of the capability table that ``anygauge hooks`` prints."""

    op: KernelOp
    source: str
    owner: str
    """Name of the plugin."""
    package: str | None
    """The distribution that the plugin came with, or ``None`` if it was not installed from one."""
    version: str | None
    location: str
    """``file:line`` of the function, or empty where it is not Python."""
    dtypes: tuple[str, ...]
    limits: Mapping[str, Sequence[Any]]
    tolerance: Mapping[str, Tolerance]
    """Declared tolerances by dtype; empty where they are the conformance suite's."""
    tolerance_reason: str
    priority: int
    is_reference: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutKernel:
    """A kernel that a plugin has and this environment cannot run."""

    op: KernelOp
    source: str
    owner: str
    missing: tuple[str, ...]
    """Modules that are not installed."""


@dataclass(frozen=True, slots=True)
class _Owned:
    owner: str
    kernel: KernelImpl

    def __str__(self) -> str:
        return f"{self.kernel.source!r} of {self.owner}"


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernels of a backend, by op, highest priority first."""

    backend: str
    kernels: Mapping[KernelOp, Sequence[_Owned]]
    left_out: Sequence[LeftOutKernel] = ()

    def resolve(self, op: KernelOp, *, dtype: str | torch.dtype, **facts: Any) -> Callable[..., Any]:
        """Return the function that serves an op.

        :param op: A name of ``KERNEL_OPS``.
        :param dtype: The dtype of the activations.
        :param facts: Other values of ``KERNEL_FACTS`` known when the module is built: ``head_dim=64``.
        :returns: A function with the signature of the op's Protocol; the reference where nothing else serves.
        """
        candidates = self.candidates(op, dtype=dtype, **facts)
        kernel = candidates[0] if candidates else reference_kernel(op)
        is_of_parts = op in _PARTS and (not candidates or kernel.priority == _LAST)
        fn = self._by_parts(op, dtype, **facts) if is_of_parts else kernel.fn
        if (observer := current_observer()) is None:
            return fn
        name = str(dtype).removeprefix("torch.")
        return observer(ResolvedKernel(op=op, dtype=name, facts=facts, fn=fn, kernel=kernel))

    def _by_parts(self, op: KernelOp, dtype: str | torch.dtype, **facts: Any) -> Callable[..., Any]:
        """Return an op as made of what serves its parts."""
        from anygauge.kernels import reference

        name, parts = _PARTS[op]
        known = ({fact: facts[fact] for fact in KERNEL_FACTS[part] if fact in facts} for part in parts)
        served = [self.resolve(part, dtype=dtype, **of) for part, of in zip(parts, known, strict=True)]
        return partial(getattr(reference, name), *served)

    def candidates(self, op: KernelOp, *, dtype: str | torch.dtype, **facts: Any) -> list[KernelImpl]:
        """Return every implementation that accepts the dtype and the facts, the one to use first."""
        assert set(facts) <= set(KERNEL_FACTS[op]), f"{op} has no fact {set(facts) - set(KERNEL_FACTS[op])}"
        name = str(dtype).removeprefix("torch.")
        return [o.kernel for o in self.kernels.get(op, ()) if _accepts(o.kernel, name, facts)]

    def preferring(self, owner: str, kernels: Iterable[KernelImpl]) -> KernelTable:
        """Return a table that prefers these kernels to all others, whatever their priority.

        :param owner: Name of the provider of the kernels, for messages.
        :raises PluginError: A kernel names an unknown op, or has not the signature of its op.
        """
        by_op = dict(self.kernels)
        for owned in (_Owned(owner, kernel) for kernel in kernels):
            _check_kernel(owned)
            by_op[owned.kernel.op] = (owned, *by_op.get(owned.kernel.op, ()))
        return replace(self, kernels=by_op)

    def rows(self, distribution: PluginDistribution | None = None) -> list[KernelRow]:
        """Return the capability table: a row per implementation.

        A row that is the reference lists the dtypes that nothing else serves without limits; there is none
        where plugins serve them all.

        :param distribution: Default: reads what is installed.
        """
        distribution = distribution or plugin_distributions()
        return [row for op in KERNEL_OPS for row in self._rows(op, distribution)]

    def _rows(self, op: KernelOp, distribution: PluginDistribution) -> list[KernelRow]:
        owned = self.kernels.get(op, ())
        rows = [_row(o.kernel, o.owner, distribution) for o in owned]
        served = {dtype for row in rows if not row.limits for dtype in row.dtypes}
        missing = tuple(dtype for dtype in REFERENCE_DTYPES if dtype not in served)
        if missing:
            rows.append(_row(reference_kernel(op, missing), _CORE, distribution, is_reference=True))
        return rows


def resolve_kernels(
    plugins: LoadedPlugins, backend: BackendSpec, loss_budget: Callable[[], int] | None = None
) -> KernelTable:
    """Collect and check the kernels that plugins register for a backend.

    :param loss_budget: Returns the bytes in which ``linear_logprob`` may keep logits for backward, where it
        is made of tiles. ``None`` keeps none.
    :raises PluginError: A kernel names an unknown op, or has not the signature of its op.
    :raises DuplicateNameError: Two kernels of one op and priority accept the same facts.
    """
    answers = plugins.answers("register_kernels", backend=backend)
    declared = [_Owned(owner, kernel) for owner, kernel in answers]
    owned_kernels = [
        replace(o, kernel=_whole(o.kernel, loss_budget)) for o in declared if not _missing(o.kernel)
    ]
    owned_kernels += [_Owned(_CORE, kernel) for kernel in core_kernels(loss_budget)]
    for owned in owned_kernels:
        _check_kernel(owned)
    by_op = {op: [owned for owned in owned_kernels if owned.kernel.op == op] for op in KERNEL_OPS}
    for group in by_op.values():
        _check_unique(group)
        group.sort(key=lambda owned: -owned.kernel.priority)
    left_out = [
        LeftOutKernel(op=o.kernel.op, source=o.kernel.source, owner=o.owner, missing=missing)
        for o in declared
        if (missing := _missing(o.kernel))
    ]
    return KernelTable(backend.name, by_op, left_out)


def reference_kernel(op: KernelOp, dtypes: Sequence[str] = REFERENCE_DTYPES) -> KernelImpl:
    """Return the plain-torch reference of an op."""
    from anygauge.kernels import reference

    fn = getattr(reference, op)
    return KernelImpl(op=op, fn=fn, source=f"{fn.__module__}.{op}", dtypes=dtypes)


def core_kernels(loss_budget: Callable[[], int] | None = None) -> list[KernelImpl]:
    """Return the core's own kernels: log-probs by tiles, and ops composed of other ops."""
    from anygauge.kernels.linear_logprob import linear_logprob
    from anygauge.kernels.reference import add_rms_norm, qk_norm_rotary

    def core(op: KernelOp, fn: Callable[..., Any], source: str) -> KernelImpl:
        return KernelImpl(op=op, fn=fn, source=source, dtypes=REFERENCE_DTYPES, priority=_LAST)

    tiled = linear_logprob if loss_budget is None else partial(linear_logprob, budget=loss_budget)
    return [
        core("linear_logprob", tiled, f"{linear_logprob.__module__}.linear_logprob"),
        core("add_rms_norm", add_rms_norm, "an addition and rms_norm"),
        core("qk_norm_rotary", qk_norm_rotary, "rms_norm and rotary_embedding"),
    ]


def _missing(kernel: KernelImpl) -> tuple[str, ...]:
    return tuple(module for module in kernel.requires if not _is_installed(module))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # somebody's stand-in, which has no spec
        return False


def _whole(kernel: KernelImpl, loss_budget: Callable[[], int] | None) -> KernelImpl:
    """Return a kernel with the signature of its op, where a plugin brings only the passes over a tile."""
    if not kernel.tiles:
        return kernel
    from anygauge.kernels.linear_logprob import linear_logprob

    if kernel.op != "linear_logprob":
        raise PluginError(
            f"Kernel {kernel.source!r} of {kernel.op} is said to be made of tiles.",
            hint="Only linear_logprob is.",
        )
    return replace(kernel, fn=partial(linear_logprob, math=kernel.fn(), budget=loss_budget), tiles=False)


def _accepts(kernel: KernelImpl, dtype: str, facts: Mapping[str, Any]) -> bool:
    """Return whether a kernel serves a module; a limited fact that the module does not state is a no."""
    limits = kernel.limits or {}
    return dtype in kernel.dtypes and all(n in facts and facts[n] in limits[n] for n in limits)


def _check_kernel(owned: _Owned) -> None:
    op = owned.kernel.op
    if op not in KERNEL_OPS:
        raise PluginError(
            f"Unknown kernel op {op!r} ({owned}).", hint=f"The ops are: {', '.join(KERNEL_OPS)}."
        )
    unknown = sorted(set(owned.kernel.limits or ()) - set(KERNEL_FACTS[op]))
    if unknown:
        known = ", ".join(KERNEL_FACTS[op]) or "none"
        raise PluginError(
            f"Kernel {owned} of {op} limits {', '.join(unknown)}, which no module states.",
            hint=f"The facts of {op} are: {known}.",
        )
    wanted = list(inspect.signature(vars(_protocol(op))["__call__"]).parameters.values())[1:]
    problem = _signature_problem(owned.kernel.fn, wanted)
    if problem:
        takes = ", ".join(("*, " if p.kind is p.KEYWORD_ONLY else "") + p.name for p in wanted)
        raise PluginError(f"Kernel {owned} cannot serve {op}: {problem}.", hint=f"It takes ({takes}).")


def _protocol(op: KernelOp) -> type:
    """Return the Protocol of an op: ``RmsNorm`` of ``rms_norm``."""
    protocol: type = getattr(contract, "".join(word.capitalize() for word in op.split("_")))
    return protocol


def _signature_problem(fn: Callable[..., Any], wanted: Sequence[inspect.Parameter]) -> str | None:
    """Return why a function cannot be called as its op is; a ``*args`` function may have any names."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return "its signature cannot be read; wrap it in a Python function"
    positional = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p.name for p in wanted if p.kind is p.KEYWORD_ONLY]
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    named = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    differs = [f"{a!r} where {b!r} belongs" for a, b in zip(named, positional, strict=False) if a != b]
    return f"it has {', '.join(differs)}" if differs else None


def _check_unique(group: Sequence[_Owned]) -> None:
    for one, other in combinations(group, 2):
        if one.kernel.priority == other.kernel.priority and _overlap(one.kernel, other.kernel):
            raise DuplicateNameError(
                f"{one} and {other} both serve {one.kernel.op} at priority {one.kernel.priority}.",
                hint="Give one a higher priority, or limit them to dtypes or facts that do not overlap.",
            )


def _overlap(one: KernelImpl, other: KernelImpl) -> bool:
    mine, theirs = one.limits or {}, other.limits or {}
    shared = mine.keys() & theirs.keys()
    meets = all(any(value in theirs[name] for value in mine[name]) for name in shared)
    return meets and bool(set(one.dtypes) & set(other.dtypes))


def _row(
    kernel: KernelImpl, owner: str, distribution: PluginDistribution, *, is_reference: bool = False
) -> KernelRow:
    package, release = distribution(owner)
    return KernelRow(
        op=kernel.op,
        source=kernel.source,
        owner=owner,
        package=package,
        version=release,
        location=source_location(kernel.fn),
        dtypes=tuple(kernel.dtypes),
        limits=kernel.limits or {},
        tolerance=kernel.tolerance or {},
        tolerance_reason=kernel.tolerance_reason,
        priority=kernel.priority,
        is_reference=is_reference,
    )
