"""The examples of docs/rewards.md are true."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import Reward
from anygauge.plugins import Plugins, load_plugins
from anygauge.rollout.rewards import Scorer, check_reward, raw_number
from anygauge_hooks.rl import Group, Sample
from anygauge_tests.code_blocks import blocks
from anygauge_tests.scoring import group

PAGE = Path(__file__).parents[3] / "docs/rewards.md"
TABLES = [tomllib.loads(text)["reward"] for text in blocks(PAGE, "toml")]
MODULE = "\n".join(blocks(PAGE, "python"))
EXAMPLES = re.findall(r"^\| `(\w+)` \| `(\".*\")` \| `(.+)` \| `(.+)` \|$", PAGE.read_text(), re.M)


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(only=[])


@pytest.fixture(scope="module", autouse=True)
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the module of the page where it can be imported."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "my_rewards.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    sys.modules.pop("my_rewards", None)


def scored(table: dict[str, Any], plugins: Plugins, *groups: Group) -> list[Sample]:
    with Scorer(Reward.model_validate(table), plugins, max_new_tokens=100, log=None) as scorer:
        return [sample for each in scorer.score(groups) for sample in each.samples]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.get("function", "parts"))
def test_a_table_of_the_page_is_a_reward(table: dict[str, Any], plugins: Plugins) -> None:
    check_reward(Reward.model_validate(table), plugins)


def test_the_examples_are_true(plugins: Plugins) -> None:
    functions = sorted({function for function, *_ in EXAMPLES})
    assert functions == ["dapo", "exact_match", "f1", "math", "multiple_choice"]
    for function in functions:
        rows = [[*map(ast.literal_eval, row[1:3]), row[3]] for row in EXAMPLES if row[0] == function]
        groups = [group(response, label=label) for response, label, _ in rows]
        found = [sample.reward for sample in scored({"function": function}, plugins, *groups)]
        expected = [float(Fraction(number)) for *_, number in rows]
        assert found == pytest.approx(expected, abs=1e-12), function


def test_the_functions_of_the_page_score(plugins: Plugins) -> None:
    samples = scored(TABLES[1], plugins, group("so 4", "5", "4" * 101))
    assert [sample.reward for sample in samples] == [1.0, 0.0, -0.5]
    samples = scored({"function": "my_rewards:judged"}, plugins, group("4", ""))
    assert [sample.reward for sample in samples] == [1.0, 0.0]


def test_the_parts_of_the_page_add_up(plugins: Plugins) -> None:
    (table,) = (table for table in TABLES if "parts" in table)
    samples = scored(table, plugins, group("4", "4", "5", ""))
    assert samples[0].raw_reward == {"right": 1.0, "distinct": 0.5, "style": {"score": 0.9, "right": True}}
    assert samples[3].raw_reward == {"right": 0.0, "distinct": 1.0, "style": 0.0}
    expected = [1.0 + 0.05 - 0.2, 1.0 + 0.05 - 0.2, 0.1, 0.1]
    assert [sample.reward for sample in samples] == pytest.approx(expected)
    numbers = [raw_number(sample.raw_reward, Reward.model_validate(table)) for sample in samples]
    assert numbers == [sample.reward for sample in samples]
