"""Rules of ``run.resume``: what may change when a run goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from anygauge.config.schema import Config
from anygauge.config.tree import is_inside
from anygauge_hooks.types import ConfigProblem

__all__ = ["CHANGEABLE", "resume_rule"]

CHANGEABLE = (
    *("data", "reward"),
    *("train.lr", "train.min_lr", "train.lr_schedule", "train.warmup_steps", "train.weight_decay"),
    *("train.clip_grad", "train.optimizer_steps", "train.global_batch_size"),
    *("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip", "algorithm.kl_coef"),
    *("algorithm.entropy_coef", "algorithm.loss_aggregation", "algorithm.normalize_advantages"),
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_new_tokens"),
)
"""Sections and keys that make another experiment, and that a checkpoint can go on with nevertheless."""


def resume_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield a resume of a run that is to be deleted, and keys that no resume may change."""
    run = config.run
    if run.resume and run.overwrite:
        hint = "run.overwrite deletes the run that run.resume continues; give one of them"
        yield ConfigProblem(path="run.resume", found=True, hint=hint)
    for key in run.accept_changes:
        if not is_inside(key, CHANGEABLE):
            hint = f"a resume cannot change it; it can change {', '.join(CHANGEABLE)}"
            yield ConfigProblem(path="run.accept_changes", found=key, hint=hint)
