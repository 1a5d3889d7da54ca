"""Metrics of rollouts by hand, and their step axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from anygauge.observability.metrics import conversation_metrics, rollout_metrics, with_step_axes
from anygauge.observability.responses import repeats, repetition_ratio, turn_metrics
from anygauge_hooks.rl import FinishReason, Group, Prompt, Sample
from anygauge_tests.scoring import sample as make_sample


def sample(
    raw: Any = 1.0, length: int = 1, *, reward: float | None = None, error: str | None = None, **fields: Any
) -> Sample:
    shaped = (raw if reward is None else reward) if error is None else None
    return make_sample(length, reward=shaped, raw_reward=None if error else raw, error=error, **fields)


def group(
    rewards: Sequence[float], lengths: Sequence[int], finish: FinishReason = "stop", dataset: str = ""
) -> Group:
    samples = (sample(r, n, finish_reason=finish) for r, n in zip(rewards, lengths, strict=True))
    return Group(prompt=Prompt(index=0, tokens=(1,), text="a", dataset=dataset), samples=tuple(samples))


def of(*samples: Sample) -> Group:
    return Group(prompt=Prompt(index=0, tokens=(1,), text="a"), samples=samples)


def number(raw: Any) -> float:
    return float(raw["score"] if isinstance(raw, dict) else raw)


def test_rollout_metrics() -> None:
    groups = [group([0.0, 1.0], [2, 4]), group([1.0, 1.0], [1, 9], finish="length")]
    assert rollout_metrics(groups, number) == {
        "rollout/raw_reward": 0.75,
        "rollout/reward": 0.75,
        "rollout/reward_std": pytest.approx(0.1875**0.5),
        "rollout/zero_std_ratio": 0.5,
        "rollout/failed_ratio": 0.0,
        "rollout/samples": 4,
        "rollout/response_len/mean": 4.0,
        "rollout/response_len/median": 3.0,
        "rollout/response_len/max": 9,
        "rollout/response_len/min": 1,
        "rollout/truncated_ratio": 0.5,
        "rollout/repetition_frac": 0.0,
        "passrate/pass@1": 0.75,
        "passrate/pass@2": 1.0,
    }


def test_raw_and_shaped_rewards_are_apart() -> None:
    groups = [of(sample({"score": 1.0, "format": 0.0}, reward=0.5), sample({"score": 0.0}, reward=-0.5))]
    metrics = rollout_metrics(groups, number)
    assert (metrics["rollout/raw_reward"], metrics["rollout/reward"]) == (0.5, 0.0)
    assert metrics["rollout/reward_std"] == 0.5


def test_what_could_not_be_scored_is_counted_and_left_out() -> None:
    groups = [of(sample(1.0, 2), sample(error="it hung", length=6)), of(sample(0.0), sample(0.0))]
    metrics = rollout_metrics(groups, number)
    assert metrics["rollout/failed_ratio"] == 0.25
    assert metrics["rollout/samples"] == 4
    assert metrics["rollout/raw_reward"] == pytest.approx(1 / 3)
    assert metrics["rollout/response_len/max"] == 6
    assert metrics["rollout/zero_std_ratio"] == 1.0
    assert metrics["passrate/pass@1"] == 0.5
    assert metrics["passrate/pass@2"] == 0.0, "of the prompts with two scored samples"


def test_without_any_score_there_is_no_reward() -> None:
    metrics = rollout_metrics([of(sample(error="it hung"))], number)
    assert metrics["rollout/failed_ratio"] == 1.0
    assert not [name for name in metrics if "reward" in name or name.startswith("passrate/")]
    assert all(math.isfinite(value) for value in metrics.values())


def test_an_unscored_sample_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="not scored"):
        rollout_metrics([of(sample(1.0), sample(1.0)._replace(reward=None))], number)


def test_data_sets_are_apart_where_there_is_more_than_one() -> None:
    groups = [
        group([1.0], [2], dataset="gsm8k"),
        group([0.0], [8], dataset="aime", finish="length"),
        group([0.0], [4], dataset="gsm8k"),
    ]
    metrics = rollout_metrics(groups, number)
    assert {name: value for name, value in metrics.items() if name.count("/") > 1 and "m" in name[8:13]} == {
        "rollout/gsm8k/raw_reward": 0.5,
        "rollout/gsm8k/response_len/mean": 3.0,
        "rollout/gsm8k/truncated_ratio": 0.0,
        "rollout/aime/raw_reward": 0.0,
        "rollout/aime/response_len/mean": 8.0,
        "rollout/aime/truncated_ratio": 1.0,
    }
    alone = rollout_metrics(groups[:1], number)
    assert not [name for name in alone if "gsm8k" in name]


def test_a_step_that_drew_from_one_data_set_of_several_has_its_metrics() -> None:
    metrics = rollout_metrics([group([1.0, 0.0], [2, 4], dataset="gsm8k")], number, datasets=2)
    assert metrics["rollout/gsm8k/raw_reward"] == 0.5
    assert metrics["rollout/gsm8k/response_len/mean"] == 3.0
    assert metrics["rollout/gsm8k/truncated_ratio"] == 0.0


def row(dataset: str, before: int, mask: Sequence[int]) -> Prompt:
    tokens, response = (1,) * before, (2,) * len(mask)
    return Prompt(index=0, tokens=tokens, text="a", dataset=dataset, response=response, loss_mask=tuple(mask))


def test_conversation_metrics() -> None:
    rows = [row("chats", 3, [1, 0, 1]), row("chats", 1, [1]), row("sums", 2, [1, 1])]
    of_all = {"train/samples": 3, "train/tokens": 5, "train/sequence_len/mean": 4.0}
    of_sums = {"train/sums/samples": 1, "train/sums/tokens": 2, "train/sums/sequence_len/mean": 4.0}
    of_chats = {"train/chats/samples": 2, "train/chats/tokens": 3, "train/chats/sequence_len/mean": 4.0}
    assert conversation_metrics(rows, datasets=2) == {**of_all, **of_chats, **of_sums}
    assert conversation_metrics(rows[2:], datasets=2).items() >= of_sums.items()
    assert len(conversation_metrics(rows[2:])) == 3, "nothing more to say of the only data set"


def test_a_data_set_that_could_not_be_scored_has_no_reward() -> None:
    failed = Group(
        prompt=Prompt(index=0, tokens=(1,), text="a", dataset="b"), samples=(sample(error="no grader"),)
    )
    metrics = rollout_metrics([group([1.0], [1], dataset="a"), failed], number)
    assert "rollout/a/raw_reward" in metrics
    assert "rollout/b/raw_reward" not in metrics
    assert "rollout/b/truncated_ratio" in metrics


def test_turns_are_runs_of_the_policys_tokens() -> None:
    masks = [(1, 1, 0, 0, 1), (0, 1), (1, 0, 1, 0, 1)]
    samples = [sample(length=len(mask), loss_mask=mask) for mask in masks]
    assert turn_metrics(samples) == {
        "multi_turn/rounds/mean": 2.0,
        "multi_turn/rounds/median": 2.0,
        "multi_turn/rounds/max": 3,
        "multi_turn/rounds/min": 1,
        "multi_turn/response_len_without_observations/mean": pytest.approx(7 / 3),
        "multi_turn/response_len_without_observations/median": 3.0,
        "multi_turn/response_len_without_observations/max": 3,
        "multi_turn/response_len_without_observations/min": 1,
    }


@pytest.mark.parametrize("mask", [(1, 1, 1), (0, 1, 1), (1, 1, 0), (0, 0, 0)])
def test_one_turn_has_no_turn_metrics(mask: tuple[int, ...]) -> None:
    assert turn_metrics([sample(length=3, loss_mask=mask)]) == {}


@pytest.mark.parametrize("period", [1, 2, 16, 17, 100, 256])
def test_a_passage_four_times_over_is_a_repetition(period: int) -> None:
    passage = list(range(period))
    times = max(4, -(-64 // period))
    start = [-1, *range(500, 600)]
    assert repeats(start + passage * times)
    assert repeats(start + passage * (times + 1) + passage[: period // 2])
    assert not repeats(start + passage * (times - 1))
    assert not repeats(start + passage * times + [-2])


def test_too_long_a_passage_is_not_looked_for() -> None:
    assert not repeats(list(range(257)) * 8)


def test_a_short_response_is_no_repetition() -> None:
    assert repetition_ratio([sample(length=63)]) == 0.0
    assert repetition_ratio([sample(length=64), sample(length=4)]) == 0.5
    assert not repeats(())


def test_every_group_gets_its_step() -> None:
    metrics = {"train/loss": 0.5, "train/entropy_loss": 1.0, "perf/step_time": 2.0}
    assert with_step_axes(metrics, 7) == {"train/step": 7, "perf/step": 7, **metrics}


def test_a_step_of_its_own_is_kept() -> None:
    assert with_step_axes({"train/loss": 0.5, "train/step": 28}, 7) == {"train/step": 28, "train/loss": 0.5}
