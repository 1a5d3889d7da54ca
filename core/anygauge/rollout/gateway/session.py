"""Agent session: one or more conversations of an agent with the model."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from anygauge.config.schema import RolloutGateway
from anygauge.rollout.gateway.admission import Admission
from anygauge.rollout.gateway.answers import Answer, answer_of
from anygauge.rollout.gateway.images import Images, Look
from anygauge.rollout.gateway.messages import Chat
from anygauge.rollout.gateway.refusals import Refusal, no_room
from anygauge.rollout.gateway.rendering import Renderer
from anygauge.rollout.gateway.request_parsing import ChatRequest, check_sampling
from anygauge.rollout.gateway.response_parsing import Style
from anygauge.rollout.gateway.sampling import Choice, Sampling
from anygauge.rollout.gateway.tool_formats import ToolFormat
from anygauge.rollout.gateway.trajectories import trajectories
from anygauge.rollout.gateway.turns import Plan, Turn, Turns
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generator

__all__ = ["MOST_FAILURES", "Manner", "Session"]

T = TypeVar("T")
_THREADS = 2
"""Threads of the shared pool that one session uses at most: its slow prompts do not delay others."""
_CHARACTERS_PER_TOKEN = 16
"""More than any context full of text has: prose has 3 to 5 characters a token, indented code and tables up to
8, and only long runs of blanks or rules have more."""
_BYTES_PER_CHARACTER = 6
"""Largest number of bytes for one character in JSON: it may be escaped."""
MOST_FAILURES = 1000
"""Requests of a session that may fail or be given up. The rollout's budget bounds those that succeed."""
_BODIES_AT_ONCE = 16
"""Largest bodies that a session may have under way; smaller ones may be more. What an agent sends stays in
memory until it is answered."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a gateway serves every session."""

    renderer: Renderer
    params: SamplingParams
    """The run's."""
    tools: ToolFormat | None
    think: bool
    """Whether reasoning is told apart."""
    options: RolloutGateway


class Session:
    """Serves requests and records what was sampled for them.

    :param name: Unique in the gateway.
    :param generator: The engines.
    :param admission: Admission of the gateway.
    :param look: Takes images into the run's store; ``None`` where the model reads text alone.
    :param max_media: Most images of one conversation; ``None`` for any number.
    """

    def __init__(
        self,
        name: str,
        generator: Generator,
        seed: int,
        manner: Manner,
        admission: Admission,
        look: Look | None = None,
        max_media: int | None = None,
    ) -> None:
        self.name = name
        self.failure: Exception | None = None
        """Exception that the engine raised, if no answer followed it."""
        self.spent = False
        """Whether a request was refused because there was no room for another token."""
        self._generator = generator
        self._seed = seed
        self._manner = manner
        self._admission = admission
        self._images = Images(manner.renderer, look, manner.params.forbidden, max_media)
        self._turns = Turns(manner.renderer, self._images, manner.options.history)
        self.bodies = Admission(_BODIES_AT_ONCE * self.max_body_bytes, "bytes of requests")
        """Bodies under way."""
        self._threads = asyncio.Semaphore(_THREADS)
        self._samplings: dict[str, list[Sampling]] = {}
        """Samplings by fingerprint; failed ones are dropped."""
        self._drawn: dict[int, int] = defaultdict(int)
        """Number of samples by hash of the prompt's tokens, which themselves would take megabytes."""
        self._failures = 0
        self._requests = 0
        self._closed = False

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns sampled so far, in the order in which they ended."""
        return self._turns.all

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request: where images are not taken, what can fit into the context."""
        context, most = self._manner.options.max_context_tokens, self._manner.options.max_body_bytes
        if context is None or self._images.taken:
            return most
        return min(most, _BYTES_PER_CHARACTER * _CHARACTERS_PER_TOKEN * context)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run something in one of this session's threads, and return its result."""
        await self._threads.acquire()
        running = asyncio.ensure_future(asyncio.to_thread(work))
        # A thread cannot be cancelled, and is in use until it ends, also after its client has left.
        running.add_done_callback(lambda _: self._threads.release())
        return await asyncio.shield(running)

    async def count(self, chat: Chat, characters: int) -> int:
        """Return the tokens of the prompt that a chat would be.

        :param characters: Number of characters of the chat.
        :raises Refusal: It is too long to be counted, or cannot be shown to the model.
        """
        if (problem := self._oversize(characters)) is not None:
            raise no_room(problem)
        return len((await self._plan(await self._images.marked(chat))).tokens)

    async def submit(
        self, chat_request: ChatRequest, characters: int, fingerprint: str, *, retried: bool
    ) -> Sampling:
        """Begin to answer a request, or find the answer that its client did not get.

        :param characters: Number of characters of its chat.
        :param fingerprint: The same for two requests only if they are the same to the byte.
        :param retried: Whether the client says that it has sent the request before.
        :raises Refusal: It cannot be served.
        """
        if self._failures >= MOST_FAILURES:
            text = f"{self._failures} requests of this session have failed, and it takes no more."
            raise Refusal(429, text, code="too_many_failed_requests")
        if self._manner.options.sampling == "refuse":
            check_sampling(chat_request, _run_settings(self._manner.params))
        if (problem := self._oversize(characters)) is not None:
            self.spent = True
            raise no_room(problem)
        chat_request = chat_request._replace(chat=await self._images.marked(chat_request.chat))
        sampling = self._again(fingerprint, retried=retried)
        if sampling is None:
            plan = await self._plan(chat_request.chat)
            # Another attempt of the same request may have begun in the meantime.
            sampling = self._again(fingerprint, retried=retried) or self._begin(
                chat_request, plan, fingerprint
            )
        return sampling

    def trajectories(self, prompt: Prompt) -> list[Sample]:
        """Return the samples to train on: one for each branch of the session."""
        return trajectories(self.turns, prompt, self._seed, self._manner.renderer)

    async def close(self) -> None:
        """Refuse new requests, and cancel those in flight."""
        self._closed = True
        await asyncio.gather(
            *(each.cancel() for known in self._samplings.values() for each in known if not each.done)
        )

    def _again(self, fingerprint: str, *, retried: bool) -> Sampling | None:
        """Return the generation of an earlier attempt.

        An agent may well ask the same twice, to have two answers. So it is the same request only if its
        client says so, or if nobody has got the first answer.
        """
        known = [each for each in self._samplings.get(fingerprint, ()) if not each.failed]
        lost = [each for each in known if not each.delivered and (retried or not each.awaited)]
        if lost:
            return lost[0]
        return known[-1] if known and retried else None

    async def _plan(self, chat: Chat) -> Plan:
        # Templates and tokenizers take seconds for a long chat, in which the event loop serves other agents.
        plan = await self.in_thread(partial(self._turns.plan, chat))
        if self._closed:
            raise Refusal(404, f"Session {self.name!r} is closed.")
        return plan

    def _oversize(self, characters: int) -> str | None:
        """Return why a chat cannot fit into the context, by its characters alone, or ``None``.

        Rendering and tokenizing take seconds and some 200 MB for each MiB, so this comes first.
        """
        context = self._manner.options.max_context_tokens
        if context is None or characters <= _CHARACTERS_PER_TOKEN * context:
            return None
        return (
            f"The prompt has {characters} characters; the context of {context} tokens has no room for them."
        )

    def _begin(self, chat_request: ChatRequest, plan: Plan, fingerprint: str) -> Sampling:
        params = self._params(chat_request, len(plan.tokens))
        self._admission.admit(chat_request.answers)
        requests = [
            self._request(chat_request, plan, params, number) for number in range(chat_request.answers)
        ]
        style = self._style(chat_request, plan)

        def ended(number: int, choice: Choice) -> Answer:
            name, wanted = _short(choice.request.id), chat_request.log_probs
            answer = answer_of(number, choice, self._manner.renderer, style, name, log_probs=wanted)
            self._record(plan, choice, answer)
            return answer

        sampling = Sampling(
            self._generator,
            requests,
            timeout_s=self._manner.options.timeout_s,
            ended=ended,
            failed=self._fail,
        )
        sampling.when_done(lambda: self._admission.release(chat_request.answers))
        sampling.when_done(lambda: self._drop_failed(fingerprint))
        self._samplings.setdefault(fingerprint, []).append(sampling)
        return sampling

    def _drop_failed(self, fingerprint: str) -> None:
        """Forget the failed attempts of a request, whose prompts and answers nobody reads any more."""
        known = self._samplings.pop(fingerprint, [])
        kept = [each for each in known if not each.failed]
        self._failures += len(known) - len(kept)
        if kept:
            self._samplings[fingerprint] = kept

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, Refusal):
            self.failure = error
        self.spent = self.spent or (isinstance(error, Refusal) and error.status == 400)

    def _params(self, chat_request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        run, context = self._manner.params, self._manner.options.max_context_tokens
        room = run.max_new_tokens if context is None else min(run.max_new_tokens, context - prompt_tokens)
        if room < 1:
            self.spent = True
            raise no_room(
                f"The prompt has {prompt_tokens} tokens; the context of {context} has no room for an answer."
            )
        stop = (*run.stop, *chat_request.stop, *self._one_call(chat_request))
        length = room if chat_request.max_tokens is None else min(room, chat_request.max_tokens)
        return replace(run, max_new_tokens=length, stop=tuple(dict.fromkeys(stop)))

    def _one_call(self, chat_request: ChatRequest) -> tuple[str, ...]:
        tools = self._manner.tools
        return (tools.end,) if tools is not None and chat_request.calls == "one" else ()

    def _request(
        self, chat_request: ChatRequest, plan: Plan, params: SamplingParams, number: int
    ) -> GenerateRequest:
        self._requests += 1
        prompt = hash(plan.tokens)
        drawn = self._drawn[prompt]
        self._drawn[prompt] += 1
        seed = (
            self._seed_of(plan.tokens, drawn)
            if chat_request.seed is None
            else (chat_request.seed + number) % 2**63
        )
        return GenerateRequest(
            id=f"{self.name}-{self._requests}",
            tokens=plan.tokens,
            params=params,
            seed=seed,
            session=self.name,
            media=plan.shown.media,
        )

    def _seed_of(self, tokens: tuple[int, ...], drawn: int) -> int:
        """Return a seed that does not depend on the order in which parallel requests arrive."""
        text = f"{self._seed}/{drawn}/{tokens}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def _style(self, chat_request: ChatRequest, plan: Plan) -> Style:
        manner = self._manner
        return Style(
            think=manner.think,
            opened=plan.opened,
            tools=None if chat_request.calls == "none" else manner.tools,
            schemas={
                tool["function"]["name"]: tool["function"].get("parameters") or {}
                for tool in chat_request.chat.tools
            },
            stop=chat_request.stop,
        )

    def _record(self, plan: Plan, choice: Choice, answer: Answer) -> None:
        self.failure = None
        self._turns.record(
            Turn(
                plan=plan,
                message=answer.message(),
                tokens=tuple(choice.tokens),
                log_probs=tuple(choice.log_probs),
                weight_versions=tuple(choice.weight_versions),
                finish_reason=choice.finish_reason,
            )
        )


def _run_settings(params: SamplingParams) -> Mapping[str, Any]:
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": 1,
    }


def _short(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
