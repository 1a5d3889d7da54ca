"""Faults of the optimizer from ``make_optimizer``, with or without the methods of a ``FusedOptimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from backend_faults.fault import Fault, reached

Make = Callable[[Any, SimpleNamespace], None]
"""Puts a fault into an optimizer, given the arguments of the hook."""

Settings = Callable[[Mapping[str, Any], SimpleNamespace], Mapping[str, Any]]
"""From a parameter group and the arguments of the hook to values that a step takes instead."""


def optimizer_fault(name: str, statement: str, make: Make) -> Fault:
    """Return a fault of an optimizer."""
    return Fault(f"optimizer.{name}", statement, "make_optimizer", partial(_change, make))


def _change(make: Make, optimizer: Any, a: SimpleNamespace) -> Any:
    if optimizer is None:
        settings = {name: getattr(a, name) for name in ("lr", "betas", "eps", "weight_decay")}
        optimizer = torch.optim.AdamW([dict(group) for group in a.param_groups], **settings)
    make(optimizer, a)
    return optimizer


def replaced(optimizer: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method of an optimizer, if it has it."""
    own = getattr(optimizer, name, None)
    if own is None:
        return
    faulty = make(own)

    def method(*given: Any, **named: Any) -> Any:
        reached()
        return faulty(*given, **named)

    setattr(optimizer, name, method)


def around(before: Callable[[Any], Any], after: Callable[[Any, Any], Any]) -> Make:
    """Do something before and after each step; ``after`` is given what ``before`` returned."""

    def stepping(optimizer: Any, own: Any) -> Any:
        def step(*given: Any, **named: Any) -> Any:
            noted = before(optimizer)
            result = own(*given, **named)
            after(optimizer, noted)
            return result

        return step

    def make(optimizer: Any, _: SimpleNamespace) -> None:
        for name in ("step", "step_from"):
            replaced(optimizer, name, partial(stepping, optimizer))

    return make


def settings(change: Settings) -> Make:
    """Let a step take other settings than those of its parameter groups."""

    def make(optimizer: Any, a: SimpleNamespace) -> None:
        def before(_: Any) -> list[dict[str, Any]]:
            changes = [change(group, a) for group in optimizer.param_groups]
            kept = [
                {name: group[name] for name in new}
                for group, new in zip(optimizer.param_groups, changes, strict=True)
            ]
            _update(optimizer, changes)
            return kept

        around(before, _update)(optimizer, a)

    return make


def _update(optimizer: Any, values: Sequence[Mapping[str, Any]]) -> None:
    for group, new in zip(optimizer.param_groups, values, strict=True):
        group.update(new)


def _weights(optimizer: Any) -> Iterator[Tensor]:
    yield from (weight for group in optimizer.param_groups for weight in group["params"])


def _add_steps(optimizer: Any, count: int) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] += count


def _values(optimizer: Any) -> list[Tensor]:
    return [weight.detach().clone() for weight in _weights(optimizer)]


def _each(change: Callable[[Tensor, Tensor], None]) -> Make:
    """Change each weight after a step, given what it was before."""

    def after(optimizer: Any, before: list[Tensor]) -> None:
        for weight, old in zip(_weights(optimizer), before, strict=True):
            change(weight.data, old)

    return around(_values, after)


def _only_first_group(optimizer: Any, before: list[Tensor]) -> None:
    first = len(optimizer.param_groups[0]["params"])
    for weight, old in [*zip(_weights(optimizer), before, strict=True)][first:]:
        weight.data.copy_(old)


def _keep(weight: Tensor, old: Tensor, start: int) -> None:
    weight.view(-1)[start:] = old.view(-1)[start:]


def _coupled(optimizer: Any) -> list[float]:
    kept = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                weight.grad = weight.grad + group["weight_decay"] * weight.detach()
        group["weight_decay"] = 0.0
    return kept


def _restore_decay(optimizer: Any, kept: list[float]) -> None:
    _update(optimizer, [{"weight_decay": value} for value in kept])


def _clear_gradients(optimizer: Any, _: Any) -> None:
    for weight in _weights(optimizer):
        if weight.grad is not None:
            weight.grad.zero_()


def _rounded_moments(optimizer: Any, _: Any) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name].copy_(state[name].bfloat16())


def _other_memory(optimizer: Any, _: Any) -> None:
    for weight in _weights(optimizer):
        weight.data = weight.data.clone()


def _finite_alone(optimizer: Any, _: SimpleNamespace) -> None:
    """Leave a step out for gradients that are not finite."""

    def stepping(own: Any) -> Any:
        def step(*given: Any, **named: Any) -> Any:
            grads = [weight.grad for weight in _weights(optimizer) if weight.grad is not None]
            return own(*given, **named) if all(grad.isfinite().all() for grad in grads) else None

        return step

    replaced(optimizer, "step", stepping)


def _then(own: Callable[..., Any], follow: Callable[[], Any]) -> Callable[..., None]:
    def method(*given: Any) -> None:
        own(*given)
        follow()

    return method


def _after_load(change: Callable[[Any], None]) -> Make:
    """Change the optimizer after it has loaded a state dict."""

    def make(optimizer: Any, _: SimpleNamespace) -> None:
        def loading(own: Any) -> Any:
            return _then(own, lambda: change(optimizer))

        replaced(optimizer, "load_state_dict", loading)

    return make


def _saved(change: Callable[[dict[str, Any]], Any]) -> Make:
    """Change the state dict that it returns."""

    def make(optimizer: Any, _: SimpleNamespace) -> None:
        replaced(optimizer, "state_dict", lambda own: lambda: change(own()))

    return make


def _without(name: str, saved: dict[str, Any]) -> dict[str, Any]:
    state = {key: {k: v for k, v in one.items() if k != name} for key, one in saved["state"].items()}
    return {**saved, "state": state}


def _set_state(name: str, change: Callable[[Any], Any], optimizer: Any) -> None:
    for state in optimizer.state.values():
        if name in state:
            state[name] = change(state[name])


def _method(name: str, make: Callable[[Any, Any], Any]) -> Make:
    return lambda optimizer, _: replaced(optimizer, name, partial(make, optimizer))


def _step_from(change: Callable[..., Any]) -> Make:
    """Change how ``step_from`` is called: ``change(own, gradients, scale, copies)``."""
    return _method("step_from", lambda _, own: partial(change, own))


def _truncated(own: Any, gradients: Any, scale: float, copies: Any) -> None:
    own(gradients, scale, copies)
    for copy in (copy for group in copies for copy in group if copy is not None):
        copy.view(torch.int16).sub_(copy.view(torch.int16) & 1)


def _scaled_in_place(own: Any, gradients: Any, scale: float, copies: Any) -> None:
    for gradient in (gradient for group in gradients for gradient in group):
        gradient.mul_(scale)
    own(gradients, 1.0, copies)


def _unwritten(own: Any, gradients: Any, scale: float, copies: Any) -> None:
    own(gradients, scale, [[None if copy is None else copy.clone() for copy in group] for group in copies])


def _dropping(optimizer: Any, a: SimpleNamespace) -> None:
    if getattr(optimizer, "takes_remainders", False):
        around(lambda _: None, _no_remainders)(optimizer, a)


def _no_remainders(optimizer: Any, _: Any) -> None:
    for weight in _weights(optimizer):
        if weight.dtype == torch.int16:
            weight.data.zero_()


def _first_gradients() -> Make:
    """Take the gradients of the first step in every step, as a recorded step does that does not copy them."""
    kept: dict[int, Tensor] = {}

    def before(optimizer: Any) -> None:
        for weight in _weights(optimizer):
            if weight.grad is not None:
                weight.grad = kept.setdefault(id(weight), weight.grad.clone())

    return around(before, lambda o, _: None)


def _round_gradients(optimizer: Any) -> None:
    for weight in _weights(optimizer):
        if weight.grad is not None:
            weight.grad = weight.grad.bfloat16().to(weight.grad.dtype)


FAULTS: Sequence[Fault] = (
    optimizer_fault(
        "first_gradients", "AdamW takes the gradients of the first step in all steps", _first_gradients()
    ),
    optimizer_fault(
        "rounded_gradients", "AdamW rounds gradients to bfloat16", around(_round_gradients, lambda o, _: None)
    ),
    optimizer_fault(
        "step_in_bfloat16",
        "the step count is bfloat16, which stays at 256",
        around(lambda o: None, lambda o, _: _set_state("step", lambda s: s.bfloat16().to(s.dtype), o)),
    ),
    optimizer_fault(
        "lr_first", "AdamW keeps the learning rate of the first step", settings(lambda group, a: {"lr": a.lr})
    ),
    optimizer_fault(
        "lr_of_first_group",
        "AdamW takes the learning rate of the first group for all",
        lambda optimizer, a: settings(lambda group, a: {"lr": optimizer.param_groups[0]["lr"]})(optimizer, a),
    ),
    optimizer_fault(
        "betas_usual",
        "AdamW takes (0.9, 0.999) for every betas",
        settings(lambda group, a: {"betas": (0.9, 0.999)}),
    ),
    optimizer_fault(
        "beta_once",
        "AdamW takes beta1 for both moments",
        settings(lambda group, a: {"betas": (group["betas"][0],) * 2}),
    ),
    optimizer_fault("eps_usual", "AdamW takes 1e-8 for every eps", settings(lambda group, a: {"eps": 1e-8})),
    optimizer_fault(
        "decay_none", "AdamW does not decay weights", settings(lambda group, a: {"weight_decay": 0.0})
    ),
    optimizer_fault(
        "decay_first",
        "AdamW keeps the weight decay that it was made with",
        settings(lambda group, a: {"weight_decay": a.weight_decay}),
    ),
    optimizer_fault(
        "decay_coupled",
        "AdamW adds the decay to the gradient, as Adam does",
        around(_coupled, _restore_decay),
    ),
    optimizer_fault(
        "no_bias_correction",
        "AdamW does not correct the bias of its moments after the first step",
        around(lambda o: _add_steps(o, 100000), lambda o, _: _add_steps(o, -100000)),
    ),
    optimizer_fault(
        "step_twice", "the step count advances by two", around(lambda o: None, lambda o, _: _add_steps(o, 1))
    ),
    optimizer_fault(
        "step_stays",
        "the step count stays at 1",
        around(lambda o: None, lambda o, _: _set_state("step", lambda s: s * 0 + 1, o)),
    ),
    optimizer_fault(
        "first_group_alone",
        "AdamW updates the first parameter group alone",
        around(_values, _only_first_group),
    ),
    optimizer_fault(
        "odd_element",
        "AdamW leaves the last of an odd number of elements as it was",
        _each(lambda w, old: _keep(w, old, w.numel() // 2 * 2) if w.numel() % 2 else None),
    ),
    optimizer_fault(
        "large_tensor", "AdamW stops at 2^20 elements", _each(lambda w, old: _keep(w, old, 1 << 20))
    ),
    optimizer_fault(
        "rounded_weights",
        "AdamW rounds the master weights to bfloat16",
        _each(lambda w, old: w.copy_(w.bfloat16()) if w.is_floating_point() else None),
    ),
    optimizer_fault(
        "rounded_moments",
        "AdamW keeps its moments with the precision of bfloat16",
        around(lambda o: None, _rounded_moments),
    ),
    optimizer_fault(
        "gradients_cleared",
        "a step of AdamW sets the gradients to zero",
        around(lambda o: None, _clear_gradients),
    ),
    optimizer_fault(
        "other_memory", "a step of AdamW puts weights into new memory", around(lambda o: None, _other_memory)
    ),
    optimizer_fault(
        "infinite_left_out", "AdamW leaves a step out if a gradient is not finite", _finite_alone
    ),
    optimizer_fault(
        "load_forgets_step",
        "AdamW begins to count steps anew after a resume",
        _after_load(partial(_set_state, "step", lambda s: s * 0)),
    ),
    optimizer_fault(
        "load_forgets_moment",
        "AdamW forgets the second moment at a resume",
        _after_load(partial(_set_state, "exp_avg_sq", lambda s: s * 0)),
    ),
    optimizer_fault(
        "load_rounds",
        "AdamW loads its moments as bfloat16",
        _after_load(partial(_set_state, "exp_avg", lambda s: s.bfloat16().float())),
    ),
    optimizer_fault(
        "load_forgets_decay",
        "AdamW forgets weight decay after a resume",
        _after_load(lambda o: _update(o, [{"weight_decay": 0.0}] * len(o.param_groups))),
    ),
    optimizer_fault(
        "load_forgets_lr",
        "AdamW keeps its own learning rate at a resume",
        lambda optimizer, a: _after_load(lambda o: _update(o, [{"lr": a.lr}] * len(o.param_groups)))(
            optimizer, a
        ),
    ),
    optimizer_fault(
        "saves_no_step", "the state dict of AdamW lacks the step count", _saved(partial(_without, "step"))
    ),
    optimizer_fault(
        "saves_no_moment",
        "the state dict of AdamW lacks the first moment",
        _saved(partial(_without, "exp_avg")),
    ),
    optimizer_fault(
        "scale_ignored",
        "step_from ignores scale",
        _step_from(lambda own, g, scale, copies: own(g, 1.0, copies)),
    ),
    optimizer_fault(
        "gradients_scaled", "step_from multiplies the gradients in place", _step_from(_scaled_in_place)
    ),
    optimizer_fault(
        "copies_unwritten", "step_from does not write the model's copies", _step_from(_unwritten)
    ),
    optimizer_fault(
        "copies_truncated", "step_from clears the last bit of the model's copies", _step_from(_truncated)
    ),
    optimizer_fault(
        "prepare_counts",
        "prepare counts a step that may be left out",
        _method("prepare", lambda o, own: _then(own, lambda: _add_steps(o, 1))),
    ),
    optimizer_fault(
        "remainders_dropped",
        "AdamW drops the lower halves of weights with remainders",
        _dropping,
    ),
)
