"""Rules of ``[[rollout.groups]]`` and of engines that a run does not start."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from anygauge.config.schema import POLICY, Config, RolloutGroup
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.engines import RolloutEngineSpec

__all__ = ["engine_kinds", "external_rule", "groups_rule"]

Problems = Iterator[ConfigProblem]
_NEEDED: Mapping[str, set[str]] = {
    "prefill": {"decode"},
    "decode": {"prefill"},
    "encoder": {"regular", "prefill"},
}
"""Which other kinds of the same model there must be one of."""


def groups_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield problems of ``[[rollout.groups]]``: counts, paths, prefill without decode."""
    groups, workers = config.rollout.groups, config.placement.rollout_workers
    if not groups:
        return
    servers = sum(group.servers for group in groups)
    if workers and servers != workers:
        hint = f"the groups have {servers} servers together: write {servers}"
        yield ConfigProblem(path="placement.rollout_workers", found=workers, hint=hint)
    if all(group.model != POLICY for group in groups):
        hint = f"no group serves the policy: leave model out of one of them, or write {POLICY!r}"
        yield ConfigProblem(path="rollout.groups", found=[group.model for group in groups], hint=hint)
    for index, group in enumerate(groups):
        for key, value, hint in _of_group(group, groups):
            yield ConfigProblem(path=f"rollout.groups[{index}].{key}", found=value, hint=hint)


def _of_group(group: RolloutGroup, groups: Sequence[RolloutGroup]) -> Iterator[tuple[str, Any, str]]:
    together = [each for each in groups if each.model == group.model]
    kinds = {each.kind for each in together}
    paths = sorted({str(each.path) for each in together if each.path is not None})
    if group.model == POLICY and group.path is not None:
        yield (
            "path",
            str(group.path),
            "the policy is model.path; leave path out, or name another model",
        )
    elif group.model != POLICY and not paths:
        yield "path", None, f"required: where the model {group.model!r} is"
    elif len(paths) > 1:
        yield "path", str(group.path), f"groups of one model differ: {', '.join(paths)}"
    for kind, needed in _NEEDED.items():
        if group.kind == kind and not kinds & needed:
            yield "kind", kind, f"needs a group of kind {' or '.join(sorted(needed))} of the same model"


def engine_kinds(config: Config, plugins: Plugins) -> Problems:
    """Yield groups, and engines of others, that the rollout engine has no notion of."""
    rollout = config.rollout
    spec: RolloutEngineSpec | None = plugins.named("register_rollout_engines").get(rollout.engine)
    if spec is None:
        return
    if rollout.groups and spec.serve is None:
        hint = f"has no effect with rollout.engine = {rollout.engine!r}, which is not a server; leave it out"
        yield ConfigProblem(path="rollout.groups", found=len(rollout.groups), hint=hint)
        return
    for index, group in enumerate(rollout.groups):
        if group.kind not in spec.kinds:
            hint = f"servers of rollout.engine = {rollout.engine!r} are {' or '.join(spec.kinds)}"
            yield ConfigProblem(path=f"rollout.groups[{index}].kind", found=group.kind, hint=hint)
    if rollout.external and spec.attach is None:
        hint = f"rollout.engine = {rollout.engine!r} cannot be attached to; leave it out"
        yield ConfigProblem(path="rollout.external", found=list(rollout.external), hint=hint)


def external_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield keys that conflict with external engines."""
    rollout = config.rollout
    if not rollout.external:
        return
    for address in rollout.external:
        if (problem := _of_address(address, rollout.external)) is not None:
            yield ConfigProblem(path="rollout.external", found=address, hint=problem)
    if config.placement.rollout_workers:
        hint = "a run with rollout.external starts no servers; leave one of them out"
        yield ConfigProblem(
            path="placement.rollout_workers", found=config.placement.rollout_workers, hint=hint
        )
    if rollout.groups:
        hint = "has no effect with rollout.external, whose engines the run does not start; leave it out"
        yield ConfigProblem(path="rollout.groups", found=len(rollout.groups), hint=hint)
    if config.debug.mode == "rollout_only":
        hint = "trains nothing, so the engines of rollout.external never get the model's weights"
        yield ConfigProblem(path="debug.mode", found=config.debug.mode, hint=hint)


def _of_address(address: str, all_of_them: Sequence[str]) -> str | None:
    place = _place(address)
    if place is None:
        return "write http://HOST:PORT"
    places = [_place(each) for each in all_of_them]
    return "is listed twice; list it once" if places.count(place) > 1 else None


def _place(address: str) -> tuple[str, int] | None:
    """Return host and port, or ``None`` if that is not all that an address says."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    more = "@" in parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment
    return (host, port) if parts.scheme == "http" and host and port and not more else None
