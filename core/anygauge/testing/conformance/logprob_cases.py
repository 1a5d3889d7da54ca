"""Cases of the log-probability ops over a vocabulary that is divided among the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anygauge.kernels.table import reference_kernel, resolve_kernels
from anygauge.testing.conformance.ranks import Case, Group, Rank
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_hooks.kernels import KernelImpl, KernelOp

__all__ = ["CASES"]

TOKENS, WIDTH, PART = 19, 16, 37
"""Tokens, width of the hidden states, and rows of the vocabulary on each rank."""
PADDING = 5
"""Rows at the end that are no tokens."""
TEMPERATURE = 0.7
BEFORE = 3.0
"""Each number of a main gradient before the call."""


@dataclass(frozen=True)
class Inputs:
    """Whole tensors in float64, on the host, the same on every rank of a group."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    cotangents: Sequence[Tensor]

    @property
    def logits(self) -> Tensor:
        """Return the logits of the whole vocabulary."""
        return self.hidden @ self.weight.t()


def inputs_of(group: Group, dtype: str, targets: int) -> Inputs:
    """Return numbers that differ by group, rounded to a dtype, and targets on each rank and on its edges.

    :param targets: For each token; 0 for one, as a vector.
    """
    generator = torch.Generator().manual_seed(1 + sum(2**member for member in group.members))
    parts, vocab = len(group.members), vocab_of(group)
    edges = [min(edge, vocab - 1) for part in range(parts) for edge in (PART * part, PART * (part + 1) - 1)]
    others = [each for each in torch.randperm(vocab, generator=generator).tolist() if each not in edges]
    ids = torch.tensor([*edges, *others]).repeat(TOKENS)[: TOKENS * max(targets, 1)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype)).double()

    return Inputs(
        normal(TOKENS, WIDTH),
        normal(PART * parts, WIDTH) / 4,
        ids.view(TOKENS, targets) if targets else ids,
        [normal(TOKENS, targets + 1) if targets else normal(TOKENS), normal(TOKENS)],
    )


def vocab_of(group: Group) -> int:
    """Return the number of tokens: some rows at the end are padding."""
    return PART * len(group.members) - PADDING


def gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of leaves; an output without a gradient has no part in them."""
    pairs = [(out, cot.to(out)) for out, cot in zip(outputs, cotangents, strict=True) if out.requires_grad]
    found = torch.autograd.grad([out for out, _ in pairs], leaves, [cotangent for _, cotangent in pairs])
    return [*found]


@dataclass(frozen=True)
class Call:
    """One call of an op, on one rank of a group."""

    op: KernelOp
    entropy_grad: bool
    targets: int = 0
    """For each token; 0 for one, as a vector. Only of ``linear_logprob``, as is the rest."""
    main_grad: bool = False

    def expected(self, inputs: Inputs, group: Group, me: int) -> dict[str, Tensor]:
        """Return outputs and gradients of a rank, from the reference over the whole vocabulary."""
        mine = slice(PART * me, PART * (me + 1))
        fn = partial(reference_kernel(self.op).fn, entropy_grad=self.entropy_grad)
        if self.op == "vocab_parallel_logprob":
            leaves = [inputs.logits.requires_grad_()]
            outputs = fn(leaves[0].clone(), inputs.targets, TEMPERATURE, None)
            (logits,) = gradients(outputs, leaves, inputs.cotangents)
            return {**named(outputs), "the gradient of logits": logits[:, mine]}
        leaves = [inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()]
        outputs = fn(*leaves, inputs.targets, TEMPERATURE, None, **self._options(group))
        hidden, weight = gradients(outputs, leaves, inputs.cotangents)
        total = weight[mine] + BEFORE if self.main_grad else weight[mine]
        return {**named(outputs), "the gradient of hidden": hidden, "the gradient of weight": total}

    def actual(
        self, fn: Callable[..., Any], inputs: Inputs, group: Group, me: int, like: Tensor
    ) -> dict[str, Tensor]:
        """Return what a kernel makes of a rank's part.

        :param like: Has the dtype and the device.
        """
        mine = slice(PART * me, PART * (me + 1))
        targets, fn = inputs.targets.to(like.device), partial(fn, entropy_grad=self.entropy_grad)
        if self.op == "vocab_parallel_logprob":
            leaf = inputs.logits[:, mine].to(like).requires_grad_()
            outputs = fn(leaf.clone(), targets, TEMPERATURE, group.handle)
            (logits,) = gradients(outputs, [leaf], inputs.cotangents)
            return {**named(outputs), "the gradient of logits": logits}
        hidden = inputs.hidden.to(like).requires_grad_()
        weight = torch.nn.Parameter(inputs.weight[mine].to(like))
        if self.main_grad:  # as Megatron's parameters have it
            weight.main_grad = torch.full_like(weight, BEFORE, dtype=torch.float32)  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        outputs = fn(hidden, weight, targets, TEMPERATURE, group.handle, **self._options(group))
        found, own = gradients(outputs, [hidden, weight], inputs.cotangents)
        if self.main_grad and weight.grad_added_to_main_grad:  # type: ignore[attr-defined]
            own = weight.main_grad  # type: ignore[attr-defined]
        return {**named(outputs), "the gradient of hidden": found, "the gradient of weight": own}

    def _options(self, group: Group) -> dict[str, Any]:
        return {"vocab_size": vocab_of(group), "rest": self.targets > 0}


def named(outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Name the outputs of an op."""
    return dict(zip(("log-probabilities", "entropies"), outputs, strict=True))


def check(call: Call, dtype: str, rank: Rank) -> Iterator[str]:
    """Compare every kernel of an op with the float64 reference, in each group."""
    like = torch.empty(0, dtype=getattr(torch, dtype), device=rank.device.torch_device)
    for kernel in resolve_kernels(rank.plugins, rank.backend).candidates(call.op, dtype=dtype):
        for group in rank.groups:
            me = group.members.index(rank.rank)
            inputs = inputs_of(group, dtype, call.targets)
            found = call.actual(kernel.fn, inputs, group, me, like)
            for name, expected in call.expected(inputs, group, me).items():
                yield from unlike(f"{kernel.source}, {group}: {name}", found[name], expected, kernel, dtype)


def unlike(what: str, found: Tensor, expected: Tensor, kernel: KernelImpl, dtype: str) -> Iterator[str]:
    """Complain where a tensor is further from the expected one than the dtype allows."""
    relative, absolute = (kernel.tolerance or TOLERANCES).get(dtype, TOLERANCES[dtype])
    limits = {"rtol": relative, "atol": absolute * expected.abs().max().item()}
    try:
        torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), **limits)
    except AssertionError as error:
        yield f"{what}: {error}"


CALLS = {
    "vocab_parallel_logprob": Call("vocab_parallel_logprob", entropy_grad=False),
    "vocab_parallel_logprob-entropy": Call("vocab_parallel_logprob", entropy_grad=True),
    "linear_logprob": Call("linear_logprob", entropy_grad=False),
    "linear_logprob-main_grad": Call("linear_logprob", entropy_grad=True, main_grad=True),
    "linear_logprob-rest": Call("linear_logprob", entropy_grad=True, targets=3),
}
CASES: Sequence[Case] = [
    Case(f"{name}-{dtype}", partial(check, call, dtype))
    for name, call in CALLS.items()
    for dtype in TOLERANCES
]
