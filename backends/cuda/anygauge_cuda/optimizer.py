"""The optimizer of the CUDA backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anygauge_hooks.optimizers import FusedOptimizer

__all__ = ["FusedAdamW", "adamw"]


class _Launch(NamedTuple):
    """Tensors that one kernel launch updates."""

    group: int
    step: float
    """The number of the step, from 1."""
    has_copies: bool
    has_remainders: bool
    plan: Any
    counts: Sequence[Tensor]
    """Step counters of its weights, on the host."""


def adamw(
    param_groups: Sequence[Mapping[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Return AdamW (https://arxiv.org/abs/1711.05101 algorithm 2): in one kernel, or torch's without Triton.

    :param param_groups: float32 tensors on the GPU.
    :param lr: Learning rate of the first step.
    :param betas: Decay rates of the two moments.
    :param eps: Added to the denominator.
    :param weight_decay: Decoupled decay.
    :returns: An optimizer whose state is ``exp_avg``, ``exp_avg_sq`` and ``step`` (a float32 scalar tensor).
    """
    groups = [dict(group) for group in param_groups]
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if find_spec("triton") is None:
        return torch.optim.AdamW(groups, **settings, fused=True)
    return FusedAdamW(groups, **settings)


class FusedAdamW(torch.optim.AdamW, FusedOptimizer):
    """AdamW whose step reads and writes each number once: gradient, weight, moments and the model's copy.

    The count of steps is on the host, where what depends on it is computed.
    """

    takes_remainders = True

    def __init__(self, groups: Sequence[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **settings, foreach=False)
        self._plans: dict[int, tuple[tuple[int, ...], Any]] = {}
        """Plans by index of the launch in a step, each with the addresses that it was made for."""
        self._prepared: tuple[Any, list[_Launch]] | None = None
        """The gradients of the next step, and its launches."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the gradients of the weights that have one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [
            [None if weight.grad is None else weight.grad.contiguous() for weight in group["params"]]
            for group in self.param_groups
        ]
        self.step_from(gradients, 1.0, [[None] * len(each) for each in gradients])
        return loss

    def prepare(
        self, gradients: Sequence[Sequence[Tensor | None]], copies: Sequence[Sequence[Tensor | None]]
    ) -> None:
        """Find what a step reads."""
        # The first step makes its moments itself: memory that is missing then is the optimizer's.
        self._prepared = (gradients, self._find(gradients, copies)) if self.state else None

    @torch.no_grad()
    def step_from(
        self,
        gradients: Sequence[Sequence[Tensor | None]],
        scale: float,
        copies: Sequence[Sequence[Tensor | None]],
    ) -> None:
        """Take a step with these gradients."""
        from anygauge_cuda.triton import adamw as kernel

        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] is not gradients:
            prepared = gradients, self._find(gradients, copies)
        for each in prepared[1]:
            rates = self._rates(self.param_groups[each.group], each.step, scale)
            kernel.launch(each.plan, rates, copies=each.has_copies, remainders=each.has_remainders)
        if counts := [count for each in prepared[1] for count in each.counts]:
            torch._foreach_add_(counts, 1)

    def _find(
        self, gradients: Sequence[Sequence[Tensor | None]], copies: Sequence[Sequence[Tensor | None]]
    ) -> list[_Launch]:
        """Return the launches of a step, of weights with the same rates and the same types each."""
        launches: defaultdict[tuple[int, float, bool, bool], list[Any]] = defaultdict(list)
        for number, group in enumerate(self.param_groups):
            for weight, gradient, copy in zip(
                group["params"], gradients[number], copies[number], strict=True
            ):
                is_remainder = weight.dtype is torch.int16
                if copy is None and is_remainder:
                    raise ValueError("A remainder came without its copy: call step_from with it.")
                if gradient is None or not weight.numel():
                    continue
                state = self.state[weight] or self._begin(weight)
                update = weight, gradient, state["exp_avg"], state["exp_avg_sq"], copy
                kind = number, state["step"].item() + 1, copy is not None, is_remainder
                launches[kind].append((update, state["step"]))
        planned = []
        for place, (kind, of_kind) in enumerate(launches.items()):
            updates, counts = zip(*of_kind, strict=True)
            planned.append(_Launch(*kind, self._plan(place, updates), counts))
        return planned

    def _begin(self, weight: Tensor) -> Any:
        """Return the state before the first step."""
        state = self.state[weight]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        return state

    def _rates(self, group: Mapping[str, Any], step: float, scale: float) -> Any:
        from anygauge_cuda.triton.adamw import Rates

        (beta1, beta2), lr = group["betas"], float(group["lr"])
        return Rates(
            fresh1=1 - beta1,
            beta2=beta2,
            fresh2=1 - beta2,
            eps=group["eps"],
            decay=1 - lr * group["weight_decay"],
            rate=lr / (1 - beta1**step),
            root=(1 - beta2**step) ** 0.5,
            scale=scale,
        )

    def _plan(self, place: int, updates: Sequence[Sequence[Tensor | None]]) -> Any:
        """Return the plan of a launch: that of the step before, unless a tensor has moved."""
        from anygauge_cuda.triton import adamw as kernel

        addresses = tuple(0 if each is None else each.data_ptr() for update in updates for each in update)
        known = self._plans.get(place)
        if known is None or known[0] != addresses:
            known = self._plans[place] = addresses, kernel.plan(updates, addresses)
        return known[1]
