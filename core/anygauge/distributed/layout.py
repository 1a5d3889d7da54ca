"""Parallel layout: each rank's part of the model and of the data, in Megatron's order of ranks.

Neighboring ranks share a tensor-parallel group, then come context, data and pipeline parallelism. Experts
divide the ranks of a pipeline stage once more: expert tensor parallelism first, then expert parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from anygauge.config.rules.parallel import size_problems
from anygauge.config.schema import Config, Parallel
from anygauge_hooks.errors import ConfigError

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of one model, divided.

    :raises ConfigError: The sizes do not divide the ranks.
    """

    world_size: int
    parallel: Parallel

    def __post_init__(self) -> None:
        for problem in size_problems(self.world_size, self.parallel):
            raise ConfigError(
                f"{problem.path} = {problem.found} does not fit {self.world_size} workers.", hint=problem.hint
            )

    @property
    def data(self) -> int:
        """Data-parallel size, which the samples of a step are divided by."""
        sizes = self.parallel
        return self.world_size // (sizes.tensor * sizes.pipeline * sizes.context)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.parallel.pipeline

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a rank, which determines its samples."""
        return rank % self.stage_ranks // (self.parallel.tensor * self.parallel.context)

    def dp_ranks(self) -> list[int]:
        """Return the data-parallel rank of every rank."""
        return [self.dp_rank(rank) for rank in range(self.world_size)]

    def reporting_ranks(self) -> list[int]:
        """Return one rank for each data-parallel rank, which has all results of its samples.

        Losses are computed on the last pipeline stage alone.
        """
        first = self.world_size - self.stage_ranks
        shares = self.dp_ranks()[first:]
        return [first + shares.index(share) for share in range(self.data)]


def layout_of(config: Config) -> Layout:
    """Return the layout of the workers that train."""
    return Layout(config.placement.train_workers, config.train.parallel)
