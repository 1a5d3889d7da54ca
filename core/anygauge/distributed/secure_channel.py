"""Secure channel: mutual authentication, and messages that cannot be forged.

Both ends know one secret. Each proves it with an HMAC over fresh nonces before anything else is read. Each
message carries an HMAC over its number in its direction, so none can be changed, dropped, repeated or taken
from another connection. Nothing is encrypted. Messages are lists of byte strings: nothing is unpickled.

This module computes bytes only: the client reads and writes them with a blocking socket, the server with
asyncio.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Final

__all__ = [
    "HEADER_BYTES",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "ForgedMessageError",
    "Keys",
    "Seal",
    "check_proof",
    "pack",
    "unpack",
]

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
LENGTH: Final = struct.Struct("!I")
HEADER_BYTES: Final = LENGTH.size + PROOF_BYTES
LONGEST: Final = 64 * 2**20
"""Bytes of a message; a longer one is refused before it is read."""


class ForgedMessageError(ValueError):
    """The other end does not know the secret, or the message is not the one that it sent."""


class Keys:
    """Proofs and keys of one connection.

    :param secret: Known to both ends.
    :param client_nonce: Random bytes of the end that has connected.
    :param server_nonce: Random bytes of the end that listens.
    """

    def __init__(self, secret: bytes, client_nonce: bytes, server_nonce: bytes) -> None:
        self._secret = secret
        self._nonces = client_nonce + server_nonce
        self.server_proof = self._derive(b"proof of the server")
        self.client_proof = self._derive(b"proof of the client")

    def to_server(self) -> Seal:
        """Return the seal of messages from the client to the server."""
        return Seal(self._derive(b"key of the client"))

    def to_client(self) -> Seal:
        """Return the seal of messages from the server to the client."""
        return Seal(self._derive(b"key of the server"))

    def _derive(self, purpose: bytes) -> bytes:
        # Proofs and keys differ by purpose, so none of them can be sent back to its origin.
        return hmac.digest(self._secret, b"anygauge store 1: " + purpose + self._nonces, "sha256")


def check_proof(proof: bytes, expected: bytes) -> None:
    """Raise :class:`ForgedMessageError` unless a proof is the expected one."""
    if not hmac.compare_digest(proof, expected):
        raise ForgedMessageError("the other end does not know the secret")


class Seal:
    """Messages of one direction of a connection, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def _tag(self, message: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + message, "sha256")

    def seal(self, message: bytes) -> bytes:
        """Return a message as it is sent."""
        if len(message) > LONGEST:
            raise ValueError(f"a message of {len(message)} bytes; the limit is {LONGEST}")
        return LENGTH.pack(len(message)) + self._tag(message) + message

    def length(self, header: bytes) -> int:
        """Return how many bytes follow a header."""
        (length,) = LENGTH.unpack_from(header)
        if length > LONGEST:
            raise ForgedMessageError(f"a message of {length} bytes; the limit is {LONGEST}")
        return int(length)

    def open(self, header: bytes, message: bytes) -> bytes:
        """Return a received message after checking that it is the next one that was sent."""
        if not hmac.compare_digest(header[LENGTH.size :], self._tag(message)):
            raise ForgedMessageError("a message was changed on its way")
        return message


def pack(fields: Sequence[bytes]) -> bytes:
    """Return byte strings as one message."""
    return b"".join(part for field in fields for part in (LENGTH.pack(len(field)), field))


def unpack(message: bytes) -> list[bytes]:
    """Return the byte strings of a message."""
    fields, start = [], 0
    while start < len(message):
        (length,) = LENGTH.unpack_from(message, start)
        start += LENGTH.size + length
        fields.append(message[start - length : start])
    return fields
