"""Values that plugins fill in. Covers adjust_config."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from anygauge.config import Config, LoadedConfig
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigConflictError, ConfigError, PluginError
from anygauge_hooks.types import BackendSpec, ConfigChange

Load = Callable[..., LoadedConfig]


class Sets:
    """A plugin that fills in one key."""

    def __init__(self, path: str, value: Any, *, only: str | None = None) -> None:
        self.path, self.value, self.only = path, value, only

    @hookimpl
    def adjust_config(self, config: Config, backend: BackendSpec) -> list[ConfigChange] | None:
        if self.only not in (None, backend.name):
            return None
        return [ConfigChange(path=self.path, value=self.value, reason="it is faster")]


def test_an_unset_key_is_filled_in_and_reported(
    load: Load, plugins: Plugins, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "anygauge.config")
    plugins.register(Sets("train.dtype", "bfloat16"), "quick")
    loaded = load()
    assert loaded.config.train.dtype == "bfloat16"
    assert [str(change) for change in loaded.changes] == ["train.dtype = 'bfloat16' (quick: it is faster)"]
    assert "train.dtype = 'bfloat16' (quick: it is faster)" in caplog.text


def test_a_backend_fills_in_for_itself_only(load: Load, plugins: Plugins) -> None:
    plugins.register(Sets("train.dtype", "bfloat16", only="fast"), "quick")
    assert load(backend="cpu").config.train.dtype is None
    assert load(backend="fast").config.train.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("tables", "overrides"),
    [
        ({"train": 'dtype = "float32"'}, []),
        ({"on.cpu.train": 'dtype = "float32"'}, []),
        ({}, ["--train.dtype", "float32"]),
    ],
)
def test_what_the_user_wrote_stays(
    load: Load, plugins: Plugins, tables: dict[str, str], overrides: list[str]
) -> None:
    plugins.register(Sets("train.dtype", "bfloat16"), "quick")
    loaded = load(tables, overrides)
    assert loaded.config.train.dtype == "float32"
    assert loaded.changes == ()


def test_none_that_the_user_wrote_stays(load: Load, plugins: Plugins) -> None:
    plugins.register(Sets("train.dtype", "bfloat16"), "quick")
    assert load({}, ["--train.dtype", "none"]).config.train.dtype is None


def test_a_key_of_an_open_table_is_filled_in_beside_the_users(load: Load, plugins: Plugins) -> None:
    plugins.register(Sets("train.megatron.a", 1), "quick")
    assert load({"train.megatron": "b = 2"}).config.train.megatron == {"a": 1, "b": 2}
    assert load({"train.megatron": "a = 2"}).config.train.megatron == {"a": 2}


def test_a_whole_table_never_replaces_one_that_the_user_wrote_in(load: Load, plugins: Plugins) -> None:
    plugins.register(Sets("train.megatron", {"a": 1}), "quick")
    assert load({"train.megatron": "b = 2"}).config.train.megatron == {"b": 2}
    assert load().config.train.megatron == {"a": 1}


def test_two_values_for_one_key_name_both_plugins(load: Load, plugins: Plugins) -> None:
    plugins.register(Sets("train.dtype", "bfloat16"), "quick")
    plugins.register(Sets("train.dtype", "float32"), "exact")
    with pytest.raises(ConfigConflictError) as caught:
        load()
    assert "quick sets train.dtype = 'bfloat16'" in str(caught.value)
    assert "exact sets train.dtype = 'float32'" in str(caught.value)
    assert load({}, ["--train.dtype", "float32"]).config.train.dtype == "float32"


def test_two_plugins_may_agree(load: Load, plugins: Plugins) -> None:
    plugins.register(Sets("train.dtype", "bfloat16"), "quick")
    plugins.register(Sets("train.dtype", "bfloat16"), "quicker")
    assert load().config.train.dtype == "bfloat16"


def test_an_empty_table_writes_no_key(load: Load, plugins: Plugins) -> None:
    plugins.register(Sets("train.dtype", "bfloat16"), "quick")
    assert load({"train": ""}).config.train.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("tables", "found"),
    [({"rollout": "temperature = nan"}, "nan"), ({"rollout": "temperature = [nan]"}, "[nan]")],
)
def test_a_problem_of_the_user_is_not_put_down_to_a_plugin(
    load: Load, plugins: Plugins, tables: dict[str, str], found: str
) -> None:
    plugins.register(Sets("train.dtype", "bfloat16"), "quick")
    with pytest.raises(ConfigError) as caught:
        load(tables, ["--train.lrr=1"])
    assert "has 2 problems:" in str(caught.value)
    assert f"rollout.temperature: found {found}; must be a" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"), [("train.dtype", "fp8"), ("train.lrr", 1), ("train.adam_betas", [0.9, "x"])]
)
def test_a_change_that_does_not_fit_names_the_plugin(
    load: Load, plugins: Plugins, path: str, value: object
) -> None:
    plugins.register(Sets(path, value), "quick")
    with pytest.raises(PluginError, match=f"'quick' sets {path}"):
        load()
