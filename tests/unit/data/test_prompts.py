"""Samples with the same prompt: found by their tokens, and kept together by ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data.balance import balance, sequence_costs
from anygauge.data.batch import pack_samples
from anygauge.data.packing import pack_by_cost
from anygauge.data.prompts import balance_groups, group_by_prompt, pack_groups, prompt_lengths, shared_costs
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.media import Media

GROUPS = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(1, 60), min_size=1, max_size=6)),
    min_size=1,
    max_size=9,
)
"""Tokens of each prompt and of the responses to it."""


def make_batch(
    prompts: Sequence[Sequence[int]], responses: Sequence[int], media: Sequence[tuple[Media, ...]] = ()
) -> TrainBatch:
    return pack_samples(
        prompts,
        [[7] * length for length in responses],
        loss_masks=[[1] * length for length in responses],
        log_probs=[[0.0] * length for length in responses],
        media=media or [()] * len(responses),
    )


def test_a_group_has_the_same_prompt_to_the_last_token() -> None:
    batch = make_batch([[1, 2], [1, 2, 7], [1, 2], [1], [1, 2, 7]], [3, 2, 1, 4, 2])
    assert prompt_lengths(batch) == [2, 3, 2, 1, 3]
    assert group_by_prompt(batch) == [[0, 2], [1, 4], [3]]
    assert group_by_prompt(batch, [4, 2, 3, 1, 3]) == [[0, 3], [1], [2, 4]]


def test_placeholders_of_media_are_no_shared_prompt() -> None:
    image = Media("image", "5be1", ((1, 2),), (1, 2, 4))
    batch = make_batch([[1, 2]] * 3, [1] * 3, [(image,), (), (image,)])
    assert group_by_prompt(batch) == [[0], [1], [2]]


@given(drawn=GROUPS, max_tokens=st.integers(1, 200), extra=st.integers(0, 3))
def test_micro_batches_count_a_prompt_once(
    drawn: list[tuple[int, list[int]]], max_tokens: int, extra: int
) -> None:
    prompts, lengths, groups = laid_out(drawn)
    costs, prompt_costs = sequence_costs(lengths, flops_per_token), sequence_costs(prompts, flops_per_token)
    bins = pack_groups(lengths, prompts, costs, prompt_costs, groups, max_tokens, lambda count: count + extra)
    assert sorted(chain.from_iterable(bins)) == list(range(len(lengths)))
    for indices in bins:
        assert indices == sorted(indices)
        assert len(indices) < 2 or tokens_of(indices, prompts, lengths, groups) <= max_tokens
    for group in groups:
        if tokens_of(group, prompts, lengths, groups) <= max_tokens:
            assert any(set(group) <= set(indices) for indices in bins)


@given(drawn=GROUPS, max_tokens=st.integers(1, 200), num_bins=st.integers(1, 9))
def test_samples_without_partners_are_divided_by_cost_alone(
    drawn: list[tuple[int, list[int]]], max_tokens: int, num_bins: int
) -> None:
    prompts, lengths, _ = laid_out(drawn)
    costs, prompt_costs = sequence_costs(lengths, flops_per_token), sequence_costs(prompts, flops_per_token)
    alone = [[sample] for sample in range(len(lengths))]
    packed = pack_groups(lengths, prompts, costs, prompt_costs, alone, max_tokens)
    assert packed == pack_by_cost(lengths, costs, max_tokens)
    if num_bins <= len(lengths):
        assert balance_groups(costs, prompt_costs, alone, num_bins) == balance(costs, num_bins)


def laid_out(drawn: list[tuple[int, list[int]]]) -> tuple[list[int], list[int], list[list[int]]]:
    """Return the tokens of each sample's prompt and of the sample, and the groups, the samples in turns."""
    places = [(turn, number) for number, (_, own) in enumerate(drawn) for turn in range(len(own))]
    places.sort()
    groups: list[list[int]] = [[] for _ in drawn]
    for sample, (_, number) in enumerate(places):
        groups[number].append(sample)
    prompts = [drawn[number][0] for _, number in places]
    return prompts, [drawn[number][0] + drawn[number][1][turn] for turn, number in places], groups


def flops_per_token(length: int) -> float:
    return 100.0 + length


def tokens_of(
    indices: Sequence[int], prompts: Sequence[int], lengths: Sequence[int], groups: Sequence[Sequence[int]]
) -> int:
    """Return the tokens of a micro-batch."""
    responses = sum(lengths[sample] - prompts[sample] for sample in indices)
    return responses + sum(prompts[group[0]] for group in groups if set(group) & set(indices))


def test_samples_share_the_cost_of_their_prompt() -> None:
    costs = shared_costs(np.array([10.0, 11.0, 12.0]), np.array([8.0, 8.0, 6.0]), [[0, 1], [2]])
    assert costs.tolist() == [6.0, 7.0, 12.0]


@pytest.mark.parametrize(
    ("groups", "costs", "prompt", "num_bins", "expected"),
    [
        ([[0, 2], [1, 3]], [12.0] * 4, 10.0, 2, [[0, 2], [1, 3]]),
        ([[0, 1, 2, 3]], [12.0] * 4, 10.0, 2, [[0, 1], [2, 3]]),
        ([[0, 1, 2, 3]], [12.0] * 4, 10.0, 4, [[0], [1], [2], [3]]),
        ([[0, 1, 2], [3]], [12.0] * 4, 1.0, 2, [[0, 3], [1, 2]]),  # 24 and 23, whole ones 34 and 12
        ([[0, 1, 2], [3]], [12.0] * 4, 10.0, 2, [[0, 1, 2], [3]]),  # 16 and 12, divided ones 14 and 24
        ([[0, 1], [2]], [12.0, 12.0, 50.0], 10.0, 3, [[0], [1], [2]]),  # or one bin would be empty
    ],
)
def test_a_group_is_divided_where_whole_ones_cost_more(
    groups: list[list[int]], costs: list[float], prompt: float, num_bins: int, expected: list[list[int]]
) -> None:
    bins = balance_groups(np.array(costs), np.full(len(costs), prompt), groups, num_bins)
    assert sorted(bins) == expected
