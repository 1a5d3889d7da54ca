"""Cases of the router, of the permutation of tokens and of the experts' products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anygauge.testing.conformance.kernel_cases.case import MANY, RAGGED, Case, normal

__all__ = ["CASES", "MOST_EXPERTS", "permute_of", "router_of", "unpermute_of"]

MOST_EXPERTS = 2048
"""Experts of which :func:`router_of` has different logits."""

CLEAR = 1e-3
"""Least difference between the last score that is chosen and the next one."""


def grouped_case(name: str, tokens: Sequence[int], inner: int = 16, outer: int = 24) -> Case:
    """Return a case of experts that have so many tokens each."""
    return Case(
        op="grouped_matmul",
        name=name,
        tensors=lambda: (normal(sum(tokens), inner), normal(len(tokens), outer, inner), torch.tensor(tokens)),
        differentiable=2,
    )


# -------------------------------------------------------------------------
# Router
# -------------------------------------------------------------------------


def router_case(
    name: str,
    tokens: int,
    experts: int,
    topk: int,
    *,
    biased: bool = False,
    shift: float = 0.0,
    **options: Any,
) -> Case:
    """Return a case in which no choice is close in any dtype.

    :param shift: Added to the bias, or to the logits where there is none.
    """

    def tensors() -> tuple[Tensor, ...]:
        bias = (normal(experts) + shift).float().double() if biased else torch.zeros(experts).double()
        clear = normal(0, experts)
        while len(clear) < tokens:
            logits = (2 * normal(tokens + 9, experts) + (0 if biased else shift)).bfloat16().double()
            clear = torch.cat((clear, logits[router_margin(logits, bias, topk, **options) > CLEAR]))
        return (clear[:tokens], bias) if biased else (clear[:tokens],)

    facts = router_facts(experts, topk, biased=biased, **options)
    return _router_case(name, tokens, tensors, facts, options.get("scaling_factor"))


def router_facts(experts: int, topk: int, *, biased: bool, **options: Any) -> dict[str, Any]:
    return {
        **{"experts": experts, "topk": topk, "has_expert_bias": biased},
        **{"pre_softmax": False, "num_groups": None, "group_topk": None},
        **{name: value for name, value in options.items() if name != "scaling_factor"},
    }


def _router_case(
    name: str, tokens: int, tensors: Any, facts: Mapping[str, Any], scaling_factor: float | None
) -> Case:
    experts = facts["experts"]

    def settle(weights: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        assert chosen.dtype == torch.int64, f"expert numbers are {chosen.dtype}, not int64"
        dense = weights.new_zeros(tokens, experts)
        is_chosen = torch.zeros_like(dense, dtype=torch.bool).scatter(1, chosen, True)
        return dense.scatter(1, chosen, weights), is_chosen

    named = ("score_function", "pre_softmax", "num_groups", "group_topk")
    return Case(
        op="topk_router",
        name=name,
        tensors=tensors,
        differentiable=1,
        arguments=(facts["topk"],),
        options={**{fact: facts[fact] for fact in named}, "scaling_factor": scaling_factor},
        facts=facts,
        keyword="expert_bias" if facts["has_expert_bias"] else None,
        rounded_once=("outputs",),
        settle=settle,
    )


def router_of(facts: Mapping[str, Any]) -> Case | None:
    """Return a case with these facts, or ``None`` if no router has them.

    All logits of a token are different bfloat16 numbers, however many there are.
    """
    experts, topk, biased = facts["experts"], facts["topk"], facts["has_expert_bias"]
    sigmoid = facts["score_function"] == "sigmoid"
    if (
        topk > experts
        or facts["num_groups"]
        or (sigmoid and facts["pre_softmax"])
        or (biased and not sigmoid)
    ):
        return None

    def tensors() -> tuple[Tensor, ...]:
        # from -2**-12 down to -16: none is so large that its sigmoid is 1
        bits = 0x3980 + torch.arange(experts) * (MOST_EXPERTS // experts)
        values = -bits.to(torch.int16).view(torch.bfloat16).double()
        logits = torch.stack([values[torch.randperm(experts)] for _ in range(5)])
        return (logits, torch.zeros(experts, dtype=torch.float64)) if biased else (logits,)

    return _router_case("facts", 5, tensors, facts, 1.7)


def small_scores() -> Case:
    """Return a case whose scores are so small that what is added to their sum shows."""

    def tensors() -> tuple[Tensor, ...]:
        values = -12 - torch.arange(16, dtype=torch.float64) / 16  # each is a bfloat16 number
        return (torch.stack([values[torch.randperm(16)] for _ in range(20)]),)

    facts = router_facts(16, 4, biased=False, score_function="sigmoid")
    return _router_case("small-scores", 20, tensors, facts, None)


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


# -------------------------------------------------------------------------
# Permutation
# -------------------------------------------------------------------------


def routing_map(tokens: int, experts: int, topk: int) -> Tensor:
    chosen = torch.rand(tokens, experts).topk(topk, dim=1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, value=True)


def permute_case(
    tokens: int, experts: int, topk: int, width: int = 16, *, wide: bool = True, unused: int = 0
) -> Case:
    """Return a case in which nobody chooses the first ``unused`` experts, and some weights are 0."""

    def tensors() -> tuple[Tensor, ...]:
        chosen = torch.nn.functional.pad(routing_map(tokens, experts - unused, topk), (unused, 0))
        probs = torch.rand(tokens, experts, dtype=torch.float64)
        return normal(tokens, width), probs.masked_fill(probs < 0.2, 0), chosen

    def settle(permuted: Tensor, probs: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        assert rows.dtype in (torch.int32, torch.int64), f"rows are {rows.dtype}, not int32 or int64"
        return permuted, probs, rows.long()

    wide_one = (1,) if wide else ()
    return Case(
        op="token_permute",
        name=f"{tokens}x{width}-{topk}of{experts}-{unused}-{'wide' if wide else 'narrow'}",
        tensors=tensors,
        differentiable=2,
        arguments=(topk,),
        facts={"experts": experts, "topk": topk},
        wide=wide_one,
        wide_outputs=wide_one,
        exact_outputs=wide_one,
        rounded_once=("outputs", "gradients"),
        settle=settle,
    )


def permute_of(facts: Mapping[str, Any]) -> Case | None:
    """Return a case with these facts, or ``None`` if there are fewer experts than a token has."""
    return permute_case(7, **facts) if facts["topk"] <= facts["experts"] else None


def unpermute_case(tokens: int, topk: int, width: int = 16, rows: torch.dtype = torch.int64) -> Case:
    def tensors() -> tuple[Tensor, ...]:
        places = torch.randperm(tokens * topk).view(tokens, topk).sort(1).values
        return normal(tokens * topk, width), places.to(rows)

    return Case(
        op="token_unpermute",
        name=f"{tokens}x{width}-{topk}-{str(rows).removeprefix('torch.')}",
        tensors=tensors,
        differentiable=1,
        facts={"topk": topk},
        rounded_once=("outputs",),
    )


def unpermute_of(facts: Mapping[str, Any]) -> Case:
    """Return a case with these facts."""
    return unpermute_case(7, facts["topk"])


ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "groups-bias": {
        **{"score_function": "sigmoid", "biased": True},
        **{"num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
    },
    "softmax": {"score_function": "softmax", "scaling_factor": 0.3},
    "pre-softmax": {"score_function": "softmax", "pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid", "scaling_factor": 1.5},
    "bias": {"score_function": "sigmoid", "biased": True},
    "groups": {"score_function": "softmax", "pre_softmax": True, "num_groups": 4, "group_topk": 2},
    "groups-of-logits": {"score_function": "softmax", "num_groups": 2, "group_topk": 1},
    "groups-sigmoid": {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4},
}

CASES = [
    *(router_case(f"{name}-60", 60, 16, 4, **options) for name, options in ROUTERS.items()),
    *(router_case(f"{name}-{n % 2}", n % 2, 16, 4, **ROUTERS[name]) for n, name in enumerate(ROUTERS)),
    router_case("one-of-many", 33, 64, 1, score_function="sigmoid", scaling_factor=1.5),
    router_case("one-of-many-before", 33, 64, 1, score_function="softmax", pre_softmax=True),
    router_case("one-of-many-after", 3, 64, 1, score_function="softmax"),
    router_case("all", 9, 8, 8, score_function="softmax", scaling_factor=2.0),
    router_case("all-sigmoid", 9, 8, 8, score_function="sigmoid"),
    router_case("odd", 20, 60, 6, score_function="softmax", pre_softmax=True, scaling_factor=1.2),
    # with every score below zero, 0 does not stand for "not allowed"
    router_case("negative-bias", 20, 16, 4, shift=-4.0, **ROUTERS["groups-bias"]),
    router_case("large-bias", 20, 16, 3, score_function="sigmoid", biased=True, shift=5.0),
    small_scores(),
    router_case("large-logits", 20, 16, 4, score_function="softmax", pre_softmax=True, shift=100.0),
    replace(
        router_case("many-experts", 9, 256, 8, biased=True, score_function="sigmoid", scaling_factor=2.5),
        in_one_dtype=True,
    ),
    replace(router_case("more-experts", 9, 512, 10, score_function="softmax"), in_one_dtype=True),
    replace(
        router_case("large", MANY, 16, 2, score_function="softmax", scaling_factor=0.6), in_one_dtype=True
    ),
    permute_case(37, 8, 3),
    permute_case(37, 8, 3, wide=False),
    *(permute_case(*sizes) for sizes in [(0, 4, 2), (1, 4, 2), (1, 1, 1), (300, 16, 8), (9, 60, 6, 33)]),
    permute_case(37, 8, 2, 33, unused=3),
    permute_case(5, 8, 1, 1),
    replace(permute_case(MANY, 4, 2, 8), in_one_dtype=True),
    replace(permute_case(70, 256, 8, 2100), in_one_dtype=True),
    unpermute_case(37, 3, rows=torch.int32),
    *(unpermute_case(tokens, topk) for tokens, topk in [(0, 2), (1, 1), (1, 4), (37, 2), (300, 8)]),
    unpermute_case(9, 6, 33),
    unpermute_case(5, 1, 1),
    replace(unpermute_case(MANY, 2, 16), in_one_dtype=True),
    grouped_case("ragged", RAGGED),
    replace(grouped_case("ragged-on-host", RAGGED), on_host=(2,)),
    grouped_case("none", (0, 0, 0)),
    grouped_case("one-expert", (7,)),
    grouped_case("one-token", (0, 1, 0)),
    grouped_case("one-takes-all", (0, 0, 50, 0)),
    grouped_case("odd", (5, 0, 9), 7, 3),
    grouped_case("wide", (20, 0, 3), 272, 136),
    grouped_case("many-experts", (0, 2, 1, 0) * 32, 8, 8),
    replace(grouped_case("usual", (700, 0, 400), 256, 512), in_one_dtype=True),
    replace(grouped_case("large", (0, MANY, 3), 8, 16), in_one_dtype=True),
]
