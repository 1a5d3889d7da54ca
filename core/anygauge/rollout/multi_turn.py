"""Multi-turn rollouts, in which the policy calls a tool."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from anygauge.plugins import imported
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Prompt, Sample
from anygauge_hooks.rollout import Draft, Rollout
from anygauge_hooks.types import FunctionPath

__all__ = ["multi_turn"]


async def multi_turn(
    rollout: Rollout,
    prompt: Prompt,
    seed: int,
    *,
    tool: FunctionPath,
    max_turns: int = 4,
    start: str = "<call>",
    end: str = "</call>",
    answer: str = "<result>{}</result>",
    chat: bool = False,
) -> Sample:
    """Let the policy speak, and answer each of its calls of a tool, until it speaks without a call.

    What is scored is what it says in its last turn. The tool's words have a loss mask of 0 and count for
    ``rollout.max_new_tokens``; the rollout ends where they find no room in it.

    :param tool: ``package.module:function``, from the text of a call to the answer: a text, or
        ``{"text": ..., "images": [...]}`` with images as :meth:`Rollout.look` takes them, which the policy
        sees after the text. It may be ``async``; if not, it runs in a thread. A ``ValueError`` is told to the
        policy; any other error ends the rollout.
    :param max_turns: Most turns of the policy.
    :param start: Begins a call.
    :param end: Ends a call, and the turn.
    :param answer: Text that the policy gets as an answer; ``{}`` stands for the tool's answer.
    :param chat: Put the answer into a message of the role ``tool``, by the chat template.
    """
    call = _tool(tool)
    draft, said = rollout.draft(), ""
    for turn in range(max_turns):
        spoken = await draft.generate(stop=[end])
        said = rollout.decode(spoken.tokens)
        wanted = _called(said, start, end)
        if wanted is None or turn == max_turns - 1:
            break
        if not await _tell(rollout, draft, answer, await _result(call, wanted), chat=chat):
            break
    return draft.sample(text=said)


@cache
def _tool(path: str) -> Callable[[str], Any]:
    tool: Callable[[str], Any] = imported(path, "Tool")
    return tool


def _called(said: str, start: str, end: str) -> str | None:
    """Return what a turn asks the tool, or ``None`` if it does not end with a call."""
    before, separator, rest = said.rpartition(end)
    if not separator or rest.strip():
        return None
    _, separator, asked = before.rpartition(start)
    return asked if separator else None


class _Result(NamedTuple):
    text: str
    images: Sequence[Any] = ()


async def _result(call: Callable[[str], Any], asked: str) -> _Result:
    try:
        if inspect.iscoroutinefunction(call):
            return _read(await call(asked))
        return _read(await asyncio.to_thread(call, asked))
    except (ValueError, RecursionError) as error:  # the second from json.loads of a thousand brackets
        return _Result(f"error: {error}")


def _read(answer: Any) -> _Result:
    if not isinstance(answer, Mapping):
        return _Result(str(answer))
    if unknown := set(answer) - {"text", "images"}:
        raise RolloutError(
            f"A tool returned {', '.join(map(repr, sorted(map(str, unknown))))} in its answer.",
            hint="Return a text, or a dict with 'text' and 'images'.",
        )
    return _Result(str(answer.get("text", "")), tuple(answer.get("images", ())))


async def _tell(rollout: Rollout, draft: Draft, answer: str, result: _Result, *, chat: bool) -> bool:
    """Tell the policy something, and show it, if there is room."""
    if result.images:
        before, _, after = answer.partition("{}")
        parts = [{"type": "text", "text": before + result.text}]
        parts += [{"type": "image", "image": image} for image in result.images]
        parts += [{"type": "text", "text": after}] * bool(after)
        return draft.observe(*await rollout.look([{"role": "tool", "content": parts}], chat=chat))
    text = answer.format(result.text)
    tokens = rollout.next_turn([{"role": "tool", "content": text}]) if chat else rollout.encode(text)
    return draft.observe(tokens)
