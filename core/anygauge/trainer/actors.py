"""What runs in a worker process: a train engine and a rollout engine side by side, behind a few calls.

An actor is thin: it holds no state of the run beyond its engines, and a call takes and returns plain data.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.algorithms.losses import bind_options, policy_objective
from anygauge.config import Config
from anygauge.device import memory_phase
from anygauge.observability.memory import worker_memory
from anygauge.observability.performance import WorkerReport
from anygauge.trainer.dumps import PerToken, RecordedLoss, write_shares
from anygauge.trainer.plan import TrainShare
from anygauge.trainer.weight_parts import WeightBucket, WeightSender
from anygauge_hooks.engines import LossFunction, RolloutEngine, TrainEngine, WorkerContext
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.rl import Prompt, Sample, SamplingParams, TrainSample

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ActorWorker",
    "generates",
    "holds_engine",
    "holds_trainer",
    "log_prob_passes",
    "make_loss",
    "replays",
]

REFERENCE = "reference"
SFT = "sft"
"""The task, and the loss of it."""


def make_loss(config: Config, context: WorkerContext) -> LossFunction:
    """Return the objective that the config describes."""
    algorithm = config.algorithm
    losses = partial(context.plugins.get, "register_policy_losses")
    if config.run.task == SFT:
        return policy_objective(losses(SFT).fn)
    policy_loss = losses(algorithm.policy_loss).fn
    bound = bind_options(
        policy_loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    return policy_objective(
        bound, kl_coef=algorithm.kl_coef, kl_type=algorithm.kl_type, entropy_coef=algorithm.entropy_coef
    )


def holds_trainer(config: Config) -> bool:
    """Return whether the run trains."""
    return config.debug.mode != "rollout_only"


def replays(config: Config) -> bool:
    """Return whether the run takes what another run made; it has no place in the data to come back to."""
    return config.debug.replay_rollouts is not None or config.debug.replay_batches is not None


def log_prob_passes(config: Config) -> int:
    """Return how many forward passes over all samples come before the first optimizer step of a rollout."""
    if config.run.task == SFT:
        return 0
    return (config.algorithm.old_log_probs == "recompute") + compares(config)


def compares(config: Config) -> bool:
    """Return whether the objective compares the policy with a reference."""
    return config.algorithm.kl_coef > 0 and config.run.task != SFT


def holds_engine(config: Config) -> bool:
    """Return whether the workers that train generate too."""
    return generates(config) and not config.placement.rollout_workers


def generates(config: Config) -> bool:
    """Return whether the run generates, in whatever processes."""
    if config.debug.mode == "train_only":
        return False
    rewards = [config.reward, *(each.reward for each in config.eval.datasets.values() if each.reward)]
    scores = any(reward.function or reward.parts for reward in rewards)
    return config.run.task != SFT or (scores and bool(config.eval.data or config.eval.datasets))


class ActorWorker:
    """The actor role, the reference role that shares its process, and their rollout engine."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        self.config = config
        self.loss = make_loss(config, context)
        self._context = context
        self._device = context.device
        self._trainer = make_trainer(config, context) if holds_trainer(config) else None
        self._engine = make_engine(config, context) if holds_engine(config) else None
        self._sender = WeightSender(is_sender=context.rank == 0)
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def trainer(self) -> TrainEngine:
        """The train engine, in a run that trains."""
        assert self._trainer is not None, "the run does not train"
        return self._trainer

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine, in a run whose training workers generate."""
        assert self._engine is not None, "the workers that train do not generate"
        return self._engine

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[list[Sample]]:
        """Return one sample per seed for each prompt."""
        start = time.perf_counter()
        with memory_phase(self._device, "generate"):
            samples = self.engine.generate(prompts, params, seeds) if prompts else []
        self._seconds["generate"] += time.perf_counter() - start
        return samples

    def train(self, steps: Sequence[TrainShare], dump: str | None = None) -> list[dict[str, float]]:
        """Take one optimizer step per share and return the metrics of each.

        The log-probs that the ratio is taken against, and the reference's, are those of the weights before
        the first step.

        :param dump: File to write the shares and the log-probs of every pass to.
        """
        samples = [sample for share in steps for sample in share.samples]
        old, reference = self._old_log_probs(samples), self._reference_log_probs(samples)
        loss = RecordedLoss(self.loss)
        current: list[Tensor] = []
        metrics, first = [], 0
        for share in steps:
            last = first + len(share.samples)
            step = self.trainer.train_step(
                share.samples,
                loss if dump else self.loss,
                temperature=self._temperature,
                weights=share.weights,
                old_log_probs=old[first:last],
                reference_log_probs=None if reference is None else reference[first:last],
                entropy_grad=self.config.algorithm.entropy_coef > 0,
            )
            metrics.append(dict(step))
            current += loss.take()
            first = last
        if dump:
            self._write(Path(dump), steps, {"old": old, "reference": reference, "current": current})
        return metrics

    def _write(self, path: Path, steps: Sequence[TrainShare], passes: Mapping[str, PerToken | None]) -> None:
        """Write what was trained on, with the log-probs of the passes that there were."""
        taken = {name: values for name, values in passes.items() if values}
        write_shares(path, steps, taken, rank=self._context.rank, num_ranks=self._context.world_size)

    def _old_log_probs(self, samples: Sequence[TrainSample]) -> Sequence[Tensor] | Sequence[Sequence[float]]:
        if self.config.run.task == SFT or self.config.algorithm.old_log_probs == "rollout":
            return [sample.rollout_log_probs for sample in samples]
        return self.trainer.log_probs(samples, temperature=self._temperature)

    def _reference_log_probs(self, samples: Sequence[TrainSample]) -> list[Tensor] | None:
        if not compares(self.config):
            return None
        return self.trainer.log_probs(samples, temperature=self._temperature, role=REFERENCE)

    @property
    def _temperature(self) -> float:
        return 1.0 if self.config.run.task == SFT else self.config.rollout.temperature

    def negative_log_likelihood(self, samples: Sequence[TrainSample]) -> float:
        """Return the sum over the tokens that count, in nats."""
        log_probs = self.trainer.log_probs(samples, temperature=1.0)
        return -sum(
            float(values.dot(values.new_tensor(sample.loss_mask)))
            for values, sample in zip(log_probs, samples, strict=True)
        )

    def sync_weights(self, version: int) -> None:
        """Give the trained weights to the rollout engine, if there is one here."""
        if self._engine is None or self._trainer is None:
            return
        start = time.perf_counter()
        with memory_phase(self._device, "weight_sync"):
            self.engine.update_weights(self.trainer.weights(), version)
        self._seconds["weight_sync"] += time.perf_counter() - start

    def next_weights(self, max_bytes: int) -> WeightBucket:
        """Return the next part of the trained weights for engines in other processes; rank 0 has the data."""
        return self._sender.next(self.trainer.weights, max_bytes)

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face directory."""
        self.trainer.save_hf(path)

    def save_checkpoint(self, path: str) -> None:
        """Copy what a checkpoint needs and start to write it."""
        self.trainer.save_checkpoint(path)

    def checkpoint_written(self) -> bool | str:
        """Return whether the checkpoint is on disk, or why it cannot be: a run goes on without."""
        try:
            return self.trainer.checkpoint_written()
        except CheckpointError as error:
            return str(error.args[0])

    def load_checkpoint(self, path: str) -> None:
        """Restore a checkpoint."""
        self.trainer.load_checkpoint(path)

    def report(self) -> WorkerReport:
        """Return the seconds spent since the last call, by phase, and the memory in use, in bytes."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        trained = self._trainer.timings() if self._trainer else {}
        return {"seconds": {**seconds, **trained}, "memory": worker_memory(self._device)}

    def close(self) -> None:
        """Release the engines."""
        if self._engine is not None:
            self._engine.close()


def make_trainer(config: Config, context: WorkerContext) -> TrainEngine:
    """Return the train engine, with the weights of the reference where the objective compares with it."""
    make = context.plugins.get("register_train_engines", config.train.engine).make
    trainer: TrainEngine = make(config, context)
    if compares(config):
        trainer.load_role(REFERENCE, str(config.reference.path or config.model.path))
    return trainer


def make_engine(config: Config, context: WorkerContext) -> RolloutEngine:
    """Return the rollout engine."""
    engine: RolloutEngine = context.plugins.get("register_rollout_engines", config.rollout.engine).make(
        config, context
    )
    return engine
