"""Attention inputs that one operator call does not take are split into several calls with the same result."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from anygauge.kernels import reference
from anygauge.testing.conformance.kernel_cases import CASES, Case
from anygauge.testing.conformance.kernel_checks import call
from anygauge_npu import attention
from contract import read
from contract.standin import declared
from simulation.operators import OPERATORS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch-npu itself declares the operators here"
)

SEQUENCES, TOKENS = 3, 220
OP = "npu_fusion_attention"
Calls = list[tuple[int, int, int]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink what a call takes."""
    monkeypatch.setattr(attention, "SEQUENCES", SEQUENCES)
    monkeypatch.setattr(attention, "TOKENS", TOKENS)


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Return the sequences, queries and keys of each call."""
    made: Calls = []

    def run(name: str) -> Callable[..., Any]:
        def attend(*given: Any, **options: Any) -> Any:
            call = inspect.signature(OPERATORS[name]).bind(*given, **options).arguments
            made.append((len(call["actual_seq_qlen"]), len(call["query"]), len(call["key"])))
            return OPERATORS[name](*given, **options)

        return attend

    with declared({OP: read.contracts()["2.13.0"]["operators"][OP]}, run):
        yield made


def longest(case: Case) -> int:
    """Return the most queries or keys of a sequence."""
    return max((*case.arguments[0], *case.options.get("key_lengths", ())), default=0)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.op == "varlen_attention" and longest(case) <= TOKENS],
    ids=str,
)
def test_several_calls_are_one_attention(small: None, calls: Calls, case: Case) -> None:
    torch.manual_seed(0)
    tensors = [x.float() for x in case.tensors()]
    found = call(attention.varlen_attention, case, tensors)
    expected = call(reference.varlen_attention, case, tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    (lengths, _), keys = case.arguments, case.options.get("key_lengths")
    asked = [pair for pair in zip(lengths, keys or lengths, strict=True) if pair[0]]
    assert sum(count for count, _, _ in calls) == len(asked)
    assert all(count <= SEQUENCES and max(sizes) <= TOKENS for count, *sizes in calls)


@pytest.mark.parametrize(
    ("lengths", "key_lengths", "count"),
    [
        ((1,) * SEQUENCES, (1,) * SEQUENCES, 1),
        ((1,) * (SEQUENCES + 1), (1,) * (SEQUENCES + 1), 2),
        ((TOKENS // 2,) * 2, (TOKENS // 2,) * 2, 1),
        ((1, 1), (TOKENS // 2, TOKENS // 2 + 1), 2),
        ((TOKENS, TOKENS), (1, 1), 2),
        ((1, TOKENS), (1, 1), 2),
    ],
)
def test_calls_are_as_few_as_the_limits_allow(
    small: None, calls: Calls, lengths: Sequence[int], key_lengths: Sequence[int], count: int
) -> None:
    q, k = torch.ones(sum(lengths), 1, 4), torch.ones(sum(key_lengths), 1, 4)
    attention.varlen_attention(q, k, k, lengths, 0.5, causal=False, key_lengths=key_lengths)
    assert len(calls) == count


def test_a_call_has_no_more_sequences_than_documented(calls: Calls) -> None:
    lengths = (1,) * 1025
    q = torch.ones(len(lengths), 1, 4)
    attention.varlen_attention(q, q, q, lengths, 0.5, causal=True)
    assert [count for count, _, _ in calls] == [1024, 1]
