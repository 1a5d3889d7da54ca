"""A call that an operator does not take has our error, and never reaches the operator."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from anygauge_hooks.errors import KernelInputError
from anygauge_npu.attention import varlen_attention
from anygauge_npu.experts import grouped_matmul
from anygauge_npu.norms import layer_norm, rms_norm, swiglu
from anygauge_npu.rotary import rotary_embedding
from anygauge_npu.router import topk_router
from anygauge_npu.tokens import token_permute, token_unpermute
from contract import read as contract
from contract.standin import declared

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch-npu itself declares the operators here"
)


@pytest.fixture(autouse=True)
def nothing_is_reached() -> Iterator[None]:
    """Fail where an operator runs."""

    def run(name: str) -> Callable[..., Any]:
        def reached(*args: object, **kwargs: object) -> None:
            raise AssertionError(f"{name} was called")

        return reached

    with declared(contract.contracts()["2.13.0"]["operators"], run):
        yield


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def attend(
    q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Attend over 5 tokens of 4 heads and 2 key heads of 16, but for what is given."""
    lengths = rest[0] if rest else (3, 2)
    q, k, v = (given if given is not None else ones(5, n, 16) for given, n in ((q, 4), (k, 2), (v, 2)))
    return varlen_attention(q, k, v, lengths, 0.25, **{"causal": True, **options})


def rotate(q: Tensor, k: Tensor, angles: Tensor, other: Tensor | None = None) -> Any:
    return rotary_embedding(q, k, angles, angles if other is None else other)


def multiply(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_matmul(x, weight, counts)


def normalize(x: Tensor) -> Tensor:
    return layer_norm(x, ones(8), ones(8), 1e-6)


def route(logits: Tensor | None = None, topk: int = 2, **options: Any) -> tuple[Tensor, Tensor]:
    given = ones(3, 8) if logits is None else logits
    return topk_router(given, topk, **{"score_function": "softmax", **options})


def permute(
    tokens: Tensor | None = None, probs: Tensor | None = None, chosen: Tensor | None = None, topk: int = 2
) -> Any:
    tokens = ones(3, 8) if tokens is None else tokens
    probs = ones(3, 4, dtype=FLOAT) if probs is None else probs
    return token_permute(
        tokens, probs, torch.ones(3, 4, dtype=torch.bool) if chosen is None else chosen, topk
    )


def collect(permuted: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    permuted = ones(6, 8) if permuted is None else permuted
    return token_unpermute(permuted, torch.arange(6).view(3, 2) if rows is None else rows)


FLOAT = torch.float32
COUNTS = torch.tensor([2, 3])
LONG = (1 << 20) + 1
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "rms_norm float64": (
        lambda: rms_norm(ones(2, 8, dtype=torch.float64), ones(8, dtype=torch.float64), 1e-6),
        r"rms_norm got x in float64\.\n.*takes float32, bfloat16, float16",
    ),
    "rms_norm of integers": (lambda: rms_norm(ones(2, 8, dtype=torch.int32), ones(8), 1e-6), "x in int32"),
    "rms_norm two dtypes": (
        lambda: rms_norm(ones(2, 8), ones(8, dtype=FLOAT), 1e-6),
        r"x in bfloat16 and weight in float32\.\n.*one dtype",
    ),
    "rms_norm narrow weight": (
        lambda: rms_norm(ones(2, 8), ones(4), 1e-6),
        r"weight of shape \[4\]\.\n.*\[8\]",
    ),
    "rms_norm number": (lambda: rms_norm(ones(), ones(8), 1e-6), "x without a dimension"),
    "swiglu float64": (lambda: swiglu(ones(2, 8, dtype=torch.float64)), "gate_up in float64"),
    "swiglu odd": (lambda: swiglu(ones(2, 7)), r"gate_up of shape \[2, 7\]\.\n.*2 F"),
    "swiglu number": (lambda: swiglu(ones()), r"gate_up of shape \[\]"),
    "rotary float64": (
        lambda: rotate(ones(3, 2, 8, dtype=torch.float64), ones(3, 2, 8, dtype=torch.float64), ones(3, 8)),
        "q in float64",
    ),
    "rotary two dtypes": (
        lambda: rotate(ones(3, 2, 8), ones(3, 2, 8, dtype=FLOAT), ones(3, 8)),
        "q in bfloat16 and k in float32",
    ),
    "rotary angles in float64": (
        lambda: rotate(ones(3, 2, 8), ones(3, 2, 8), ones(3, 8, dtype=torch.float64)),
        "cos in float64",
    ),
    "rotary other tokens": (
        lambda: rotate(ones(3, 2, 8), ones(4, 2, 8), ones(3, 8)),
        r"k of shape \[4, 2, 8\]\.\n.*\[T, K, D\]: here \[3, any, 8\]",
    ),
    "rotary layout": (lambda: rotate(ones(1, 3, 2, 8), ones(1, 3, 2, 8), ones(3, 8)), r"q is \[T, H, D\]"),
    "rotary odd": (lambda: rotate(ones(3, 2, 8), ones(3, 2, 8), ones(3, 5)), "5 angles for heads of 8"),
    "rotary wider": (lambda: rotate(ones(3, 2, 8), ones(3, 2, 8), ones(3, 16)), "16 angles for heads of 8"),
    "rotary too wide": (
        lambda: rotate(ones(1, 1, 896), ones(1, 1, 896), ones(1, 896)),
        r"a number of angles of 896\.\n.*takes 2 to 895",
    ),
    "rotary too many heads": (
        lambda: rotate(ones(1, 1000, 2), ones(1, 1, 2), ones(1, 2)),
        "a number of query heads of 1000",
    ),
    "rotary sines": (lambda: rotate(ones(3, 2, 8), ones(3, 2, 8), ones(3, 8), ones(3, 4)), r"sin of shape"),
    "rotary angles with a gradient": (
        lambda: rotate(ones(3, 2, 8), ones(3, 2, 8), ones(3, 8).requires_grad_()),
        "angles that want a gradient",
    ),
    "attention float64": (lambda: attend(ones(5, 4, 16, dtype=torch.float64)), "q in float64"),
    "attention two dtypes": (lambda: attend(ones(5, 4, 16, dtype=FLOAT)), "q in float32 and k in bfloat16"),
    "attention layout": (lambda: attend(ones(1, 4, 5, 16)), r"q of shape \[1, 4, 5, 16\]\.\n.*\[T, H, D\]"),
    "attention head sizes": (lambda: attend(ones(5, 4, 32)), r"k of shape \[5, 2, 16\].\n.*\[any, any, 32\]"),
    "attention too wide": (
        lambda: attend(ones(5, 4, 769), ones(5, 2, 769), ones(5, 2, 769)),
        r"a head size of 769\.\n.*takes 1 to 768",
    ),
    "attention values too wide": (lambda: attend(v=ones(5, 2, 769)), "a value size of 769"),
    "attention no width": (lambda: attend(ones(5, 4, 0), ones(5, 2, 0)), "a head size of 0"),
    "attention too many heads": (
        lambda: attend(ones(5, 257, 16), ones(5, 1, 16), ones(5, 1, 16)),
        "a number of heads of 257",
    ),
    "attention uneven heads": (lambda: attend(ones(5, 3, 16)), "3 query heads and 2 key heads"),
    "attention no key heads": (
        lambda: attend(None, ones(5, 0, 16), ones(5, 0, 16)),
        "4 query heads and 0 key heads",
    ),
    "attention other values": (lambda: attend(v=ones(5, 4, 16)), r"v of shape \[5, 4, 16\]"),
    "attention within no token": (lambda: attend(window=0), "a window of 0 tokens"),
    "attention within a window, not causal": (
        lambda: attend(window=3, causal=False),
        "a window without a causal mask",
    ),
    "attention sinks of key heads": (lambda: attend(sinks=ones(2)), r"sinks of shape \[2\]\.\n.*\[H\]"),
    "attention sinks in another dtype": (
        lambda: attend(sinks=ones(4, dtype=FLOAT)),
        "q in bfloat16 and sinks in float32",
    ),
    "lengths too few": (lambda: attend(None, None, None, (3,)), "lengths that sum to 3; q has 5 tokens"),
    "lengths with a 0 in front, cumulative": (
        lambda: attend(None, None, None, (0, 3, 5)),
        "lengths that sum to 8; q has 5 tokens",
    ),
    "lengths negative": (lambda: attend(None, None, None, (6, -1)), r"lengths \[6, -1\]\.\n.*at least 0"),
    "lengths of floats": (lambda: attend(None, None, None, (3.0, 2.0)), r"lengths \[3\.0, 2\.0\]"),
    "lengths of truths": (lambda: attend(None, None, None, (True, 4)), r"lengths \[True, 4\]"),
    "lengths as a tensor": (
        lambda: attend(None, None, None, COUNTS),
        r"lengths as a tensor\.\n.*host integers",
    ),
    "lengths of nothing": (lambda: attend(None, None, None, None), r"lengths None\.\n.*one length per seq"),
    "queries as a list": (lambda: attend(cast("Tensor", [[1.0]])), r"q of type list\.\n.*Pass a tensor"),
    "experts counts as a list": (
        lambda: multiply(ones(4, 4), ones(3, 3, 4), cast("Tensor", [1, 1, 2])),
        r"tokens_per_expert of type list\.\n.*Pass a tensor",
    ),
    "key lengths too few": (
        lambda: attend(key_lengths=(3, 3)),
        "key_lengths that sum to 6; k has 5 tokens",
    ),
    "fewer keys than queries": (
        lambda: attend(key_lengths=(2, 3)),
        r"a sequence of 3 queries and 2 keys\.\n.*last tokens",
    ),
    "queries without a key": (
        lambda: attend(causal=False, key_lengths=(0, 5)),
        r"a sequence of 3 queries and 0 keys\.\n.*have a key",
    ),
    "key lengths of other sequences": (lambda: attend(key_lengths=(5,)), "2 lengths and 1 key_lengths"),
    "a long sequence of queries": (
        lambda: attend(
            ones(LONG, 1, 1), ones(1, 1, 1), ones(1, 1, 1), (LONG,), causal=False, key_lengths=(1,)
        ),
        r"a sequence of 1048577\.\n.*takes 0 to 1048576",
    ),
    "a long sequence of keys": (
        lambda: attend(
            ones(1, 1, 1), ones(LONG, 1, 1), ones(LONG, 1, 1), (1,), causal=False, key_lengths=(LONG,)
        ),
        r"a sequence of 1048577\.\n.*takes 0 to 1048576",
    ),
    "experts float64": (
        lambda: multiply(ones(5, 4, dtype=torch.float64), ones(2, 3, 4, dtype=torch.float64), COUNTS),
        "x in float64",
    ),
    "experts two dtypes": (
        lambda: multiply(ones(5, 4), ones(2, 3, 4, dtype=FLOAT), COUNTS),
        "x in bfloat16 and weight in float32",
    ),
    "experts transposed": (
        lambda: multiply(ones(5, 4), ones(2, 4, 3), COUNTS),
        r"weight of shape \[2, 4, 3\]\.\n.*\[E, N, K\]: here \[any, any, 4\]",
    ),
    "experts batch": (lambda: multiply(ones(1, 5, 4), ones(2, 3, 4), COUNTS), r"x of shape \[1, 5, 4\]"),
    "experts none": (lambda: multiply(ones(0, 4), ones(0, 3, 4), COUNTS[:0]), "a number of experts of 0"),
    "experts too many": (
        lambda: multiply(ones(5, 4), ones(1025, 3, 4), torch.ones(1025, dtype=torch.int64)),
        r"a number of experts of 1025\.\n.*takes 1 to 1024",
    ),
    "experts too wide": (
        lambda: multiply(ones(1, 65536), ones(1, 1, 65536), COUNTS[:1]),
        r"K of 65536\.\n.*takes 1 to 65535",
    ),
    "experts other counts": (
        lambda: multiply(ones(5, 4), ones(3, 3, 4), COUNTS),
        "tokens_per_expert of shape",
    ),
    "experts int32": (
        lambda: multiply(ones(5, 4), ones(2, 3, 4), COUNTS.int()),
        "tokens_per_expert in int32",
    ),
    "experts too few tokens": (
        lambda: multiply(ones(6, 4), ones(2, 3, 4), COUNTS),
        r"tokens_per_expert \[2, 3\]; x has 6 tokens",
    ),
    "experts negative": (
        lambda: multiply(ones(5, 4), ones(2, 3, 4), torch.tensor([6, -1], device="cpu")),
        r"tokens_per_expert \[6, -1\]",
    ),
    "layer_norm float64": (lambda: normalize(ones(2, 8, dtype=torch.float64)), "x in float64"),
    "layer_norm two dtypes": (lambda: normalize(ones(2, 8, dtype=FLOAT)), "x in float32 and weight"),
    "layer_norm wide": (lambda: normalize(ones(2, 16)), r"weight of shape \[8\]\.\n.*\[16\]"),
    "router float64": (lambda: route(ones(3, 8, dtype=torch.float64)), "logits in float64"),
    "router layout": (lambda: route(ones(3, 1, 8)), r"logits of shape \[3, 1, 8\]\.\n.*\[T, E\]"),
    "router no expert": (lambda: route(topk=0), r"a topk of 0\.\n.*takes 1 to 8"),
    "router more than all": (lambda: route(topk=9), r"a topk of 9\.\n.*takes 1 to 8"),
    "router groups": (lambda: route(num_groups=2, group_topk=1), r"groups of experts\.\n.*num_groups"),
    "router function": (lambda: route(score_function="relu"), "score_function 'relu'"),
    "router bias of softmax": (lambda: route(expert_bias=ones(8, dtype=FLOAT)), "expert_bias with softmax"),
    "router bias of others": (
        lambda: route(score_function="sigmoid", expert_bias=ones(4, dtype=FLOAT)),
        r"expert_bias of shape \[4\]",
    ),
    "router bias bfloat16": (
        lambda: route(score_function="sigmoid", expert_bias=ones(8)),
        "expert_bias in bfloat16",
    ),
    "router one sigmoid": (
        lambda: route(score_function="sigmoid", topk=1),
        r"a topk of 1\.\n.*takes 2 to 8",
    ),
    "router too many": (
        lambda: route(ones(1, 2049), score_function="sigmoid"),
        r"a number of experts of 2049\.\n.*takes 3 to 2048",
    ),
    "permute float64": (lambda: permute(ones(3, 8, dtype=torch.float64)), "tokens in float64"),
    "permute probabilities": (
        lambda: permute(ones(3, 8, dtype=torch.float16)),
        r"tokens in float16 and probs in float32\.\n.*one dtype",
    ),
    "permute map": (lambda: permute(chosen=ones(3, 4)), "routing_map in bfloat16"),
    "permute other tokens": (lambda: permute(ones(2, 8)), r"routing_map of shape \[3, 4\]\.\n.*\[2, any\]"),
    "permute layout": (lambda: permute(ones(3, 1, 8)), r"tokens of shape \[3, 1, 8\]"),
    "permute other experts": (lambda: permute(probs=ones(3, 5, dtype=FLOAT)), r"probs of shape \[3, 5\]"),
    "permute more than all": (lambda: permute(topk=5), r"a topk of 5\.\n.*takes 1 to 4"),
    "unpermute float64": (lambda: collect(ones(6, 8, dtype=torch.float64)), "permuted in float64"),
    "unpermute other rows": (lambda: collect(ones(5, 8)), r"permuted of shape \[5, 8\]\.\n.*\[6, any\]"),
    "unpermute rows": (lambda: collect(rows=torch.arange(6)), r"rows of shape \[6\]\.\n.*\[T, K\]"),
    "unpermute floats": (lambda: collect(rows=ones(3, 2)), "rows in bfloat16"),
    "unpermute too many": (
        lambda: collect(ones(513, 8), torch.arange(513).view(1, 513)),
        r"a topk of 513\.\n.*takes 1 to 512",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_the_operator_does_not_take_has_our_error(name: str) -> None:
    call, text = BAD[name]
    with pytest.raises(KernelInputError, match=rf"(?s){text}.*\[AG608\]"):
        call()


def test_a_call_that_is_right_reaches_the_operator() -> None:
    for call in (
        attend,
        lambda: rms_norm(ones(2, 8), ones(8), 1e-6),
        lambda: swiglu(ones(2, 8)),
        lambda: rotate(ones(3, 2, 8), ones(3, 2, 8), ones(3, 8)),
        lambda: multiply(ones(5, 4), ones(2, 3, 4), COUNTS),
        route,
        lambda: route(score_function="sigmoid"),
        permute,
        collect,
        lambda: collect(ones(512, 8), torch.arange(512).view(1, 512)),
    ):
        with pytest.raises(AssertionError, match=r"npu_.* was called"):
            call()
