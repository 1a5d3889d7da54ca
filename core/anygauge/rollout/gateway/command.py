"""Agents that run as separate programs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from anygauge.rollout.gateway.server import Gateway
from anygauge.rollout.gateway.session import Session
from anygauge.strict_json import parse_json
from anygauge_hooks.errors import RolloutError

__all__ = ["run_command"]

GUARDED = "anygauge.rollout.gateway.guarded_command"
_END = 2000
"""Characters of standard error that an error shows."""
_PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ"),
    *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables of the driver that a program gets: where things are, and no keys."""
_Files = tuple[IO[bytes], IO[bytes], IO[bytes]]
"""Standard input, output and error of a program."""


async def run_command(
    command: Sequence[str],
    gateway: Gateway,
    session: Session,
    row: Mapping[str, Any],
    pass_env: Iterable[str] = (),
) -> Any:
    """Run an agent as a program, and return the reward that it writes.

    It gets the row as a JSON object on its standard input, and finds the model through the variables that
    both clients read: ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``.
    If the last line that it writes to standard output is a JSON number or object, that is the reward. All
    processes that it starts are killed when it ends, or the rollout does. Only the last MiB of its output is
    kept, and of the driver's environment it gets only a few variables.

    :param pass_env: Names of further variables of the driver.
    :raises RolloutError: It cannot be started, or ended with an error; the end of what it wrote is attached.
    """
    environment = _environment(gateway, session, pass_env)
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise RolloutError(
            f"The agent {command[0]!r} cannot be started: it is not a program.",
            hint="Is it installed on this node?",
        )
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(json.dumps(row, default=str).encode())
        given.seek(0)
        status = await _run(command, environment, (given, output, errors))
        said, complaint = _text(output), _text(errors)
    if status:
        raise RolloutError(
            f"The agent {command[0]!r} ended with status {status}: {complaint[-_END:].strip()}",
            hint="Run it by hand with the variables that docs/agents.md lists.",
        )
    return _reward(said)


async def _run(command: Sequence[str], environment: Mapping[str, str], files: _Files) -> int:
    """Run a program and return its status; if the wait is cancelled, all that it started ends first."""
    ended = asyncio.get_running_loop().sock_recv
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            process = _start(command, environment, theirs, files)
        try:
            await ended(ours, 1)
        finally:
            with suppress(OSError):
                ours.shutdown(socket.SHUT_WR)  # at which the guard ends what is left
            await ended(ours, 1)
            status = process.wait()
    return status


def _start(
    command: Sequence[str], environment: Mapping[str, str], lifeline: socket.socket, files: _Files
) -> subprocess.Popen[bytes]:
    """Start a program below its guard.

    :param lifeline: Becomes the guard's alone. The guard ends everything when the other end is closed, and
        closes this one when it has ended.
    """
    given, output, errors = files
    # Not asyncio's: that kills the guard when it is cancelled at the wrong moment, and leaves the children.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", GUARDED, str(given.fileno()), *command],
        stdin=lifeline.fileno(),
        stdout=output,
        stderr=errors,
        env=environment,
        pass_fds=[given.fileno()],
        start_new_session=True,
    )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _environment(gateway: Gateway, session: Session, pass_env: Iterable[str]) -> dict[str, str]:
    key = gateway.key(session)
    # A proxy that the host uses for the world outside does not know the gateway.
    direct = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), gateway.host]
    return {
        **{name: os.environ[name] for name in (*_PASSED_ON, *pass_env) if name in os.environ},
        **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, direct))),
        "OPENAI_BASE_URL": gateway.openai_url(session),
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": gateway.anthropic_url(session),
        "ANTHROPIC_API_KEY": key,
    }


def _reward(output: str) -> Any:
    lines = output.strip().splitlines()
    try:
        value = parse_json(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, int | float | dict) and not isinstance(value, bool) else None
