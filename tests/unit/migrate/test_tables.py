"""Tables of the arguments of other projects: every key exists, every row says one thing, hints use them."""

from __future__ import annotations

import inspect
import re

import pytest

import anygauge
from anygauge.config.keys import config_keys
from anygauge.config.validate import validate
from anygauge.migrate import slime, trl, verl
from anygauge.migrate.table import PROJECTS, Row, foreign_keys, rows

KEYS = {key.path: key.kind for key in config_keys()}


def exists(key: str) -> bool:
    """Return whether a key is in the schema, or in a table that takes any."""
    parts = key.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts))]
    is_table = key in ("data.train", "eval.data") and f"{key}[].path" in KEYS
    return key in KEYS or is_table or any(KEYS.get(path, "").startswith("table") for path in above)


@pytest.mark.parametrize("project", PROJECTS)
def test_a_row_has_keys_that_exist_or_one_reason(project: str) -> None:
    assert [row.name for row in rows(project).values() if not is_sound(row)] == []


def is_sound(row: Row) -> bool:
    says_one_thing = sum(map(bool, (row.keys, row.note, row.unneeded))) == 1
    has_a_use = bool(row.keys) or not (row.values or row.rule or row.default is not None)
    return says_one_thing and has_a_use and all(map(exists, row.keys))


def test_a_row_that_is_not_sound_is_noticed() -> None:
    assert is_sound(Row("a", keys=("train.lr",), default=1e-6))
    for row in (
        Row("a"),
        Row("a", keys=("train.lrr",)),
        Row("a", keys=("train.lr",), note="n"),
        Row("a", note="n", rule="r"),
    ):
        assert not is_sound(row)


def test_a_key_that_does_not_exist_is_noticed() -> None:
    assert exists("rollout.sglang.tp_size")
    assert not exists("rollout.tp_size")
    assert not exists("nothing.at_all")


@pytest.mark.parametrize("project", PROJECTS)
def test_an_argument_of_train_that_a_note_names_exists(project: str) -> None:
    named = {
        name for row in rows(project).values() for name in re.findall(r"train\(\.\.\., (\w+)=", row.note)
    }
    assert named <= {*inspect.signature(anygauge.train).parameters}


def test_every_value_of_a_table_in_code_is_one_of_ours() -> None:
    choices = {key.path: key.choices for key in config_keys()}
    assert set(trl.AGGREGATIONS.values()) <= set(choices["algorithm.loss_aggregation"])
    assert set(trl.SCHEDULES.values()) <= set(choices["train.lr_schedule"])
    assert set(verl.KL_TYPES.values()) <= set(choices["algorithm.kl_type"])
    for key in (*slime.CRITIC.values(), *verl.CRITIC.values()):
        assert exists(key)


QLORA = 'QLoRA is train.lora.base = "nf4", with train.engine = "fsdp"'


@pytest.mark.parametrize(
    ("table", "name", "hint"),
    [
        ("rollout", "rollout_batch_size", "write rollout.prompts_per_step (docs/migrate/slime.md)"),
        ("train", "ppo_mini_batch_size", "write train.global_batch_size (docs/migrate/verl.md)"),
        ("algorithm", "num_generations", "write rollout.samples_per_prompt (docs/migrate/trl.md)"),
        ("train", "load_in_4bit", f"{QLORA} (docs/lora.md)"),
        ("algorithm", "beta", "write algorithm.kl_coef and algorithm.kl_type (docs/migrate/trl.md)"),
    ],
)
def test_an_unknown_key_of_another_project_is_named_by_ours(table: str, name: str, hint: str) -> None:
    (problem,) = [each for each in validate({table: {name: 1}}).problems if each.path.endswith(name)]
    assert problem.hint == f"unknown key; {hint}"


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        ({}, "`anygauge import verl FILE`"),
        ({"actor": {"optim": {"lr": 1, "betas": 2}}}, "`anygauge import verl FILE`"),
        ({"actor": {"optim": {"lr": 1}}}, "write train.lr (docs/migrate/verl.md)"),
    ],
)
def test_a_table_of_verl_is_named(table: dict[str, object], hint: str) -> None:
    tree = {"actor_rollout_ref": table}
    (problem,) = [each for each in validate(tree).problems if each.path == "actor_rollout_ref"]
    assert hint in problem.hint


def test_an_argument_without_a_counterpart_gives_no_hint() -> None:
    assert list(foreign_keys("num_train_epochs")) == []
    assert list(foreign_keys("qqq")) == []
