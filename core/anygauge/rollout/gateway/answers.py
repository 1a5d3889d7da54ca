"""Responses to an agent: complete, or as increments while the generation grows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

from anygauge.rollout.gateway.detokenizer import Detokenizer
from anygauge.rollout.gateway.messages import Call, Message
from anygauge.rollout.gateway.rendering import Renderer
from anygauge.rollout.gateway.response_parsing import Block, Style, read
from anygauge.rollout.gateway.sampling import Choice
from anygauge_hooks.rl import FinishReason

__all__ = ["Answer", "Piece", "Reader", "answer_of"]


class Piece(NamedTuple):
    """Increment of an answer."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: Call | None = None
    block: int = 0
    """Which part of the answer it belongs to."""
    number: int = 0
    """Number of the call."""


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
    """Text and log-probability of each token, but for the one that ended the turn."""

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


class Reader:
    """Follows one generation for one client.

    :param name: Begins the ids of calls; unique in the run.
    """

    def __init__(self, renderer: Renderer, style: Style, name: str) -> None:
        self._renderer = renderer
        self._style = style
        self._name = name
        self._detokenizer = Detokenizer(renderer)
        self._seen: tuple[Piece, ...] = ()

    def blocks(self, choice: Choice) -> tuple[Piece, ...]:
        """Return the parts of an answer, as far as they are certain."""
        tokens = self._renderer.spoken(choice.tokens, choice.finish_reason)
        final = choice.finish_reason is not None
        text = self._renderer.decode(tokens) if final else self._detokenizer.text(tokens)
        return _numbered(read(text, self._style, final=final), self._name)

    def pieces(self, choice: Choice) -> list[Piece]:
        """Return the new pieces since the last call."""
        seen, self._seen = self._seen, self.blocks(choice)
        known = {piece.block: len(piece.text) for piece in seen}
        return [
            piece._replace(text=piece.text[known.get(piece.block, 0) :])
            for piece in self._seen
            if piece.block not in known or len(piece.text) > known[piece.block]
        ]


def answer_of(number: int, choice: Choice, renderer: Renderer, style: Style, name: str) -> Answer:
    """Return the agent's answer from a finished generation."""
    tokens = renderer.spoken(choice.tokens, choice.finish_reason)
    text = renderer.decode(tokens)
    stops = [(at, each) for each in style.stop if (at := text.find(each)) >= 0]
    return Answer(
        number=number,
        blocks=Reader(renderer, style, name).blocks(choice),
        finish_reason=choice.finish_reason or "abort",
        stop=min(stops)[1] if stops else None,
        prompt_tokens=len(choice.request.tokens),
        response_tokens=len(choice.tokens),
        log_probs=tuple(
            (renderer.decode((token,)), value)
            for token, value in zip(tokens, choice.log_probs[: len(tokens)], strict=True)
        ),
    )


def _numbered(blocks: Sequence[Block], name: str) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    calls = 0
    for number, block in enumerate(blocks):
        if block.call is None:
            pieces.append(Piece(block.kind, block.text, block=number))
        else:
            call = Call(f"call_{name}_{calls}", block.call.name, json.dumps(block.call.arguments))
            pieces.append(Piece("call", call=call, block=number, number=calls))
            calls += 1
    return tuple(pieces)
