"""Config rules for SGLang servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from anygauge.config.modalities import modalities
from anygauge.config.schema import POLICY
from anygauge.plugins import probe_backend
from anygauge.serving.server_plan import plan_servers
from anygauge.serving.sglang.adapters import adapter_problems
from anygauge.serving.sglang.arguments import argument_problems
from anygauge.serving.sglang.client.media import LONGEST_S
from anygauge.serving.sglang.installed import Installed, how_to_install, installed_sglang
from anygauge.serving.sglang.keys import key_problems
from anygauge.serving.sglang.kinds import SPARE, context_room, plan_copies, plan_stages
from anygauge.serving.sglang.versions import LISTED, ServerApi, find_api
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.types import BackendSpec

__all__ = ["sglang_problems"]

ENGINE = "sglang"


def sglang_problems(config: Config, backend: BackendSpec) -> Iterator[ConfigProblem]:
    """Yield problems of the servers' keys, and keys without effect."""
    if config.rollout.engine != ENGINE:
        yield from _without_effect(config)
        return
    yield from key_problems(config)
    yield from _of_media(config)
    if config.rollout.external:
        yield from _of_others(config)
        return
    if not config.placement.rollout_workers and config.debug.mode != "train_only":
        hint = f"a server has a process of its own: write {_servers(config)}"
        yield ConfigProblem(path="placement.rollout_workers", found=0, hint=hint)
    installed = installed_sglang()
    yield from _installation(config, backend, installed)
    yield from argument_problems(config.rollout.sglang, "rollout.sglang", installed)
    for index, group in enumerate(config.rollout.groups):
        yield from argument_problems(group.sglang, f"rollout.groups[{index}].sglang", installed)
    yield from _without_tokenizer(config)
    yield from _not_updated(config, installed)
    if config.pushes_adapter:
        yield from adapter_problems(config)
    yield from _too_short(config)


def _without_effect(config: Config) -> Iterator[ConfigProblem]:
    rollout = config.rollout
    values: dict[str, Any] = {"sglang": rollout.sglang, "sglang_version": rollout.sglang_version}
    values |= {key: getattr(rollout, key) and "..." for key in ("api_key", "admin_api_key")}
    values |= {f"groups[{index}].sglang": group.sglang for index, group in enumerate(rollout.groups)}
    for key, value in values.items():
        if value:
            hint = f'has no effect with rollout.engine = "{rollout.engine}"; leave it out'
            yield ConfigProblem(path=f"rollout.{key}", found=value, hint=hint)


def _of_others(config: Config) -> Iterator[ConfigProblem]:
    """Yield what is wrong where somebody else has started the servers; SGLang need not be installed here."""
    if config.rollout.sglang:
        hint = "has no effect with rollout.external, whose engines the run does not start; leave it out"
        yield ConfigProblem(path="rollout.sglang", found=config.rollout.sglang, hint=hint)
    yield from _treatment(config)


def _of_media(config: Config) -> Iterator[ConfigProblem]:
    """Yield what servers cannot be shown, and towers that would be trained here and stay old there."""
    kinds = modalities(config)
    encodes = any(plan.kind == "encoder" and plan.model == POLICY for plan in plan_servers(config))
    if encodes and (unserved := sorted(kinds - {"image"})):
        hint = f'servers of kind "encoder" decode {" and ".join(unserved)} themselves, to other frames and '
        hint += "tokens than the run's; leave their group out, or write images alone"
        yield ConfigProblem(path="model.modalities", found=unserved, hint=hint)
    if "audio" in kinds and config.media.max_seconds > LONGEST_S:
        hint = f"servers of SGLang take recordings of at most {LONGEST_S} seconds"
        yield ConfigProblem(path="media.max_seconds", found=config.media.max_seconds, hint=hint)
    if encodes and "image" in kinds and "vision" not in config.train.freeze:
        hint = 'servers of kind "encoder" take no new weights: add "vision", or leave their group out'
        yield ConfigProblem(path="train.freeze", found=list(config.train.freeze), hint=hint)


def _servers(config: Config) -> int:
    return sum(group.servers for group in config.rollout.groups) or 1


def _installation(
    config: Config, backend: BackendSpec, installed: Installed | None
) -> Iterator[ConfigProblem]:
    treat_as = config.rollout.sglang_version
    if problems := list(_treatment(config)):
        yield from problems
    elif installed is not None:
        try:
            find_api(installed.version, treat_as=treat_as)
        except RolloutError as error:
            hint = f"{error.args[0]} {error.hint}"
            yield ConfigProblem(path="rollout.sglang_version", found=treat_as, hint=hint)
    elif probe_backend(backend).ok:  # a host without the backend only checks the config, for another
        hint = f"SGLang is not installed; install it: {how_to_install(backend)}"
        yield ConfigProblem(path="rollout.engine", found=ENGINE, hint=hint)


def _treatment(config: Config) -> Iterator[ConfigProblem]:
    """Yield a version that is to stand for another, and is none that was tested."""
    treat_as = config.rollout.sglang_version
    if treat_as is not None and treat_as not in LISTED:
        hint = f"must be a version that was tested: {', '.join(LISTED)}"
        yield ConfigProblem(path="rollout.sglang_version", found=treat_as, hint=hint)


def _too_short(config: Config) -> Iterator[ConfigProblem]:
    """Yield servers that do not take a prompt with its response."""
    room, length = (
        context_room(config, None),
        (config.data.max_prompt_tokens or 1) + config.rollout.max_new_tokens,
    )
    if room is not None and length > room:
        hint = (
            f"a prompt and its response may have {length} tokens, and servers with this context_length take "
        )
        hint += f"{room} (data.max_prompt_tokens + rollout.max_new_tokens must fit)"
        yield ConfigProblem(path="rollout.sglang.context_length", found=room + SPARE, hint=hint)


def _not_updated(config: Config, installed: Installed | None) -> Iterator[ConfigProblem]:
    """Yield what the servers' version cannot do with new weights."""
    sync, path = config.weight_sync, "weight_sync.transport"
    synced = [plan for plan in plan_servers(config) if plan.is_synced]
    if sync.transport != "disk" and any(plan_copies(config, plan) > 1 for plan in synced):
        hint = 'cannot update the copies of the weights that dp_size makes; write "disk", or more servers '
        hint += "instead of dp_size (placement.rollout_workers)"
        yield ConfigProblem(path=path, found=sync.transport, hint=hint)
    elif sync.transport == "distributed" and any(plan_stages(config, plan) > 1 for plan in synced):
        hint = 'SGLang numbers the processes of a broadcast without pp_size; write "tensor" or "disk"'
        yield ConfigProblem(path=path, found=sync.transport, hint=hint)
    api = _api(config, installed)
    if config.pushes_adapter and api is not None and not api.loads_adapters:
        hint = f"SGLang {api.version} never unloads an adapter whose request was aborted while it waited; "
        hint += "install a newer SGLang, or send merged weights, by another transport"
        yield ConfigProblem(path=path, found=sync.transport, hint=hint)
    if sync.pause == "in_place" and api is not None and not api.version_spans:
        hint = f"SGLang {api.version} tells one weight version for a response, which would be of several; "
        hint += 'write "retract" or "abort"'
        yield ConfigProblem(path="weight_sync.pause", found=sync.pause, hint=hint)


def _api(config: Config, installed: Installed | None) -> ServerApi | None:
    """Return how the servers are spoken to; where that is not known, it is a problem of its own."""
    if installed is not None:
        with suppress(RolloutError):
            return find_api(installed.version, treat_as=config.rollout.sglang_version)
    return None


def _without_tokenizer(config: Config) -> Iterator[ConfigProblem]:
    """Yield the strings that a server which knows tokens alone cannot look for."""
    tables = (config.rollout.sglang, *(group.sglang for group in config.rollout.groups))
    keys = {key.removeprefix("--").replace("-", "_") for table in tables for key in table if table[key]}
    if "skip_tokenizer_init" not in keys:
        return
    for path, stop in (
        ("rollout.stop", config.rollout.stop),
        *((f"eval.datasets.{name}.stop", each.stop or ()) for name, each in config.eval.datasets.items()),
    ):
        if stop:
            hint = "a server with skip_tokenizer_init gets no text; use stop_token_ids"
            yield ConfigProblem(path=path, found=list(stop), hint=hint)
