"""Registrations and refusals of the core's data plugin."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.config import Config
from anygauge.data import plugin
from anygauge.data.source import FileSource


def config(*, task: str = "rl", evaluation: Any = None, **data: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "x", "task": task},
            "model": {"path": "m"},
            "data": {"train": ["t.jsonl"], **data},
            "reward": {"function": "math"},
            "eval": evaluation or {},
        }
    )


def problems(config: Config) -> list[tuple[str, Any]]:
    return [(problem.path, problem.found) for problem in plugin.check_config(config)]


def test_register_data_sources() -> None:
    assert {item.name: item.fn for item in plugin.register_data_sources()} == {"files": FileSource}


def test_check_config_finds_settings_without_effect() -> None:
    found = config(system_prompt="Hi", chat_template_kwargs={"thinking": True}, tools_key="tools")
    assert problems(found) == [
        ("data.system_prompt", "Hi"),
        ("data.chat_template_kwargs", {"thinking": True}),
        ("data.tools_key", "tools"),
    ]


def test_check_config_accepts_them_with_a_template() -> None:
    assert problems(config(system_prompt="Hi", tools_key="tools", apply_chat_template=True)) == []
    assert problems(config()) == []


def test_all_files_have_a_weight_or_none() -> None:
    files = [{"path": "a.jsonl", "weight": 2.0}, "b.jsonl"]
    assert problems(config(train=files)) == [("data.train", [2.0, None])]
    assert problems(config(train=[{**files[0], "weight": 1.0}, {"path": "b.jsonl", "weight": 3.0}])) == []


def test_a_weight_means_nothing_in_evaluation() -> None:
    files = [{"path": "a.jsonl", "weight": 2.0}]
    found = problems(config(evaluation={"data": files, "datasets": {"own": {"files": files}}}))
    assert found == [("eval.data[0].weight", 2.0), ("eval.datasets.own.files[0].weight", 2.0)]


@pytest.mark.parametrize(
    ("files", "unnamed"),
    [
        (["a/test.jsonl", "b/test.parquet"], [0, 1]),
        (["a/test.jsonl@[:5]", "a/test.jsonl@[5:]"], [0, 1]),
        (["a/test.jsonl", {"path": "b/test.jsonl", "name": "test"}], [0]),
        ([{"path": f"{folder}/test.jsonl", "name": "test"} for folder in "ab"], []),
        (["a/test.jsonl", {"path": "b/test.jsonl", "name": "b"}], []),
    ],
)
def test_a_name_is_shared_only_on_purpose(files: list[Any], unnamed: list[int]) -> None:
    assert [path for path, _ in problems(config(train=files))] == [f"data.train[{n}]" for n in unnamed]
    found = problems(config(evaluation={"data": files}))
    assert [path for path, _ in found] == [f"eval.data[{n}]" for n in unnamed]


def test_sft_on_plain_prompts_needs_a_label() -> None:
    assert problems(config(task="sft", label_key=None)) == [("data.label_key", None)]
    assert problems(config(task="sft", label_key=None, apply_chat_template=True)) == []
    assert problems(config(task="sft")) == []


def test_settings_without_effect_are_found_in_evaluation() -> None:
    own: dict[str, Any] = {"files": ["e.jsonl"], "system_prompt": "Hi"}
    assert problems(config(evaluation={"datasets": {"e": own}})) == [("eval.datasets.e.system_prompt", "Hi")]
    off = config(
        evaluation={"datasets": {"e": own | {"apply_chat_template": False}}}, apply_chat_template=True
    )
    assert problems(off) == [("eval.datasets.e.system_prompt", "Hi")]
    assert problems(config(evaluation={"datasets": {"e": own | {"apply_chat_template": True}}})) == []
