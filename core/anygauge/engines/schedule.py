"""Learning-rate schedule, in optimizer steps."""

from __future__ import annotations

import math

from anygauge.config import Config
from anygauge.config.schema import Train

__all__ = ["decay_steps", "learning_rate"]


def decay_steps(config: Config) -> int:
    """Return the optimizer step in which the decay ends.

    That is one step after the run: at its end the rate may be 0, and a step would train nothing.
    """
    steps = config.run.steps - config.critic.warmup_steps
    return max(steps * config.optimizer_steps, config.train.warmup_steps) + 1


def learning_rate(train: Train, step: int, total: int) -> float:
    """Return the learning rate of an optimizer step, as Megatron's scheduler does.

    :param step: From 1.
    :param total: Result of :func:`decay_steps`.
    """
    if train.warmup_steps and step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    if step > total:
        return train.min_lr
    done = (step - train.warmup_steps) / (total - train.warmup_steps)
    return train.min_lr + 0.5 * (math.cos(math.pi * done) + 1) * (train.lr - train.min_lr)
