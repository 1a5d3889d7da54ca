"""Fake engines in threads of the test, which cost no start; those that are killed are processes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from aiohttp import web

from anygauge_tests.fake_engine import FakeServer, Options
from anygauge_tests.fake_engine.server import application
from anygauge_tests.processes import has_ipv6

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class ThreadServer(FakeServer):
    """A fake engine on an event loop of its own in this process; a start forgets what it held."""

    def __init__(self, options: Options | None = None, *, host: str = "127.0.0.1") -> None:
        super().__init__(options)
        self._host = host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        self.close()
        address: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop, address), daemon=True)
        self._thread.start()
        self.address = address.result(20)
        return self.address

    def _run(self, loop: asyncio.AbstractEventLoop, address: Future[str]) -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(self._serve())
        host = f"[{self._host}]" if ":" in self._host else self._host
        address.set_result(f"http://{host}:{runner.addresses[0][1]}")
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    async def _serve(self) -> web.AppRunner:
        runner = web.AppRunner(application(self.options), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, self._host, 0).start()
        return runner

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(20)
        self._loop = self._thread = None


@pytest.fixture
def short_lived() -> Iterator[FakeServer]:
    """Return a server for a test that ends it."""
    with ThreadServer() as running:
        yield running


@pytest.fixture
def ipv6_server() -> Iterator[FakeServer]:
    """Return a server that is reached over IPv6 alone."""
    if not has_ipv6():
        pytest.skip("no IPv6")
    with ThreadServer(host="::1") as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with ThreadServer() as running:
        yield running


@pytest.fixture(scope="module")
def servers(server: FakeServer) -> Iterator[tuple[FakeServer, FakeServer]]:
    """Return a server, and one of two processes that split the model."""
    with ThreadServer(Options(tp_size=2)) as second:
        yield server, second


@pytest.fixture
def adapter_server() -> Iterator[FakeServer]:
    """Return a server whose requests ask for an adapter."""
    with ThreadServer(Options(adapter="policy", token_s=0.0005)) as running:
        yield running


@pytest.fixture
def old_server() -> Iterator[FakeServer]:
    """Return a server of an earlier version."""
    with ThreadServer(Options(sglang="0.5.17")) as running:
        yield running
