"""Messages to the policy in ``examples/geo3k_vlm_multi_turn``."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from anygauge_hooks.rl import Prompt, Sample
from anygauge_hooks.rollout import Generation

SCRIPT = Path(__file__).parents[3] / "examples" / "geo3k_vlm_multi_turn" / "environment.py"
CHOICES = ["30", "40", "60", "80"]
SUM = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*(3+4)"}}</tool_call>'
CORNER = '<tool_call>{"name": "crop", "arguments": {"box": [0, 500, 500, 1000]}}</tool_call>'


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("geo3k_environment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Scripted:
    """A rollout whose policy says what it was given, and which takes down what it is told."""

    def __init__(self, says: Sequence[str], room: int = 10) -> None:
        self.says = list(says)
        self.told: list[Any] = []
        self.room = room
        self.spoken = 0

    def draft(self) -> Scripted:
        return self

    async def generate(self) -> Generation:
        self.spoken += 1
        return Generation((self.spoken - 1,), (0.0,), (0,), "stop")

    def decode(self, tokens: Sequence[int]) -> str:
        return self.says[tokens[0]]

    def next_turn(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        return messages[0]

    async def look(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, tuple[str, ...]]:
        return messages[0], ("media",)

    def observe(self, tokens: Any, media: Sequence[Any] = ()) -> bool:
        if len(self.told) == self.room:
            return False
        self.told.append((*tokens.values(), *media))
        return True

    def sample(self) -> Sample:
        return Sample(0, (1,), (2,), (0.0,), (1,), (0,), self.says[self.spoken - 1], "stop", 0)


def play(environment: ModuleType, rollout: Scripted, image: Path | None = None, **options: Any) -> Any:
    row = {"choices": CHOICES, "images": [str(image)]}
    prompt = Prompt(index=0, tokens=(1,), text="", label="B", source="rows:1", metadata=row)
    return asyncio.run(environment.solve(rollout, prompt, 0, **options)).reward


def test_the_right_letter_ends_it(environment: ModuleType) -> None:
    rollout = Scripted(["The answer is B."])
    assert play(environment, rollout) == 1.0
    assert rollout.told == []


def test_each_wrong_letter_is_told_and_halves_the_reward(environment: ModuleType) -> None:
    rollout = Scripted(["The answer is A.", "The answer is C.", "The answer is B."])
    assert play(environment, rollout) == 0.25
    assert rollout.told == [("user", environment.WRONG)] * 2


def test_a_call_is_answered_and_costs_nothing(environment: ModuleType) -> None:
    rollout = Scripted([f"Let me see. {SUM}", "The answer is B."])
    assert play(environment, rollout) == 1.0
    assert rollout.told == [("tool", "14")]


def test_turns_end(environment: ModuleType) -> None:
    rollout = Scripted([SUM] * 9)
    assert play(environment, rollout, max_turns=3) == 0.0
    assert (rollout.spoken, len(rollout.told)) == (3, 2)


def test_it_ends_where_the_budget_has_no_room(environment: ModuleType) -> None:
    rollout = Scripted([SUM, "The answer is B."], room=0)
    assert play(environment, rollout) == 0.0
    assert rollout.spoken == 1


def test_a_part_of_the_diagram_is_shown(environment: ModuleType, tmp_path: Path) -> None:
    picture = Image.new("RGB", (200, 100), "white")
    picture.paste("red", (0, 50, 100, 100))
    picture.save(tmp_path / "1.png")
    rollout = Scripted([CORNER, "The answer is B."])
    assert play(environment, rollout, tmp_path / "1.png", may_crop=True) == 1.0
    role, content, media = rollout.told[0]
    assert (role, media) == ("tool", "media")
    assert content[0]["image"].size == (100, 50)
    assert content[0]["image"].getcolors() == [(5000, (255, 0, 0))]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("{", "a call is"),
        ('{"name": 1, "arguments": {}}', "a call is"),
        ('{"name": "calculator", "arguments": {}}', "expression must be a text"),
        ('{"name": "crop", "arguments": {"box": [0, 0, 1, 1]}}', "there is no tool 'crop'"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(environment: ModuleType, call: str, problem: str) -> None:
    rollout = Scripted([f"<tool_call>{call}</tool_call>", "The answer is B."])
    assert play(environment, rollout) == 1.0
    role, text = rollout.told[0]
    assert (role, text[:6]) == ("tool", "error:")
    assert problem in text


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2**10", "1024"),
        ("sqrt(3**2 + 4**2)", "5"),
        ("sin(radians(30))", "0.5"),
        ("-7 % 3", "2"),
        ("1/3", "0.3333333333"),
    ],
)
def test_arithmetic(environment: ModuleType, expression: str, value: str) -> None:
    assert environment.calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "1e308*10", "(-8)**0.5", "1/0", "sqrt(-1)", "__import__('os')", "().__class__", "a",
        "1 if 1 else 2", "[1]", "True",
        "'a'*9", "1j", "(" * 150, "-" * 150, "1" * 201, "", "sqrt(1, 2)", "10**400",
    ],
)  # fmt: skip
def test_what_has_no_value_is_an_error(environment: ModuleType, expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        environment.calculate(expression)


@pytest.mark.parametrize(
    "box", [None, [0, 0, 1], [0, 0, 0, 9], [5, 0, 1, 9], [0, 0, 1, 1001], [0, 0, 9, 9], ["0"] * 4]
)
def test_there_is_no_such_part(environment: ModuleType, tmp_path: Path, box: Any) -> None:
    Image.new("RGB", (60, 60)).save(tmp_path / "1.png")
    with pytest.raises(ValueError, match=r"four numbers|left is before|less than"):
        environment.crop(tmp_path / "1.png", json.loads(json.dumps(box)))
