"""An engine that says what a test wrote down, and a data source of a list: for tests of rollout functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anygauge_hooks.rl import Prompt
from anygauge_hooks.rollout import GenerateRequest, Generation

__all__ = ["ListSource", "ScriptedEngine"]


class ScriptedEngine:
    """A :class:`~anygauge_hooks.rollout.Generator` without a model.

    :param say: From a request to all the tokens that follow it; more than it asks for are cut off, as
        ``"length"``.
    :param holds: From a request to how many of its tokens are there when it stops to wait: for an abort,
        which returns these, or for :meth:`release`, which returns all. ``None`` does not wait.
    """

    def __init__(
        self,
        say: Callable[[GenerateRequest], Sequence[int]],
        holds: Callable[[GenerateRequest], int | None] = lambda request: None,
    ) -> None:
        self._say = say
        self._holds = holds
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self.version = 0
        """Version of the weights that it reports."""
        self.requests: list[GenerateRequest] = []
        """All that it got."""
        self.cancelled: list[str] = []
        """Requests whose caller went away."""
        self.aborts = 0

    @property
    def waiting(self) -> list[str]:
        """Requests that wait."""
        return list(self._waiting)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return what was written down; log-probs are -1/2 per token."""
        self.requests.append(request)
        said = list(self._say(request))
        limit = request.params.max_new_tokens
        cut = len(said) > limit
        held = self._holds(request)
        if held is not None and held <= min(len(said), limit) and not await self._wait(request.id):
            return self._generation(said[:held], "abort")
        await asyncio.sleep(0)
        return self._generation(said[:limit], "length" if cut else "stop")

    async def _wait(self, name: str) -> bool:
        """Return whether a request was released; ``False`` if it was aborted."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[name] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            del self._waiting[name]

    def _generation(self, tokens: Sequence[int], finish_reason: Any) -> Generation:
        count = len(tokens)
        return Generation(tuple(tokens), (-0.5,) * count, (self.version,) * count, finish_reason)

    async def abort(self) -> None:
        """End every request that waits."""
        self.aborts += 1
        self._answer(self._waiting, released=False)

    def release(self, *names: str) -> None:
        """Let requests go on; without names, all."""
        self._answer(names or self._waiting, released=True)

    def _answer(self, names: Any, *, released: bool) -> None:
        for name in names:
            if not self._waiting[name].done():
                self._waiting[name].set_result(released)


class ListSource:
    """A :class:`~anygauge_hooks.data.DataSource` of prompts that are there.

    :param epochs: After which it has no more; ``None`` for any number.
    """

    def __init__(self, prompts: Sequence[Prompt], epochs: int | None = None) -> None:
        self._prompts = prompts
        self._epochs = epochs
        self._at = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, in order."""
        last = self._at + num_prompts
        if self._epochs is not None:
            last = min(last, self._epochs * len(self._prompts))
        prompts = [self._prompts[place % len(self._prompts)] for place in range(self._at, last)]
        self._at = last
        return prompts

    def all(self, limit: int | None = None) -> list[Prompt]:
        """Return every prompt once."""
        return list(self._prompts[:limit])

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there."""
        self._at = state["at"]
