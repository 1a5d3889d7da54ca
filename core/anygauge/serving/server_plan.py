"""Server plan: the servers that a config asks for, in start order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.config.schema import POLICY, RolloutGroup
from anygauge_hooks.serving import ServerKind

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["ServerPlan", "groups_of", "plan_servers"]

_READS_PROMPTS = ("regular", "prefill")
"""Kinds that ask the encoders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One server, as the config wants it."""

    rank: int
    """Rank of the worker that owns it: servers start in the order of their ranks, the encoders first."""
    wave: int
    """Servers of one wave start at once; those of the next once these answer."""
    kind: ServerKind
    model: str
    path: Path | None
    """Path of the model; ``None`` for the policy's own."""
    group: RolloutGroup
    needs_encoders: bool
    """Whether it is to be told the addresses of the encoders of its model when it starts."""

    @property
    def is_synced(self) -> bool:
        """Whether it gets the trained weights; encoders do not."""
        return self.model == POLICY and self.kind != "encoder"


def groups_of(config: Config) -> tuple[RolloutGroup, ...]:
    """Return the groups that the config names, or the one that it means without."""
    servers = len(config.rollout.external) or max(1, config.placement.rollout_workers)
    return config.rollout.groups or (RolloutGroup(servers=servers),)


def plan_servers(config: Config) -> tuple[ServerPlan, ...]:
    """Return every server in the order of ranks: encoders first, then the groups as they are written."""
    groups = sorted(groups_of(config), key=lambda group: group.kind != "encoder")
    plans: list[ServerPlan] = []
    encoders = {group.model for group in groups if group.kind == "encoder"}
    paths = {group.model: group.path for group in groups if group.path is not None}
    for group in groups:
        for _ in range(group.servers):
            plans.append(_plan(group, len(plans), encoders, paths.get(group.model)))
    return tuple(plans)


def _plan(group: RolloutGroup, rank: int, encoders: Collection[str], path: Path | None) -> ServerPlan:
    return ServerPlan(
        rank=rank,
        wave=1 if encoders and group.kind != "encoder" else 0,
        kind=group.kind,
        model=group.model,
        path=path,
        group=group,
        needs_encoders=group.kind in _READS_PROMPTS and group.model in encoders,
    )
