"""Turns sampled in a session, and how a later request continues from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from anygauge.rollout.gateway.images import Images, Shown
from anygauge.rollout.gateway.messages import Chat, Message, same_reasoning, say, start
from anygauge.rollout.gateway.rendering import Renderer
from anygauge_hooks.rl import FinishReason

__all__ = ["Plan", "Turn", "Turns"]


class Plan(NamedTuple):
    """The prompt of a request."""

    shown: Shown
    key: str
    """Key of the chat, made from its messages."""
    parent: Turn | None = None
    """Turn whose prompt and response it begins with."""
    opened: bool = False
    """Whether the prompt has opened the reasoning already."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the prompt."""
        return self.shown.tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One generation, as the engine made it."""

    plan: Plan
    message: Message
    """Message that was returned to the agent as the model's."""
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason
    """``"abort"``: the agent went away before the end."""

    @property
    def whole(self) -> Shown:
        """Prompt and response."""
        return self.plan.shown.then(Shown(self.tokens))


@dataclass
class Turns:
    """The turns of a session, found again by what was said before them and in them.

    :param history: ``"template"``: where the template shows a turn otherwise than it was sampled, the prompt
        starts again from the template's text. ``"append"``: it always goes on from the sampled tokens.
    """

    renderer: Renderer
    images: Images
    history: Literal["template", "append"] = "template"
    all: list[Turn] = field(default_factory=list)
    _by_chat: dict[str, list[Turn]] = field(default_factory=lambda: defaultdict(list))

    def record(self, turn: Turn) -> None:
        """Keep a turn."""
        self.all.append(turn)
        self._by_chat[turn.plan.key].append(turn)

    def plan(self, chat: Chat) -> Plan:
        """Return the tokens to go on from.

        They begin with those of the latest turn of the chat that was recorded, if the template lets them.

        :raises Refusal: The chat cannot be rendered.
        """
        key, said = self._recognized(chat)
        chat = chat._replace(messages=tuple(_as_recorded(chat, said)))
        text = self.renderer.render(chat, generate=True)
        opened = self.renderer.opens_thinking(text)
        for position in sorted(said, reverse=True):
            onward = self._onward(chat, position, said[position], text)
            if onward is not None:
                shown, parent = onward
                return Plan(shown, key, parent, opened)
        shown = self.images.placed(self.renderer.encode(text), chat.messages)
        return Plan(shown, key, None, opened)

    def _recognized(self, chat: Chat) -> tuple[str, dict[int, Turn]]:
        """Return the key of a chat, and which of its messages are turns that were recorded."""
        key, said = start(chat), {}
        for position, message in enumerate(chat.messages):
            edited = None
            if message.role == "assistant":
                turn, edited = self._find(key, message)
                if turn is not None:
                    said[position] = turn
            key = say(key, message, reasoning=edited)
        return key, said

    def _find(self, key: str, message: Message) -> tuple[Turn | None, str | None]:
        """Return the turn that a message repeats, or else the reasoning in which it differs from all."""
        meaning = message.meaning()
        alike = [turn for turn in self._by_chat.get(key, ()) if turn.message.meaning() == meaning]
        same = [turn for turn in alike if same_reasoning(message.reasoning, turn.message.reasoning)]
        if not same:
            return None, message.reasoning if alike else None
        ids = [call.id for call in message.calls]
        # The same may have been sampled twice; ids of calls tell which of the two this is.
        exact = [turn for turn in same if [call.id for call in turn.message.calls] == ids]
        return (exact or same)[0], None

    def _onward(self, chat: Chat, position: int, turn: Turn, text: str) -> tuple[Shown, Turn | None] | None:
        """Return the prompt that goes on from a turn, and the turn if all of it is in there.

        :param text: The whole chat, rendered.
        """
        if self.history == "template" and not self._shown_as_sampled(chat, position, turn, text):
            return None
        after = self.renderer.after(chat, position)
        if after is None:
            return None
        messages = chat.messages[position + 1 :]
        if len(self.renderer.spoken(turn.tokens, turn.finish_reason)) == len(turn.tokens):
            return turn.whole.then(self.images.placed(self.renderer.encode(after), messages)), turn
        last = turn.tokens[-1]
        closing = self.renderer.decode((last,))
        if after.startswith(closing):
            rest = self.renderer.encode_after(last, after[len(closing) :])
            return turn.whole.then(self.images.placed(rest, messages)), turn
        # The template ends the turn with another token than the model did, so the prompt leaves that one out.
        spoken = turn.plan.shown.then(Shown(turn.tokens[:-1]))
        return spoken.then(self.images.placed(self.renderer.encode(after), messages)), None

    def _shown_as_sampled(self, chat: Chat, position: int, turn: Turn, text: str) -> bool:
        """Return whether the template shows a turn, and all before it, as when the turn was sampled."""
        before = chat._replace(messages=chat.messages[:position])
        if not text.startswith(self.renderer.render(before, generate=True)):
            return False
        upto = chat._replace(messages=chat.messages[: position + 1])
        return text.startswith(self.renderer.render(upto, generate=False)) or text.startswith(
            self.renderer.decode(self.images.single(turn.whole))
        )


def _as_recorded(chat: Chat, said: dict[int, Turn]) -> Iterator[Message]:
    """Yield the messages of a chat; those that were recorded with all that the model said."""
    for position, message in enumerate(chat.messages):
        if position in said:
            recorded = said[position].message
            calls = zip(message.calls, recorded.calls, strict=True)
            # A tool's answer names the call by the agent's id.
            yield recorded._replace(
                calls=tuple(theirs._replace(arguments=ours.arguments) for theirs, ours in calls)
            )
        else:
            yield message
