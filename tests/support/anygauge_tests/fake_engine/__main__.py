"""Serve until the process is ended: prints one line of JSON with its address, then nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import orjson
from aiohttp import web

from anygauge.distributed.lifetime import die_with
from anygauge_tests.fake_engine.options import Options, parse_options
from anygauge_tests.fake_engine.server import application


async def _serve(options: Options, host: str, port: int, *, lifeline: bool) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    runner = web.AppRunner(application(options), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=1024)
    await site.start()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    if lifeline:
        loop.add_reader(0, _read_lifeline, ended)
    bound = runner.addresses[0]
    sys.stdout.buffer.write(
        orjson.dumps({"address": f"http://{bound[0]}:{bound[1]}", "pid": os.getpid()}) + b"\n"
    )
    sys.stdout.flush()
    await ended.wait()
    os._exit(0)


def _read_lifeline(ended: asyncio.Event) -> None:
    if not os.read(0, 1):
        ended.set()


def main() -> None:
    """Serve as the command line says."""
    options, arguments = parse_options()
    die_with(arguments.parent)
    asyncio.run(_serve(options, arguments.host, arguments.port, lifeline=arguments.lifeline))


if __name__ == "__main__":
    main()
