"""Every kernel agrees with the float64 reference, forward and backward, in every dtype that it declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.kernels.table import KernelTable, reference_kernel
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_hooks.kernels import KERNEL_FACTS, KERNEL_OPS, KernelImpl, KernelOp, Tolerance
from anygauge_hooks.types import Device

pytestmark = pytest.mark.conformance


@dataclass(frozen=True, eq=False)
class Case:
    """One call of an op. Tensors are made on the host in float64."""

    op: KernelOp
    name: str
    tensors: Callable[[], tuple[Tensor, ...]]
    differentiable: int
    """How many of the tensors, from the first, get a gradient; these take the dtype under test."""
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    wide: tuple[int, ...] = ()
    """Which tensors are float32 whatever the dtype under test."""
    wide_outputs: tuple[int, ...] = ()
    """The same of the outputs."""
    keyword: str | None = None
    """The name of the last tensor, where the op takes that by keyword."""
    settle: Callable[..., tuple[Tensor, ...]] = lambda *outputs: outputs
    """Makes outputs that the op leaves some freedom comparable."""

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


@dataclass(frozen=True)
class Result:
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def padded(x: Tensor) -> Tensor:
    """Return the same values as a slice of wider rows, as a part of a fused projection is."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def transposed(x: Tensor) -> Tensor:
    """Return the same values with the strides of the first and the last dimension exchanged."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


VANISHING = 1e-12
"""Part of another tensor's values below which float64 has nothing but its rounding."""

LAYOUTS = {"contiguous": contiguous, "padded": padded, "transposed": transposed}


# -------------------------------------------------------------------------
# Cases
# -------------------------------------------------------------------------


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def rms_norm_case(*shape: int, magnitude: float = 1.0) -> Case:
    return Case(
        "rms_norm",
        f"{'x'.join(map(str, shape))}-{magnitude:g}",
        lambda: (magnitude * normal(*shape), normal(shape[-1])),
        2,
        (1e-6,),
    )


def add_norm_case(*shape: int, adds: bool = True) -> Case:
    """Return a case that adds a residual, or that has the norm alone beside what it is of."""

    def tensors() -> tuple[Tensor, ...]:
        return (normal(*shape), normal(shape[-1]), *((normal(*shape),) if adds else ()))

    name = f"{'x'.join(map(str, shape))}-{'sum' if adds else 'alone'}"
    keyword = "residual" if adds else None
    return Case("add_rms_norm", name, tensors, 2 + adds, (1e-6,), keyword=keyword)


def layer_norm_case(*shape: int, magnitude: float = 1.0, shift: float = 0.0) -> Case:
    return Case(
        "layer_norm",
        f"{'x'.join(map(str, shape))}-{magnitude:g}-{shift:g}",
        lambda: (magnitude * normal(*shape) + shift, normal(shape[-1]), normal(shape[-1])),
        3,
        (1e-6,),
    )


def rotary_case(
    tokens: int, heads: int, key_heads: int, width: int, rotary: int, magnitude: float = 1.0
) -> Case:
    """Return a case whose cosines and sines are multiplied as YaRN does."""

    def tensors() -> tuple[Tensor, ...]:
        angles = 6 * torch.rand(tokens, rotary, dtype=torch.float64)
        cos, sin = magnitude * angles.cos(), magnitude * angles.sin()
        return normal(tokens, heads, width), normal(tokens, key_heads, width), cos, sin

    name = f"{tokens}-{heads}-{key_heads}-{width}-{rotary}" + (f"-{magnitude:g}" if magnitude != 1 else "")
    facts = {"head_dim": width, "unit_angles": magnitude <= 1}
    return Case("rotary_embedding", name, tensors, 2, facts=facts)


def qkv_case(tokens: int, groups: int, group: int, width: int, rotary: int) -> Case:
    def tensors() -> tuple[Tensor, ...]:
        angles = 6 * torch.rand(tokens, rotary, dtype=torch.float64)
        qkv = normal(tokens, groups, group + 2, width)
        return qkv, normal(width), normal(width), angles.cos(), angles.sin()

    name = f"{tokens}-{groups}-{group}-{width}-{rotary}"
    facts = {"head_dim": width, "unit_angles": True}
    return Case("qk_norm_rotary", name, tensors, 3, (1e-6,), facts=facts)


def swiglu_case(*shape: int) -> Case:
    return Case("swiglu", "x".join(map(str, shape)), lambda: (2 * normal(*shape),), 1)


def attention_case(
    name: str, lengths: Sequence[int], heads: int = 4, key_heads: int = 2, width: int = 32, *, causal: bool
) -> Case:
    tokens = sum(lengths)
    return Case(
        "varlen_attention",
        f"{name}-{'causal' if causal else 'full'}",
        lambda: (
            normal(tokens, heads, width),
            normal(tokens, key_heads, width),
            normal(tokens, key_heads, width),
        ),
        3,
        (tuple(lengths), width**-0.5),
        {"causal": causal},
        {"head_dim": width, "value_dim": width, "causal": causal, "return_lse": False},
    )


def grouped_case(name: str, tokens: Sequence[int], inner: int, outer: int) -> Case:
    """Return a case of experts that have so many tokens each."""
    return Case(
        "grouped_matmul",
        name,
        lambda: (normal(sum(tokens), inner), normal(len(tokens), outer, inner), torch.tensor(tokens)),
        2,
    )


def convolution_case(name: str, lengths: Sequence[int], channels: int = 24, width: int = 4) -> Case:
    return Case(
        "causal_conv1d",
        name,
        lambda: (normal(sum(lengths), channels), normal(channels, width)),
        2,
        arguments=(tuple(lengths),),
        facts={"width": width},
    )


def delta_case(
    name: str,
    lengths: Sequence[int],
    heads: int = 3,
    width: int = 16,
    value_width: int = 24,
    decay: float = 1.0,
) -> Case:
    """Return a case whose states are multiplied with ``exp(-decay)`` per token, more or less."""
    tokens = sum(lengths)

    def tensors() -> tuple[Tensor, ...]:
        q, k = (torch.nn.functional.normalize(normal(tokens, heads, width), dim=-1) for _ in range(2))
        g = -2 * decay * torch.rand(tokens, heads, dtype=torch.float64)
        beta = torch.rand(tokens, heads, dtype=torch.float64)
        return q, k, normal(tokens, heads, value_width), g, beta

    facts = {"head_dim": width, "value_dim": value_width}
    arguments = (tuple(lengths), width**-0.5)
    return Case("gated_delta_rule", name, tensors, 5, arguments, facts=facts, wide=(3, 4))


def prefix_case(
    name: str,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    *,
    causal: bool,
    value_width: int = 32,
    width: int = 32,
) -> Case:
    """Return a case whose queries are the last tokens of each sequence, as under context parallelism."""
    heads, key_heads = 4, 2
    tokens, seen = sum(lengths), sum(key_lengths)
    return Case(
        "varlen_attention",
        f"{name}-{'causal' if causal else 'full'}",
        lambda: (
            normal(tokens, heads, width),
            normal(seen, key_heads, width),
            normal(seen, key_heads, value_width),
        ),
        3,
        (tuple(lengths), width**-0.5),
        {"causal": causal, "key_lengths": tuple(key_lengths)},
        {"head_dim": width, "value_dim": value_width, "causal": causal, "return_lse": False},
    )


def with_lse(case: Case) -> Case:
    """Return a case of attention that asks for the log-sum-exp too."""
    return replace(
        case,
        name=f"{case.name}-lse",
        options={**case.options, "return_lse": True},
        facts={**case.facts, "return_lse": True},
        wide_outputs=(1,),
    )


def router_case(
    name: str, tokens: int, experts: int, topk: int, *, biased: bool = False, **options: Any
) -> Case:
    """Return a case in which no choice is close in any dtype."""

    def tensors() -> tuple[Tensor, ...]:
        logits = 2 * normal(50 * tokens + 1, experts).bfloat16().double()
        bias = normal(experts).float().double() if biased else logits.new_zeros(experts)
        is_clear = router_margin(logits, bias, topk, **options) > 1e-3
        clear = logits[is_clear][:tokens]
        assert len(clear) == tokens
        return (clear, bias) if biased else (clear,)

    def settle(weights: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        assert chosen.dtype == torch.int64
        dense = weights.new_zeros(tokens, experts)
        return dense.scatter(1, chosen, weights), torch.zeros_like(dense, dtype=torch.bool).scatter(
            1, chosen, True
        )

    facts: dict[str, Any] = {
        **{"experts": experts, "topk": topk, "has_expert_bias": biased},
        **{"pre_softmax": False, "num_groups": None, "group_topk": None},
        **{name: value for name, value in options.items() if name != "scaling_factor"},
    }
    keyword = "expert_bias" if biased else None
    return Case("topk_router", name, tensors, 1, (topk,), options, facts, keyword=keyword, settle=settle)


def router_margin(
    logits: Tensor,
    bias: Tensor,
    topk: int,
    *,
    score_function: str,
    pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    scaling_factor: float = 1.0,
) -> Tensor:
    """Return by how much, at least, each token's choice of groups and of experts was made: ``[T]``."""

    def gap(x: Tensor, count: int) -> Tensor:
        best = torch.nn.functional.pad(x, (0, 1), value=-torch.inf).sort(1, descending=True).values
        return best[:, count - 1] - best[:, count]

    scores = logits.softmax(1) if pre_softmax else logits
    if score_function == "sigmoid":
        scores = logits.sigmoid() + bias
    grouped = scores.view(len(scores), num_groups, scores.shape[1] // num_groups)
    totals = grouped.topk(topk // group_topk, dim=2).values.sum(2)
    worst = totals.topk(group_topk, dim=1).values[:, -1:]
    allowed = grouped.masked_fill((totals < worst).unsqueeze(2), -torch.inf).flatten(1)
    return torch.minimum(gap(totals, group_topk), gap(allowed, topk))


def routing_map(tokens: int, experts: int, topk: int) -> Tensor:
    chosen = torch.rand(tokens, experts).topk(topk, dim=1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, value=True)


def permute_case(
    tokens: int, experts: int, topk: int, width: int = 16, *, wide: bool = True, unused: int = 0
) -> Case:
    """Return a case in which nobody chooses the first ``unused`` experts."""

    def tensors() -> tuple[Tensor, ...]:
        chosen = torch.nn.functional.pad(routing_map(tokens, experts - unused, topk), (unused, 0))
        return normal(tokens, width), torch.rand(tokens, experts, dtype=torch.float64), chosen

    name = f"{tokens}x{width}-{topk}of{experts}-{unused}-{'wide' if wide else 'narrow'}"
    wide_one = (1,) if wide else ()
    facts = {"experts": experts, "topk": topk}
    return Case(
        "token_permute",
        name,
        tensors,
        2,
        (topk,),
        facts=facts,
        wide=wide_one,
        wide_outputs=wide_one,
        settle=lambda permuted, probs, rows: (permuted, probs, rows.long()),
    )


def unpermute_case(tokens: int, topk: int, width: int = 16, rows: torch.dtype = torch.int64) -> Case:
    def tensors() -> tuple[Tensor, ...]:
        places = torch.randperm(tokens * topk).view(tokens, topk).sort(1).values
        return normal(tokens * topk, width), places.to(rows)

    name = f"{tokens}x{width}-{topk}-{str(rows).removeprefix('torch.')}"
    return Case("token_unpermute", name, tensors, 1, facts={"topk": topk})


def logprob_case(
    tokens: int, vocab: int, temperature: float, *, entropy_grad: bool, masked: int = 0, offset: float = 0.0
) -> Case:
    """Return a case whose last ``masked`` logits are minus infinity."""

    def tensors() -> tuple[Tensor, ...]:
        logits = 3 * normal(tokens, vocab) + offset
        logits[:, vocab - masked :] = -torch.inf
        return logits, torch.randint(vocab - masked, (tokens,))

    name = f"{tokens}x{vocab}-{temperature}-{masked}-{offset:g}-{'grad' if entropy_grad else 'plain'}"
    options = {"entropy_grad": entropy_grad}
    arguments = (temperature, None)
    return Case("vocab_parallel_logprob", name, tensors, 1, arguments, options, wide_outputs=(0, 1))


def linear_logprob_case(
    tokens: int,
    width: int,
    vocab: int,
    temperature: float,
    *,
    entropy_grad: bool,
    count: int = 0,
    padding: int = 0,
    rest: bool = False,
) -> Case:
    """Return a case of ``count`` targets for each token, or a vector for 0, and a weight with padding.

    :param rest: Whether all other tokens are asked for. The targets are then the likeliest.
    """

    def tensors() -> tuple[Tensor, ...]:
        targets = torch.randint(vocab, (tokens, count) if count else (tokens,))
        hidden, weight = normal(tokens, width), normal(vocab + padding, width) / width**0.5
        if rest:
            targets = (hidden @ weight[:vocab].t()).topk(count, dim=1).indices
        return hidden, weight, targets

    name = f"{tokens}x{width}x{vocab}-{temperature}-{count}-{padding}-{'grad' if entropy_grad else 'plain'}"
    options = {"entropy_grad": entropy_grad, "vocab_size": vocab if padding else None}
    if rest:
        name, options = f"{name}-rest", {**options, "rest": True}
    return Case("linear_logprob", name, tensors, 2, (temperature, None), options, wide_outputs=(0, 1))


ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"score_function": "softmax"},
    "pre-softmax": {"score_function": "softmax", "pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "bias": {"score_function": "sigmoid", "biased": True},
    "bias-scaled": {"score_function": "sigmoid", "biased": True, "scaling_factor": 2.5},
    "groups": {"score_function": "softmax", "pre_softmax": True, "num_groups": 4, "group_topk": 2},
    "groups-of-logits": {"score_function": "softmax", "num_groups": 2, "group_topk": 1},
    "groups-bias": {
        **{"score_function": "sigmoid", "biased": True},
        **{"num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
    },
}
RAGGED = (3, 1, 0, 7, 12, 1, 33, 0, 8, 5)
CASES = [
    *(rms_norm_case(*shape) for shape in [(0, 8), (1, 8), (7, 64), (5, 3, 33), (300, 128), (40, 720)]),
    rms_norm_case(16, 64, magnitude=1e-3),  # as large as the root of epsilon
    rms_norm_case(16, 64, magnitude=1e3),
    *(
        add_norm_case(*shape, adds=adds)
        for adds in (True, False)
        for shape in [(0, 8), (1, 8), (5, 3, 33), (40, 720)]
    ),
    *(layer_norm_case(*shape) for shape in [(0, 8), (1, 8), (7, 64), (5, 3, 33), (300, 128)]),
    layer_norm_case(16, 64, magnitude=1e-3),
    layer_norm_case(16, 64, shift=8.0),
    rotary_case(0, 2, 2, 8, 8),
    rotary_case(1, 2, 1, 8, 8),
    rotary_case(19, 4, 2, 32, 32),
    rotary_case(19, 4, 4, 24, 16),
    rotary_case(7, 3, 1, 128, 64),
    rotary_case(19, 4, 2, 32, 32, magnitude=1.35),
    *(
        qkv_case(*sizes)
        for sizes in [
            (0, 1, 1, 8, 8),
            (1, 2, 1, 8, 8),
            (19, 2, 4, 32, 32),
            (19, 3, 2, 24, 16),
            (40, 1, 5, 128, 128),
        ]
    ),
    *(swiglu_case(*shape) for shape in [(0, 4), (1, 2), (7, 66), (2, 5, 128)]),
    *(
        attention_case(name, lengths, causal=causal)
        for causal in (True, False)
        for name, lengths in {
            "none": (),
            "empty": (0, 0),
            "one": (1,),
            "ones": (1, 1, 1),
            "equal": (6,) * 5,
            "ragged": RAGGED,
            "long": (150, 3, 200),
        }.items()
    ),
    *(
        prefix_case(name, lengths, key_lengths, causal=causal)
        for causal in (True, False)
        for name, (lengths, key_lengths) in {
            "prefix": ((3, 3, 1, 0, 5, 5), (3, 9, 4, 0, 5, 10)),
            "prefix-unasked": ((2, 0, 4), (2, 7, 4)),
            "prefix-long": ((70, 10, 70), (70, 130, 210)),
        }.items()
    ),
    *(
        with_lse(attention_case(name, lengths, causal=causal))
        for causal in (True, False)
        for name, lengths in {"empty": (0, 0), "one": (1,), "ragged": RAGGED, "long": (150, 3, 200)}.items()
    ),
    # Of a length that is round enough for a kernel that takes such sequences for a batch.
    with_lse(attention_case("batch", (512, 512), 2, 1, 16, causal=True)),
    with_lse(prefix_case("prefix", (3, 3, 1, 0, 5, 5), (3, 9, 4, 0, 5, 10), causal=True)),
    with_lse(prefix_case("fewer-keys", (3, 9, 1, 0, 5), (1, 4, 7, 2, 5), causal=False)),
    with_lse(prefix_case("few-keys-long", (200, 9), (130, 3), causal=False)),
    with_lse(prefix_case("narrow-values", RAGGED, RAGGED, causal=True, value_width=24)),
    with_lse(prefix_case("wide-values", RAGGED, RAGGED, causal=False, value_width=48)),
    *(
        router_case(f"{name}-{tokens}", tokens, 16, 4, **options)
        for tokens in (0, 1, 60)
        for name, options in ROUTERS.items()
    ),
    router_case("one-of-many", 33, 64, 1, score_function="sigmoid", scaling_factor=1.5),
    router_case("one-of-many", 33, 64, 1, score_function="softmax", pre_softmax=True),
    router_case("all", 9, 8, 8, score_function="softmax"),
    *(permute_case(*sizes) for sizes in [(0, 4, 2), (1, 4, 2), (1, 1, 1), (37, 8, 2), (300, 16, 8)]),
    permute_case(37, 8, 3, wide=False),
    permute_case(37, 8, 2, 33, unused=3),
    *(unpermute_case(*sizes) for sizes in [(0, 2), (1, 1), (1, 4), (37, 2), (300, 8)]),
    unpermute_case(37, 3, rows=torch.int32),
    *(
        grouped_case(name, tokens, 16, 24)
        for name, tokens in {
            "none": (0, 0, 0),
            "one-expert": (7,),
            "one-token": (0, 1, 0),
            "ragged": RAGGED,
            "one-takes-all": (0, 0, 50, 0),
        }.items()
    ),
    grouped_case("odd", (5, 0, 9), 7, 3),
    *(
        make(name, lengths)
        for make in (convolution_case, delta_case)
        for name, lengths in {
            "none": (),
            "empty": (0, 0),
            "one": (1,),
            "ragged": RAGGED,
            "long": (70, 3, 130),
        }.items()
    ),
    convolution_case("wide", RAGGED, 5, 7),
    delta_case("forgets", (70, 5), decay=30.0),
    delta_case("keeps", (64, 65), decay=1e-3),
    delta_case("narrow-values", (5, 0, 17), width=32, value_width=8),
    prefix_case("narrow-values", RAGGED, RAGGED, causal=True, value_width=24),
    prefix_case("wide-values", RAGGED, RAGGED, causal=True, value_width=48),
    *(
        prefix_case(
            f"heads-{width}-{values}",
            (70, 0, 9),
            (70, 30, 40),
            causal=causal,
            value_width=values,
            width=width,
        )
        for causal in (True, False)
        for width, values in ((128, 128), (192, 128), (256, 256))
    ),
    attention_case("multi-head", RAGGED, 3, 3, 16, causal=True),
    attention_case("multi-query", RAGGED, 6, 1, 64, causal=True),
    *(
        logprob_case(tokens, vocab, temperature, entropy_grad=entropy_grad)
        for entropy_grad in (False, True)
        for tokens, vocab, temperature in [(0, 8, 1.0), (1, 8, 1.0), (37, 50, 0.7), (300, 2000, 1.0)]
    ),
    *(
        linear_logprob_case(tokens, width, vocab, temperature, entropy_grad=entropy_grad)
        for entropy_grad in (False, True)
        for tokens, width, vocab, temperature in [(0, 8, 8, 1.0), (1, 8, 8, 1.0), (37, 24, 50, 0.7)]
    ),
    linear_logprob_case(300, 16, 1500, 1.0, entropy_grad=True),
    linear_logprob_case(20, 16, 40, 1.3, entropy_grad=True, count=5, padding=3),
    linear_logprob_case(20, 16, 40, 0.7, entropy_grad=True, count=5, padding=3, rest=True),
    linear_logprob_case(37, 16, 700, 1.0, entropy_grad=False, count=2, rest=True),
    logprob_case(9, 40, 0.5, entropy_grad=False, masked=8),
    logprob_case(9, 40, 0.5, entropy_grad=True, masked=8),
    logprob_case(9, 40, 1.0, entropy_grad=True, offset=60.0),
]


# -------------------------------------------------------------------------
# Tests
# -------------------------------------------------------------------------


def call(fn: Callable[..., Any], case: Case, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    named = {} if case.keyword is None else {case.keyword: tensors[-1]}
    given = tensors[: len(tensors) - len(named)]
    result = fn(*given, *case.arguments, **case.options, **named)
    outputs = result if isinstance(result, tuple) else (result,)
    for index, output in enumerate(outputs):
        if output.is_floating_point() and output.dtype != torch.float64:
            wanted = torch.float32 if index in case.wide_outputs else tensors[0].dtype
            assert output.dtype == wanted, f"output {index} of {case} has dtype {output.dtype}"
    return case.settle(*outputs)


def evaluate(fn: Callable[..., Any], case: Case, tensors: Sequence[Tensor]) -> Result:
    """Return outputs and gradients, on the host in float64, for cotangents that depend on the case alone."""
    inputs = [x.detach() for x in tensors]
    for x in inputs[: case.differentiable]:
        x.requires_grad_()
    outputs = call(fn, case, inputs)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    wanted = [(o, c.to(o)) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    gradients = torch.autograd.grad(
        [out for out, _ in wanted],
        inputs[: case.differentiable],
        [cotangent for _, cotangent in wanted],
    )
    return Result(outputs, gradients)


def expect(case: Case, tensors: Sequence[Tensor]) -> Result:
    """Return what the float64 reference makes of the tensors that the kernel sees, rounded to its dtype."""
    fn = reference_kernel(case.op).fn
    wide = [x.cpu().double() if x.is_floating_point() else x.cpu() for x in tensors]
    return evaluate(fn, case, wide)


@lru_cache(maxsize=1)
def expected_result(case: Case, dtype: str, where: torch.device) -> Result:
    """Evaluate the reference once for all layouts and kernels of a case: the values are the same."""
    return expect(case, _inputs(case, dtype, contiguous, where))


def inputs_of(case: Case, dtype: str, layout: Callable[[Tensor], Tensor], device: Device) -> list[Tensor]:
    return _inputs(case, dtype, layout, device.torch_device)


def _inputs(case: Case, dtype: str, layout: Callable[[Tensor], Tensor], where: torch.device) -> list[Tensor]:
    # the host's alone: torch.manual_seed also keeps the stack of its caller for every kind of device
    torch.default_generator.manual_seed(0)
    made: list[Tensor] = []
    for index, x in enumerate(case.tensors()):
        if index < case.differentiable:
            kind = torch.float32 if index in case.wide else getattr(torch, dtype)
            made.append(layout(x.to(where, kind)))
        else:
            made.append(x.to(where, torch.float32 if x.is_floating_point() else x.dtype))
    return made


def assert_close(
    actual: Tensor, expected: Tensor, tolerance: Tolerance, what: str, beside: float = 0.0
) -> None:
    """Compare a tensor with what it should be.

    :param beside: The largest value of the tensors that came with it. One that vanishes beside them, such as
        the gradient of a query that sees one key, is a difference of their size, and as exact as they are.
    """
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    relative, absolute = tolerance
    actual, expected = (x.detach().cpu().double() for x in (actual, expected))
    largest = _largest(expected)
    largest = beside if largest <= VANISHING * beside else largest
    torch.testing.assert_close(
        actual,
        expected,
        rtol=relative,
        atol=absolute * largest,
        msg=lambda text: f"{what}\n{text}",
    )


def _largest(x: Tensor) -> float:
    return x.double().abs().max().item() if x.numel() else 0.0


def check_kernel(
    kernel: KernelImpl, case: Case, dtype: str, layout: Callable[[Tensor], Tensor], device: Device
) -> None:
    """Compare one implementation with the float64 reference."""
    inputs = inputs_of(case, dtype, layout, device)
    expected = expected_result(case, dtype, device.torch_device)
    before = [x.clone() for x in inputs]
    actual = evaluate(kernel.fn, case, inputs)
    tolerance = (kernel.tolerance or TOLERANCES).get(dtype, TOLERANCES[dtype])
    for kind in ("outputs", "gradients"):
        pairs = zip(getattr(actual, kind), getattr(expected, kind), strict=True)
        beside = max(map(_largest, getattr(expected, kind)), default=0.0)
        for index, (result, wanted) in enumerate(pairs):
            assert_close(result, wanted, tolerance, f"{kernel.source}: {kind[:-1]} {index} of {case}", beside)
    if case.op != "vocab_parallel_logprob":  # logits may be overwritten
        for index, (now, then) in enumerate(zip(inputs, before, strict=True)):
            assert torch.equal(now, then), f"{kernel.source} overwrites argument {index} in {case}"


def test_cases_state_every_fact_of_their_op() -> None:
    """A kernel that limits a fact would else never be tried."""
    assert not [str(case) for case in CASES if set(case.facts) != set(KERNEL_FACTS[case.op])]
    assert {case.op for case in CASES} == set(KERNEL_OPS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference(
    kernels: KernelTable, device: Device, case: Case, dtype: str, layout: str
) -> None:
    served = kernels.candidates(case.op, dtype=dtype, **case.facts)
    for kernel in [*served, reference_kernel(case.op)]:
        check_kernel(kernel, case, dtype, LAYOUTS[layout], device)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", [c for c in CASES if c.op != "vocab_parallel_logprob"], ids=str)
def test_without_a_gradient_the_output_is_the_same(
    kernels: KernelTable, device: Device, case: Case, dtype: str
) -> None:
    inputs = inputs_of(case, dtype, contiguous, device)
    for kernel in kernels.candidates(case.op, dtype=dtype, **case.facts):
        with torch.no_grad():
            silent = call(kernel.fn, case, inputs)
        loud = evaluate(kernel.fn, case, inputs).outputs
        for one, other in zip(silent, loud, strict=True):
            assert torch.equal(one, other)


def cut(x: Tensor, before: Sequence[int], own: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the first part of every packed sequence, and the rest."""
    parts = torch.split(x, [size for pair in zip(before, own, strict=True) for size in pair])
    return torch.cat(parts[::2]), torch.cat(parts[1::2])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_attention_to_parts_of_the_keys_merges_into_the_whole(
    kernels: KernelTable, device: Device, dtype: str
) -> None:
    """The rest of each sequence attends to its first part and to itself, one after the other."""
    before, own, width = (5, 1, 140), (7, 1, 60), 32
    lengths = tuple(map(sum, zip(before, own, strict=True)))
    case = attention_case("whole", lengths, width=width, causal=True)
    q, k, v = inputs_of(case, dtype, contiguous, device)
    _, expected = cut(expect(case, (q, k, v)).outputs[0], before, own)
    (_, queries), (far_keys, near_keys), (far_values, near_values) = (cut(x, before, own) for x in (q, k, v))
    facts = {"head_dim": width, "value_dim": width, "return_lse": True}
    far, near = (
        kernels.resolve("varlen_attention", dtype=dtype, causal=causal, **facts) for causal in (False, True)
    )
    outputs, sums = zip(
        far(
            queries, far_keys, far_values, own, width**-0.5, causal=False, key_lengths=before, return_lse=True
        ),
        near(queries, near_keys, near_values, own, width**-0.5, causal=True, return_lse=True),
        strict=True,
    )
    shares = torch.stack(sums).softmax(0).unsqueeze(-1)
    merged = (torch.stack(outputs).float() * shares).sum(0)
    assert_close(merged, expected, TOLERANCES[dtype], "merged attention")


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprob_may_overwrite_the_output_of_a_projection(
    kernels: KernelTable, device: Device, dtype: str, entropy_grad: bool
) -> None:
    """The projection's own gradients are right although its output was used as scratch space."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((24, 16), (50, 16)))
    hidden, weight = (x.to(getattr(torch, dtype)).double() for x in (hidden, weight))
    targets = torch.randint(50, (24,))

    def gradients(fn: Callable[..., Any], kind: torch.dtype, where: torch.device) -> tuple[Tensor, ...]:
        leaves = [x.to(where, kind).requires_grad_() for x in (hidden, weight)]
        logits = torch.nn.functional.linear(*leaves)
        logprob, entropy = fn(logits, targets.to(where), 0.8, None, entropy_grad=entropy_grad)
        loss = logprob.square().sum() + (entropy.sum() if entropy_grad else 0.0)
        return torch.autograd.grad(loss, leaves)

    expected = gradients(reference_kernel("vocab_parallel_logprob").fn, torch.float64, torch.device("cpu"))
    for kernel in kernels.candidates("vocab_parallel_logprob", dtype=dtype):
        actual = gradients(kernel.fn, getattr(torch, dtype), device.torch_device)
        # the projection itself rounds: twice what a kernel alone may differ
        relative, absolute = TOLERANCES[dtype]
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, (2 * relative, 2 * absolute), kernel.source)
