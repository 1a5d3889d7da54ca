"""Seeds and sampling parameters of training and evaluation samples."""

from __future__ import annotations

from anygauge.config import Config
from anygauge.config.schema import EvalDataset
from anygauge.trainer.plan import sample_seeds
from anygauge_hooks.rl import SamplingParams

__all__ = ["eval_params", "eval_seeds", "group_seeds", "rollout_params", "rollout_seeds"]

TRAIN_STREAM, EVAL_STREAM = 0, 1
"""Streams of random numbers."""


def rollout_seeds(config: Config, step: int, num_prompts: int) -> list[list[int]]:
    """Return the seeds of a training step's samples."""
    return sample_seeds(config.run.seed, TRAIN_STREAM, step, num_prompts, config.rollout.samples_per_prompt)


def group_seeds(config: Config, number: int) -> list[int]:
    """Return the seeds of a group, from how many prompts were drawn before it in the run.

    Where each step trains on the prompts that it draws, they are those of :func:`rollout_seeds`.
    """
    step, place = divmod(number, config.rollout.prompts_per_step)
    return rollout_seeds(config, step + 1, place + 1)[place]


def eval_seeds(config: Config, num_prompts: int, num_samples: int) -> list[list[int]]:
    """Return the seeds of an evaluation: the same each time, so that only the policy changes in between."""
    return sample_seeds(config.run.seed, EVAL_STREAM, 0, num_prompts, num_samples)


def rollout_params(config: Config, forbidden: tuple[int, ...] = ()) -> SamplingParams:
    """Return how training samples are drawn.

    :param forbidden: Tokens that are never drawn; see :func:`anygauge.trainer.inputs.forbidden_tokens`.
    """
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        forbidden=forbidden,
    )


def eval_params(dataset: EvalDataset, forbidden: tuple[int, ...] = ()) -> SamplingParams:
    """Return how the samples of an evaluation data set are drawn.

    :param dataset: With every field filled in but the reward's.
    :param forbidden: As in :func:`rollout_params`.
    """
    assert dataset.max_new_tokens is not None
    assert dataset.temperature is not None
    assert dataset.top_p is not None
    assert dataset.top_k is not None
    assert dataset.stop is not None
    assert dataset.stop_token_ids is not None
    return SamplingParams(
        max_new_tokens=dataset.max_new_tokens,
        temperature=dataset.temperature,
        top_p=dataset.top_p,
        top_k=dataset.top_k,
        stop=dataset.stop,
        stop_token_ids=dataset.stop_token_ids,
        forbidden=forbidden,
    )
