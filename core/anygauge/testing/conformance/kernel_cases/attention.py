"""Cases of attention over packed sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from anygauge.testing.conformance.kernel_cases.case import CHUNKS, RAGGED, Case, normal

__all__ = ["CASES", "attention_case", "attention_of", "with_lse", "with_sinks"]


def attention_case(
    name: str,
    lengths: Sequence[int],
    heads: int = 4,
    key_heads: int = 2,
    width: int = 32,
    *,
    causal: bool,
    scale: float = 0.3,
    key_lengths: Sequence[int] | None = None,
    value_width: int | None = None,
    window: int | None = None,
) -> Case:
    """Return a case whose queries are the last tokens of each sequence, where there are more keys."""
    tokens, keys = sum(lengths), sum(lengths if key_lengths is None else key_lengths)
    values = value_width or width
    given = {"key_lengths": None if key_lengths is None else tuple(key_lengths), "window": window}
    options = {option: value for option, value in given.items() if value is not None}
    has = {"return_lse": False, "has_window": window is not None, "has_sinks": False}
    return Case(
        op="varlen_attention",
        name=f"{name}-{'causal' if causal else 'full'}",
        tensors=lambda: (
            normal(tokens, heads, width),
            normal(keys, key_heads, width),
            normal(keys, key_heads, values),
        ),
        differentiable=3,
        arguments=(tuple(lengths), scale),
        options={"causal": causal, **options},
        facts={"head_dim": width, "value_dim": values, "causal": causal, **has},
    )


def with_sinks(case: Case) -> Case:
    """Return a case of attention with sinks: some take much of a head's weight, and others nearly none."""

    def tensors() -> tuple[Tensor, ...]:
        q, k, v = case.tensors()
        return q, k, v, 2 * normal(q.shape[1])

    return replace(
        case,
        name=f"{case.name}-sinks",
        tensors=tensors,
        differentiable=4,
        keyword="sinks",
        facts={**case.facts, "has_sinks": True},
    )


def with_lse(case: Case) -> Case:
    """Return a case of attention that asks for the log-sum-exp too."""
    return replace(
        case,
        name=f"{case.name}-lse",
        options={**case.options, "return_lse": True},
        facts={**case.facts, "return_lse": True},
        wide_outputs=(1,),
        exact_outputs=(1,),
    )


def attention_of(facts: Mapping[str, Any]) -> Case | None:
    """Return a case with these facts; windows are of causal attention alone."""
    width, causal = facts["head_dim"], facts["causal"]
    options = {"scale": 0.7 * width**-0.5, "value_width": facts["value_dim"]}
    if facts["has_window"] and not causal:
        return None
    options["window"] = 4 if facts["has_window"] else None
    case = attention_case("facts", (5, 0, 18), 4, 2, width, causal=causal, key_lengths=(9, 2, 18), **options)
    case = with_sinks(case) if facts["has_sinks"] else case
    return with_lse(case) if facts["return_lse"] else case


def peaked() -> Case:
    """Return a case whose scores overflow without a maximum that is taken off first.

    They are 96 and more: float32 rounds them by as much as its tolerance allows.
    """

    def tensors() -> tuple[Tensor, ...]:
        q, k = normal(sum(RAGGED), 4, 16), normal(sum(RAGGED), 2, 16)
        q[..., 0], k[..., 0] = 64.0, 2.0
        return q, k, normal(sum(RAGGED), 2, 16)

    case = attention_case("peaked", RAGGED, 4, 2, 16, causal=True, scale=0.75)
    return replace(case, tensors=tensors, in_one_dtype=True)


PREFIX, PREFIX_KEYS = (3, 3, 1, 0, 5, 5), (3, 9, 4, 0, 5, 10)

CASES = [
    attention_case("ragged", RAGGED, causal=True),
    attention_case("ragged", RAGGED, causal=False, scale=0.1),
    with_lse(attention_case("ragged", RAGGED, causal=True, scale=0.05)),
    with_lse(attention_case("ragged", RAGGED, causal=False)),
    *(
        attention_case(name, lengths, causal=causal)
        for causal in (True, False)
        for name, lengths in {"none": (), "empty": (0, 0), "one": (1,), "ones": (1, 1, 1)}.items()
    ),
    with_lse(attention_case("empty", (0, 0), causal=True)),
    with_lse(attention_case("one", (1,), causal=False)),
    attention_case("equal", (6,) * 5, causal=True, scale=0.4),
    attention_case("equal", (6,) * 5, causal=False, scale=0.02),
    with_lse(attention_case("long", (150, 3, 200), causal=True)),
    attention_case("long", (150, 3, 200), causal=False),
    attention_case("chunks", CHUNKS, 2, 1, 16, causal=True),
    with_lse(attention_case("chunks", CHUNKS, 2, 1, 16, causal=False)),
    replace(attention_case("usual", (1100, 700), 2, 1, 16, causal=True, scale=0.2), in_one_dtype=True),
    # a length that is round enough for kernels that take such sequences for a batch
    with_lse(attention_case("batch", (512, 512), 2, 1, 16, causal=True)),
    attention_case("prefix", PREFIX, key_lengths=PREFIX_KEYS, causal=True),
    attention_case("prefix", PREFIX, key_lengths=PREFIX_KEYS, causal=False),
    with_lse(attention_case("prefix", PREFIX, key_lengths=PREFIX_KEYS, causal=True, scale=0.6)),
    attention_case("prefix-unasked", (2, 0, 4), key_lengths=(2, 7, 4), causal=True),
    attention_case("prefix-unasked", (2, 0, 4), key_lengths=(2, 7, 4), causal=False),
    attention_case("prefix-long", (70, 10, 70), key_lengths=(70, 130, 210), causal=True),
    attention_case("far-keys", (3, 9), 4, 2, 16, key_lengths=(5000, 4100), causal=True),
    with_lse(attention_case("fewer-keys", (3, 9, 1, 0, 5), key_lengths=(1, 4, 7, 2, 5), causal=False)),
    with_lse(attention_case("few-keys-long", (200, 9), key_lengths=(130, 3), causal=False)),
    attention_case("narrow-values", RAGGED, causal=True, value_width=24),
    with_lse(attention_case("wide-values", RAGGED, causal=False, value_width=48)),
    attention_case("multi-head", RAGGED, 3, 3, 16, causal=True),
    attention_case("multi-query", RAGGED, 6, 1, 64, causal=True, scale=0.2),
    attention_case("many-heads", (9, 4), 40, 8, 8, causal=True, scale=0.5),
    peaked(),
    attention_case("window", RAGGED, causal=True, window=4),
    attention_case("window-one", RAGGED, causal=True, window=1),
    attention_case("window-wide", RAGGED, causal=True, window=33),
    with_lse(attention_case("window-equal", (6,) * 5, causal=True, window=5, scale=0.4)),
    attention_case("window-prefix", PREFIX, key_lengths=PREFIX_KEYS, causal=True, window=3),
    attention_case("window-long", (150, 3, 200), causal=True, window=64),
    attention_case("window-batch", (512, 512), 2, 1, 16, causal=True, window=100),
    with_sinks(attention_case("ragged", RAGGED, causal=True)),
    with_sinks(attention_case("ragged", RAGGED, causal=False, scale=0.1)),
    with_lse(with_sinks(attention_case("prefix", PREFIX, key_lengths=PREFIX_KEYS, causal=True))),
    with_sinks(attention_case("none", (), causal=True)),
    with_sinks(attention_case("narrow-values", RAGGED, causal=True, value_width=24)),
    with_sinks(attention_case("window", (70, 0, 9), 8, 1, 64, causal=True, window=8, scale=0.125)),
    with_lse(with_sinks(attention_case("window-long", (150, 3, 200), causal=True, window=130))),
    with_sinks(attention_case("batch", (512, 512), 2, 1, 16, causal=True, window=128)),
    *(
        attention_case(
            f"heads-{width}-{values}",
            (70, 0, 9),
            key_lengths=(70, 30, 40),
            width=width,
            value_width=values,
            causal=causal,
            scale=1.5 * width**-0.5,
        )
        for width, values, causal in (
            (40, 40, True),
            (80, 80, False),
            (96, 64, True),
            (128, 128, True),
            (192, 128, True),
            (192, 128, False),
            (256, 256, False),
            (576, 512, True),
        )
    ),
    replace(
        attention_case("many-keys", (3, 9), 4, 4, 32, key_lengths=(5000, 4100), causal=False),
        in_one_dtype=True,
    ),
    replace(
        with_lse(attention_case("many-queries", (4200, 9), 8, 2, 32, key_lengths=(5, 3), causal=False)),
        in_one_dtype=True,
    ),
    replace(
        attention_case("many-sequences", (1, 2, 0) * 100, 2, 1, 8, causal=True, scale=0.9), in_one_dtype=True
    ),
]
