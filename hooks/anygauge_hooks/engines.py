"""What the trainer asks of a train engine and of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.rl import Prompt, Sample, SamplingParams, TrainSample
    from anygauge_hooks.types import BackendSpec, Device

__all__ = [
    "LossFunction",
    "LossInputs",
    "RolloutEngine",
    "RolloutEngineSpec",
    "TrainEngine",
    "TrainEngineSpec",
    "WeightStream",
    "WorkerContext",
]

WeightStream = Iterable[tuple[str, "Tensor"]]
"""Full tensors under their Hugging Face names, in checkpoint order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Who and where a worker process is."""

    rank: int
    world_size: int
    backend: BackendSpec
    device: Device
    plugins: Any
    """``anygauge.plugins.Plugins`` of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch, flattened over its loss tokens. All tensors are ``[T]`` and on the device."""

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
    weights: Tensor
    """float32: the share of each token in the mean over the whole step, mask included. ``sum(x * weights)``
    over every micro-batch and every data-parallel rank is the aggregated value of ``x``."""
    samples: Sequence[int] = ()
    """Which samples of the step the tokens are of, in their order."""
    lengths: Sequence[int] = ()
    """How many tokens each of these samples has; they add up to ``T``."""


LossFunction = Callable[["LossInputs"], tuple["Tensor", Mapping[str, "Tensor"]]]
"""Returns the scalar loss contribution of a micro-batch, and metrics that add up over micro-batches the same
way (each already multiplied by ``weights`` and summed)."""


class TrainEngine(Protocol):
    """A model with, for the roles that train, an optimizer."""

    def log_probs(
        self, samples: Sequence[TrainSample], *, temperature: float, role: str = "actor"
    ) -> list[Tensor]:
        """Return the log-probabilities of each sample's response tokens under a role's weights.

        :param samples: This data-parallel rank's share.
        :param role: ``"actor"``, or a role whose weights :meth:`load_role` keeps.
        :returns: One host tensor ``[R]`` per sample, float32, in the order of ``samples``.
        """

    def train_step(
        self,
        samples: Sequence[TrainSample],
        loss: LossFunction,
        *,
        temperature: float,
        weights: Sequence[Sequence[float]],
        old_log_probs: Sequence[Tensor] | Sequence[Sequence[float]],
        reference_log_probs: Sequence[Tensor] | None,
        entropy_grad: bool,
    ) -> Mapping[str, float]:
        """Take one optimizer step on this rank's share and return the metrics of the whole step.

        :param weights: Per sample and response token, the token's share in the mean of the whole step.
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
        """Return whether what :meth:`save_checkpoint` started is on disk.

        :raises CheckpointError: It could not be written.
        """

    def load_checkpoint(self, path: str) -> None:
        """Restore what :meth:`save_checkpoint` wrote: the next step is the one that would have come.

        :raises CheckpointError: It is incomplete, or of another model or layout; nothing was changed.
        """

    def timings(self) -> Mapping[str, float]:
        """Return and reset the seconds spent since the last call, by phase (``forward_backward``, ...)."""


class RolloutEngine(Protocol):
    """Generates responses."""

    version: int
    """Version of the weights that it serves."""

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[list[Sample]]:
        """Return one sample per seed for each prompt, in order. The same seed gives the same sample.

        :param seeds: For each prompt, one seed per sample.
        """

    def update_weights(self, weights: WeightStream, version: int) -> None:
        """Replace all weights. On error the engine refuses to generate until an update succeeds.

        :raises WeightMappingError: A tensor is missing, unknown or of the wrong shape.
        """

    def abort(self) -> None:
        """End a running :meth:`generate` soon, from another thread; it returns what it has."""

    def close(self) -> None:
        """Release the device memory and any process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineSpec:
    """A train engine that a config can name."""

    name: str
    make: Callable[[Any, WorkerContext], TrainEngine]
    """Called in each worker with the config and the worker's context. Imports the engine's libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineSpec:
    """A rollout engine that a config can name."""

    name: str
    make: Callable[[Any, WorkerContext], RolloutEngine]
