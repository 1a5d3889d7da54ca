"""Responses to an agent, in neither API's words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

from anygauge.rollout.gateway.messages import Call, Message
from anygauge.rollout.gateway.rendering import Renderer
from anygauge.rollout.gateway.response_parsing import Block, Style, read
from anygauge.rollout.gateway.sampling import Choice
from anygauge_hooks.rl import FinishReason

__all__ = ["Answer", "Piece", "answer_of"]


class Piece(NamedTuple):
    """Part of an answer."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: Call | None = None


class Answer(NamedTuple):
    """A generation that has ended."""

    number: int
    """Among the answers to the request."""
    blocks: tuple[Piece, ...]
    """Reasoning, text and calls in the order in which they were written."""
    finish_reason: FinishReason
    stop: str | None
    """Which string of the request's ended it."""
    prompt_tokens: int
    response_tokens: int
    log_probs: tuple[tuple[str, float], ...]
    """Text and log-probability of each token, but for the one that ended the turn; empty unless asked for."""

    @property
    def content(self) -> str:
        """Return all text that is neither reasoning nor a call."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        """Return the reasoning."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> tuple[Call, ...]:
        """Return the calls of tools."""
        return tuple(block.call for block in self.blocks if block.call is not None)

    def message(self) -> Message:
        """Return the answer as a message that the agent may send back."""
        return Message("assistant", self.content, self.reasoning or None, self.calls)


def answer_of(
    number: int, choice: Choice, renderer: Renderer, style: Style, name: str, *, log_probs: bool
) -> Answer:
    """Return the agent's answer from a finished generation.

    :param name: Begins the ids of calls; unique in the run.
    :param log_probs: Whether it has the text and log-prob of each token, which are decoded one by one.
    """
    tokens = renderer.spoken(choice.tokens, choice.finish_reason)
    text = renderer.decode(tokens)
    stops = [(at, each) for each in style.stop if (at := text.find(each)) >= 0]
    return Answer(
        number=number,
        blocks=_pieces(read(text, style), name),
        finish_reason=choice.finish_reason,
        stop=min(stops)[1] if stops else None,
        prompt_tokens=len(choice.request.tokens),
        response_tokens=len(choice.tokens),
        log_probs=tuple(
            (renderer.decode((token,)), value)
            for token, value in zip(tokens, choice.log_probs[: len(tokens)], strict=True)
        )
        if log_probs
        else (),
    )


def _pieces(blocks: Sequence[Block], name: str) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    calls = 0
    for block in blocks:
        if block.call is None:
            pieces.append(Piece(block.kind, block.text))
        else:
            call = Call(f"call_{name}_{calls}", block.call.name, json.dumps(block.call.arguments))
            pieces.append(Piece("call", call=call))
            calls += 1
    return tuple(pieces)
