"""Errors about ``[train.lora]``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import LoadedConfig
from anygauge.config.lora import lora_settings
from anygauge.config.roles import critic_config, evaluation_components, teacher_config
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import TrainEngineSpec
from anygauge_hooks.errors import ConfigError

Load = Callable[..., LoadedConfig]
ABLE = ["--train.engine=able"]
RANK = [*ABLE, "--train.lora.rank=8"]
ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj"],
    "modules_to_save": None,
    "lora_dropout": 0.1,
    "bias": "none",
    "rank_pattern": {},
    "megatron_core": "megatron.core",
}


class Engines:
    """An engine that has LoRA, and one that has not."""

    @hookimpl
    def register_train_engines(self) -> Iterable[TrainEngineSpec]:
        return [
            TrainEngineSpec(name="able", make=none, supports_lora=True, lora_bases=frozenset({"nf4"})),
            TrainEngineSpec(name="plain", make=none),
        ]


def none(config: object, context: object) -> None: ...


@pytest.fixture(autouse=True)
def able(plugins: Plugins) -> None:
    plugins.register(Engines(), "engines")


def write_adapter(directory: Path, **keys: Any) -> Path:
    directory.mkdir()
    config = {name: value for name, value in (ADAPTER | keys).items() if value != "absent"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").touch()
    return directory


def test_alpha_is_twice_the_rank_and_other_models_have_no_adapters(load: Load) -> None:
    config = load({}, RANK).config
    settings = lora_settings(config.train.lora)
    assert (settings.rank, settings.alpha, settings.scale) == (8, 16.0, 2.0)
    assert (settings.targets, settings.modules_to_save) == (None, ())
    assert not critic_config(config).train.lora.is_on
    assert not teacher_config(config).train.lora.is_on


def test_targets_are_names_or_one_expression(load: Load) -> None:
    names = load({}, [*RANK, '--train.lora.targets=["q_proj", "v_proj"]']).config.train.lora
    assert names.targets == ("q_proj", "v_proj")
    assert load({}, [*RANK, "--train.lora.targets=.*_proj"]).config.train.lora.targets == ".*_proj"
    word = load({}, [*RANK, "--train.lora.targets=all-linear"]).config.train.lora
    assert lora_settings(word).targets is None


def test_an_adapter_brings_its_settings(load: Load, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", modules_to_save=["lm_head"])
    for overrides in ([], ["--train.lora.rank=4", "--train.lora.alpha=6"]):
        lora = load({}, [*ABLE, f"--train.lora.path={path}", *overrides]).config.train.lora
        settings = lora_settings(lora)
        assert (settings.rank, settings.alpha, settings.targets) == (4, 6.0, ["q_proj"])
        assert settings.modules_to_save == ("lm_head",)


def test_an_evaluation_from_an_adapter_builds_the_engine_that_merges_it(load: Load, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    assert not evaluation_components(load({}, RANK).config, loads=False).trains
    assert evaluation_components(load({}, [*ABLE, f"--train.lora.path={path}"]).config, loads=False).trains
    assert evaluation_components(load({}, [*RANK, "--train.lora.base=nf4"]).config, loads=False).trains


PROBLEMS: Iterable[tuple[list[str], str]] = (
    (
        [*ABLE, "--train.lora.path=nowhere", "--debug.mode=rollout_only"],
        r"train.lora.path: .*no train engine merges it with debug.mode",
    ),
    (
        ["--train.engine=plain", "--train.lora.rank=8"],
        r"train.lora.rank: found 8 .*; .*'plain' has no LoRA; these have: 'able', 'megatron'",
    ),
    ([*RANK, '--train.freeze=["vision"]'], r"train.freeze: .*trains adapters alone: choose layers with"),
    ([*RANK, "--train.lora.rank=0"], r"train.lora.rank: .*greater than 0"),
    (
        ["--train.engine=megatron", "--train.lora.rank=8", "--train.lora.base=nf4"],
        r"train.lora.base: found 'nf4' .*; .*'megatron' has no such base; these have: 'able'",
    ),
    ([*ABLE, "--train.lora.base=nf4"], r"train.lora.base: found 'nf4' .*has no effect without train.lora"),
    (
        [*ABLE, "--train.lora.alpha=8"],
        r"train.lora.alpha: found 8.0 .*; has no effect without train.lora.rank",
    ),
    (
        [*RANK, "--train.lora.dropout=0.1"],
        r"train.lora.dropout: found 0.1 .*; must be 0: with dropout, log-probs",
    ),
    ([*RANK, "--train.lora.targets=[]"], r"train.lora.targets: .*names no module"),
    ([*RANK, "--train.lora.targets=("], r"train.lora.targets: .*no regular expression: missing \)"),
    ([*ABLE, "--train.lora.path=nowhere"], r"train.lora.path: found .nowhere. .*; no such directory in "),
)


@pytest.mark.parametrize(("overrides", "text"), PROBLEMS)
def test_problems(load: Load, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load({}, overrides)


ADAPTERS: Iterable[tuple[Mapping[str, Any], list[str], str]] = (
    ({}, ["--train.lora.rank=8"], "train.lora.rank: found 8 .*; the adapter of train.lora.path has 4"),
    ({}, ["--train.lora.alpha=8"], "train.lora.alpha: found 8.0 .*; the adapter of train.lora.path has 6.0"),
    ({"r": "absent"}, [], r"is not a peft adapter: its adapter_config.json cannot be read: KeyError\('r'\)"),
    ({"r": 0}, [], "is not a peft adapter: .*r = 0, lora_alpha = 6.0"),
    ({"lora_alpha": -1}, [], "is not a peft adapter: .*r = 4, lora_alpha = -1.0"),
    ({"peft_type": "IA3"}, [], "peft_type = 'IA3', which LoRA here does not support"),
    ({"bias": "all"}, [], "bias = 'all', which"),
    ({"use_rslora": True}, [], "use_rslora = True, which"),
    ({"layers_to_transform": 0}, [], "layers_to_transform = 0, which"),
    ({"rank_pattern": {"q_proj": 2}}, [], r"rank_pattern = \{'q_proj': 2\}, which"),
    ({"target_modules": None}, [], "target_modules = None, which"),
    ({"init_lora_weights": "pissa"}, [], "init_lora_weights = 'pissa', which"),
)


@pytest.mark.parametrize(("keys", "overrides", "text"), ADAPTERS)
def test_problems_of_an_adapter(
    load: Load, tmp_path: Path, keys: Mapping[str, Any], overrides: list[str], text: str
) -> None:
    path = write_adapter(tmp_path / "adapter", **keys)
    with pytest.raises(ConfigError, match=text):
        load({}, [*ABLE, f"--train.lora.path={path}", *overrides])


def test_an_adapter_without_its_weights_is_none(load: Load, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"train.lora.path: .* has no adapter_model.safetensors"):
        load({}, [*ABLE, f"--train.lora.path={path}"])


def test_an_adapter_is_not_overwritten(load: Load, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    path = write_adapter(tmp_path / "runs" / "mine" / "adapter")
    keys = [f"--run.directory={tmp_path / 'runs'}", "--run.name=mine", "--run.overwrite=true"]
    with pytest.raises(ConfigError, match=r"train.lora.path: .*run.overwrite would delete it"):
        load({}, [*ABLE, *keys, f"--train.lora.path={path}"])
