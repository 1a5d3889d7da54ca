"""From groups to shares: nothing is lost, weights add up, seeds are distinct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anygauge.algorithms.advantages import grpo
from anygauge.data.balance import split_evenly
from anygauge.trainer.loop import are_any_scored
from anygauge.trainer.plan import conversation_samples, plan_metrics, plan_steps, sample_seeds, train_samples
from anygauge_hooks.errors import PluginError, RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import NO_VERSION, Group, MiniBatch, Prompt, Sample, TrainSample


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


def make_train_sample(number: int, length: int) -> TrainSample:
    """Return a sample of ``length`` tokens that is known by its first."""
    return TrainSample(
        tokens=(number, *(0,) * (length - 1)),
        response_length=length,
        loss_mask=(1,) * length,
        rollout_log_probs=(0.0,) * length,
        advantages=(0.0,) * length,
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


def test_media_reach_what_is_trained_on() -> None:
    image = Media("image", "5be1", ((1, 2),), (1, 2, 4))
    prompt = Prompt(index=0, tokens=(1, 2, 3), text="", response=(7,), loss_mask=(1,), media=(image,))
    sample = make_sample(1.0, 2)._replace(media=(image,))
    failed = sample._replace(reward=None, error="it raised")
    trained = train_samples([Group(prompt=prompt, samples=(sample, failed))], grpo)
    assert [each.media for each in (*conversation_samples([prompt]), *trained)] == [(image,)] * 3


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
    assert [sum(weights) for weights in shares[0][0].loss_weights] == pytest.approx([0.4, 0.0, 0.6, 0.0, 0.0])


def test_an_empty_response_is_no_sample(caplog: pytest.LogCaptureFixture) -> None:
    prompt = Prompt(index=0, tokens=(1, 2, 3), text="")
    whole = train_samples([Group(prompt=prompt, samples=(make_sample(1.0, 2), make_sample(0.0, 3)))], grpo)
    empty = (make_sample(5.0, 0), make_sample(1.0, 2), make_sample(0.0, 3))
    assert train_samples([Group(prompt=prompt, samples=empty)], grpo) == whole
    assert caplog.messages == ["1 of 3 responses have no token: there is nothing in them to train on"]
    none = [Group(prompt=prompt, samples=(make_sample(1.0, 0),))]
    assert train_samples(none, grpo) == []
    assert not are_any_scored(none)
    assert are_any_scored([Group(prompt=prompt, samples=empty)])


@pytest.mark.parametrize("found", [torch.ones(3), [1.0, 2.0], None], ids=str)
def test_an_estimator_of_groups_that_returns_something_else(found: Any) -> None:
    group = Group(
        prompt=Prompt(index=0, tokens=(1,), text=""), samples=(make_sample(1.0, 2), make_sample(0.0, 3))
    )
    with pytest.raises(PluginError, match=r"one advantage for each of 2 rewards"):
        train_samples([group], lambda rewards: found)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=16, max_size=40),
    num_steps=st.integers(1, 4),
    num_ranks=st.integers(1, 4),
    aggregation=st.sampled_from(["token_mean", "sample_mean"]),
)
def test_every_sample_is_in_one_share(
    lengths: list[int], num_steps: int, num_ranks: int, aggregation: str
) -> None:
    samples = [make_train_sample(index, length) for index, length in enumerate(lengths)]
    plan = plan_steps(samples, num_steps, num_ranks, aggregation)  # type: ignore[arg-type]
    assert len(plan) == num_ranks
    seen = sorted(sample.tokens[0] for shares in plan for share in shares for sample in share.samples)
    assert seen == list(range(len(lengths)))
    for step in range(num_steps):
        total = sum(sum(map(sum, shares[step].loss_weights)) for shares in plan)
        assert total == pytest.approx(1.0)
        assert all(shares[step].samples for shares in plan)


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


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    num_steps=st.integers(1, 3),
    num_ranks=st.integers(1, 6),
)
def test_no_rank_is_without_work(
    aggregation: str, lengths: list[int], num_steps: int, num_ranks: int
) -> None:
    samples = [make_train_sample(index, length) for index, length in enumerate(lengths)]
    plan = plan_steps(samples, num_steps, num_ranks, aggregation)  # type: ignore[arg-type]
    alone = plan_steps(samples, num_steps, 1, aggregation)  # type: ignore[arg-type]
    assert {len(shares) for shares in plan} == {min(num_steps, len(samples))}
    assert all(share.samples for shares in plan for share in shares)
    assert learnt(plan) == learnt(alone)
    idle = [
        sample for shares in plan for share in shares for sample in share.samples if not any(sample.loss_mask)
    ]
    assert plan_metrics(plan, float)["train/idle_samples"] == len(idle)
    assert len(idle) == sum(max(num_ranks - len(shares.samples), 0) for shares in alone[0])


def learnt(plan: Sequence[Sequence[MiniBatch]]) -> list[dict[int, list[float]]]:
    """Return the token weights of each sample by optimizer step; what repeats another has none."""
    return [
        {
            sample.tokens[0]: list(weights)
            for share in step
            for sample, weights in zip(share.samples, share.loss_weights, strict=True)
            if any(weights)
        }
        for step in zip(*plan, strict=True)
    ]


def test_the_shortest_sample_is_what_idle_ranks_repeat() -> None:
    plan = plan_steps([make_train_sample(0, 5), make_train_sample(1, 2)], 1, 4, "token_mean")
    repeated = [s.tokens[0] for (share,) in plan for s in share.samples if not any(s.loss_mask)]
    assert repeated == [1, 1]


def test_ranks_are_even_in_what_a_model_computes() -> None:
    samples = [make_train_sample(index, length) for index, length in enumerate([6, 3, 3, 3])]
    by_length = plan_steps(samples, 1, 2, "token_mean")
    assert sorted(len(shares[0].samples) for shares in by_length) == [2, 2]
    by_work = plan_steps(samples, 1, 2, "token_mean", lambda length: 1.0 + length**2)
    assert sorted(len(shares[0].samples) for shares in by_work) == [1, 3]
    metrics = plan_metrics(by_work, lambda length: 1.0 + length**2)
    assert metrics == {"train/idle_samples": 0, "perf/train_imbalance": pytest.approx(222 / 156)}


def test_a_step_of_nothing_is_refused() -> None:
    with pytest.raises(RolloutError, match="no sample to train on"):
        plan_steps([], 2, 2, "token_mean")


def parted(prompt: Prompt) -> Group:
    """Return three rollouts, of which the second became two samples and could the third not be scored."""

    def sample(length: int, reward: float | None, rollout: int | None = None) -> Sample:
        return Sample(
            prompt_index=prompt.index,
            prompt_tokens=prompt.tokens,
            response_tokens=(5,) * length,
            log_probs=(-0.1,) * length,
            loss_mask=(1,) * length,
            weight_versions=(0,) * length,
            text="",
            finish_reason="stop",
            seed=0,
            reward=reward,
            error=None if reward is not None else "not scored",
            rollout=rollout,
        )

    samples = (sample(2, 1.0), sample(1, 0.0, 1), sample(3, 0.0, 1), sample(2, None, 2), sample(1, None, 2))
    return Group(prompt=prompt, samples=samples)


def test_a_rollout_of_several_samples_counts_once_in_its_group() -> None:
    seen: list[list[float]] = []

    def center(rewards: torch.Tensor) -> torch.Tensor:
        seen.append(rewards.tolist())
        return rewards - rewards.mean()

    groups = [parted(Prompt(index=n, tokens=(1,), text="")) for n in range(2)]
    samples = train_samples(groups, center)
    assert seen == [[1.0, 0.0]]
    assert [sample.advantages[0] for sample in samples] == [0.5, -0.5, -0.5, 0.0, 0.0] * 2
    assert {sample.baseline for sample in samples if any(sample.loss_mask)} == {0.5}
    assert [any(sample.loss_mask) for sample in samples] == [True, True, True, False, False] * 2
    assert [sample.rollout for sample in samples] == [None, 1, 1, 3, 3, None, 6, 6, 8, 8]


def test_a_rollout_of_several_samples_is_in_one_optimizer_step_and_weighs_as_one() -> None:
    groups = [parted(Prompt(index=n, tokens=(1,), text="")) for n in range(4)]
    shares = plan_steps(train_samples(groups, lambda rewards: rewards), 2, 2, "sample_mean")
    steps = [[share for rank in shares for share in (rank[step],)] for step in range(2)]
    found = []
    for step in steps:
        weights: dict[int | None, float] = {}
        for share in step:
            for sample, weight in zip(share.samples, share.loss_weights, strict=True):
                weights[sample.rollout] = weights.get(sample.rollout, 0.0) + sum(weight)
        found.append(weights)
    assert not (found[0].keys() & found[1].keys()) - {None}
    parts = [weight for weights in found for number, weight in weights.items() if number is not None]
    assert sorted(round(weight, 6) for weight in parts) == [0.0] * 4 + [0.25] * 4


def test_a_sample_is_on_policy_if_the_weights_being_trained_made_all_of_it() -> None:
    made = [(3, 3), (2, 3), (2, 2), (NO_VERSION, 3), ()]
    samples = tuple(make_sample(1.0, 2)._replace(weight_versions=versions) for versions in made)
    group = Group(prompt=Prompt(index=0, tokens=(1, 2, 3), text=""), samples=samples)
    found = [sample.is_on_policy for sample in train_samples([group], grpo, version=3)]
    assert found == [True, False, False, True, True]
    parted = replace(group, samples=tuple(sample._replace(rollout=0) for sample in samples))
    assert [sample.is_on_policy for sample in train_samples([parted], grpo, version=3)] == found
    assert not any(sample.is_on_policy for sample in train_samples([group], grpo))
