"""Gateway server: serves OpenAI's and Anthropic's APIs to agents from the driver's event loop."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from anygauge.config.schema import RolloutGateway
from anygauge.rollout.gateway import anthropic_api, openai_api
from anygauge.rollout.gateway.admission import Admission
from anygauge.rollout.gateway.answers import Answer
from anygauge.rollout.gateway.connections import Connections, most_connections
from anygauge.rollout.gateway.images import Look
from anygauge.rollout.gateway.messages import Chat
from anygauge.rollout.gateway.refusals import Refusal, bad_request
from anygauge.rollout.gateway.rendering import Renderer
from anygauge.rollout.gateway.request_parsing import ChatRequest
from anygauge.rollout.gateway.response_parsing import THINK
from anygauge.rollout.gateway.sampling import Sampling
from anygauge.rollout.gateway.session import Manner, Session
from anygauge.rollout.gateway.tool_formats import find_format
from anygauge.strict_json import parse_json
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import Generator

__all__ = ["Gateway"]

_log = logging.getLogger(__name__)
T = TypeVar("T", ChatRequest, Chat)
_SESSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HEADER_TIMEOUT_S = 30.0
"""For the header of a request, from the beginning of a connection or the end of the request before."""
_BODY_TIMEOUT_S = 120.0
_BACKLOG = 4096
"""Connections that may wait to be taken: the agents of a step begin together, and their clients give up after
seconds. A host may allow fewer (``net.core.somaxconn``)."""
_ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before others are read from or closed: each takes a descriptor."""
_RETRY_AFTER_S = 1.0
_ENDPOINTS = "/v1/chat/completions, /v1/messages, /v1/messages/count_tokens and /v1/models"


class _Body(NamedTuple, Generic[T]):
    """The body of a request."""

    parsed: T
    characters: int
    """Number of characters of its chat to render."""
    fingerprint: str
    """Digest of path and body."""

    @classmethod
    def of(cls, raw: bytes, parse: Callable[[Mapping[str, Any]], T], path: str) -> _Body[T]:
        """Parse a body; takes tens of milliseconds for megabytes, and so no time of the event loop."""
        parsed = parse(_json_object(raw))
        fingerprint = hashlib.blake2b(path.encode() + b"\0" + raw).hexdigest()
        return cls(parsed, parsed.characters(), fingerprint)


class Gateway:
    """Serves sessions over HTTP and records their samples.

    Example::

        async with Gateway(tokenizer, params) as gateway:
            session = gateway.open(generator, seed=1)
            client = openai.AsyncOpenAI(base_url=gateway.openai_url(session), api_key=gateway.key(session))
            ...
            samples = session.trajectories(prompt)

    :param tokenizer: The model's, with a chat template.
    :param params: How the run samples.
    :param template_options: Further arguments of the chat template.
    :raises ConfigError: The tokenizer has no chat template, or an option is wrong.
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        options: RolloutGateway | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = options = options or RolloutGateway()
        template = str(getattr(tokenizer, "chat_template", ""))
        tools = find_format(options.tool_format, template)
        think = options.reasoning == "split" or (options.reasoning == "auto" and THINK[1] in template)
        spoken = (*THINK, *((tools.start, tools.end) if tools else ()))
        renderer = Renderer(tokenizer, template_options, params.stop_token_ids, spoken)
        self._manner = Manner(renderer=renderer, params=params, tools=tools, think=think, options=options)
        self._admission = Admission(options.max_requests, "generations")
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None
        self._listener: asyncio.Server | None = None
        self._address = ""
        self._numbers = 0
        self._started = 0

    # -------------------------------------------------------------------------
    # Life
    # -------------------------------------------------------------------------

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen at a free port.

        :raises RolloutError: This host has no such address.
        """
        self._started = int(time.time())
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(
            self._runner.server, most=most_connections(), header_timeout_s=_HEADER_TIMEOUT_S
        )
        try:
            self._listener = await self._listen(self._connections)
        except OSError as error:
            await self.close()
            raise RolloutError(
                f"The gateway cannot listen at {self._options.host!r}: {error}.",
                hint="host is an address of this node; agents elsewhere need one that they can reach.",
            ) from error
        host, port = self._listener.sockets[0].getsockname()[:2]
        self._address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _listen(self, connections: Connections) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        [(family, _, _, _, address), *_] = await loop.getaddrinfo(
            self._options.host, 0, type=socket.SOCK_STREAM
        )
        listener = socket.create_server(address, family=family)
        server = await loop.create_server(connections, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        listener.listen(_BACKLOG)  # asyncio takes one number for both
        return server

    async def close(self) -> None:
        """Close every session and stop listening."""
        for session in list(self._sessions.values()):
            await self.end(session)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(
        self,
        generator: Generator,
        *,
        seed: int,
        name: str | None = None,
        look: Look | None = None,
        max_media: int | None = None,
    ) -> Session:
        """Begin a session.

        :param generator: Generator that answers its requests.
        :param name: Unique among those that are open, of letters, digits, ``-``, ``_``; ``None`` makes one.
        :param look: Takes images into the run's store; ``None`` where the model reads text alone.
        :param max_media: Most images of one conversation; ``None`` for any number.
        :raises RolloutError: There is a session of that name, or it is no name.
        """
        self._numbers += 1
        name = f"{self._numbers}-{secrets.token_hex(4)}" if name is None else name
        if not _SESSION_NAME.fullmatch(name) or name in self._sessions:
            raise RolloutError(
                f"A session cannot be called {name!r}.",
                hint="A name is unique, and has at most 64 letters, digits, - and _.",
            )
        session = Session(name, generator, seed, self._manner, self._admission, look, max_media)
        self._sessions[name] = session
        return session

    async def end(self, session: Session) -> None:
        """Close a session; its records stay."""
        await session.close()
        self._sessions.pop(session.name, None)

    def openai_url(self, session: Session) -> str:
        """Return the ``base_url`` of OpenAI's client."""
        return f"{self._address}/s/{session.name}/v1"

    def anthropic_url(self, session: Session) -> str:
        """Return the ``base_url`` of Anthropic's client."""
        return f"{self._address}/s/{session.name}"

    @property
    def address(self) -> str:
        """Address that it listens on; the session is then identified by the key."""
        return self._address

    @property
    def host(self) -> str:
        """Host part of :attr:`address`."""
        return urlsplit(self._address).hostname or ""

    def key(self, session: Session) -> str:
        """Return the API key of a session, which opens no other."""
        return f"ag.{session.name}.{self._signature(session.name)}"

    def _signature(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()

    # -------------------------------------------------------------------------
    # HTTP
    # -------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._options.max_body_bytes, middlewares=[self._heard, _refusing]
        )
        for prefix in ("", "/s/{session}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._openai)
            app.router.add_post(f"{prefix}/v1/messages", self._anthropic)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)
        return app

    @web.middleware
    async def _heard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        assert self._connections is not None
        self._connections.heard(request.protocol)
        return await handler(request)

    def _session(self, request: web.Request) -> Session:
        """Return the session of a request, whose key must be its own."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = request.headers.get("x-api-key") or bearer
        _, _, named = key.partition("ag.")
        name, _, signature = named.partition(".")
        # A header may hold bytes that are no text.
        given, right = (each.encode(errors="surrogateescape") for each in (signature, self._signature(name)))
        if not hmac.compare_digest(given, right):
            raise Refusal(401, "The API key is not one of this run's.", code="invalid_api_key")
        assert self._connections is not None
        self._connections.trust(request.protocol)
        wanted = request.match_info.get("session") or request.headers.get("x-session-id") or name
        if wanted != name:
            raise Refusal(401, f"The API key is not that of session {wanted!r}.", code="invalid_api_key")
        if name not in self._sessions:
            raise Refusal(404, f"Session {name!r} is closed.", code="session_not_found")
        return self._sessions[name]

    def _known(self, model: str) -> str:
        names = self._options.models
        if model not in names and "*" not in names:
            raise Refusal(
                404,
                f"The model {model!r} does not exist; there is {', '.join(names)}.",
                parameter="model",
                code="model_not_found",
            )
        return model

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        async with self._submitted(request, openai_api.parse_request) as (chat_request, sampling):
            told = f"chatcmpl-{sampling.name}", int(time.time()), chat_request, await _answers(sampling)
            if chat_request.stream:
                return await _send(request, sampling, _event_stream(openai_api.chunks(*told)))
            return await _send(request, sampling, web.json_response(openai_api.completion(*told)))

    async def _anthropic(self, request: web.Request) -> web.StreamResponse:
        async with self._submitted(request, anthropic_api.parse_request) as (chat_request, sampling):
            [answer] = await _answers(sampling)
            told = f"msg_{sampling.name}", chat_request, answer
            if chat_request.stream:
                return await _send(request, sampling, _event_stream(anthropic_api.events(*told)))
            return await _send(request, sampling, web.json_response(anthropic_api.message(*told)))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        async with self._read(request, anthropic_api.chat_of) as (session, body):
            return web.json_response({"input_tokens": await session.count(body.parsed, body.characters)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response(self._listed(request, self._options.models))

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        listing = self._listed(request, [self._known(request.match_info["model"])])
        return web.json_response(listing["data"][0])

    def _listed(self, request: web.Request, names: Sequence[str]) -> Mapping[str, Any]:
        """Return models as the API of a request lists them."""
        if "anthropic-version" in request.headers:
            created = datetime.fromtimestamp(self._started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return anthropic_api.models(names, created)
        return openai_api.models(names, self._started)

    @asynccontextmanager
    async def _submitted(
        self, request: web.Request, parse: Callable[[Mapping[str, Any]], ChatRequest]
    ) -> AsyncIterator[tuple[ChatRequest, Sampling]]:
        """Give a chat request and its generation, which is waited for until the block ends."""
        async with self._read(request, parse) as (session, body):
            self._known(body.parsed.model)
            sampling = await session.submit(*body, retried=_retried(request))
            async with sampling:
                yield body.parsed, sampling

    @asynccontextmanager
    async def _read(
        self, request: web.Request, parse: Callable[[Mapping[str, Any]], T]
    ) -> AsyncIterator[tuple[Session, _Body[T]]]:
        """Give the session and the parsed body.

        Until the block ends, the body counts among those of its session that are under way.

        :param parse: Parser of an API, from a JSON object to a request.
        """
        session = self._session(request)  # before the body: a stranger's is never read
        length, limit = request.content_length, session.max_body_bytes
        size = limit if length is None else min(length, limit)
        session.bodies.admit(size)
        try:
            raw = await self._body(request, session)
            yield session, await session.in_thread(lambda: _Body.of(raw, parse, request.path))
        finally:
            session.bodies.release(size)

    async def _body(self, request: web.Request, session: Session) -> bytes:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refusal(415, "The body is compressed. Send it as it is.")
        limit = session.max_body_bytes
        try:
            _check_length(request.content_length or 0, limit)
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                raw = await request.read()
            _check_length(len(raw), limit)
        except web.HTTPRequestEntityTooLarge as error:
            session.spent = True  # as with any prompt that has no room
            raise Refusal(
                413,
                f"The body is larger than {limit} bytes. Send less, or raise rollout.gateway.max_body_bytes "
                "and max_context_tokens.",
                code="request_too_large",
            ) from error
        except TimeoutError as error:
            raise Refusal(408, f"The body did not come in {_BODY_TIMEOUT_S:g} s.") from error
        return raw


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, length)


def _json_object(raw: bytes) -> Mapping[str, Any]:
    try:
        body = parse_json(raw)
    except ValueError as error:
        raise bad_request(f"The body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise bad_request("The body is not a JSON object.")
    return body


def _retried(request: web.Request) -> bool:
    """Return whether a client says that it has sent a request before, as OpenAI's and Anthropic's do."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isascii() and count.isdecimal() and count.strip("0") != ""  # of any length


async def _answers(sampling: Sampling) -> list[Answer]:
    """Return the answers. An engine error becomes a 503 or 504, which clients retry."""
    try:
        return await sampling.answers()
    except (RolloutError, DeadlineError) as error:
        status = 504 if isinstance(error, DeadlineError) else 503
        raise Refusal(status, str(error), code="engine_error", retry_after_s=_RETRY_AFTER_S) from error


async def _send(request: web.Request, sampling: Sampling, response: web.Response) -> web.Response:
    await response.prepare(request)
    await response.write_eof()
    sampling.delivered = True
    return response


def _event_stream(events: Iterable[bytes]) -> web.Response:
    return web.Response(body=b"".join(events), content_type="text/event-stream")


@web.middleware
async def _refusing(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a refusal in the shape of the API that was asked."""
    try:
        return await handler(request)
    except Refusal as refusal:
        answer = refusal
    except web.HTTPException as error:
        known = f"; here are {_ENDPOINTS}." if error.status in (404, 405) else ""
        answer = Refusal(error.status, f"{error.reason}: {request.method} {request.path}{known}")
    except Exception as error:  # noqa: BLE001 - foreign code: engines and templates; an agent gets the error
        _log.error("A request of an agent failed.", exc_info=error)
        answer = Refusal(500, f"{type(error).__name__}: {error}")
    anthropics = "/v1/messages" in request.path or "anthropic-version" in request.headers
    body = anthropic_api.error_body(answer) if anthropics else openai_api.error_body(answer)
    headers = {} if answer.retry_after_s is None else {"Retry-After": f"{answer.retry_after_s:g}"}
    return web.json_response(body, status=answer.status, headers=headers)
