"""Hooks of a backend that take the run's config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from anygauge.config import Config
from anygauge.config.changes import adjust
from anygauge.config.tree import flatten, plain
from anygauge.config.validate import keys, validate
from anygauge.kernels.table import KernelTable
from anygauge.plugins import Plugins
from anygauge.serving.sglang.arguments import argument_problems
from anygauge.serving.sglang.installed import installed_sglang
from anygauge.testing.conformance.process_state import rng_untouched, state_untouched
from anygauge.testing.conformance.recipes import RECIPES, adjusted, recipe
from anygauge_hooks.types import BackendSpec, ConfigChange, ConfigProblem, Device

pytestmark = pytest.mark.conformance

HOST = "cpu"
DTYPES = ("float32", "bfloat16")
KEYS = frozenset(path for path, _ in keys())
SECTIONS = frozenset(path.rpartition(".")[0] for path in KEYS)
OF_DEVICES = ("cluster", "placement", "rollout", "train", "weight_sync")
"""Tables whose keys depend on the device; the others say what is trained on what."""
SPELLED = re.compile(r"true|false|-?[0-9.]+", re.IGNORECASE)
"""Texts for values that are no texts."""
OF_THE_BACKEND = ("device", "base_gpu_id", "gpu_id_step", "enable_memory_saver", "max_total_tokens")
"""Arguments of a server that a backend decides, and a user does in other keys or not at all."""


@pytest.fixture(params=[*RECIPES.values()], ids=[*RECIPES])
def tables(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def config(tables: Mapping[str, Any], backend: BackendSpec, plugins: Plugins) -> Config:
    return adjusted(tables, backend, plugins)


def unchanging(plugins: Plugins, device: Device, hook: str, config: Config, **arguments: Any) -> list[Any]:
    """Return the items that a hook gives for a config, after a look at what the call changes: nothing."""
    before = config.model_dump()
    with rng_untouched(device), state_untouched():
        first, again = (plugins.collect(hook, config=config, **arguments) for _ in range(2))
    assert first == again
    assert config.model_dump() == before
    return first


# -------------------------------------------------------------------------
# adjust_config
# -------------------------------------------------------------------------


def test_changes_are_of_keys_that_exist(
    tables: Mapping[str, Any], plugins: Plugins, backend: BackendSpec, device: Device
) -> None:
    changes = unchanging(plugins, device, "adjust_config", recipe(tables), backend=backend)
    for change in changes:
        assert isinstance(change, ConfigChange)
        assert change.path in KEYS
        assert change.path.partition(".")[0] in OF_DEVICES, "it does not depend on a device"
        assert change.reason
        assert json.loads(json.dumps(change.value)) == change.value


def test_changes_are_the_same_for_a_config_that_has_them(
    config: Config, plugins: Plugins, backend: BackendSpec
) -> None:
    tree = config.model_dump(mode="json")
    again, _ = adjust(tree, config, backend, plugins, user_keys=())
    assert validate(again).config.model_dump() == config.model_dump()


def test_what_the_user_wrote_stays(plugins: Plugins, backend: BackendSpec) -> None:
    for name in DTYPES:
        config = recipe({"train": {"dtype": name}})
        tree = config.model_dump(mode="json")
        kept, _ = adjust(tree, config, backend, plugins, user_keys=flatten(tree))
        assert kept == tree


def test_the_chosen_precision_is_one_of_the_device(
    config: Config, plugins: Plugins, backend: BackendSpec, device: Device
) -> None:
    name = config.train.dtype or "float32"
    assert name in DTYPES
    ones = torch.ones(8, 8, dtype=getattr(torch, name), device=device.torch_device)
    assert bool(((ones @ ones) == 8).all())


# -------------------------------------------------------------------------
# check_config
# -------------------------------------------------------------------------


def test_problems_are_of_keys_that_exist(
    config: Config, plugins: Plugins, backend: BackendSpec, device: Device
) -> None:
    problems = unchanging(plugins, device, "check_config", config, backend=backend)
    values = flatten(config.model_dump())
    for problem in problems:
        assert isinstance(problem, ConfigProblem)
        assert plain(problem.path) in KEYS | SECTIONS
        assert isinstance(problem.hint, str)
        assert problem.hint
        assert problem.found == values.get(problem.path, problem.found)


@pytest.mark.parametrize("name", ["rl", "sft", "deterministic", "parallel", "float32"])
def test_a_plain_config_has_no_problem(plugins: Plugins, backend: BackendSpec, name: str) -> None:
    config = adjusted(RECIPES[name], backend, plugins)
    assert plugins.collect("check_config", config=config, backend=backend) == []


def test_options_that_a_provider_does_not_know_are_refused(plugins: Plugins, backend: BackendSpec) -> None:
    for provider in backend.providers:
        train = {"provider": provider, "provider_options": {"no_such_option": 1}}
        config = adjusted({"train": train}, backend, plugins)
        paths = [each.path for each in plugins.collect("check_config", config=config, backend=backend)]
        assert any(path.startswith("train.provider_options") for path in paths)


# -------------------------------------------------------------------------
# rollout_engine_args
# -------------------------------------------------------------------------


def engine_args(plugins: Plugins, config: Config, backend: BackendSpec, engine: str) -> Mapping[str, Any]:
    return plugins.merged("rollout_engine_args", config=config, backend=backend, engine=engine)


def test_arguments_are_those_of_the_engine(
    config: Config, plugins: Plugins, backend: BackendSpec, device: Device
) -> None:
    for engine in plugins.named("register_rollout_engines"):
        unchanging(plugins, device, "rollout_engine_args", config, backend=backend, engine=engine)
        given = engine_args(plugins, config, backend, engine)
        assert all(name.isidentifier() for name in given)
        assert json.loads(json.dumps(given)) == given
        assert not [value for value in given.values() if isinstance(value, str) and SPELLED.fullmatch(value)]
    assert engine_args(plugins, config, backend, "no_such_engine") == {}


def test_what_answers_a_hook_answers_something(plugins: Plugins, backend: BackendSpec) -> None:
    config = adjusted(RECIPES["colocated"], backend, plugins)
    if plugins.implementations("rollout_engine_args", backend):
        engines = plugins.named("register_rollout_engines")
        assert any(engine_args(plugins, config, backend, engine) for engine in engines)


def test_arguments_of_sglang_are_known_and_not_the_launchers(
    config: Config, plugins: Plugins, backend: BackendSpec
) -> None:
    given = engine_args(plugins, config, backend, "sglang")
    assert given.get("device", backend.device_type) == backend.device_type
    table = {name: value for name, value in given.items() if name not in OF_THE_BACKEND}
    assert list(argument_problems(table, "rollout.sglang", installed_sglang())) == []


def test_servers_that_share_devices_give_memory_back(plugins: Plugins, backend: BackendSpec) -> None:
    if backend.device_type == HOST:
        return
    apart, shared = (adjusted(RECIPES[name], backend, plugins) for name in ("served", "colocated"))
    if engine_args(plugins, apart, backend, "sglang") == engine_args(plugins, shared, backend, "sglang"):
        problems = plugins.collect("check_config", config=shared, backend=backend)
        assert "placement.colocated" in {problem.path for problem in problems}


# -------------------------------------------------------------------------
# get_spec_provider
# -------------------------------------------------------------------------


def providers(plugins: Plugins, backend: BackendSpec) -> Iterable[tuple[str | None, Config]]:
    """Yield the providers that can be chosen on this host, and no provider."""
    for name in (None, *backend.providers):
        config = adjusted({"train": {"provider": name or "none"}}, backend, plugins)
        if not plugins.collect("check_config", config=config, backend=backend):
            yield name, config


def test_a_provider_names_parts_of_a_layer(
    plugins: Plugins, backend: BackendSpec, kernels: KernelTable
) -> None:
    for _, config in providers(plugins, backend):
        provided = plugins.first("get_spec_provider", backend=backend, kernels=kernels, config=config)
        if provided is not None:
            assert unknown_parts(provided) == set()


def unknown_parts(provided: object) -> set[str]:
    from anygauge.engines.megatron.layers.provider import SpecProvider  # takes seconds, and few need it

    public = {name for name in dir(provided) if not name.startswith("_")}
    return {name for name in public if callable(getattr(provided, name))} - set(vars(SpecProvider))
