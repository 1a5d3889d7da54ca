"""From groups to shares: nothing is lost, weights add up, seeds are distinct."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anygauge.algorithms.advantages import grpo
from anygauge.trainer.plan import plan_steps, sample_seeds, split_evenly, train_samples
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Group, Prompt, Sample, TrainSample


def make_sample(reward: float, length: int) -> Sample:
    return Sample(
        prompt_index=0,
        prompt_tokens=(1, 2, 3),
        response_tokens=(7,) * length,
        log_probs=(-0.5,) * length,
        loss_mask=(1,) * length,
        weight_versions=(0,) * length,
        text="x",
        finish_reason="stop",
        seed=0,
        reward=reward,
    )


def test_advantages_are_of_the_group_and_reach_every_token() -> None:
    prompt = Prompt(index=0, tokens=(1, 2, 3), text="")
    groups = [
        Group(prompt=prompt, samples=(make_sample(1.0, 2), make_sample(0.0, 3))),
        Group(prompt=prompt, samples=(make_sample(5.0, 1), make_sample(5.0, 1))),
    ]
    samples = train_samples(groups, grpo)
    expected = grpo(torch.tensor([1.0, 0.0])).tolist()
    assert [sample.advantages for sample in samples] == [
        (expected[0],) * 2,
        (expected[1],) * 3,
        (0.0,),
        (0.0,),
    ]
    assert samples[1].tokens == (1, 2, 3, 7, 7, 7)
    assert samples[1].response_length == 3


def test_a_sample_that_was_not_scored_moves_nothing() -> None:
    prompt = Prompt(index=0, tokens=(1, 2, 3), text="")
    failed = make_sample(0.0, 2)._replace(reward=None, error="it raised")
    whole = train_samples([Group(prompt=prompt, samples=(make_sample(1.0, 2), make_sample(0.0, 3)))], grpo)
    groups = [
        Group(prompt=prompt, samples=(make_sample(1.0, 2), failed, make_sample(0.0, 3))),
        Group(prompt=prompt, samples=(failed, failed)),
    ]
    first, left_out, second, *others = train_samples(groups, grpo)
    assert [first, second] == whole
    assert [sample.loss_mask for sample in (left_out, *others)] == [(0, 0)] * 3
    shares = plan_steps([first, left_out, second, *others], 1, 1, "token_mean")
    assert [sum(weights) for weights in shares[0][0].weights] == pytest.approx([0.4, 0.0, 0.6, 0.0, 0.0])


@given(
    lengths=st.lists(st.integers(1, 30), min_size=16, max_size=40),
    num_steps=st.integers(1, 4),
    num_ranks=st.integers(1, 4),
    aggregation=st.sampled_from(["token_mean", "sample_mean"]),
)
def test_every_sample_is_in_one_share(
    lengths: list[int], num_steps: int, num_ranks: int, aggregation: str
) -> None:
    samples = [
        TrainSample(
            tokens=[index],
            response_length=length,
            loss_mask=[1] * length,
            rollout_log_probs=[0.0] * length,
            advantages=[0.0] * length,
        )
        for index, length in enumerate(lengths)
    ]
    plan = plan_steps(samples, num_steps, num_ranks, aggregation)  # type: ignore[arg-type]
    assert len(plan) == num_ranks
    seen = sorted(sample.tokens[0] for shares in plan for share in shares for sample in share.samples)
    assert seen == list(range(len(lengths)))
    for step in range(num_steps):
        total = sum(sum(map(sum, shares[step].weights)) for shares in plan)
        assert total == pytest.approx(1.0)
        sizes = [len(shares[step].samples) for shares in plan]
        assert max(sizes) - min(sizes) <= 1


def test_seeds_are_distinct_between_samples_steps_and_streams() -> None:
    seeds = [
        seed
        for run in (0, 1)
        for stream in (0, 1)
        for step in (0, 1, 500)
        for group in sample_seeds(run, stream, step, 64, 8)
        for seed in group
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert sample_seeds(3, 0, 7, 2, 2) == sample_seeds(3, 0, 7, 2, 2)


@given(count=st.integers(0, 100), parts=st.integers(1, 9))
def test_slices_cover_and_are_even(count: int, parts: int) -> None:
    slices = split_evenly(count, parts)
    assert [i for part in slices for i in range(count)[part]] == list(range(count))
    sizes = [len(range(count)[part]) for part in slices]
    assert max(sizes) - min(sizes) <= 1


def test_a_step_without_work_for_a_rank_is_refused() -> None:
    sample = TrainSample(
        tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[0.0], advantages=[0.0]
    )
    with pytest.raises(
        RolloutError, match="3 samples cannot be divided among 2 optimizer steps and 2 workers"
    ):
        plan_steps([sample] * 3, 2, 2, "token_mean")
