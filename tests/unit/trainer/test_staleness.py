"""Tokens of old weights: their mask, and how they are counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from anygauge.observability.metrics import MOST_LAGS, staleness_metrics
from anygauge.trainer.plan import plan_steps, rollout_batch
from anygauge.trainer.staleness import mask_stale
from anygauge_hooks.rl import Group, Prompt, Sample
from anygauge_tests.scoring import sample as make_sample


def sample(versions: Sequence[int], mask: Sequence[int] | None = None, reward: float = 1.0) -> Sample:
    size = len(versions)
    loss_mask = tuple(mask or (1,) * size)
    return make_sample(size, loss_mask=loss_mask, weight_versions=tuple(versions), reward=reward)


def group(*samples: Sample) -> Group:
    return Group(prompt=Prompt(index=0, tokens=(1,), text=""), samples=samples)


def masks(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    return [each.loss_mask for group in groups for each in group.samples]


@pytest.mark.parametrize(
    ("max_lag", "expected"),
    [
        (None, [(1, 1, 1, 1), (1, 0, 1)]),
        (2, [(1, 1, 1, 1), (1, 0, 1)]),
        (1, [(0, 1, 1, 1), (1, 0, 1)]),
        (0, [(0, 0, 1, 1), (0, 0, 1)]),
    ],
)
def test_tokens_older_than_the_bound_are_masked(max_lag: int | None, expected: list[tuple[int, ...]]) -> None:
    groups = [group(sample([5, 6, 7, 7]), sample([6, 6, 7], mask=[1, 0, 1]))]
    assert masks(mask_stale(groups, 7, max_lag)) == expected


def test_nothing_else_of_a_sample_changes() -> None:
    groups = [group(sample([1, 2]), sample([2, 2]))]
    (found,) = mask_stale(groups, 2, 0)
    assert found.samples[0] == groups[0].samples[0]._replace(loss_mask=(0, 1))
    assert found.samples[1] is groups[0].samples[1]


def test_a_masked_token_is_in_no_mean_and_its_sample_in_its_group() -> None:
    groups = mask_stale([group(sample([1, 2], reward=1.0), sample([2, 2], reward=0.0))], 2, 0)
    (batch,) = plan_steps(rollout_batch(groups), 1, 1, "token_mean")
    assert batch.group_rewards == [[1.0, 0.0]]
    assert batch.loss_weights is not None
    assert batch.loss_weights.tolist() == pytest.approx([0.0, 1 / 3, 1 / 3, 1 / 3])


def test_a_step_that_is_too_old_as_a_whole_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mask_stale([group(sample([1, 1]))], 3, 1)
    assert "every token of the step is more than 1 versions old" in caplog.text


def test_lags() -> None:
    samples = [sample([3, 3, 3, 3]), sample([1, 2, 3], mask=[1, 0, 1]), sample([2, 2]), sample([])]
    assert staleness_metrics(samples, 3) == {
        "rollout/lag/mean": pytest.approx((2 + 2 * 1) / 8),
        "rollout/lag/max": 2,
        "rollout/lag/share_0": pytest.approx(5 / 8),
        "rollout/lag/share_1": pytest.approx(2 / 8),
        "rollout/lag/share_2": pytest.approx(1 / 8),
        "rollout/mixed_ratio": 0.25,
    }


def test_long_lags_are_counted_as_one() -> None:
    metrics = staleness_metrics([sample([0]), sample([50]), sample([100 - MOST_LAGS])], 100)
    assert metrics["rollout/lag/max"] == 100
    assert metrics[f"rollout/lag/share_{MOST_LAGS}"] == 1.0
    assert [name for name in metrics if "share" in name] == [f"rollout/lag/share_{MOST_LAGS}"]


@pytest.mark.parametrize("found", [sample([]), sample([1, 2], mask=[0, 0]), sample([1, 1], mask=[0, 0])])
def test_no_token_has_no_lag(found: Sample) -> None:
    assert staleness_metrics([found], 3) == {}
