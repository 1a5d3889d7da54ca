"""Run code that names one vendor's device literally on another device, while a ``with`` block is open.

Megatron-core writes ``device="cuda"``, ``torch.cuda.current_device()`` and ``"torch.cuda.FloatTensor"`` in
its data-parallel buffers, optimizer, schedules, collectives, recompute and checkpoints, with no argument to
change it. Two mechanisms redirect that; nothing on disk is edited and nothing is left behind:

* A :class:`torch.overrides.TorchFunctionMode` rewrites the arguments of torch functions. It belongs to the
  thread that entered the scope. A thread that makes tensors enters a scope of its own.
* Attributes are replaced on the first entry and put back on the last exit. They belong to the process and
  are reference counted. :func:`scoped_attributes` lists them all, ``docs/seams.md`` says why each is there.

Most replaced attributes are a fence: a function of ``torch.cuda`` that nothing stands for raises
:class:`~anygauge_hooks.errors.MissedRedirectionError` instead of landing on another device.

Constructors that no Python function guards, such as ``torch.Generator(device="cuda")``, raise only where no
such device is visible: the environment of a worker hides the devices of every backend but its own.

A device without a scope map needs none of this: :func:`make_scope` then returns a null context.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from types import FunctionType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anygauge.failures import on_failure
from anygauge_hooks.errors import MissedRedirectionError, ScopeError
from anygauge_hooks.megatron import REDIRECTED, ScopeMap, scope_map_of
from anygauge_hooks.types import Device

__all__ = [
    "FENCED_MODULES",
    "FENCED_PRIVATE",
    "HARMLESS",
    "OTHER_SEAMS",
    "DeviceScope",
    "fenced_attributes",
    "has_pinned_memory",
    "make_scope",
    "redirected_attributes",
    "scoped_attributes",
]

FENCED_MODULES = ("torch.cuda", "torch.cuda.memory", "torch.cuda.random")
"""Modules whose other public functions raise."""

FENCED_PRIVATE = ("_exchange_device", "_lazy_init", "_maybe_exchange_device")
"""Private functions that raise too: everything that makes a device usable or current ends in one of them."""

HARMLESS = ("is_current_stream_capturing", "is_initialized")
"""Public functions that are left alone: torch asks them on every device, and they reach none."""

_AUTOCAST = "torch.amp.autocast_mode.autocast.__init__"
_ENGINE = "torch.autograd._engine_run_backward"
_IS_BUILT = "torch.backends.cuda.is_built"
_SET_RNG_STATE = "megatron.core.tensor_parallel.random._set_cuda_rng_state"
_TENSOR_TYPES = {
    "fp32": "megatron.core.transformer.module._FLOAT_TYPES",
    "fp16": "megatron.core.transformer.module._HALF_TYPES",
    "bf16": "megatron.core.transformer.module._BF16_TYPES",
}
OTHER_SEAMS = (_AUTOCAST, _ENGINE, _IS_BUILT, _SET_RNG_STATE, *_TENSOR_TYPES.values())
"""Attributes outside the fenced modules."""

_VENDOR = "cuda"
_VENDOR_TYPES = f"torch.{_VENDOR}."


def make_scope(device: Device) -> AbstractContextManager[None]:
    """Return the scope in which Megatron runs on ``device``.

    :param device: The device of this process.
    :returns: A :class:`DeviceScope`, or a null context if Megatron's literal names already mean this device.
    """
    scope_map = scope_map_of(device)
    return contextlib.nullcontext() if scope_map is None else DeviceScope(scope_map)


def has_pinned_memory(device: Device) -> bool:
    """Return whether the host memory of copies from a device is pinned."""
    scope_map = scope_map_of(device)
    return scope_map is None or scope_map.has_pinned_memory


class DeviceScope(AbstractContextManager[None]):
    """Redirects literal device names while it is open. Reusable, nestable, and safe to enter from any thread.

    :raises ScopeError: On entry: a scope of another device type is open in this process, the process has
        already initialized the vendor's own device, or the device's map is incomplete.
    """

    def __init__(self, scope_map: ScopeMap) -> None:
        self._map = scope_map
        # On import it tables the functions of torch, so that must not come inside a scope. It takes long, and
        # a device without a scope map does without.
        importlib.import_module("torch._dynamo")

    def __enter__(self) -> None:
        # made first: nothing may fail once the process counts this entry
        mode = None if _thread.entries else _Redirection(self._map, _own_prefix(self._map))
        with _lock:
            if not _process.entries:
                _install(self._map)
            elif _process.device_type != self._map.device_type:
                raise _two_devices(_process.device_type, self._map.device_type)
            _process.entries += 1
        if mode is not None:
            _thread.mode = mode
            mode.__enter__()
        _thread.entries += 1

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _thread.entries -= 1
        if not _thread.entries:
            mode, _thread.mode = _thread.mode, None
            assert mode is not None
            mode.__exit__(exc_type, exc, traceback)
        with _lock:
            _process.entries -= 1
            if not _process.entries:
                _restore()


# -------------------------------------------------------------------------
# Attributes, per process
# -------------------------------------------------------------------------


class _Process:
    """Attributes replaced in this process, and the number of scopes that need them."""

    entries = 0
    device_type = ""

    def __init__(self) -> None:
        self.saved: list[tuple[Any, str, Any]] = []


_process = _Process()
_lock = threading.RLock()


@functools.cache
def redirected_attributes() -> frozenset[str]:
    """Return the dotted names of the attributes that a scope map stands in for."""
    return frozenset(
        f"{module}.{name}"
        for module in FENCED_MODULES
        for name in REDIRECTED
        if hasattr(importlib.import_module(module), name)
    )


@functools.cache
def fenced_attributes() -> frozenset[str]:
    """Return the dotted names of the attributes that raise inside a scope."""
    return frozenset(
        f"{module}.{name}"
        for module in FENCED_MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if name in FENCED_PRIVATE or _is_public_function(name, value)
    )


def scoped_attributes() -> frozenset[str]:
    """Return the dotted name of every attribute that differs while a scope is open."""
    return redirected_attributes() | fenced_attributes() | frozenset(OTHER_SEAMS)


def _is_public_function(name: str, value: Any) -> bool:
    if name.startswith("_") or name in REDIRECTED or name in HARMLESS:
        return False
    return isinstance(value, FunctionType) and value.__module__.startswith("torch.cuda")


def _install(scope_map: ScopeMap) -> None:
    """Replace every attribute, or none if one of them cannot be."""
    if torch.cuda.is_initialized():
        raise ScopeError(
            f"This process already uses {_VENDOR!r}, so a missed redirection to {scope_map.device_type!r} "
            "could land there.",
            hint="Enter the scope first, or hide the GPUs from the process: CUDA_VISIBLE_DEVICES=''.",
        )
    with on_failure(_restore):
        for dotted, value in _replacements(scope_map).items():
            owner, name = _locate(dotted)
            _process.saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
    _process.device_type = scope_map.device_type


def _restore() -> None:
    while _process.saved:
        setattr(*_process.saved.pop())


@functools.cache
def _locate(dotted: str) -> tuple[Any, str]:
    """Return the module or class that holds an attribute, and the attribute's name."""
    path, _, name = dotted.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, cls = path.rpartition(".")
        return getattr(importlib.import_module(module), cls), name


def _replacements(scope_map: ScopeMap) -> dict[str, Any]:
    """Return the replacement of each of :func:`scoped_attributes`."""
    _check_map(scope_map)
    functions, target = scope_map.functions, scope_map.device_type
    new: dict[str, Any] = {name: functions[name.rpartition(".")[2]] for name in redirected_attributes()}
    new |= {name: _fence(name, target) for name in fenced_attributes()}
    for dtype, name in _TENSOR_TYPES.items():
        new[name] = tuple(_tensor_type(path) for path in scope_map.tensor_types[dtype])
    # Megatron's setter calls the vendor's generators by index, where its getter calls torch.cuda.random
    new[_SET_RNG_STATE] = lambda new_state, device=-1, graph_safe=False: functions["set_rng_state"](new_state)
    new[_IS_BUILT] = lambda: False  # else optimizers of torch 2.10 ask CUDA itself about a captured graph
    new[_AUTOCAST] = _fence_autocast(torch.autocast.__init__, target)
    new[_ENGINE] = _with_popped_mode(getattr(torch.autograd, _ENGINE.rpartition(".")[2]))
    return new


def _tensor_type(dotted: str) -> Any:
    return attrgetter(dotted.removeprefix("torch."))(torch)


def _own_prefix(scope_map: ScopeMap) -> str:
    """Return what names of tensor types on a device begin with; of several, the longest are its own."""
    prefixes = [name.rpartition(".")[0] for names in scope_map.tensor_types.values() for name in names]
    return f"{max(prefixes, key=len)}."


def _check_map(scope_map: ScopeMap) -> None:
    functions, wanted = set(scope_map.functions), set(REDIRECTED)
    if functions != wanted:
        raise ScopeError(
            f"The scope map of {scope_map.device_type!r} lacks {sorted(wanted - functions)} and has "
            f"{sorted(functions - wanted)} that the scope does not know.",
            hint="A backend stands in for exactly the names of anygauge_hooks.megatron.REDIRECTED.",
        )


def _fence(dotted: str, target: str) -> Callable[..., Any]:
    def missed(*args: Any, **kwargs: Any) -> Any:
        raise MissedRedirectionError(
            f"{dotted} was called inside the device scope of {target!r}, where nothing stands for it.",
            hint="Keep the call out of the scope, or add the function to the scope and to docs/seams.md.",
        )

    return missed


def _fence_autocast(init: Callable[..., None], target: str) -> Callable[..., None]:
    def checked(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        # Megatron's linear layers enter it disabled in every backward, which asks nothing of a device
        if device_type == _VENDOR and enabled:
            raise MissedRedirectionError(
                f"torch.autocast({_VENDOR!r}) was entered inside the device scope of {target!r}.",
                hint="Leave enable_autocast off and keep the parameters in bfloat16.",
            )
        init(self, device_type, dtype, enabled, cache_enabled)

    return checked


def _two_devices(open_type: str, asked: str) -> ScopeError:
    return ScopeError(
        f"A device scope of {asked!r} was entered while one of {open_type!r} is open in this process.",
        hint="Roles on different devices run in different processes.",
    )


# -------------------------------------------------------------------------
# Arguments, per thread
# -------------------------------------------------------------------------

_Handler = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


class _Redirection(TorchFunctionMode):
    """Rewrites device names in the arguments of torch functions.

    :param types: Prefix of the names of the device's legacy tensor types.
    """

    def __init__(self, scope_map: ScopeMap, types: str) -> None:
        super().__init__()
        self._map = scope_map
        self._types = types
        tensor: Any = torch.Tensor
        self._handlers: dict[Any, _Handler] = {
            tensor.to: self._to,
            tensor.cuda: self._cuda,
            tensor.type: self._type,
            tensor.is_cuda.__get__: self._is_cuda,
            tensor.backward: self._backward,
            torch.autograd.backward: self._backward,
            torch.autograd.grad: self._backward,
        }
        if not scope_map.has_pinned_memory:
            self._handlers[tensor.pin_memory] = _itself

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # every torch call of a step comes through here: a dictionary look-up and out
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        if "device" in kwargs or "pin_memory" in kwargs:
            kwargs = self._redirect(kwargs)
        return func(*args, **kwargs)

    def _redirect(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(kwargs)
        if "device" in new:
            new["device"] = self._place(new["device"])
        if "pin_memory" in new and not self._map.has_pinned_memory:
            new["pin_memory"] = False
        return new

    def _place(self, device: Any) -> Any:
        """Return the device that a literal name stands for; anything else as it is."""
        if isinstance(device, str):
            if not device.startswith(_VENDOR):
                return device
            device = torch.device(device)
        elif not isinstance(device, torch.device) or device.type != _VENDOR:
            return device
        return self._target(device.index)

    def _target(self, index: int | None) -> torch.device:
        if index is None or not self._map.has_index:
            return torch.device(self._map.device_type)
        return torch.device(self._map.device_type, index)

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return func(*map(self._place, args), **self._redirect(kwargs))

    def _cuda(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        rest = dict(kwargs)
        device = args[1] if len(args) > 1 else rest.pop("device", None)
        target = self._target(device) if device is None or isinstance(device, int) else self._place(device)
        return args[0].to(target, *args[2:], **rest)

    def _type(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not kwargs and not any(args[1:]):  # a vendor's own Tensor.type may pass its defaults on
            return func(args[0]).replace(self._types, _VENDOR_TYPES, 1)
        named = (arg.replace(_VENDOR_TYPES, self._types, 1) if isinstance(arg, str) else arg for arg in args)
        return func(*named, **kwargs)

    def _is_cuda(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return self._map.is_accelerator and args[0].device.type == self._map.device_type

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Remember the mode for :func:`_with_popped_mode`: torch pops it while ``func`` runs."""
        before, _thread.popped = _thread.popped, self
        try:
            return func(*args, **kwargs)
        finally:
            _thread.popped = before


class _Thread(threading.local):
    """Scopes that this thread has entered."""

    entries = 0
    mode: _Redirection | None = None
    popped: _Redirection | None = None


_thread = _Thread()


def _with_popped_mode(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Run the autograd engine under the mode, which ``backward()`` has popped.

    Recomputed activations and gradient hooks make tensors during backward. The engine hands the modes of the
    thread that calls it to its device threads.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        mode, _thread.popped = _thread.popped, None
        if mode is None:
            return engine(*args, **kwargs)
        with mode:
            return engine(*args, **kwargs)

    return run


def _itself(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0]
