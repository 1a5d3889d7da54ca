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
from anygauge_hooks import hookimpl
from anygauge_hooks.algorithms import ValueInputs, ValueLoss
from anygauge_hooks.engines import LossFunction, LossInputs, TopKLogProbs, TrainEngineSpec, WorkerContext
from anygauge_hooks.rl import TrainSample

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
        self._paths = {"actor": str(config.model.path)}

    def load_role(self, role: str, path: str) -> None:
        """Let a role have the logits of a path."""
        self._paths[role] = path

    def log_probs(
        self, samples: Sequence[TrainSample], *, temperature: float, role: str = "actor"
    ) -> list[Tensor]:
        """Return the log-probabilities of each sample's response tokens, ``[R]``."""
        table = self._table(role) / temperature
        return [_taken(_rows(table, each), _response(each)).float() for each in samples]

    def top_k_log_probs(
        self, samples: Sequence[TrainSample], count: int, *, temperature: float, role: str = "actor"
    ) -> list[TopKLogProbs]:
        """Return the top-k tokens in the place of each response token."""
        top_k, table = [], self._table(role) / temperature
        for each in samples:
            rows = _rows(table, each)
            ids = rows.topk(min(count, VOCABULARY)).indices
            sampled = _taken(rows, _response(each)).float()
            top_k.append(TopKLogProbs(ids, _with_remainder(rows, ids).float(), sampled))
        return top_k

    def train_step(
        self,
        samples: Sequence[TrainSample],
        loss: LossFunction,
        *,
        temperature: float,
        loss_weights: Sequence[Sequence[float]],
        old_log_probs: Sequence[Tensor] | Sequence[Sequence[float]],
        reference_log_probs: Sequence[Tensor] | None,
        entropy_grad: bool,
        teacher: Sequence[TopKLogProbs] | None = None,
    ) -> Mapping[str, float]:
        """Move the logits, then record the loss and its gradient."""
        table = logits(self._paths["actor"], len(self.steps) + 1).requires_grad_()
        rows = torch.cat([_rows(table / temperature, each) for each in samples])
        entropy = -(rows.exp() * rows).sum(-1).float()
        ids = None if teacher is None else torch.cat([each.ids for each in teacher])
        inputs = LossInputs(
            log_probs=_taken(rows, [token for each in samples for token in _response(each)]).float(),
            entropy=entropy if entropy_grad else entropy.detach(),
            old_log_probs=_flat(old_log_probs),
            rollout_log_probs=_flat([each.rollout_log_probs for each in samples]),
            reference_log_probs=None if reference_log_probs is None else _flat(reference_log_probs),
            advantages=_flat([each.advantages for each in samples]),
            loss_mask=_flat([each.loss_mask for each in samples]),
            loss_weights=_flat(loss_weights),
            samples=range(len(samples)),
            lengths=[each.response_length for each in samples],
            teacher_top_k_log_probs=None
            if teacher is None
            else torch.cat([each.log_probs for each in teacher]),
            top_k_log_probs=None if ids is None else _with_remainder(rows, ids).float(),
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

    def values(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Return the value before each response token, ``[R]``."""
        table = values(self._path, len(self.steps))
        return [table[_before(each)].float() for each in samples]

    def train_values(
        self,
        samples: Sequence[TrainSample],
        loss: ValueLoss,
        *,
        loss_weights: Sequence[Sequence[float]],
        old_values: Sequence[Tensor],
        returns: Sequence[Tensor],
    ) -> Mapping[str, float]:
        """Move the values, then record the loss and its gradient."""
        table = values(self._path, len(self.steps) + 1).requires_grad_()
        inputs = ValueInputs(
            values=torch.cat([table[_before(each)] for each in samples]).float(),
            old_values=_flat(old_values),
            returns=_flat(returns),
            loss_mask=_flat([each.loss_mask for each in samples]),
            loss_weights=_flat(loss_weights),
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


def _before(sample: TrainSample) -> list[int]:
    """Return the token before each response token."""
    return list(sample.tokens[-sample.response_length - 1 : -1])


def _response(sample: TrainSample) -> list[int]:
    return list(sample.tokens[-sample.response_length :])


def _rows(table: Tensor, sample: TrainSample) -> Tensor:
    """Return the distributions of the response tokens, ``[R, V]``."""
    return table[_before(sample)].log_softmax(-1)


def _taken(rows: Tensor, tokens: Sequence[int]) -> Tensor:
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def _with_remainder(rows: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of some tokens, and last that of all others, ``[R, K + 1]``."""
    others = rows.scatter(1, ids, -torch.inf)
    rest = others.logsumexp(-1) if ids.shape[1] < VOCABULARY else rows.new_full(rows.shape[:1], NONE_LEFT)
    return torch.cat([rows.gather(1, ids), rest[:, None]], 1)


def _flat(values: Sequence[Tensor] | Sequence[Sequence[float]]) -> Tensor:
    return torch.cat([torch.as_tensor(each, dtype=torch.float32) for each in values])
