"""Checks of ``[train.lora]``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from anygauge.config.lora import read_adapter_config
from anygauge.config.rules.file import no_directory
from anygauge.config.schema import Config, Lora
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.engines import TrainEngineSpec

__all__ = ["adapter_rule", "lora_rules"]

Problems = Iterator[ConfigProblem]
TABLE = "train.lora"


def lora_rules(config: Config, plugins: Plugins) -> Problems:
    """Yield keys of LoRA that have no effect, and what the train engine does not have."""
    lora = config.train.lora
    if not lora.is_on:
        for key, field in Lora.model_fields.items():
            if (value := getattr(lora, key)) != field.default:
                hint = f"has no effect without {TABLE}.rank or {TABLE}.path; set one of them"
                yield ConfigProblem(path=f"{TABLE}.{key}", found=value, hint=hint)
        return
    engines: Mapping[str, TrainEngineSpec] = plugins.named("register_train_engines")
    engine = engines.get(config.train.engine)
    if engine is not None and not engine.supports_lora:
        able = ", ".join(repr(name) for name, each in sorted(engines.items()) if each.supports_lora)
        hint = f"train.engine = {engine.name!r} has no LoRA; these have: {able or 'none'}"
        key = "path" if lora.rank is None else "rank"
        yield ConfigProblem(path=f"{TABLE}.{key}", found=getattr(lora, key), hint=hint)
    if engine is not None and lora.base is not None and lora.base not in engine.lora_bases:
        able = ", ".join(repr(name) for name, each in sorted(engines.items()) if lora.base in each.lora_bases)
        hint = f"train.engine = {engine.name!r} has no such base; these have: {able or 'none'}"
        yield ConfigProblem(path=f"{TABLE}.base", found=lora.base, hint=hint)
    if lora.path is not None and config.debug.mode == "rollout_only":
        hint = 'no train engine merges it with debug.mode = "rollout_only"; name a merged model as model.path'
        yield ConfigProblem(path=f"{TABLE}.path", found=str(lora.path), hint=hint)
    if config.train.freeze:
        hint = f"{TABLE} trains adapters alone: choose layers with {TABLE}.targets, leave this out"
        yield ConfigProblem(path="train.freeze", found=list(config.train.freeze), hint=hint)
    yield from _values(lora)


def _values(lora: Lora) -> Problems:
    if lora.dropout:
        hint = "must be 0: with dropout, log-probs of the passes of a step and of the rollout engine differ"
        yield ConfigProblem(path=f"{TABLE}.dropout", found=lora.dropout, hint=hint)
    if lora.targets is not None and not lora.targets:
        hint = "names no module; leave it out for all linear layers but the output layer"
        yield ConfigProblem(path=f"{TABLE}.targets", found=lora.targets, hint=hint)
    if isinstance(lora.targets, str):
        try:
            re.compile(lora.targets)
        except re.error as error:
            hint = f"no regular expression: {error}; write names as a list"
            yield ConfigProblem(path=f"{TABLE}.targets", found=lora.targets, hint=hint)


def adapter_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield an adapter that cannot be read, and keys that contradict it."""
    lora = config.train.lora
    if lora.path is None:
        return
    if not lora.path.is_dir():
        yield ConfigProblem(path=f"{TABLE}.path", found=str(lora.path), hint=no_directory(lora.path))
        return
    try:
        stored = read_adapter_config(lora.path)
    except CheckpointError as error:
        yield ConfigProblem(path=f"{TABLE}.path", found=str(lora.path), hint=f"{error.args[0]} {error.hint}")
        return
    for key in ("rank", "alpha"):
        value, own = getattr(lora, key), getattr(stored, key)
        if value is not None and value != own:
            hint = f"the adapter of {TABLE}.path has {own}; leave this out"
            yield ConfigProblem(path=f"{TABLE}.{key}", found=value, hint=hint)
