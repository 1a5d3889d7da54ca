"""Rules of ``[profile]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from anygauge.config.schema import Config
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.engines import RolloutEngineSpec
    from anygauge_hooks.types import BackendSpec

__all__ = ["TORCH", "profile_rules"]

TORCH = "torch"
"""The kind that every backend has."""


def profile_rules(config: Config, backend: BackendSpec, plugins: Plugins) -> Iterator[ConfigProblem]:
    """Yield a kind of profile that nothing here records, and steps and ranks that there are not."""
    profile, engine = config.profile, config.rollout.engine
    spec: RolloutEngineSpec | None = plugins.find("register_rollout_engines", engine)
    is_server = spec is not None and spec.profiles
    kinds = (TORCH, *backend.profile_kinds, *((engine,) if is_server else ()))
    if profile.kind not in kinds:
        hint = f"backend {backend.name} with rollout.engine = {engine!r} records {', '.join(kinds)}"
        yield ConfigProblem(path="profile.kind", found=profile.kind, hint=hint)
    for step in profile.steps:
        if step > config.run.steps:
            hint = f"the run has run.steps = {config.run.steps}; name steps from 1 to that"
            yield ConfigProblem(path="profile.steps", found=step, hint=hint)
    servers = config.placement.rollout_workers or len(config.rollout.external)
    count = servers if profile.kind == engine else max(config.placement.train_workers, servers)
    for rank in profile.ranks:
        if rank >= count:
            hint = f"there is no such rank; name ranks from 0 to {count - 1}"
            yield ConfigProblem(path="profile.ranks", found=rank, hint=hint)
