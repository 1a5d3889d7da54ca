"""Actor: a worker with a train engine and, if it is embedded, a rollout engine.

An actor is thin: it holds no state of the run beyond its engines, and a call takes and returns plain data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from anygauge.algorithms.corrected_loss import CorrectedLoss, with_sample_sizes
from anygauge.algorithms.losses import bind_options, policy_objective
from anygauge.algorithms.on_policy import OnPolicyDifference
from anygauge.algorithms.values import value_loss
from anygauge.config import Config
from anygauge.config.roles import Components, critic_config, run_components
from anygauge.config.rules.algorithm import compares, estimator, has_critic, reads_old_log_probs
from anygauge.data.batch import mini_batches, select
from anygauge.distributed.layout import layout_of
from anygauge.observability.performance import WorkerReport
from anygauge.run_directory.dumps import RecordedLoss, model_facts, write_batch
from anygauge.serving.rollout_workers import GeneratingWorker, LocalPeer, make_engine, preload_engine
from anygauge.trainer.estimate import estimate
from anygauge.trainer.teacher import TEACHER, Teacher, make_teacher, maker
from anygauge.weight_sync.pusher import WeightPusher, make_pusher, takes_several_senders
from anygauge.weight_sync.report import SyncReport
from anygauge_hooks.algorithms import Correction
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import (
    CriticEngine,
    HasAdapters,
    HasSenders,
    LossFunction,
    LossInputs,
    SupportsOffload,
    TrainEngine,
    TrainEngineSpec,
    WorkerContext,
)
from anygauge_hooks.errors import CheckpointError, ConfigError
from anygauge_hooks.serving import MemoryState
from anygauge_hooks.weights import WeightPeer

if TYPE_CHECKING:
    from anygauge_hooks.types import BackendSpec, LoadedPlugins

__all__ = [
    "ActorWorker",
    "make_loss",
    "replays",
]

ACTOR, REFERENCE, CRITIC = "actor", "reference", "critic"
CRITIC_NAMES = {"grad_norm": "critic_grad_norm", "lr": "critic_lr"}
"""Metrics of the critic that would be the policy's."""
SFT = "sft"
"""The task, and the loss of it."""
POLL_S = 0.05


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
    if algorithm.correction:
        bound = CorrectedLoss(bound, corrections(config, context.plugins))
    return policy_objective(
        bound,
        kl_coef=algorithm.kl_coef,
        kl_type=algorithm.kl_type,
        entropy_coef=algorithm.entropy_coef,
        distill_kl_coef=algorithm.distill_kl_coef,
    )


def corrections(config: Config, plugins: LoadedPlugins) -> dict[str, Callable[[LossInputs], Correction]]:
    """Return the corrections that the config names, with their options bound."""
    find = partial(plugins.get, "register_corrections")
    return {name: partial(find(name).fn, **options) for name, options in config.algorithm.correction.items()}


def replays(config: Config) -> bool:
    """Return whether the run takes what another run made; it has no place in the data to come back to."""
    return config.debug.replay_rollouts is not None or config.debug.replay_batches is not None


class ActorWorker(GeneratingWorker):
    """The actor role, the roles that share its process, and the rollout engine.

    Reference and teacher borrow the actor's memory where they are of its size. The critic is an engine of its
    own.

    :param components: Components that the run builds; ``None`` takes those that the config asks for.
    """

    def __init__(
        self, config: Config, context: WorkerContext, *, components: Components | None = None
    ) -> None:
        super().__init__(context, "actor")
        components = components or run_components(config)
        self.config = config
        self.loss = make_loss(config, context)
        self._context = context
        self._layout = layout_of(config)
        self._estimator = estimator(config, context.plugins)
        self._reads_old = reads_old_log_probs(config, context.plugins)
        self._trainer = make_trainer(config, context) if components.trains else None
        self._teacher: Teacher | None = None
        self._critic: CriticEngine | None = None
        self._refused: str | None = None
        """Why the last checkpoint was not begun."""
        if components.learns:
            load_reference(config, self.trainer)
            self._teacher = make_teacher(config, context, self.trainer)
            self._critic = make_critic(config, context)
        if components.generates and not config.has_engines_apart:
            self._engine = make_engine(config, context)
        self._rollouts_trained = 0.0
        self._pusher: WeightPusher | None = None

    @staticmethod
    def preload(
        config: Config, plugins: LoadedPlugins, backend: BackendSpec, *, components: Components | None = None
    ) -> None:
        """Import what the engines need.

        :param components: As of the class.
        """
        components = components or run_components(config)
        train: TrainEngineSpec = plugins.get("register_train_engines", config.train.engine)
        if components.trains and train.preload is not None:
            train.preload(plugins, backend)
        if components.generates and not config.has_engines_apart:
            preload_engine(config, plugins)

    @property
    def trainer(self) -> TrainEngine:
        """The train engine, in a run that trains."""
        assert self._trainer is not None, "the run does not train"
        return self._trainer

    def train(
        self, batch: TrainBatch, dump: str | None = None, *, update_policy: bool = True
    ) -> list[dict[str, float]]:
        """Take the optimizer steps of a batch and return the metrics of each.

        The log-probs that the ratio is taken against, those of other models and the critic's values are of
        the weights before the first step. That step computes its own, so only what reads them earlier, or the
        later steps, ask for a pass.

        :param dump: File to write the batch and the log-probs of every pass to.
        :param update_policy: Or train the critic alone.
        """
        batch = replace(batch)  # the columns that are added stay here
        self._run_passes(batch, updates=update_policy)
        total = self.trainer.data_parallel_sum
        estimated = estimate(self.config.algorithm, self._estimator, batch, total)
        loss = RecordedLoss(self.loss)
        current: list[Tensor] = []
        metrics = []
        for part in self._mini_batches(batch):
            step = estimated | self._train_critic(part)
            if update_policy:
                step |= self._train_policy(part, loss if dump else self.loss)
            metrics.append(step)
            current += loss.take()
        if dump:
            self._write(Path(dump), batch, current)
        return metrics

    def _run_passes(self, batch: TrainBatch, *, updates: bool) -> None:
        """Ask the models about the samples.

        :param updates: Whether the policy's loss will read what they say, or the advantages alone.
        """
        if self._teacher is not None:
            self._teacher.evaluate(batch, updates=updates)
            asked = batch.teacher_log_probs is not None or batch.teacher_top_k is not None
            self._rollouts_trained += asked and self._borrows
        if self._reads_rollout:
            batch.old_log_probs = batch.rollout_log_probs
        elif self._reads_old:
            batch.old_log_probs = self._log_probs(batch, ACTOR)
        elif updates and len(batch.steps) > 1:
            batch.old_log_probs = self._later_log_probs(batch)
        if compares(self.config) if updates else self.config.algorithm.kl_reward_coef > 0:
            batch.reference_log_probs = self._log_probs(batch, REFERENCE)
        if self._critic is not None:
            batch.values = self._critic.values(batch)

    @property
    def _reads_rollout(self) -> bool:
        """Whether the ratio is taken against the log-probs of the rollout engine."""
        return self.config.run.task == SFT or self.config.algorithm.old_log_probs == "rollout"

    def _later_log_probs(self, batch: TrainBatch) -> Tensor:
        """Return the policy's log-probs of all optimizer steps but the first, and 0 in that."""
        later = select(batch, range(batch.steps[0], len(batch.lengths)))
        log_probs = self.trainer.log_probs(later, temperature=self._temperature)
        self._rollouts_trained += sum(later.lengths) / sum(batch.lengths)
        return torch.cat((torch.zeros(len(batch.loss_mask) - len(log_probs)), log_probs))

    def _mini_batches(self, batch: TrainBatch) -> list[TrainBatch]:
        """Return the samples of each optimizer step."""
        first, *others = mini_batches(batch)
        if not (self._reads_rollout or self._reads_old):
            first.old_log_probs = None
        return [first, *others]

    def _train_policy(self, batch: TrainBatch, loss: LossFunction) -> Mapping[str, float]:
        """Take one optimizer step."""
        metrics = self.trainer.train_step(
            batch,
            OnPolicyDifference(loss, batch.is_on_policy),
            temperature=self._temperature,
            entropy_grad=self.config.algorithm.entropy_coef > 0,
        )
        return with_sample_sizes(metrics)

    def _train_critic(self, batch: TrainBatch) -> dict[str, float]:
        """Take one optimizer step of the critic, if there is one."""
        if self._critic is None:
            return {}
        assert batch.returns is not None, "an estimator that needs values gives returns"
        metrics = self._critic.train_values(batch, partial(value_loss, clip=self.config.critic.value_clip))
        return {CRITIC_NAMES.get(name, name): value for name, value in metrics.items() if name != "loss"}

    def _write(self, path: Path, batch: TrainBatch, current: Sequence[Tensor]) -> None:
        """Write what was trained on, with the log-probs of the passes that there were.

        :param current: Log-probs of each sample, as the loss saw them; none if the policy was not trained.
        """
        if current and not (self._reads_rollout or self._reads_old):
            first = torch.cat([*current[: batch.steps[0]]])
            others = [] if batch.old_log_probs is None else [batch.old_log_probs[len(first) :]]
            batch.old_log_probs = torch.cat([first, *others])
        write_batch(
            path,
            batch,
            current,
            dp_rank=self._layout.dp_rank(self._context.rank),
            dp_size=self._layout.data,
            model=model_facts(self.config.model.path),
        )

    def _log_probs(self, batch: TrainBatch, role: str) -> Tensor:
        self._rollouts_trained += 1
        return self.trainer.log_probs(batch, temperature=self._temperature, role=role)

    @property
    def _temperature(self) -> float:
        return 1.0 if self.config.run.task == SFT else self.config.rollout.temperature

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        """Return the sum over the tokens that count, in nats."""
        lengths = list(batch.response_lengths)
        log_probs = torch.split(self.trainer.log_probs(batch, temperature=1.0), lengths)
        masks = torch.split(batch.loss_mask.float(), lengths)
        return -sum(float(values.dot(mask)) for values, mask in zip(log_probs, masks, strict=True))

    def push_weights(
        self, version: int, peers: Sequence[WeightPeer] = (), senders: Sequence[int] = ()
    ) -> SyncReport | None:
        """Send the trained weights to the rollout engine of this worker, or to those of the engines that are
        this rank's, and return how each came out of it; ``None`` where there is none.

        :param peers: Engines elsewhere; none where each worker has one.
        :param senders: The rank that sends to each of them.
        """
        own = [peer for peer, rank in zip(peers, senders, strict=True) if rank == self._context.rank]
        if self._engine is not None:
            own = [LocalPeer(address=f"the engine of rank {self._context.rank}", engine=self._engine)]
        with self._timed("weight_sync"):
            if isinstance(self.trainer, HasSenders) and self._may_all_send(peers, senders):
                parts = self.trainer.weights_by_sender()
                return self._pusher_to(peers).push_jointly(parts, version, peers, rank=self._context.rank)
            weights = self._pushed()
            if not own:
                for _ in weights:  # gathering them is a collective
                    pass
                return None
            return self._pusher_to(own).push(weights, version, own)

    def _pushed(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors that engines get, whole. A collective.

        :raises ConfigError: The train engine cannot yield its adapters by themselves.
        """
        if not self.config.pushes_adapter:
            return self.trainer.weights()
        if isinstance(self.trainer, HasAdapters):
            return self.trainer.adapter_weights()
        raise ConfigError(
            f"train.engine = {self.config.train.engine!r} yields no adapters by themselves.",
            hint="Send merged weights: set weight_sync.transport to another one.",
        )

    def _may_all_send(self, peers: Sequence[WeightPeer], senders: Sequence[int]) -> bool:
        """Return whether other ranks may send a part of what rank 0 is asked to send."""
        if not peers or any(senders):
            return False
        return takes_several_senders(self.config, self._context, peers)

    def _pusher_to(self, peers: Sequence[WeightPeer]) -> WeightPusher:
        if self._pusher is None:
            self._pusher = make_pusher(self.config, self._context, peers)
        return self._pusher

    def set_memory_state(self, state: MemoryState) -> None:
        """Set the memory state of the engines.

        Only the policy's weights are sent to rollout engines, so the others sleep at ``"weights"`` too.
        """
        from anygauge.distributed.process_groups import release_process_groups, reload_process_groups

        teacher = None if self._teacher is None or self._borrows else self._teacher.engine
        with self._timed("sleep" if state == "nothing" else "wake_up"):
            if state != "nothing":
                reload_process_groups()
            for engine in (self._critic, teacher):
                if engine is not None:
                    cast("SupportsOffload", engine).set_memory_state(
                        "everything" if state == "everything" else "nothing"
                    )
            cast("SupportsOffload", self.trainer).set_memory_state(state)
            if state == "nothing":
                release_process_groups()
                if self._pusher is not None:
                    self._pusher.release_buffers()
            self._device.empty_cache()

    def device_memory(self) -> Mapping[str, int]:
        """Return the memory of this worker's device, in bytes."""
        return self._device.memory()

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face directory; that of the critic is in it.

        An error here ends the workers, so a checkpoint that is being written is awaited before.
        """
        try:
            self.trainer.save_hf(path)
            if self._critic is not None:
                self._critic.save_hf(str(Path(path) / CRITIC))
        except CheckpointError:
            while self.checkpoint_written() is False:
                time.sleep(POLL_S)
            raise

    def save_checkpoint(self, path: str) -> None:
        """Copy what a checkpoint needs and start to write it; the critic's has a directory of its own.

        What goes wrong is for :meth:`checkpoint_written` to say.
        """
        self._refused = None
        if self._critic is not None:
            directory = Path(path) / CRITIC
            try:
                directory.mkdir(exist_ok=True)
            except OSError as error:
                self._refused = f"The checkpoint cannot be written: {error}."
                return
            self._critic.save_checkpoint(str(directory))
        self.trainer.save_checkpoint(path)

    def checkpoint_written(self) -> bool | str:
        """Return whether the checkpoint is on disk, or why it cannot be: a run goes on without."""
        if self._refused is not None:
            return self._refused
        try:
            is_critic_written = self._critic is None or self._critic.checkpoint_written()
            return self.trainer.checkpoint_written() and is_critic_written
        except CheckpointError as error:
            return str(error.args[0])

    def load_checkpoint(self, path: str) -> None:
        """Restore a checkpoint."""
        if self._critic is not None:
            self._critic.load_checkpoint(str(Path(path) / CRITIC))
        self.trainer.load_checkpoint(path)

    def report(self) -> WorkerReport:
        """Return what a worker tells, and how often the policy's engine was asked about all samples."""
        asked, self._rollouts_trained = self._rollouts_trained, 0.0
        return {**super().report(), "passes": {"log_probs": asked}}

    def close(self) -> None:
        """Release the rollout engine, and what sends weights."""
        if self._pusher is not None:
            self._pusher.close()
        super().close()

    @property
    def _borrows(self) -> bool:
        """Whether the teacher is in the policy's memory."""
        return self._teacher is not None and self._teacher.engine is self._trainer

    def _engine_seconds(self) -> Mapping[str, float]:
        engines = [each for each in (self._critic, self._trainer) if each is not None]
        seconds = {phase: value for engine in engines for phase, value in engine.timings().items()}
        if self._teacher is not None and not self._borrows:
            seconds[TEACHER] = sum(self._teacher.engine.timings().values())
        return seconds


def make_trainer(config: Config, context: WorkerContext) -> TrainEngine:
    """Return the train engine."""
    trainer: TrainEngine = context.plugins.get("register_train_engines", config.train.engine).make(
        config, context
    )
    return trainer


def load_reference(config: Config, trainer: TrainEngine) -> None:
    """Give the train engine the weights of the reference, where anything is compared with them."""
    if compares(config):
        trainer.load_role(REFERENCE, str(config.reference.path or config.model.path))


def make_critic(config: Config, context: WorkerContext) -> CriticEngine | None:
    """Return the critic's engine, if the advantage estimator needs values."""
    if not has_critic(config, context.plugins):
        return None
    critic: CriticEngine = maker(config, context, "make_critic", CRITIC)(critic_config(config), context)
    return critic
