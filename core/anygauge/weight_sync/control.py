"""HTTP commands to one server before and after a weight update, without an event loop."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx2

from anygauge_hooks.errors import DeadlineError, RolloutError

if TYPE_CHECKING:
    from anygauge_hooks.weights import WeightPeer

__all__ = ["EngineControl", "RefusedError", "message_of"]

EXCERPT = 300


@cache
def _certificates() -> ssl.SSLContext:
    """Return what a client reads when it is made, which takes longer than a small update: once for all."""
    return httpx2.create_ssl_context(trust_env=False)


class RefusedError(RolloutError):
    """A server answered that it will not."""


class EngineControl:
    """The requests that one server is sent, each with a deadline.

    :param deadline_s: Longest wait for one answer, in seconds.
    """

    def __init__(self, peer: WeightPeer, *, deadline_s: float) -> None:
        self.peer = peer
        self._deadline_s = deadline_s
        # A proxy of the environment is for the hub, not for servers of the run.
        self._client = httpx2.Client(
            base_url=peer.address, timeout=deadline_s, trust_env=False, verify=_certificates()
        )

    def post(self, path: str, body: Mapping[str, Any], *, what: str) -> Mapping[str, Any]:
        """Post and return the answer.

        :param what: What is waited for, as the object of a sentence: ``"bucket 3 of version 7"``.
        :raises RefusedError: Status 4xx or 5xx.
        :raises DeadlineError: No answer in time.
        :raises RolloutError: No connection, or it broke.
        """
        try:
            reply = self._client.post(path, json=dict(body), headers=self.peer.keys.headers(path))
        except httpx2.TimeoutException as error:
            raise DeadlineError(
                f"{self.peer.address}{path} did not answer about {what} in {self._deadline_s:g} s.",
                hint="Look at the engine's log; weight_sync.deadline_s is how long to wait.",
            ) from error
        except httpx2.TransportError as error:
            raise RolloutError(
                f"{self.peer.address}{path} cannot be asked about {what}: {type(error).__name__}: {error}.",
                hint="The engine has ended, or was never there; look at its log.",
            ) from error
        if not reply.is_success:
            raise RefusedError(
                f"{self.peer.address}{path} refused {what}: {reply.status_code} {message_of(reply)}.",
                hint="Look at the engine's log.",
            )
        return _object(reply)

    def pause(self, mode: str) -> None:
        """Let the engine make no more tokens.

        :param mode: What becomes of the requests that it has: ``"abort"``, ``"retract"`` (they start over
            with the tokens that they have) or ``"in_place"`` (they go on, with the old cache).
        """
        self.post("/pause_generation", {"mode": mode}, what="a pause")

    def resume(self) -> None:
        """Let the engine go on."""
        self.post("/continue_generation", {}, what="going on")

    def begin(self) -> None:
        """Open an update.

        One that was left open, by a sender that died, is closed first: what it has loaded is overwritten.

        :raises RefusedError: The engine takes none; it has the weights that it had.
        """
        try:
            self.post("/begin_weight_update", {}, what="the begin of an update")
        except RefusedError:
            self._close_left_open()
            self.post("/begin_weight_update", {}, what="the begin of an update")

    def _close_left_open(self) -> None:
        try:
            self.end()
        except RefusedError:  # none is open
            return

    def end(self) -> None:
        """Close the update."""
        self.post("/end_weight_update", {}, what="the end of an update")

    def version(self) -> str:
        """Return the version that the engine says its weights are of."""
        path = self.peer.api.info_path
        try:
            reply = self._client.get(path, headers=self.peer.keys.headers(path))
        except httpx2.TimeoutException as error:
            raise DeadlineError(
                f"{self.peer.address} did not tell its weight version in {self._deadline_s:g} s."
            ) from error
        except httpx2.TransportError as error:
            raise RolloutError(f"{self.peer.address} cannot be asked for its version: {error}.") from error
        if not reply.is_success:
            raise RefusedError(
                f"{self.peer.address} refused to tell its version: {reply.status_code} {message_of(reply)}."
            )
        return str(_object(reply).get("weight_version"))

    def checksums(self) -> list[dict[str, str]]:
        """Return, for each process of the engine, the checksums of its parameters by name.

        :raises RolloutError: It tells none, so that nothing can be compared.
        """
        reply = self.post("/weights_checker", {"action": "checksum"}, what="checksums")
        try:
            checksums = [dict(rank["checksums"]) for rank in reply["ranks"]]
        except (LookupError, TypeError, ValueError):
            checksums = []
        if not checksums or not all(checksums):
            raise RolloutError(
                f"{self.peer.address}/weights_checker told no checksums: {str(reply)[:EXCERPT]}.",
                hint='An engine that cannot tell them: weight_sync.verify = "none".',
            )
        return checksums

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def message_of(reply: httpx2.Response) -> str:
    """Return what a refusal says."""
    message = _object(reply).get("message") or reply.text
    return repr(str(message)[:EXCERPT])


def _object(reply: httpx2.Response) -> Mapping[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
