"""Geometry over several turns: a diagram, a calculator, a look at a part of the diagram, and a second try.

The policy ends each turn with a call of a tool or with the letter of its answer:

    <tool_call>{"name": "calculator", "arguments": {"expression": "sqrt(3**2 + 4**2)"}}</tool_call>
    <tool_call>{"name": "crop", "arguments": {"box": [0, 0, 500, 500]}}</tool_call>

A call is answered; so is a wrong letter, which halves the reward. ``docs/rollout.md`` says what a rollout
function is given.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from anygauge.rollout.rewards import multiple_choice
from anygauge_hooks.rl import Prompt, Sample

if TYPE_CHECKING:
    from PIL import Image

    from anygauge_hooks.rollout import Draft, Rollout

__all__ = ["calculate", "crop", "solve"]

START, END = "<tool_call>", "</tool_call>"
WRONG = "That is not right. Look at the diagram again, and name another letter."
LONGEST: Final = 200
"""Characters of an expression."""
WHOLE: Final = 1000
"""Coordinates of a box go from 0 to this, whatever the size of the diagram."""
LEAST: Final = 28
"""Pixels of a side of what is cut out."""


async def solve(
    rollout: Rollout, prompt: Prompt, seed: int, *, max_turns: int = 4, may_crop: bool = False
) -> Sample:
    """Let the policy speak until it names the right letter, and answer what it says until then.

    The reward is 1 for the right letter, half of that after a wrong one, and so on; 0 without the right one.

    :param max_turns: Of the policy.
    :param may_crop: Offer the tool ``crop``.
    """
    draft, wrong, is_right = rollout.draft(), 0, False
    for turn in range(max_turns):
        spoken = await draft.generate()
        said = rollout.decode(spoken.tokens)
        call = called(said)
        is_right = call is None and multiple_choice(said, prompt.label, prompt.metadata) == 1.0
        if is_right or turn == max_turns - 1 or spoken.finish_reason == "length":
            break
        wrong += call is None
        if not await reply(rollout, draft, prompt, call, may_crop=may_crop):
            break
    return draft.sample()._replace(reward=0.5**wrong if is_right else 0.0)


def called(said: str) -> str | None:
    """Return the call with which a turn ends, or ``None``."""
    before, separator, rest = said.rpartition(END)
    if not separator or rest.strip():
        return None
    return before.rpartition(START)[2]


async def reply(rollout: Rollout, draft: Draft, prompt: Prompt, call: str | None, *, may_crop: bool) -> bool:
    """Tell the policy what its call gave, or that its answer is wrong; return whether there was room."""
    if call is None:
        return draft.observe(rollout.next_turn([{"role": "user", "content": WRONG}]))
    try:
        name, arguments = read_call(call)
        if name == "crop" and may_crop:
            part = await asyncio.to_thread(crop, diagram(prompt), arguments.get("box"))
            shown = {"role": "tool", "content": [{"type": "image", "image": part}]}
            tokens, media = await rollout.look([shown])
            return draft.observe(tokens, media)
        if name != "calculator":
            raise ValueError(f"there is no tool {name!r}")
        result = calculate(arguments.get("expression"))
    except ValueError as error:
        result = f"error: {error}"
    return draft.observe(rollout.next_turn([{"role": "tool", "content": result}]))


def read_call(call: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a tool and its arguments.

    :raises ValueError: It is no call.
    """
    try:
        wanted = json.loads(call)
        name, arguments = wanted["name"], wanted["arguments"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError('a call is {"name": ..., "arguments": {...}}') from error
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError('a call is {"name": ..., "arguments": {...}}')
    return name, arguments


# -------------------------------------------------------------------------
# The calculator
# -------------------------------------------------------------------------

_TWO: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,  # of floats: it cannot become large without an error, nor complex
}
_ONE: Mapping[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_NAMES = {"pi": math.pi, "e": math.e}
_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    name: getattr(math, name)
    for name in ("sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "degrees", "radians", "log", "exp")
} | {"abs": abs}


def calculate(expression: Any) -> str:
    """Return the value of an arithmetic expression, to ten digits; angles are in radians.

    :raises ValueError: It is something else, or has no value.
    """
    if not isinstance(expression, str) or not expression.strip():
        raise ValueError("expression must be a text")
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("this is no arithmetic") from error
    except ArithmeticError as error:
        raise ValueError(str(error) or "the value is too large") from error
    if not math.isfinite(value):
        raise ValueError("the value is too large")
    return f"{value:.10g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _ONE:
            return _ONE[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            return _TWO[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_value(argument))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")


# -------------------------------------------------------------------------
# The diagram
# -------------------------------------------------------------------------


def diagram(prompt: Prompt) -> Path:
    """Return the file of a prompt's diagram."""
    return Path(prompt.metadata["images"][0])


def crop(path: Path, box: Any) -> Image.Image:
    """Return a part of a diagram.

    :param box: Left, top, right and bottom, from 0 to 1000.
    :raises ValueError: There is no such part.
    """
    from PIL import Image

    if not (isinstance(box, list) and len(box) == 4 and all(type(side) in (int, float) for side in box)):
        raise ValueError("box is four numbers: left, top, right, bottom")
    left, top, right, bottom = box
    if not (0 <= left < right <= WHOLE and 0 <= top < bottom <= WHOLE):
        raise ValueError(f"left is before right and top before bottom, from 0 to {WHOLE}")
    with Image.open(path) as picture:
        width, height = picture.size
        part = picture.crop(
            (
                int(left * width / WHOLE),
                int(top * height / WHOLE),
                math.ceil(right * width / WHOLE),
                math.ceil(bottom * height / WHOLE),
            )
        )
    if min(part.size) < LEAST:
        raise ValueError(f"this is less than {LEAST} pixels wide or high; take a larger part")
    return part
