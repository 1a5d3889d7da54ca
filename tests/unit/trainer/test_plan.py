"""From groups to shares: nothing is lost, weights add up, seeds are distinct."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data.balance import alike, free, split_evenly
from anygauge.data.batch import mini_batches
from anygauge.trainer.loop import are_any_scored, start_training
from anygauge.trainer.plan import conversation_batch, plan_metrics, plan_steps, rollout_batch, sample_seeds
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.errors import DataError, RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import NO_VERSION, Group, Prompt, Sample
from anygauge_tests import scoring
from anygauge_tests.batches import TrainSample, make_batch, plan_samples, split, unpack_samples
from anygauge_tests.engine_config import engine_config


def make_sample(reward: float, length: int) -> Sample:
    return scoring.sample(length, prompt_tokens=(1, 2, 3), response_tokens=(7,) * length, reward=reward)


def make_train_sample(number: int, length: int) -> TrainSample:
    """Return a sample with a response of ``length`` tokens that is known by its first token."""
    return TrainSample(
        tokens=(number, *(0,) * length),
        response_length=length,
        loss_mask=(1,) * length,
        rollout_log_probs=(0.0,) * length,
        advantages=(0.0,) * length,
    )


def test_samples_are_packed_group_by_group() -> None:
    prompt = Prompt(index=0, tokens=(1, 2, 3), text="")
    groups = [
        Group(prompt=prompt, samples=(make_sample(1.0, 2), make_sample(0.0, 3))),
        Group(prompt=prompt, samples=(make_sample(5.0, 1), make_sample(5.0, 1))),
    ]
    batch = rollout_batch(groups)
    assert batch.group_rewards == [[1.0, 0.0], [5.0, 5.0]]
    assert batch.rollouts == [0, 1, 2, 3]
    assert batch.rewards.tolist() == [1.0, 0.0, 5.0, 5.0]
    assert (batch.lengths, batch.response_lengths) == ([5, 6, 4, 4], [2, 3, 1, 1])
    assert batch.tokens.tolist() == [1, 2, 3, 7, 7, 1, 2, 3, 7, 7, 7, 1, 2, 3, 7, 1, 2, 3, 7]
    assert batch.loss_mask.tolist() == [True] * 7
    assert batch.rollout_log_probs.tolist() == [-0.5] * 7


@pytest.mark.parametrize("field", ["log_probs", "loss_mask"])
def test_a_sample_whose_values_do_not_fit_is_refused(field: str) -> None:
    wrong = make_sample(1.0, 3)._replace(**{field: (1,) * 2})
    group = Group(prompt=Prompt(index=0, tokens=(1,), text=""), samples=(make_sample(1.0, 2), wrong))
    with pytest.raises(DataError, match="Sample 1 of 6 tokens has a response of 3, and mask and log-probs"):
        rollout_batch([group])


def test_media_reach_what_is_trained_on() -> None:
    image = Media("image", "5be1", ((1, 2),), (1, 2, 4))
    prompt = Prompt(index=0, tokens=(1, 2, 3), text="", response=(7,), loss_mask=(1,), media=(image,))
    sample = make_sample(1.0, 2)._replace(media=(image,))
    failed = sample._replace(reward=None, error="it raised")
    trained = rollout_batch([Group(prompt=prompt, samples=(sample, failed))])
    assert [*conversation_batch([prompt]).media, *trained.media] == [(image,)] * 3


def test_a_sample_that_was_not_scored_moves_nothing() -> None:
    prompt = Prompt(index=0, tokens=(1, 2, 3), text="")
    failed = make_sample(0.0, 2)._replace(reward=None, error="it raised")
    groups = [
        Group(prompt=prompt, samples=(make_sample(1.0, 2), failed, make_sample(0.0, 3))),
        Group(prompt=prompt, samples=(failed, failed)),
    ]
    batch = rollout_batch(groups)
    assert batch.group_rewards == [[1.0, None, 0.0], [None, None]]
    assert batch.rollouts == [0, 1, 2, 3, 4]
    assert batch.loss_mask.tolist() == [True] * 2 + [False] * 2 + [True] * 3 + [False] * 4
    (planned,) = plan_steps(batch, 1, 1, "token_mean")
    assert sums(planned) == pytest.approx([0.4, 0.0, 0.6, 0.0, 0.0])


def test_an_empty_response_is_no_sample(caplog: pytest.LogCaptureFixture) -> None:
    prompt = Prompt(index=0, tokens=(1, 2, 3), text="")
    empty = (make_sample(5.0, 0), make_sample(1.0, 2), make_sample(0.0, 3))
    batch = rollout_batch([Group(prompt=prompt, samples=empty)])
    assert (batch.response_lengths, batch.group_rewards) == ([2, 3], [[1.0, 0.0]])
    assert caplog.messages == ["1 of 3 responses have no token: there is nothing in them to train on"]
    none = [Group(prompt=prompt, samples=(make_sample(1.0, 0),))]
    assert rollout_batch(none).lengths == []
    assert not are_any_scored(none)
    assert are_any_scored([Group(prompt=prompt, samples=empty)])


def sums(batch: TrainBatch) -> list[float]:
    """Return the weight of each sample."""
    assert batch.loss_weights is not None
    return [float(each.double().sum()) for each in split(batch, batch.loss_weights)]


def firsts(batch: TrainBatch) -> list[int]:
    """Return the first token of each sample."""
    return [sample.tokens[0] for sample in unpack_samples(batch)]


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
    plan = plan_samples(samples, num_steps, num_ranks, aggregation)
    assert len(plan) == num_ranks
    assert sorted(first for batch in plan for first in firsts(batch)) == list(range(len(lengths)))
    for step in zip(*map(mini_batches, plan), strict=True):
        assert sum(sum(sums(batch)) for batch in step) == pytest.approx(1.0)
        assert all(batch.lengths for batch in step)


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
    plan = plan_samples(samples, num_steps, num_ranks, aggregation)
    (alone,) = plan_samples(samples, num_steps, 1, aggregation)
    assert {len(batch.steps) for batch in plan} == {min(num_steps, len(samples))}
    assert all(count > 0 for batch in plan for count in batch.steps)
    assert learned(plan) == learned([alone])
    idle = [each for batch in plan for each in unpack_samples(batch) if not any(each.loss_mask)]
    assert plan_metrics(plan, float)["train/idle_samples"] == len(idle)
    assert len(idle) == sum(max(num_ranks - count, 0) for count in alone.steps)


def learned(plan: Sequence[TrainBatch]) -> list[dict[int, float]]:
    """Return the weight of each sample by optimizer step; what repeats another has none."""
    return [
        {
            first: weight
            for batch in step
            for first, weight in zip(firsts(batch), sums(batch), strict=True)
            if weight
        }
        for step in zip(*map(mini_batches, plan), strict=True)
    ]


def test_the_shortest_sample_is_what_idle_ranks_repeat() -> None:
    plan = plan_samples([make_train_sample(0, 5), make_train_sample(1, 2)], 1, 4, "token_mean")
    repeated = [s.tokens[0] for batch in plan for s in unpack_samples(batch) if not any(s.loss_mask)]
    assert repeated == [1, 1]
    assert [sum(sums(batch)) for batch in plan].count(0.0) == 2


def test_ranks_are_even_in_what_a_model_computes() -> None:
    samples = [make_train_sample(index, length) for index, length in enumerate([5, 2, 2, 2])]
    by_length = plan_samples(samples, 1, 2, "token_mean")
    assert sorted(len(batch.lengths) for batch in by_length) == [2, 2]
    by_work = plan_samples(samples, 1, 2, "token_mean", lambda length: 1.0 + length**2)
    assert sorted(len(batch.lengths) for batch in by_work) == [1, 3]
    metrics = plan_metrics(by_work, lambda length: 1.0 + length**2)
    assert metrics == {"train/idle_samples": 0, "perf/train_imbalance": pytest.approx(222 / 156)}


def test_ranks_have_whole_groups_where_a_prompt_is_computed_once() -> None:
    samples = [make_train_sample(group, 3) for group in (5, 6) for _ in range(3)]
    assert len(set(firsts(plan_samples(samples, 1, 2, "token_mean")[0]))) == 2
    plan = plan_samples(samples, 1, 2, "token_mean", packs_prefixes=True)
    assert sorted(map(firsts, plan)) == [[5] * 3, [6] * 3]
    long = [make_train_sample(5, 8)] * 2, [make_train_sample(7, 6), make_train_sample(6, 6)]
    apart = [plan_samples(each, 1, 1, "token_mean")[0] for each in long]
    # 1 + 8 + 8 tokens and 7 + 7
    metrics = plan_metrics(apart, lambda length: 1.0, packs_prefixes=True)
    assert metrics["perf/train_imbalance"] == pytest.approx(17 / 15.5)


@pytest.mark.parametrize(("packing", "imbalance"), [(False, 16 / 14), (True, 13 / 11.5)])
def test_a_run_plans_for_its_prefix_packing(packing: bool, imbalance: float) -> None:
    """Four samples of one token and a response of three, and three: 13 and 10 tokens, or 16 and 12."""
    config = engine_config("none", train={"prefix_packing": packing})
    sent: list[list[int]] = []
    workers = SimpleNamespace(
        call_async=lambda *_, per_rank, **__: sent.extend(firsts(batch) for (batch,), _ in per_rank)
    )
    layout = SimpleNamespace(data=2, dp_ranks=lambda: [0, 1])
    session = SimpleNamespace(layout=layout, workers=workers)
    loop: Any = SimpleNamespace(config=config, session=session, flops_per_token=alike, media_flops=free)
    training = start_training(
        loop, 1, make_batch([make_train_sample(group, 3) for group in (5, 5, 5, 5, 6, 6, 6)])
    )
    assert (sorted(sent) == [[5] * 4, [6] * 3]) is packing
    assert training.planned["perf/train_imbalance"] == pytest.approx(imbalance)


def test_a_step_of_nothing_is_refused() -> None:
    with pytest.raises(RolloutError, match="no sample to train on"):
        plan_steps(rollout_batch([]), 2, 2, "token_mean")


def parted(prompt: Prompt) -> Group:
    """Return three rollouts, of which the second became two samples and could the third not be scored."""

    def sample(length: int, reward: float | None, rollout: int | None = None) -> Sample:
        error = None if reward is not None else "not scored"
        return scoring.sample(length, prompt_index=prompt.index, reward=reward, error=error, rollout=rollout)

    samples = (sample(2, 1.0), sample(1, 0.0, 1), sample(3, 0.0, 1), sample(2, None, 2), sample(1, None, 2))
    return Group(prompt=prompt, samples=samples)


def test_a_rollout_of_several_samples_counts_once_in_its_group() -> None:
    batch = rollout_batch([parted(Prompt(index=n, tokens=(1,), text="")) for n in range(2)])
    assert batch.group_rewards == [[1.0, 0.0, None]] * 2
    assert batch.rollouts == [0, 1, 1, 2, 2, 3, 4, 4, 5, 5]
    trained_on = [any(sample.loss_mask) for sample in unpack_samples(batch)]
    assert trained_on == [True, True, True, False, False] * 2


def test_a_rollout_of_several_samples_is_in_one_optimizer_step_and_weighs_as_one() -> None:
    groups = [parted(Prompt(index=n, tokens=(1,), text="")) for n in range(4)]
    plan = plan_steps(rollout_batch(groups), 2, 2, "sample_mean")
    of_steps = []
    for step in zip(*map(mini_batches, plan), strict=True):
        weights: Counter[int] = Counter()
        for batch in step:
            for rollout, weight in zip(batch.rollouts, sums(batch), strict=True):
                weights[rollout] += weight
        of_steps.append(weights)
    one, other = of_steps
    assert not one.keys() & other.keys()
    assert sorted(round(weight, 6) for weight in (*one.values(), *other.values())) == [0.0] * 4 + [0.25] * 8


def test_a_sample_is_on_policy_if_the_weights_being_trained_made_all_of_it() -> None:
    made = [(3, 3), (2, 3), (2, 2), (NO_VERSION, 3), ()]
    samples = tuple(make_sample(1.0, 2)._replace(weight_versions=versions) for versions in made)
    group = Group(prompt=Prompt(index=0, tokens=(1, 2, 3), text=""), samples=samples)
    assert rollout_batch([group], version=3).is_on_policy == [True, False, False, True, True]
    parted = replace(group, samples=tuple(sample._replace(rollout=0) for sample in samples))
    assert rollout_batch([parted], version=3).is_on_policy == [True, False, False, True, True]
    assert not any(rollout_batch([group]).is_on_policy)
