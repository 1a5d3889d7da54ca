"""Contexts that rollouts and the producer run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anygauge.rollout.functions import UserFunctions
from anygauge.rollout.scoring import ScoringQueue
from anygauge.rollout.text import TextTools
from anygauge_hooks.data import DataSource
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import Generator

if TYPE_CHECKING:
    from anygauge.config.schema import Rollout as RolloutConfig

__all__ = ["ProducerContext", "RolloutContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Engines, functions and text tools that samples are made with."""

    config: RolloutConfig
    generator: Generator
    functions: UserFunctions
    text: TextTools
    engines: Mapping[str, Generator] = field(default_factory=dict)
    """Engines of models other than the trained one, by name."""
    vocab_size: int | None = None
    """Vocabulary size of the model: all token ids of an engine must be below it; ``None`` if it is
    unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerContext:
    """Data source, sampling parameters and scorer of a producer."""

    rollout_context: RolloutContext
    source: DataSource
    seeds: Callable[[int], Sequence[int]]
    """Seeds for each rollout of a group, from the number of prompts drawn before it in the run."""
    params: SamplingParams
    scorer: ScoringQueue | None = None
    """``None`` where the rollout function gives the rewards, or none is needed."""
    config: RolloutConfig
    """Which groups a step needs; rollout functions see that of :attr:`rollout_context`."""
    name: str = ""
    """Beginning of the names of its groups, which are unique in the run."""
    max_requests: int | None = None
    """Requests that the engines have at once, at most; ``None`` for any number."""
    max_unscored_ratio: float = 0.1
    """Share of a step's rollouts that may fail to be scored."""
