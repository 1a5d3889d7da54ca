"""How critic and teacher may be divided beside the policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.config import Config
from anygauge.config.load import load_config
from anygauge.config.roles import critic_config, teacher_config
from anygauge.plugins import load_plugins
from anygauge_hooks.errors import ConfigError
from anygauge_tests.recipe import tiny_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(
        tmp_path_factory.mktemp("roles"),
        algorithm__advantage="gae",
        placement__train_workers=4,
        rollout__prompts_per_step=4,
        train__parallel__tensor=2,
    )


def load(recipe: Path, overrides: list[str]) -> Config:
    return load_config(recipe, overrides, backend="cpu", plugins=load_plugins()).config


def sizes(section: str, **values: int) -> list[str]:
    return [f"--{section}.parallel.{name}={value}" for name, value in values.items()]


def test_by_default_they_are_divided_as_the_policy(recipe: Path) -> None:
    config = load(recipe, [])
    assert critic_config(config).train.parallel == teacher_config(config).train.parallel
    assert critic_config(config).train.parallel == config.train.parallel


@pytest.mark.parametrize("own", [{"context": 2}, {"tensor": 2, "virtual_pipeline": 1}])
def test_every_rank_keeps_its_samples(recipe: Path, own: dict[str, int]) -> None:
    sizes_of_critic = critic_config(load(recipe, sizes("critic", **own))).train.parallel
    assert sizes_of_critic.model_dump(include=own.keys()) == own
    assert sizes_of_critic.tensor * sizes_of_critic.context == 2


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (
            {"tensor": 1},
            r"parallel: found 'one rank'.*tensor \* context = 2, pipeline = 1, as train\.parallel",
        ),
        ({"pipeline": 2}, r"parallel: found 'pipeline = 2'.*must leave every rank its samples"),
        ({"tensor": 3}, r"parallel\.tensor: found 3.*must be a multiple of"),
        ({"context": 2, "virtual_pipeline": 2}, r"parallel\.virtual_pipeline: found 2.*needs"),
        ({"tensor": 2, "expert": 2}, r"parallel\.expert: found 2.*has no experts to divide"),
    ],
)
def test_a_wrong_size_is_named_with_its_role(recipe: Path, own: dict[str, int], found: str) -> None:
    model = load(recipe, []).model.path
    with pytest.raises(ConfigError, match=rf"critic\.{found}") as error:
        load(recipe, [f"--critic.path={model}", *sizes("critic", **own)])
    assert "train.parallel." not in str(error.value).replace("train.parallel.pipeline above 1", "")
