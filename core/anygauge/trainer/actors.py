"""What runs in a worker process: a train engine and a rollout engine side by side, behind a few calls.

An actor is thin: it holds no state of the run beyond its engines, and a call takes and returns plain data.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anygauge.algorithms.losses import bind_options, policy_objective
from anygauge.config import Config
from anygauge_hooks.engines import LossFunction, RolloutEngine, TrainEngine, WorkerContext
from anygauge_hooks.rl import Prompt, Sample, SamplingParams, TrainSample

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ActorWorker", "TrainShare", "make_loss"]

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class TrainShare:
    """One rank's part of one optimizer step."""

    samples: tuple[TrainSample, ...]
    weights: tuple[Sequence[float], ...]
    """Per sample and response token: its share in the mean of the whole step."""


def make_loss(config: Config, context: WorkerContext) -> LossFunction:
    """Return the objective that the config describes."""
    algorithm = config.algorithm
    policy_loss = context.plugins.get("register_policy_losses", algorithm.policy_loss).fn
    bound = bind_options(
        policy_loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    return policy_objective(
        bound, kl_coef=algorithm.kl_coef, kl_type=algorithm.kl_type, entropy_coef=algorithm.entropy_coef
    )


class ActorWorker:
    """The actor role, the reference role that shares its process, and their rollout engine."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        self.config = config
        self.loss = make_loss(config, context)
        plugins = context.plugins
        self.trainer: TrainEngine = plugins.get("register_train_engines", config.train.engine).make(
            config, context
        )
        self.engine: RolloutEngine = plugins.get("register_rollout_engines", config.rollout.engine).make(
            config, context
        )
        if config.algorithm.kl_coef:
            self.trainer.load_role(REFERENCE, str(config.reference.path or config.model.path))
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[list[Sample]]:
        """Return one sample per seed for each prompt."""
        start = time.perf_counter()
        samples = self.engine.generate(prompts, params, seeds) if prompts else []
        self._seconds["generate"] += time.perf_counter() - start
        return samples

    def train(self, steps: Sequence[TrainShare]) -> list[dict[str, float]]:
        """Take one optimizer step per share and return the metrics of each.

        The log-probs that the ratio is taken against, and the reference's, are those of the weights before
        the first step.
        """
        temperature = self.config.rollout.temperature
        samples = [sample for share in steps for sample in share.samples]
        old = self._old_log_probs(samples)
        reference = (
            self.trainer.log_probs(samples, temperature=temperature, role=REFERENCE)
            if self.config.algorithm.kl_coef
            else None
        )
        metrics, first = [], 0
        for share in steps:
            last = first + len(share.samples)
            step = self.trainer.train_step(
                share.samples,
                self.loss,
                temperature=temperature,
                weights=share.weights,
                old_log_probs=old[first:last],
                reference_log_probs=None if reference is None else reference[first:last],
                entropy_grad=self.config.algorithm.entropy_coef > 0,
            )
            metrics.append(dict(step))
            first = last
        return metrics

    def _old_log_probs(self, samples: Sequence[TrainSample]) -> Sequence[Tensor] | Sequence[Sequence[float]]:
        if self.config.algorithm.old_log_probs == "rollout":
            return [sample.rollout_log_probs for sample in samples]
        return self.trainer.log_probs(samples, temperature=self.config.rollout.temperature)

    def sync_weights(self, version: int) -> None:
        """Give the trained weights to the rollout engine."""
        start = time.perf_counter()
        self.engine.update_weights(self.trainer.weights(), version)
        self._seconds["weight_sync"] += time.perf_counter() - start

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face directory."""
        self.trainer.save_hf(path)

    def timings(self) -> Mapping[str, float]:
        """Return and reset the seconds spent in the engines since the last call, by phase."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return {**seconds, **self.trainer.timings()}

    def close(self) -> None:
        """Release the engines."""
        self.engine.close()
