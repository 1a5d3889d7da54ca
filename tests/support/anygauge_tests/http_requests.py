"""One HTTP request, answered with any status."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.error import HTTPError

__all__ = ["Reply", "ask"]

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Reply(NamedTuple):
    """An answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return what the body holds."""
        return json.loads(self.body)


def ask(
    url: str,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str | None = None,
    timeout_s: float = 60,
) -> Reply:
    """Send a request, past every proxy; by default a POST if there is a body."""
    request = urllib.request.Request(url, data, {**(headers or {})}, method=method)
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            return Reply(answer.status, answer.read())
    except HTTPError as error:
        return Reply(error.code, error.read())
