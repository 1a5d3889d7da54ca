"""Faults of the other hooks of a backend. Nothing here imports torch: some of these hooks must not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from anygauge_hooks.types import Availability, ConfigChange, ConfigProblem, HostCheck
from anygauge_hooks.weights import WeightTransport, WeightTransportSpec
from backend_faults.fault import Fault, backend_name, noted, other_answer, reached

Change = Callable[[Any, SimpleNamespace], Any]


def hook_fault(hook: str, name: str, statement: str, change: Change) -> Fault:
    """Return a fault of a hook's answer."""
    return Fault(f"{hook}.{name}", statement, hook, noted(change))


def deaf_fault(hook: str, name: str, statement: str, shown: Any, taken: Any) -> Fault:
    """Return a fault of a collecting hook that takes one value of an argument for all."""
    argument = name.removesuffix("_ignored")
    change = other_answer(hook, shown={argument: shown}, taken={argument: taken})
    return Fault(f"{hook}.{name}", statement, hook, lambda _, a: [x for x in [change(_, a)] if x is not None])


@dataclass(frozen=True)
class _Raised:
    error: Exception


def _answer(function: Any, given: Any, named: Any) -> Any:
    try:
        return function(*given, **named)
    except Exception as error:  # noqa: BLE001 - whatever the vendor's own raises
        return _Raised(error)


_made: dict[str, Callable[[Any], Any]] = {}


@dataclass(frozen=True)
class _Function:
    """A faulty function of a spec, which can be sent to another process as the vendor's can."""

    fault: str
    own: Any

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the faulty answer; the fault is reached where it is another one than the vendor's."""
        if (answer := _answer(_made[self.fault](self.own), given, named)) != _answer(self.own, given, named):
            reached()
        if isinstance(answer, _Raised):
            raise answer.error
        return answer


def spec_fault(name: str, statement: str, **fields: Callable[[Any], Any]) -> Fault:
    """Return a fault of fields of the backend's ``BackendSpec``; each is made of the vendor's own."""
    _made.update({f"{name}.{field}": make for field, make in fields.items()})

    def made(field: str, own: Any) -> Any:
        value = fields[field](own)
        return _Function(f"{name}.{field}", own) if callable(value) else value

    def change(spec: Any) -> Any:
        if spec.name != backend_name():
            return spec
        values = {field: made(field, getattr(spec, field)) for field in fields}
        if any(value != getattr(spec, field) for field, value in values.items() if not callable(value)):
            reached()
        return replace(spec, **values)

    return Fault(
        f"register_backends.{name}",
        statement,
        "register_backends",
        lambda answers, a: [[change(s) for s in answer] for answer in answers],
    )


def _in_driver(answers: Any, a: SimpleNamespace) -> Any:
    reached()
    for answer in answers:
        os.environ.update(answer)
    return answers


def _with_torch(answers: Any, a: SimpleNamespace) -> Any:
    reached()
    _imports_torch()
    return answers


def _more(**entries: Any) -> Change:
    return lambda answers, a: [*answers, entries]


def _raise(*given: Any, **named: Any) -> Any:
    raise RuntimeError("the driver did not answer")


def _imports_torch(*given: Any) -> Any:
    import torch

    return [HostCheck(name="torch", status="PASS", found=torch.__version__)]


SPECS = [
    spec_fault("probe_raises", "probe raises", probe=lambda own: _raise),
    spec_fault("probe_text", "probe returns a text", probe=lambda own: lambda: "ok"),
    spec_fault(
        "probe_silent",
        "probe gives no reason where it fails",
        probe=lambda own: lambda: Availability(ok=False),
    ),
    spec_fault("device_type_index", "device_type has an index", device_type=lambda own: f"{own}:0"),
    spec_fault(
        "dist_backend", "dist_backend is one that torch does not know", dist_backend=lambda own: f"{own}x"
    ),
    spec_fault("no_resource", "scheduler_resource is empty", scheduler_resource=lambda own: ""),
    spec_fault(
        "resource_of_ray",
        "scheduler_resource is one that Ray has for itself",
        scheduler_resource=lambda own: "CPU",
    ),
    spec_fault(
        "local_device_id",
        "local_device returns the physical id",
        local_device=lambda own: lambda ids, environ: int(ids[0]),
    ),
    spec_fault(
        "local_device_99",
        "local_device returns 99",
        local_device=lambda own: lambda ids, environ: 99,
    ),
    spec_fault(
        "local_device_text",
        "local_device returns a text",
        local_device=lambda own: lambda ids, environ: str(own(ids, environ)),
    ),
    spec_fault(
        "local_device_first",
        "local_device returns 0 for every id",
        local_device=lambda own: lambda ids, environ: 0,
    ),
    spec_fault(
        "local_device_environ",
        "local_device reads the process's environment",
        local_device=lambda own: lambda ids, environ: own(ids, os.environ),
    ),
    spec_fault(
        "visible_devices_whole",
        "visible_devices does not split its value",
        visible_devices=lambda own: lambda text: [text],
    ),
    spec_fault(
        "visible_devices_bare",
        "visible_devices keeps blanks and empty entries",
        visible_devices=lambda own: lambda text: text.split(","),
    ),
    spec_fault(
        "hidden_env_number",
        "hidden_env has a number",
        hidden_env=lambda own: {**own, "ABACUS_VISIBLE_DEVICES": -1},
    ),
    spec_fault("providers_text", "providers is a text", providers=lambda own: "megablocks"),
    spec_fault("host_checks_torch", "host_checks imports torch", host_checks=lambda own: _imports_torch),
    spec_fault("host_checks_raise", "host_checks raises", host_checks=lambda own: _raise),
    spec_fault(
        "host_checks_status",
        "host_checks has a status of its own",
        host_checks=lambda own: lambda: [HostCheck(name="driver", status="ok")],
    ),
]


def _texts(answers: Sequence[Mapping[str, Any]], a: SimpleNamespace) -> Any:
    return [
        {name: int(value) if value.isdecimal() else None for name, value in answer.items()}
        for answer in answers
    ]


WORKERS = [
    hook_fault("worker_env", "nothing", "worker_env answers nothing", lambda answers, a: []),
    hook_fault("worker_env", "numbers", "worker_env has values that are no texts", _texts),
    deaf_fault(
        "worker_env",
        "role_ignored",
        "worker_env gives every role the variables of the trainers",
        "sglang",
        "actor",
    ),
    deaf_fault(
        "worker_env",
        "deterministic_ignored",
        "worker_env ignores deterministic",
        True,
        False,
    ),
    deaf_fault(
        "worker_env",
        "interface_ignored",
        "worker_env ignores interface",
        "eth0",
        None,
    ),
    deaf_fault(
        "worker_env",
        "ip_version_ignored",
        "worker_env ignores ip_version",
        "4",
        "any",
    ),
    hook_fault(
        "worker_env",
        "whole_environment",
        "worker_env returns the whole environment of the driver",
        lambda answers, a: [*answers, dict(os.environ)],
    ),
    hook_fault(
        "worker_env", "path_replaced", "worker_env replaces PATH", _more(PATH="/usr/local/abacus/bin")
    ),
    hook_fault(
        "worker_env",
        "changes_driver",
        "worker_env sets its variables in the driver too",
        _in_driver,
    ),
    hook_fault(
        "worker_env",
        "varies",
        "worker_env has another value at each call",
        lambda answers, a: [*answers, {"ABACUS_SESSION": os.urandom(4).hex()}],
    ),
]


def _default_dtype(answer: Any, a: SimpleNamespace) -> None:
    import torch

    torch.set_default_dtype(torch.bfloat16)


def _no_grad(answer: Any, a: SimpleNamespace) -> None:
    import torch

    torch.set_grad_enabled(False)


def _seeds(answer: Any, a: SimpleNamespace) -> None:
    import torch

    torch.manual_seed(0)


def _threads(answer: Any, a: SimpleNamespace) -> None:
    import torch

    torch.set_num_threads(1)


def _deterministic(answer: Any, a: SimpleNamespace) -> None:
    import torch

    torch.use_deterministic_algorithms(mode=False)


def _directory(answer: Any, a: SimpleNamespace) -> None:
    os.chdir("/")


PREPARED = [
    hook_fault(
        "prepare_worker", "default_dtype", "prepare_worker sets torch's default dtype", _default_dtype
    ),
    hook_fault("prepare_worker", "no_grad", "prepare_worker turns gradients off", _no_grad),
    hook_fault("prepare_worker", "seeds", "prepare_worker seeds the generators", _seeds),
    hook_fault("prepare_worker", "threads", "prepare_worker sets the number of threads to 1", _threads),
    hook_fault(
        "prepare_worker",
        "deterministic_off",
        "prepare_worker turns deterministic algorithms off",
        _deterministic,
    ),
    hook_fault("prepare_worker", "directory", "prepare_worker changes the working directory", _directory),
    hook_fault(
        "prepare_worker",
        "raises_without_config",
        "prepare_worker needs a config where there is none",
        lambda answer, a: a.config.model_dump(),
    ),
    hook_fault(
        "prepare_worker",
        "raises_without_log",
        "prepare_worker needs a log where there is none",
        lambda answer, a: a.log + ".abacus",
    ),
]


class _Cached:
    """A fuser that compiles for the first arguments and returns their result for all of one shape."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.results = function, {}

    def __call__(self, *given: Any, **named: Any) -> Any:
        key = tuple(str(getattr(x, "shape", x)) for x in (*given, *named.values()))
        return self.results.setdefault(key, self.function(*given, **named))


def _detached(fuser: Any) -> Any:
    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        fused = fuser(function)

        def call(*given: Any, **named: Any) -> Any:
            result = fused(*given, **named)
            return result.detach() if hasattr(result, "detach") else result

        return call

    return fuse


def _positional(fuser: Any) -> Any:
    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            return fuser(function)(*given)

        return call

    return fuse


def _fuser(make: Callable[[Any], Any]) -> Change:
    return lambda answer, a: make(answer or (lambda function: function))


FUSERS = [
    hook_fault(
        "make_jit_fuser", "none", "the fuser returns nothing", _fuser(lambda own: lambda function: None)
    ),
    hook_fault(
        "make_jit_fuser",
        "cached",
        "a fused function returns its first result for a shape again",
        _fuser(lambda own: lambda function: _Cached(own(function))),
    ),
    hook_fault("make_jit_fuser", "no_gradient", "a fused function has no gradient", _fuser(_detached)),
    hook_fault(
        "make_jit_fuser",
        "no_keywords",
        "a fused function takes no keyword arguments",
        _fuser(_positional),
    ),
    hook_fault(
        "make_jit_fuser",
        "result",
        "make_jit_fuser returns a fused function instead of a fuser",
        lambda answer, a: lambda: None,
    ),
]

ENGINES = [
    hook_fault(
        "rollout_engine_args", "nothing", "rollout_engine_args answers nothing", lambda answers, a: []
    ),
    deaf_fault(
        "rollout_engine_args",
        "engine_ignored",
        "rollout_engine_args gives every engine the arguments of SGLang",
        "embedded",
        "sglang",
    ),
    hook_fault(
        "rollout_engine_args",
        "unknown",
        "rollout_engine_args has an argument that SGLang lacks",
        _more(abacus_beads=10),
    ),
    hook_fault(
        "rollout_engine_args",
        "dashes",
        "rollout_engine_args has the names of the command line",
        lambda answers, a: [{f"--{k.replace('_', '-')}": v for k, v in x.items()} for x in answers],
    ),
    hook_fault(
        "rollout_engine_args",
        "texts",
        "rollout_engine_args has texts for switches",
        lambda answers, a: [
            {k: str(v).lower() if isinstance(v, bool) else v for k, v in x.items()} for x in answers
        ],
    ),
    hook_fault(
        "rollout_engine_args", "model", "rollout_engine_args chooses the model", _more(model_path="abacus-7b")
    ),
]

_CHANGE = ConfigChange(path="train.dtyp", value="float32", reason="beads")

CONFIGS = [
    hook_fault(
        "adjust_config",
        "unknown_key",
        "adjust_config names a key that is not there",
        lambda answers, a: [*answers, [_CHANGE]],
    ),
    hook_fault(
        "adjust_config",
        "bad_value",
        "adjust_config has a value that its key does not take",
        lambda answers, a: [[replace(_CHANGE, path="train.dtype", value="fp32")]],
    ),
    hook_fault(
        "adjust_config",
        "no_reason",
        "adjust_config gives no reason",
        lambda answers, a: [[replace(x, reason="") for x in answer] for answer in answers],
    ),
    hook_fault(
        "adjust_config",
        "changes_seed",
        "adjust_config fills in a seed of its own",
        lambda answers, a: [*answers, [replace(_CHANGE, path="run.seed", value=7)]],
    ),
    hook_fault(
        "check_config",
        "refuses_default",
        "check_config refuses the default config",
        lambda answers, a: [
            *answers,
            [ConfigProblem(path="train.dtype", found="float32", hint="buy more beads")],
        ],
    ),
    hook_fault("check_config", "raises", "check_config raises", lambda answers, a: _raise()),
    hook_fault(
        "report_environment",
        "number",
        "report_environment has a number for a version",
        lambda answers, a: [*answers, {backend_name(): 9.1}],
    ),
    hook_fault(
        "report_environment",
        "raises",
        "report_environment raises without a driver",
        lambda answers, a: _raise(),
    ),
    hook_fault(
        "report_environment",
        "torch",
        "report_environment imports torch",
        lambda answers, a: [*answers, {"torch": _imports_torch()[0].found}],
    ),
]


class _Silent(WeightTransport):
    """A transport that sends nothing."""

    def send(self, bucket: Any, update: Any) -> None:
        """Send nothing."""


def _make_silent() -> WeightTransport:
    return _Silent()


def _transport(**fields: Any) -> Change:
    spec = WeightTransportSpec(name="abacus", make=lambda config, context: _Silent())
    return lambda answers, a: [*answers, [replace(spec, **fields)]]


TRANSPORTS = [
    hook_fault(
        "register_weight_transports",
        "sends_nothing",
        "a weight transport sends nothing and says nothing",
        _transport(),
    ),
    hook_fault(
        "register_weight_transports",
        "name_taken",
        "a weight transport has a name of the core",
        _transport(name="disk"),
    ),
    hook_fault(
        "register_weight_transports",
        "no_send",
        "a weight transport has no send",
        _transport(make=lambda config, context: WeightTransport()),
    ),
    hook_fault(
        "register_weight_transports",
        "no_arguments",
        "make of a weight transport takes no arguments",
        _transport(make=_make_silent),
    ),
    hook_fault(
        "register_weight_transports",
        "buffer_device",
        "buffer_device of a weight transport returns an index",
        _transport(buffer_device=lambda context: context.device.index),
    ),
    hook_fault(
        "register_weight_transports",
        "nowhere",
        "a weight transport takes servers neither on the trainers' devices nor on others",
        _transport(same_device=False, other_device=False),
    ),
    hook_fault(
        "register_weight_transports",
        "torch",
        "register_weight_transports imports torch",
        _with_torch,
    ),
]

FAULTS: Sequence[Fault] = (*SPECS, *WORKERS, *PREPARED, *FUSERS, *ENGINES, *CONFIGS, *TRANSPORTS)
