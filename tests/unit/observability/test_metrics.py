"""Metrics of rollouts and evaluations, by hand, and their step axes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from anygauge.observability.metrics import eval_metrics, rollout_metrics, with_step_axes
from anygauge_hooks.rl import FinishReason, Group, Prompt, Sample


def group(rewards: Sequence[float | None], lengths: Sequence[int], finish: FinishReason = "stop") -> Group:
    prompt = Prompt(index=0, tokens=(1,), text="a")
    samples = tuple(
        Sample(
            prompt_index=0,
            prompt_tokens=(1,),
            response_tokens=(2,) * length,
            log_probs=(-0.5,) * length,
            loss_mask=(1,) * length,
            weight_versions=(0,) * length,
            text="b",
            finish_reason=finish,
            seed=0,
            reward=reward,
        )
        for reward, length in zip(rewards, lengths, strict=True)
    )
    return Group(prompt=prompt, samples=samples)


def test_rollout_metrics() -> None:
    groups = [group([0.0, 1.0], [2, 4]), group([1.0, 1.0], [1, 9], finish="length")]
    assert rollout_metrics(groups) == {
        "rollout/reward_mean": 0.75,
        "rollout/reward_std": pytest.approx(0.1875**0.5),
        "rollout/reward_min": 0.0,
        "rollout/reward_max": 1.0,
        "rollout/zero_variance_ratio": 0.5,
        "rollout/samples": 4,
        "rollout/response_length_mean": 4.0,
        "rollout/response_length_max": 9,
        "rollout/truncated_ratio": 0.5,
    }


def test_eval_metrics() -> None:
    assert eval_metrics([group([0.0, 1.0], [1, 1]), group([0.0, 0.0], [3, 3])]) == {
        "eval/reward_mean": 0.25,
        "eval/reward_best": 0.5,
        "eval/prompts": 2,
        "eval/response_length_mean": 2.0,
        "eval/response_length_max": 3,
        "eval/truncated_ratio": 0.0,
    }


def test_an_unscored_sample_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="not scored"):
        rollout_metrics([group([1.0, None], [1, 1])])


def test_every_group_gets_its_step() -> None:
    metrics = {"train/loss": 0.5, "train/entropy": 1.0, "perf/step_time_s": 2.0}
    assert with_step_axes(metrics, 7) == {"train/step": 7, "perf/step": 7, **metrics}


def test_a_step_of_its_own_is_kept() -> None:
    assert with_step_axes({"train/loss": 0.5, "train/step": 28}, 7) == {"train/step": 28, "train/loss": 0.5}
