"""HTTP server that requires a secret, with bounded memory for unauthenticated clients."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from time import monotonic
from typing import Any

from anygauge.distributed.addresses import in_url
from anygauge_hooks.errors import AnygaugeError

__all__ = ["HEAD_BYTES", "LARGEST_BODY", "SECRET_HEADER", "STRANGERS", "THREAD", "SecretServer"]

SECRET_HEADER = "x-anygauge-secret"
HEAD_BYTES = 16 * 1024
"""Request line and headers together."""
HEAD_S = 10.0
"""From the start of a connection, or the last answer, to the end of the next head. Senders open a
connection for each request, and so never meet this limit."""
LARGEST_BODY = 32 * 2**30
"""A bucket is smaller, unless it is one large tensor; this is above any tensor of a published model."""
STRANGERS = 16
"""Connections that have not shown the secret yet; one more ends the oldest."""
LAST_READ = 64 * 1024
LAST_READ_S = 1.0
POLL_S = 0.05
"""Longest time that :meth:`SecretServer.close` waits for the thread that listens."""
THREAD = "weight-receiver-connection"

Answer = Callable[[str, bytes], Mapping[str, Any]]
_log = logging.getLogger(__name__)


class SecretServer(socketserver.ThreadingTCPServer):
    """Listens from its construction until :meth:`close`, and has a thread for each connection.

    :param answer: Gets path and body of a request that has shown the secret.
    :param stall_s: Longest pause within such a body, in seconds.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, *, answer: Answer, stall_s: float) -> None:
        self.secret = secrets.token_hex(16)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), partial(_Handler, self.secret.encode(), answer, stall_s))
        self.address = f"{in_url(host)}:{self.server_address[1]}"
        self._strangers: dict[socket.socket, None] = {}
        """Oldest first."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
        with self._lock:
            if len(self._strangers) >= STRANGERS:
                self._end_oldest()
            self._strangers[request] = None
        work = partial(self.process_request_thread, request, client_address)
        threading.Thread(target=work, name=THREAD, daemon=True).start()

    def _end_oldest(self) -> None:
        """Wake the oldest connection's thread, which then closes it."""
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        with suppress(OSError):  # the other end has closed it
            oldest.shutdown(socket.SHUT_RDWR)

    def trust(self, connection: socket.socket) -> None:
        """Exempt a connection from eviction by newer ones."""
        with self._lock:
            self._strangers.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.trust(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log in one line why a connection ended, unless the other end closed it."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _log.warning("a connection from %s ended: %r", client_address[0], error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and content of an answer in one packet
    server: SecretServer

    def __init__(self, secret: bytes, answer: Answer, stall_s: float, *arguments: Any) -> None:
        self._secret = secret
        self._answer = answer
        self._stall_s = stall_s
        super().__init__(*arguments)

    def setup(self) -> None:
        """Open the streams of the connection."""
        super().setup()
        self._stream = self.rfile

    def finish(self) -> None:
        """Close the streams of the connection."""
        self._stream.close()
        super().finish()

    def handle_one_request(self) -> None:
        """Read the head of a request, bounded in bytes and time, and answer it."""
        try:
            self.rfile = BytesIO(self._head())
            super().handle_one_request()
        except OSError:  # too slow, or gone
            self.close_connection = True

    def _head(self) -> bytes:
        """Return what comes up to the empty line; nothing if that is too long."""
        head, ends = bytearray(), monotonic() + HEAD_S
        while not head.endswith(b"\r\n\r\n"):
            self.connection.settimeout(max(ends - monotonic(), 0.001))
            # one byte at a time, out of a small buffer: the body stays where it is until the secret is known
            byte = self._stream.read(1)
            if not byte or len(head) == HEAD_BYTES:
                return b""
            head += byte
        return bytes(head)

    def do_POST(self) -> None:
        """Answer a request, if it shows the secret."""
        shown = self.headers.get(SECRET_HEADER, "").encode("latin-1", "replace")
        if not hmac.compare_digest(shown, self._secret):
            self.send_error(HTTPStatus.FORBIDDEN, "this is the receiver of another run")
            return
        self.server.trust(self.connection)
        if (length := self._length()) is None:
            return
        self.connection.settimeout(self._stall_s)
        data = self._stream.read(length)
        if len(data) == length:
            self._reply(*self._respond(data))

    def _length(self) -> int | None:
        """Return the length of the body; answer why it is refused, if it is."""
        lengths = self.headers.get_all("content-length", [])
        if not lengths or "transfer-encoding" in self.headers:
            self.send_error(HTTPStatus.LENGTH_REQUIRED, "say the length of the body")
        elif len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdecimal()):
            self.send_error(HTTPStatus.BAD_REQUEST, "the length of the body is no number")
        elif len(lengths[0]) > len(str(LARGEST_BODY)) or int(lengths[0]) > LARGEST_BODY:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has {LARGEST_BODY} bytes at most")
        else:
            return int(lengths[0])
        return None

    def _respond(self, data: bytes) -> tuple[int, Mapping[str, Any]]:
        """Return status and content of an answer."""
        try:
            return HTTPStatus.OK, self._answer(self.path, data)
        except AnygaugeError as error:
            return HTTPStatus.CONFLICT, {"message": str(error)}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return HTTPStatus.BAD_REQUEST, {"message": f"this request cannot be read: {error!r}"}
        except Exception as error:  # noqa: BLE001 - foreign code: a transport; the sender raises it
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"message": repr(error)}

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request and close the connection, on which its body may follow."""
        self.close_connection = True
        self._reply(code, {"message": message or HTTPStatus(code).phrase})
        # one piece of a body that came with the head: a close that leaves it unread takes the answer back
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LAST_READ_S)
            self.connection.recv(LAST_READ)

    def _reply(self, status: int, value: Mapping[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response_only(status)
        self.send_header("content-length", str(len(content)))
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the sender gets the errors."""
