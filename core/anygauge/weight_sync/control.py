"""HTTP requests to one server of weights, without an event loop."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import httpx2

from anygauge_hooks.errors import DeadlineError, RolloutError

__all__ = ["EngineControl", "RefusedError"]

EXCERPT = 300


@cache
def _certificates() -> ssl.SSLContext:
    """Return what a client reads when it is made, which takes longer than a small update: once for all."""
    return httpx2.create_ssl_context(trust_env=False)


class RefusedError(RolloutError):
    """A server answered that it will not."""


class EngineControl:
    """The requests that one server is sent, each with a deadline. Engines build their ``WeightTarget`` on it.

    :param headers: Function from a path to the headers that a request for it needs.
    :param deadline_s: Longest wait for one answer, in seconds.
    """

    def __init__(
        self, address: str, headers: Callable[[str], Mapping[str, str]], *, deadline_s: float
    ) -> None:
        self.address = address
        self._headers = headers
        self._deadline_s = deadline_s
        # A proxy of the environment is for the hub, not for servers of the run.
        self._client = httpx2.Client(
            base_url=address, timeout=deadline_s, trust_env=False, verify=_certificates()
        )

    def post(self, path: str, body: Mapping[str, Any] | bytes, *, what: str) -> Mapping[str, Any]:
        """Post and return the answer.

        :param what: What is waited for, as the object of a sentence: ``"bucket 3 of version 7"``.
        :raises RefusedError: Status 4xx or 5xx.
        :raises DeadlineError: No answer in time.
        :raises RolloutError: No connection, or it broke.
        """
        return self._send("POST", path, body, what)

    def get(self, path: str, *, what: str) -> Mapping[str, Any]:
        """Return what a path answers; raises what :meth:`post` does."""
        return self._send("GET", path, None, what)

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, what: str
    ) -> Mapping[str, Any]:
        content: dict[str, Any] = {"content" if isinstance(body, bytes) else "json": body}
        try:
            reply = self._client.request(method, path, **content, headers=self._headers(path))
        except httpx2.TimeoutException as error:
            raise DeadlineError(
                f"{self.address}{path} did not answer about {what} in {self._deadline_s:g} s.",
                hint="Look at its log; weight_sync.deadline_s is how long to wait.",
            ) from error
        except httpx2.TransportError as error:
            raise RolloutError(
                f"{self.address}{path} cannot be asked about {what}: {type(error).__name__}: {error}.",
                hint="It has ended, or was never there; look at its log.",
            ) from error
        if not reply.is_success:
            raise RefusedError(
                f"{self.address}{path} refused {what}: {reply.status_code} {_message_of(reply)}.",
                hint="Look at its log.",
            )
        return _object(reply)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _message_of(reply: httpx2.Response) -> str:
    """Return what a refusal says."""
    message = _object(reply).get("message") or reply.text
    return repr(str(message)[:EXCERPT])


def _object(reply: httpx2.Response) -> Mapping[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
