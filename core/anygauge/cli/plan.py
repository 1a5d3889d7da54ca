"""``anygauge plan``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.cli.devices import DeviceFacts, add_device_arguments, backend_of_gpu, device_facts

if TYPE_CHECKING:
    from anygauge.api.start import Loaded
    from anygauge.config import Config
    from anygauge.planning.plan import Plan
    from anygauge.planning.shape import ModelShape
    from anygauge.plugins import Plugins

__all__ = ["HELP", "add_arguments", "dry_run_plan", "planned", "run"]

HELP = "Show layout, batches, memory and time of a run before it starts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(takes_config_keys=True)
    parser.usage = (
        "anygauge plan CONFIG.toml [--section.key value ...] [--backend NAME] [--gpu NAME] "
        "[--device-memory GIB] [--json]"
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument(
        "--backend", metavar="NAME", help="default: that of --gpu, else the only usable accelerator, else cpu"
    )
    add_device_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")


def run(args: argparse.Namespace) -> int:
    """Print the plan; the status is 1 if the run cannot fit.

    :raises DoesNotFitError: Weights and optimizer alone need more than a device has.
    """
    from anygauge.api.start import load
    from anygauge.planning.fit import check_fit, plan_warnings
    from anygauge.planning.text import as_json, table_lines
    from anygauge.plugins import load_plugins

    loaded = load(
        args.config,
        list(args.overrides),
        say=_silent,
        backend=args.backend or backend_of_gpu(load_plugins(), args.gpu),
        is_dry=True,
        check_files=False,  # a plan needs the model's config.json alone
    )
    facts = device_facts(loaded.plugins, loaded.config.backend, args.gpu, args.device_memory)
    config, plan = planned(loaded, facts)
    warnings = list(plan_warnings(config, plan))
    if args.json:
        print(json.dumps(as_json(plan, warnings), indent=2))
    else:
        print(*table_lines(config, plan), sep="\n")
        _warn(warnings)
    check_fit(config, plan)
    return 0


def dry_run_plan(loaded: Loaded, *, is_probed: bool) -> Iterator[str]:
    """Yield the short form of a plan, or why there is none.

    :param is_probed: Whether the backend was found to run here, so that its device may be asked.
    :raises DoesNotFitError: After all lines: weights and optimizer alone need more than a device has.
    """
    from anygauge.planning.fit import check_fit, plan_warnings
    from anygauge.planning.text import short_lines
    from anygauge_hooks.errors import ConfigError

    backend = loaded.config.backend
    facts = device_facts(loaded.plugins, backend) if is_probed else DeviceFacts(None, None)
    try:
        config, plan = planned(loaded, facts)
    except ConfigError as error:
        yield f"no plan: {error.args[0]}"
        return
    yield from short_lines(config, plan)
    yield from (f"warning: {text}" for text in plan_warnings(config, plan))
    check_fit(config, plan)


def planned(loaded: Loaded, facts: DeviceFacts) -> tuple[Config, Plan]:
    """Return a config with paths of this host, and its plan.

    :raises ConfigError: The model's ``config.json`` is not here or does not tell its sizes, or the model
        cannot be divided as the config says.
    """
    from anygauge.config.rules.algorithm import reads_old_log_probs
    from anygauge.planning.plan import HOST_DEVICES, Assumptions, make_plan
    from anygauge.planning.rates import RATES
    from anygauge_hooks.resources import read_memory

    config, plugins, backend = loaded.config.config, loaded.plugins, loaded.config.backend
    shape = _shape("model.path", config, plugins)
    shared = min(config.placement.train_workers, HOST_DEVICES) if facts.is_host else 1
    given = Assumptions(
        backend=backend.name,
        master_bytes=backend.master_weight_bytes,
        device_bytes=None if facts.memory is None else facts.memory / shared,
        host_bytes=read_memory().total if facts.is_here and not facts.is_host else None,
        gpu=facts.gpu,
        rates=RATES.get(facts.gpu or ""),
        reads_old_log_probs=reads_old_log_probs(config, plugins),
        critic=_critic_shape(config, shape, plugins),
    )
    return config, make_plan(config, shape, given)


def _critic_shape(config: Config, policy: ModelShape, plugins: Plugins) -> ModelShape | None:
    from anygauge.config.rules.algorithm import has_critic

    if not has_critic(config, plugins):
        return None
    return policy if config.critic.path is None else _shape("critic.path", config, plugins)


def _shape(key: str, config: Config, plugins: Plugins) -> ModelShape:
    """Return the sizes of the model that a key names.

    :raises ConfigError: It has none, or cannot be divided as the config says.
    """
    from anygauge.config.families import with_defaults
    from anygauge.config.roles import as_language_model
    from anygauge.planning.model_sizes import model_shape, read_config

    directory = _directory(key, config)
    hf = as_language_model(read_config(directory))
    _check_division(key, config, hf, plugins)
    return model_shape(directory, with_defaults(plugins, hf, config.train.engine))


def _directory(key: str, config: Config) -> Path:
    """Return where a model's ``config.json`` is; a plan does not need the weights beside it.

    :raises ConfigError: It is a name whose ``config.json`` is not in the cache, or a directory without one.
    """
    from anygauge.config.model_files import missing_parts
    from anygauge.hub import cached_model, sizes_command
    from anygauge.hub.names import model_name
    from anygauge_hooks.errors import ConfigError

    path: Path = getattr(config, key.split(".")[0]).path
    name = model_name(key, path, config.model.revision if key == "model.path" else None)
    if name is None:
        if not os.path.isfile(path / "config.json"):
            raise ConfigError(
                f"A plan needs the sizes of {key} = {str(path)!r}: {missing_parts(path)[0]}.",
                hint="Name a Hugging Face directory, or a model that is in the cache.",
            )
        return path
    cached = cached_model(name, config.hub)
    if cached is None:
        raise ConfigError(
            f"A plan needs the sizes of {key} = {str(name)!r}, whose config.json is not in the cache.",
            hint=f"Run `{sizes_command(name, config.hub)}`, or name a Hugging Face directory; as a path, "
            f"{name.local_clause()}",
        )
    return cached


def _check_division(key: str, config: Config, hf: Mapping[str, Any], plugins: Plugins) -> None:
    from anygauge.config.rules.model import division_rule
    from anygauge_hooks.errors import ConfigError

    problems = division_rule(key, config, hf, plugins)
    lines = [f"{problem.path}: found {problem.found!r}; {problem.hint}" for problem in problems]
    if lines:
        hint = "`anygauge keys WORD` explains the keys that have a word."
        raise ConfigError("\n  ".join(["The config does not fit its model:", *lines]), hint=hint)


def _warn(warnings: Sequence[str]) -> None:
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr)


def _silent(text: str) -> None:
    """Say nothing of what loading a config fills in: the plan shows it."""
