"""Train engines whose models are tables, for tests of objectives: a whole step takes milliseconds.

The logits of a token, and the critic's value before it, depend on the previous token alone. A step records
the loss and its gradient, and then does not follow it: before each step the table moves by a fixed amount, so
that ratios differ from 1 and a test can compute the weights of every step itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anygauge.config import Config
from anygauge.data.batch import ranges
from anygauge_hooks import hookimpl
from anygauge_hooks.algorithms import ValueInputs, ValueLoss
from anygauge_hooks.batch import TopKLogProbs, TrainBatch
from anygauge_hooks.engines import LossFunction, LossInputs, TrainEngineSpec, WorkerContext

__all__ = ["VOCABULARY", "Step", "TabularCritic", "TabularEngine", "TabularPlugin", "logits", "values"]

VOCABULARY = 6
NONE_LEFT = -1e4
"""Log-probability of all other tokens where there are none."""


class Step(NamedTuple):
    """An optimizer step."""

    loss: float
    gradient: Tensor
    """The shape of the table."""


def logits(path: str | Path, step: int = 0) -> Tensor:
    """Return the logits of a model, ``[V, V]``: a row for each previous token.

    :param path: Of the model, whose last part is the seed.
    :param step: How many optimizer steps have begun.
    """
    table = _draw(f"{Path(path).name} logits", (VOCABULARY, VOCABULARY)) * 1.5
    return table + sum(0.4 * _draw(f"logits {each}", table.shape) for each in range(step))


def values(path: str | Path, step: int = 0) -> Tensor:
    """Return the values of a critic, ``[V]``, by previous token; the arguments are as for :func:`logits`."""
    table = _draw(f"{Path(path).name} values", (VOCABULARY,))
    return table + sum(0.4 * _draw(f"values {each}", table.shape) for each in range(step))


def _draw(seed: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


class TabularEngine:
    """A :class:`~anygauge_hooks.engines.TrainEngine`, as far as a worker needs one to train."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        del context
        self.steps: list[Step] = []
        self.asked = 0
        """How many samples the policy's log-probs were asked of."""
        self._paths = {"actor": str(config.model.path)}

    def load_role(self, role: str, path: str) -> None:
        """Let a role have the logits of a path."""
        self._paths[role] = path

    def log_probs(self, batch: TrainBatch, *, temperature: float, role: str = "actor") -> Tensor:
        """Return the log-probabilities of all response tokens, ``[T]``."""
        self.asked += len(batch.lengths) if role == "actor" else 0
        rows, tokens = _rows(self._table(role) / temperature, batch)
        return _taken(rows, tokens).float()

    def top_k_log_probs(
        self, batch: TrainBatch, count: int, *, temperature: float, role: str = "actor"
    ) -> TopKLogProbs:
        """Return the top-k tokens in the place of each response token."""
        rows, tokens = _rows(self._table(role) / temperature, batch)
        ids = rows.topk(min(count, VOCABULARY)).indices
        return TopKLogProbs(ids, _with_remainder(rows, ids).float(), _taken(rows, tokens).float())

    def train_step(
        self, batch: TrainBatch, loss: LossFunction, *, temperature: float, entropy_grad: bool
    ) -> Mapping[str, float]:
        """Record the loss and its gradient; the next step finds other logits."""
        assert batch.advantages is not None
        assert batch.loss_weights is not None
        table = logits(self._paths["actor"], len(self.steps)).requires_grad_()
        rows, tokens = _rows(table / temperature, batch)
        entropy, teacher = -(rows.exp() * rows).sum(-1).float(), batch.teacher_top_k
        log_probs = _taken(rows, tokens).float()
        inputs = LossInputs(
            log_probs=log_probs,
            entropy=entropy if entropy_grad else entropy.detach(),
            old_log_probs=log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs,
            rollout_log_probs=batch.rollout_log_probs,
            reference_log_probs=batch.reference_log_probs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask.float(),
            loss_weights=batch.loss_weights,
            samples=range(len(batch.lengths)),
            lengths=batch.response_lengths,
            teacher_top_k_log_probs=None if teacher is None else teacher.log_probs,
            top_k_log_probs=None if teacher is None else _with_remainder(rows, teacher.ids).float(),
        )
        value, metrics = loss(inputs)
        self.steps.append(Step(value.item(), torch.autograd.grad(value, table)[0]))
        return {name: float(each) for name, each in metrics.items()}

    def data_parallel_sum(self, values: Tensor) -> Tensor:
        """Return the values: there is one rank."""
        return values

    def timings(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def _table(self, role: str) -> Tensor:
        return logits(self._paths[role], len(self.steps) if role == "actor" else 0)


class TabularCritic:
    """A :class:`~anygauge_hooks.engines.CriticEngine`, as far as a worker needs one to train."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        del context
        self.steps: list[Step] = []
        self._path = config.model.path

    def values(self, batch: TrainBatch) -> Tensor:
        """Return the value before each response token, ``[T]``."""
        return values(self._path, len(self.steps))[_before(batch)].float()

    def train_values(self, batch: TrainBatch, loss: ValueLoss) -> Mapping[str, float]:
        """Move the values, then record the loss and its gradient."""
        assert batch.values is not None
        assert batch.returns is not None
        assert batch.loss_weights is not None
        table = values(self._path, len(self.steps) + 1).requires_grad_()
        inputs = ValueInputs(
            values=table[_before(batch)].float(),
            old_values=batch.values,
            returns=batch.returns,
            loss_mask=batch.loss_mask.float(),
            loss_weights=batch.loss_weights,
        )
        value, metrics = loss(inputs)
        self.steps.append(Step(value.item(), torch.autograd.grad(value, table)[0]))
        return {name: float(each) for name, each in metrics.items()}

    def timings(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}


class TabularPlugin:
    """Provides ``train.engine = "tabular"``."""

    @hookimpl
    def register_train_engines(self) -> list[TrainEngineSpec]:
        """Return the engine."""
        engine: Any = TabularEngine
        critic: Any = TabularCritic
        return [TrainEngineSpec(name="tabular", make=engine, make_critic=critic, make_forward_only=engine)]


def _responses(batch: TrainBatch) -> Tensor:
    """Return where the response tokens are among all, ``[T]``."""
    ends = torch.tensor(batch.lengths).cumsum(0)
    return ranges(ends - torch.tensor(batch.response_lengths), batch.response_lengths)


def _before(batch: TrainBatch) -> Tensor:
    """Return the token before each response token, ``[T]``."""
    return batch.tokens[_responses(batch) - 1]


def _rows(table: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return the distributions of the response tokens, ``[T, V]``, and these, ``[T]``."""
    return table[_before(batch)].log_softmax(-1), batch.tokens[_responses(batch)]


def _taken(rows: Tensor, tokens: Tensor) -> Tensor:
    return rows.gather(1, tokens.long()[:, None])[:, 0]


def _with_remainder(rows: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of some tokens, and last that of all others, ``[R, K + 1]``."""
    others = rows.scatter(1, ids, -torch.inf)
    rest = others.logsumexp(-1) if ids.shape[1] < VOCABULARY else rows.new_full(rows.shape[:1], NONE_LEFT)
    return torch.cat([rows.gather(1, ids), rest[:, None]], 1)
