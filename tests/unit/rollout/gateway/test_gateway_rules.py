"""Errors about a wrong agent, or a wrong gateway, before a run starts."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.config.schema import RolloutGateway
from anygauge.config.validate import validate
from anygauge.rollout.gateway.rules import agent_problems

RIGHT = {"function": "agent", "function_options": {"agent": "agents_here:solve"}}


async def solve(*, base_url: str, api_key: str, row: Any, times: int = 2) -> None: ...


@pytest.fixture(autouse=True)
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("agents_here")
    module.solve = solve  # type: ignore[attr-defined]
    module.blocking = lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "agents_here", module)


def config(rollout: dict[str, Any], **data: Any) -> Config:
    checked = validate(
        {
            "run": {"name": "agents"},
            "model": {"path": "/models/tiny"},
            "data": {"train": ["train.jsonl"], **data},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, **rollout},
        }
    )
    assert not checked.problems, checked.problems
    return checked.config


def problems(rollout: dict[str, Any], **data: Any) -> dict[str, str]:
    return {each.path: each.hint for each in agent_problems(config(rollout, **data))}


@pytest.mark.parametrize(
    "rollout",
    [
        {},
        {"function": "my_functions:own", "gateway": {"history": "append"}},
        RIGHT,
        {**RIGHT, "function_options": {"command": ["python", "agent.py"], "pass_env": ["SEARCH_API_KEY"]}},
        {**RIGHT, "function_options": {"agent": "agents_here:solve", "agent_options": {"times": 3}}},
        {**RIGHT, "gateway": {"max_requests": 8, "tool_format": "anygauge_tests.tools:SHOUTED"}},
    ],
)
def test_what_fits_has_no_problem(rollout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from anygauge.rollout.gateway.tool_formats import FORMATS
    from anygauge_tests import tools

    monkeypatch.setattr(tools, "SHOUTED", FORMATS["hermes"], raising=False)
    assert problems(rollout) == {}


@pytest.mark.parametrize(
    ("options", "path", "hint"),
    [
        ({}, "", "needs one of agent and command"),
        ({"agent": "agents_here:solve", "command": ["c"]}, "", "needs one of agent and command"),
        ({"command": "python agent.py"}, ".command", "each a string"),
        ({"command": ["python", 3]}, ".command", "each a string"),
        ({"command": ["agent"], "pass_env": "KEY"}, ".pass_env", "names of environment variables"),
        ({"command": ["agent"], "pass_env": [3]}, ".pass_env", "names of environment variables"),
        ({"agent": "agents_here:solve", "pass_env": ["KEY"]}, ".pass_env", "no effect with agent"),
        ({"agent": "solve"}, ".agent", "package.module:function"),
        ({"agent": "nowhere:solve"}, ".agent", "no module 'nowhere'"),
        ({"agent": "agents_here:blocking"}, ".agent", "write async def"),
        (
            {"agent": "agents_here:solve", "agent_options": {"loud": 1}},
            ".agent_options.loud",
            "solve takes no such argument",
        ),
    ],
)
def test_a_wrong_agent(options: dict[str, Any], path: str, hint: str) -> None:
    found = problems({"function": "agent", "function_options": options})
    assert list(found) == [f"rollout.function_options{path}"]
    assert hint in found[f"rollout.function_options{path}"]


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("host", "0.0.0.0", "name one of this host that they can reach"),
        ("tool_format", "yaml", "Take auto, none, glm"),
        ("tool_format", "json:nothing", "has no 'nothing'"),
        ("tool_format", "json:loads", "with a ToolFormat"),
        ("max_requests", 7, "a step has 8 rollouts at once"),
    ],
)
def test_a_wrong_gateway(key: str, value: Any, hint: str) -> None:
    found = problems({**RIGHT, "gateway": {key: value}})
    assert list(found) == [f"rollout.gateway.{key}"]
    assert hint in found[f"rollout.gateway.{key}"]


@pytest.mark.parametrize("function", ["single_turn", "multi_turn"])
def test_a_gateway_that_nobody_opens(function: str) -> None:
    found = problems({"function": function, "gateway": {"history": "append"}})
    assert found == {
        "rollout.gateway.history": f"has no effect with rollout.function = {function!r}; leave it out"
    }


def test_a_prompt_is_not_rendered_twice() -> None:
    assert list(problems(RIGHT, apply_chat_template=True)) == ["data.apply_chat_template"]


def test_an_agent_sends_its_images_itself() -> None:
    assert list(problems(RIGHT, multimodal_keys={"image": "images"})) == ["data.multimodal_keys"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("sampling", "own"), ("port", 80), ("models", []), ("host", ""), ("timeout_s", 0), ("max_requests", 0)],
)
def test_what_the_schema_refuses(key: str, value: Any) -> None:
    tree = {"rollout": {**RIGHT, "gateway": {key: value}}}
    assert [each.path for each in validate(tree).problems if "gateway" in each.path] == [
        f"rollout.gateway.{key}"
    ]


def test_every_key_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[4] / "docs" / "agents.md").read_text()
    table = page.split("| key | default |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.M) == list(RolloutGateway.model_fields)
