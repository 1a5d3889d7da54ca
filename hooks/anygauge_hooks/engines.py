"""Interfaces of train engines and rollout engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from anygauge_hooks.types import WorkerContext

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from anygauge_hooks.algorithms import ValueLoss
    from anygauge_hooks.batch import TopKLogProbs, TrainBatch
    from anygauge_hooks.models import ModelSpec
    from anygauge_hooks.rollout import GenerateRequest, Generation
    from anygauge_hooks.serving import EngineServer, MemoryState, ServerKind
    from anygauge_hooks.settings import RunConfig
    from anygauge_hooks.types import BackendSpec, ConfigProblem, LoadedPlugins

__all__ = [
    "CriticEngine",
    "HasAdapters",
    "HasDecoderLayers",
    "HasSenders",
    "LossFunction",
    "LossInputs",
    "RolloutEngine",
    "RolloutEngineSpec",
    "SupportsOffload",
    "TrainEngine",
    "TrainEngineSpec",
    "WeightStream",
    "WorkerContext",
]

WeightStream = Iterable[tuple[str, "Tensor"]]
"""Full tensors under their Hugging Face names, in checkpoint order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch, flattened over its loss tokens. Tensors are on the device, and ``[T]`` unless said.

    A policy loss and a correction get 0 in every tensor where ``loss_mask`` is 0.
    """

    log_probs: Tensor
    """Under the weights being trained, float32, with gradient."""
    entropy: Tensor
    """In nats, float32; with gradient only if the entropy coefficient is not 0."""
    old_log_probs: Tensor
    """Under the weights that the ratio is taken against, float32."""
    rollout_log_probs: Tensor
    """As the rollout engine reported them, float32."""
    reference_log_probs: Tensor | None
    """Under the frozen reference, float32; ``None`` without a KL term."""
    advantages: Tensor
    """float32."""
    loss_mask: Tensor
    """float32, 1 where a token counts."""
    loss_weights: Tensor
    """float32: the share of each token in the mean over the whole step, mask included. ``sum(x * weights)``
    over every micro-batch and every data-parallel rank is the aggregated value of ``x``."""
    metric_weights: Tensor | None = None
    """float32: the share of each token in the mean of a metric, where a correction has changed
    ``loss_weights``; else ``None``, and they are the same."""
    samples: Sequence[int] = ()
    """Which samples of the step the tokens are of, in their order."""
    lengths: Sequence[int] = ()
    """How many tokens each of these samples has; they add up to ``T``."""
    teacher_top_k_log_probs: Tensor | None = None
    """``[T, K + 1]``, float32, the teacher's log-probs of its top-k tokens, and last that of all others;
    ``None`` without such a term."""
    top_k_log_probs: Tensor | None = None
    """``[T, K + 1]``, those of the same tokens under the weights being trained, with gradient."""


LossFunction = Callable[["LossInputs"], tuple["Tensor", Mapping[str, "Tensor"]]]
"""Returns the scalar loss contribution of a micro-batch, and metrics that add up over micro-batches the same
way (each already multiplied by ``loss_weights``, or ``metric_weights`` if there are any, and summed)."""


class TrainEngine(Protocol):
    """A model with, for the roles that train, an optimizer.

    Several methods take the same :class:`~anygauge_hooks.batch.TrainBatch` object in a step, so an engine can
    plan and pack it once.
    """

    def log_probs(self, batch: TrainBatch, *, temperature: float, role: str = "actor") -> Tensor:
        """Return the log-probabilities of all response tokens under a role's weights.

        :param batch: Samples of this data-parallel rank.
        :param role: ``"actor"``, or a role whose weights :meth:`load_role` keeps.
        :returns: ``[T]``, float32, on the host.
        """

    def top_k_log_probs(
        self, batch: TrainBatch, count: int, *, temperature: float, role: str = "actor"
    ) -> TopKLogProbs:
        """Return the top-k tokens in the place of each response token, as :meth:`log_probs` does.

        :param count: Number of tokens, at most the vocabulary's.
        """

    def train_step(
        self, batch: TrainBatch, loss: LossFunction, *, temperature: float, entropy_grad: bool
    ) -> Mapping[str, float]:
        """Take one optimizer step on this rank's mini-batch and return the metrics of the whole step.

        :param batch: With every column that the loss reads. Without ``old_log_probs`` the ratio is taken
            against the weights of this step: the loss gets its own log-probs, detached.
        :raises NonFiniteError: The loss or the gradient norm is not finite; no weight was changed.
        """

    def load_role(self, role: str, path: str) -> None:
        """Keep host copies of another role's weights, read from a Hugging Face directory."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names. A collective: every rank iterates to the end."""

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face directory. A collective; rank 0 writes."""

    def save_checkpoint(self, path: str) -> None:
        """Copy everything that an exact resume needs to the host, and start to write it into a directory.

        Returns once training may go on. A collective: each rank writes files of its own, the last of them a
        JSON object ``rank-00000.json`` with the number of the rank.
        """

    def checkpoint_written(self) -> bool:
        """Return whether the checkpoint of :meth:`save_checkpoint` is on disk.

        :raises CheckpointError: It could not be written.
        """

    def load_checkpoint(self, path: str) -> None:
        """Restore a checkpoint of :meth:`save_checkpoint`; the next step is as in an uninterrupted run.

        :raises CheckpointError: It is incomplete, or of another model or layout; nothing was changed.
        """

    def data_parallel_sum(self, values: Tensor) -> Tensor:
        """Return the sum of a small host tensor over data-parallel ranks, the same on each. A collective.

        Context-, tensor- and pipeline-parallel ranks of one data-parallel rank have the same samples, counted
        once.
        """

    def timings(self) -> Mapping[str, float]:
        """Return and reset the seconds spent since the last call, by phase (``forward_backward``, ...)."""


class SupportsOffload(Protocol):
    """An engine that shares its device with others, and can release its memory (sleep)."""

    def set_memory_state(self, state: MemoryState) -> None:
        """Sleep or wake up: change from any memory state to this one.

        What is given up is kept in host memory, but for gradients and other things that the next step makes
        again: a step after ``"nothing"`` and ``"everything"`` is bit for bit the step without. With
        ``"weights"`` a train engine yields :meth:`TrainEngine.weights`, and anything else is an error that
        says so; with ``"nothing"`` everything is. A collective.
        """


@runtime_checkable
class HasSenders(Protocol):
    """A train engine with several ranks that each send weights they hold, so that no rank gathers all."""

    def weights_by_sender(self) -> Mapping[int, Iterator[tuple[str, Tensor]]]:
        """Return the weights of :meth:`TrainEngine.weights` by the rank that sends them. A collective.

        Each tensor is in one of the iterators. Every rank iterates each to its end, in order: the rank that
        sends it gets whole tensors, and the others get nothing but give their shards.
        """


@runtime_checkable
class HasAdapters(Protocol):
    """A train engine that can yield the adapters that it trains by themselves."""

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that are trained, whole, under their names in the model: ``....lora_A.weight``.

        A collective: every rank iterates to the end. Only those of rank 0 are sent.
        """


@runtime_checkable
class HasDecoderLayers(Protocol):
    """A train engine whose layers ``anygauge check-model`` can compare with transformers'."""

    def decoder_layers(self) -> Sequence[Module]:
        """Return the decoder layers of this rank in order, without towers.

        Their first argument or ``hidden_states`` and their first result are hidden states whose last
        dimension is the hidden size, and tokens of a micro-batch lie end to end in the others.
        """


class CriticEngine(Protocol):
    """A model that expects the rewards, with an optimizer of its own."""

    def values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's value before each response token. It does not depend on the temperature.

        :param batch: Samples of this data-parallel rank.
        :returns: ``[T]``, float32, on the host.
        """

    def train_values(self, batch: TrainBatch, loss: ValueLoss) -> Mapping[str, float]:
        """Take one optimizer step on this rank's mini-batch and return the metrics of the whole step.

        :param batch: With loss weights, values and returns.
        :raises NonFiniteError: The loss or the gradient norm is not finite; no weight was changed.
        """

    def save_hf(self, path: str) -> None:
        """Do as :meth:`TrainEngine.save_hf`: a directory that ``critic.path`` takes."""

    def save_checkpoint(self, path: str) -> None:
        """Do as :meth:`TrainEngine.save_checkpoint`."""

    def checkpoint_written(self) -> bool:
        """Do as :meth:`TrainEngine.checkpoint_written`."""

    def load_checkpoint(self, path: str) -> None:
        """Do as :meth:`TrainEngine.load_checkpoint`."""

    def timings(self) -> Mapping[str, float]:
        """Return and reset the seconds spent since the last call, by phase."""


class RolloutEngine(Protocol):
    """An engine in a worker process, behind the :class:`~anygauge_hooks.rollout.Generator` of the driver."""

    version: int
    """Version of the weights that it serves."""

    def answer(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Answer the requests of one batch, in order.

        They differ in their tokens, seeds and media, and in ``max_new_tokens`` by less than a factor of 2.
        The same batch gets the same answers.

        :raises RolloutError: One of them cannot be served, or the last weight update failed.
        """

    def update_weights(self, weights: WeightStream, version: int) -> None:
        """Replace all weights. On error the engine refuses to generate until an update succeeds.

        :raises WeightMappingError: A tensor is missing, unknown or of the wrong shape.
        """

    def abort(self) -> None:
        """Interrupt a running :meth:`answer` from another thread; it returns the tokens so far."""

    def close(self) -> None:
        """Release the device memory and any process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineSpec:
    """A train engine that a config can name."""

    name: str
    make: Callable[[RunConfig, WorkerContext], TrainEngine]
    """Called in each worker with the config and the worker's context. Imports the engine's libraries."""
    make_critic: Callable[[RunConfig, WorkerContext], CriticEngine] | None = None
    """The same for a critic, with the config that is its own; ``None`` if the engine has none."""
    make_forward_only: Callable[[RunConfig, WorkerContext], TrainEngine] | None = None
    """The same for a model that is asked for log-probs alone, and has no optimizer."""
    supports_offload: bool = False
    """Whether its engines are :class:`SupportsOffload`, which ``placement.colocated`` needs."""
    supports_lora: bool = False
    """Whether its engines train adapters as ``[train.lora]`` says; without, the table is refused."""
    lora_bases: frozenset[str] = frozenset()
    """Values of ``train.lora.base`` that its engines have; others are refused."""
    prepare: Callable[[LoadedPlugins, BackendSpec], None] | None = None
    """Called with the process's plugins and its backend where a run has a ``train.provider``, before
    ``prepare_worker``: a provider may import the engine's libraries, and this must not."""
    preload: Callable[[LoadedPlugins, BackendSpec], None] | None = None
    """Called with the process's plugins and its backend as soon as a worker has its device, to import what
    :attr:`make` needs: until that is called, the run still reads its data."""
    describe_model: Callable[[ModelSpec, Mapping[str, Any]], object] | None = None
    """From a family and a Hugging Face config to what the engine computes with given weights: equal for two
    configs whose models may share their modules. A config that it cannot build raises
    :class:`~anygauge_hooks.errors.ConfigError`, or the ``KeyError``, ``ValueError`` or ``TypeError`` of a key
    that is missing or wrong. ``None`` builds any config, and compares the keys themselves."""
    check_model: Callable[[RunConfig, str, ModelSpec, Mapping[str, Any]], Iterable[ConfigProblem]] | None = (
        None
    )
    """Called while the config is checked with each model of a run that :attr:`describe_model` takes: config,
    key that names the model, such as ``"model.path"`` or ``"critic.path"``, family and Hugging Face config.
    Returns the keys that do not fit the model. Must not import the engine's libraries."""
    make_family: Callable[[Mapping[str, Any]], ModelSpec] | None = None
    """From a Hugging Face config whose architecture no plugin registers to a family of it, for an engine that
    builds models without :attr:`~anygauge_hooks.models.ModelSpec.engines`. Raises
    :class:`~anygauge_hooks.errors.ConfigError` for a model that it cannot build. Must not import the engine's
    libraries. ``None`` trains registered families alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineSpec:
    """A rollout engine that a config can name: one in the worker's process, or a server of its own."""

    name: str
    make: Callable[[RunConfig, WorkerContext], RolloutEngine] | None = None
    """Called in each worker with the config and the worker's context; ``None`` if it is a server."""
    serve: Callable[[RunConfig, WorkerContext], EngineServer] | None = None
    """The same for a server, which is yet to be started."""
    preload: Callable[[], None] | None = None
    """Called in each worker before :attr:`make`, as that of :class:`TrainEngineSpec`."""
    devices: Callable[[RunConfig], int] | None = None
    """Function from the config to the number of devices of each server; ``None`` is one."""
    context: Callable[[RunConfig, int | None], int | None] | None = None
    """From the config and the model's longest context to how many tokens it takes of a prompt and its
    response, also of one that goes on; a number that is ``None`` is any. ``None`` takes the model's."""
    releases_memory: bool = False
    """Whether its clients can :meth:`~anygauge_hooks.serving.EngineClient.set_memory_state`, with which
    ``placement.colocated`` has servers share devices with the trainers."""
    loads_adapters: bool = False
    """Whether its servers load adapters of peft, which ``weight_sync.transport = "adapter"`` sends."""
    profiles: bool = False
    """Whether its clients are :class:`~anygauge_hooks.serving.SupportsProfile`: then ``profile.kind`` may be
    the name of the engine."""
    starts_early: bool = False
    """Whether its servers are :class:`~anygauge_hooks.serving.SupportsEarlyStart`."""
    kinds: Sequence[ServerKind] = ("regular",)
    """Kinds of servers that it supports, for ``[[rollout.groups]]``."""
    attach: Callable[[RunConfig, str], EngineServer] | None = None
    """From the config and an address to a server that somebody else has started: its ``start`` looks whether
    it is the one that the run needs, its ``close`` lets go of it. ``None`` if there is no such thing."""
