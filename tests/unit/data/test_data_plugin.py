"""What the core's data plugin registers and refuses."""

from __future__ import annotations

from anygauge.config import Config
from anygauge.data import plugin
from anygauge.data.jsonl import JsonlSource


def config(**data: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"train": ["t.jsonl"], **data},
            "reward": {"function": "math"},
        }
    )


def test_register_data_sources() -> None:
    assert {item.name: item.fn for item in plugin.register_data_sources()} == {"jsonl": JsonlSource}


def test_check_config_finds_settings_without_effect() -> None:
    problems = plugin.check_config(config(system_prompt="Hi", chat_template_kwargs={"thinking": True}))
    assert [(problem.path, problem.found) for problem in problems] == [
        ("data.system_prompt", "Hi"),
        ("data.chat_template_kwargs", {"thinking": True}),
    ]


def test_check_config_accepts_them_with_a_template() -> None:
    assert plugin.check_config(config(system_prompt="Hi", apply_chat_template=True)) == []
    assert plugin.check_config(config()) == []
