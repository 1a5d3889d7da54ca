"""Advantages on the ranks: which there are to estimate, and that they do not depend on the division."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.algorithms import plugin
from anygauge.config.schema import Algorithm
from anygauge.data.batch import pack_samples
from anygauge.trainer.estimate import estimate
from anygauge_hooks.algorithms import TokenAdvantages
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.errors import PluginError
from anygauge_hooks.types import NamedFunction
from anygauge_tests.batches import TrainSample, make_batch, split

ESTIMATORS = {each.name: each for each in plugin.register_advantage_estimators()}


def make_samples(count: int = 7) -> list[TrainSample]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index in range(count):
        length = 1 + index % 4
        mask = (torch.rand(length, generator=generator) > 0.3).long().tolist()
        rewards = torch.randn(2, generator=generator).tolist()
        samples.append(
            TrainSample(
                tokens=[index] * (length + 1),
                response_length=length,
                loss_mask=mask,
                rollout_log_probs=[-1.0] * length,
                advantages=[rewards[0]] * length,
                reward=rewards[0],
                baseline=rewards[1],
            )
        )
    return samples


def asked(samples: Sequence[TrainSample]) -> TrainBatch:
    """Return a batch after all passes."""

    def draw(scale: float) -> Tensor:
        values = []
        for sample in samples:
            generator = torch.Generator().manual_seed(int(sample.tokens[0] + scale * 1000))
            values.append(torch.randn(sample.response_length, generator=generator))
        return torch.cat(values)

    return make_batch(
        samples,
        old_log_probs=draw(1),
        reference_log_probs=draw(2),
        teacher_log_probs=draw(3),
        values=draw(4),
    )


def columns(batch: TrainBatch) -> list[list[float]]:
    """Return the advantages of each sample, and the returns if there are any."""
    assert batch.advantages is not None
    values = batch.advantages if batch.returns is None else torch.stack((batch.advantages, batch.returns), 1)
    return [part.flatten().tolist() for part in split(batch, values)]


def alone(x: Tensor) -> Tensor:
    return x


class Group:
    """Threads that stand for ranks, and sum what each of them gives."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: dict[int, Tensor] = {}

    def total(self, rank: int) -> Any:
        def sum_of_all(x: Tensor) -> Tensor:
            self.given[rank] = x
            self.barrier.wait(10)
            result = torch.stack([self.given[each] for each in sorted(self.given)]).sum(0)
            self.barrier.wait(10)
            return result

        return sum_of_all


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gae", {"kl_reward_coef": 0.1}),
        ("gae", {"normalize_advantages": True}),
        ("reinforce_plus_plus", {"kl_reward_coef": 0.1, "advantage_options": {"gamma": 0.9}}),
        ("reinforce_plus_plus_baseline", {}),
        ("on_policy_distillation", {}),
        ("grpo", {"normalize_advantages": True, "distill_coef": 0.5}),
    ],
)
def test_the_division_among_ranks_does_not_matter(name: str, options: dict[str, Any]) -> None:
    algorithm = Algorithm(advantage=name, **options)
    samples = make_samples()
    whole = asked(samples)
    expected = estimate(algorithm, ESTIMATORS[name], whole, alone)
    assert (whole.returns is not None) == (name == "gae")
    ranks = Group(3)

    def of_rank(rank: int) -> tuple[dict[str, float], list[list[float]]]:
        own = asked(samples[rank::3])
        return estimate(algorithm, ESTIMATORS[name], own, ranks.total(rank)), columns(own)

    with ThreadPoolExecutor(3) as threads:
        parts = list(threads.map(of_rank, range(3)))
    for rank, (metrics, own) in enumerate(parts):
        assert metrics == pytest.approx(expected, abs=1e-6)
        for one, other in zip(own, columns(whole)[rank::3], strict=True):
            assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("name", [None, "grpo", "rloo"])
def test_groups_without_more_ask_no_rank(name: str | None) -> None:
    def fail(x: Tensor) -> Tensor:
        raise AssertionError

    batch = make_batch(make_samples())
    given = batch.group_advantages
    assert not estimate(Algorithm(), ESTIMATORS[name] if name else None, batch, fail)
    assert batch.advantages is given


def rewarded(group_rewards: Sequence[Sequence[float | None]], rollouts: Sequence[int]) -> TrainBatch:
    """Return samples of one prompt token and two response tokens each, with the rewards of all groups."""
    tokens: Any = {"prompts": [(1,)] * len(rollouts), "responses": [(2, 3)] * len(rollouts)}
    values: Any = {"loss_masks": [(1, 1)] * len(rollouts), "log_probs": [(0.0, 0.0)] * len(rollouts)}
    batch = pack_samples(**tokens, **values, media=[()] * len(rollouts), rollouts=rollouts)
    batch.group_rewards = group_rewards
    return batch


def test_advantages_are_of_the_group_and_reach_every_token() -> None:
    """On a rank that has one sample of the first group, both of a rollout, and one that was not scored."""
    asked_for: list[list[float]] = []

    def center(rewards: Tensor, *, scale: float) -> Tensor:
        asked_for.append(rewards.tolist())
        return (rewards - rewards.mean()) * scale

    named = NamedFunction(name="center", fn=center)
    batch = rewarded([[1.0, 0.0, 5.0], [None, 4.0, 2.0], [4.0, 2.0], [], [None]], [1, 4, 4, 3, 7, 8])
    assert not estimate(Algorithm(advantage="center", advantage_options={"scale": 2.0}), named, batch, alone)
    assert asked_for == [[1.0, 0.0, 5.0], [4.0, 2.0]], "equal groups ask once"
    assert columns(batch) == [[-4.0] * 2, [2.0] * 2, [2.0] * 2, [0.0] * 2, [-2.0] * 2, [0.0] * 2]
    assert batch.baselines is not None
    assert batch.baselines.tolist() == [2.0, 3.0, 3.0, 0.0, 3.0, 0.0]


def test_a_mean_is_rounded_once() -> None:
    """Rewards are not rounded to float32 before it."""
    rewards = [0.1, 0.7, 0.9]
    batch = rewarded([rewards], [0])
    estimate(Algorithm(), ESTIMATORS["grpo"], batch, alone)
    assert batch.baselines is not None
    assert batch.baselines.tolist() == torch.tensor([fmean(rewards)]).tolist()
    assert fmean(torch.tensor(rewards).tolist()) != fmean(rewards)


@pytest.mark.parametrize("found", [torch.ones(3), [1.0, 2.0], None], ids=str)
def test_an_estimator_of_groups_that_returns_something_else(found: Any) -> None:
    stranger = NamedFunction(name="stranger", fn=lambda rewards: found)
    with pytest.raises(PluginError, match=r"one advantage for each of 2 rewards"):
        estimate(Algorithm(advantage="stranger"), stranger, rewarded([[1.0, 0.0]], [0]), alone)


def test_the_teacher_is_added_to_the_advantages() -> None:
    samples = make_samples()
    batch = asked(samples)
    given, old, teacher = batch.group_advantages, batch.old_log_probs, batch.teacher_log_probs
    assert given is not None
    assert old is not None
    assert teacher is not None
    metrics = estimate(Algorithm(distill_coef=0.5), ESTIMATORS["grpo"], batch, alone)
    torch.testing.assert_close(batch.advantages, given + 0.5 * (teacher - old))
    distance = (old - teacher)[batch.loss_mask].mean().item()
    assert metrics["opd_reverse_kl"] == pytest.approx(distance, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.rewards, "it returned a Tensor"),
        (lambda x: TokenAdvantages(x.rewards[:-1], x.rewards), r"its advantages are \[15\]"),
        (lambda x: TokenAdvantages(x.rewards, x.rewards[:, None]), r"its returns are \[16, 1\]"),
        (lambda x: TokenAdvantages(x.rewards), "its returns are a NoneType"),
        (lambda x: TokenAdvantages(x.rewards, x.rewards.tolist()), "its returns are a list"),
    ],
)
def test_a_strangers_estimator_that_returns_something_else(make: Any, message: str) -> None:
    samples = make_samples()
    stranger = NamedFunction(name="stranger", fn=make, kind="token", needs=["values"])
    with pytest.raises(PluginError, match=rf"'stranger'.*\[16\](.|\n)*{message}"):
        estimate(Algorithm(advantage="stranger"), stranger, asked(samples), alone)


def test_the_penalty_is_the_log_ratio_to_the_reference() -> None:
    samples = [make_samples(4)[3]._replace(loss_mask=[1, 1, 1, 1], reward=2.0)]
    batch = asked(samples)
    assert batch.old_log_probs is not None
    assert batch.reference_log_probs is not None
    estimate(Algorithm(advantage="gae", kl_reward_coef=0.5), ESTIMATORS["gae"], batch, alone)
    assert batch.returns is not None
    costs = 0.5 * (batch.old_log_probs - batch.reference_log_probs)
    expected = [2.0 - float(costs[place:].sum()) for place in range(4)]
    assert batch.returns.tolist() == pytest.approx(expected, abs=1e-5)
