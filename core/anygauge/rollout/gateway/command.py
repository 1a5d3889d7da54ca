"""Agents that are programs of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from anygauge.rollout.gateway.server import Gateway
from anygauge.rollout.gateway.session import Session
from anygauge_hooks.errors import RolloutError

__all__ = ["run_command"]

_END = 2000
"""Characters of standard error that an error shows."""


async def run_command(
    command: Sequence[str], gateway: Gateway, session: Session, row: Mapping[str, Any]
) -> Any:
    """Run an agent as a program, and return the reward that it writes.

    It gets the row as a JSON object on its standard input, and finds the model through the variables that
    both clients read: ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``.
    If the last line that it writes to standard output is a JSON number or object, that is the reward. It
    leads a session of its own, all processes of which are killed when the rollout ends.

    :raises RolloutError: It cannot be started, or ended with an error; the end of what it wrote is attached.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **_environment(gateway, session)},
            start_new_session=True,
        )
    except OSError as error:
        raise RolloutError(
            f"The agent {command[0]!r} cannot be started: {error}.", hint="Is it installed on this node?"
        ) from error
    try:
        output, problems = await process.communicate(json.dumps(row, default=str).encode())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        raise RolloutError(
            f"The agent {command[0]!r} ended with status {process.returncode}: "
            f"{problems.decode(errors='replace')[-_END:].strip()}",
            hint="Run it by hand with the variables that docs/agents.md lists.",
        )
    return _reward(output.decode(errors="replace"))


def _environment(gateway: Gateway, session: Session) -> dict[str, str]:
    key = gateway.key(session)
    # A proxy that the host uses for the world outside does not know the gateway.
    direct = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), gateway.host]
    return {
        **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, direct))),
        "OPENAI_BASE_URL": gateway.openai_url(session),
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": gateway.anthropic_url(session),
        "ANTHROPIC_API_KEY": key,
    }


def _reward(output: str) -> Any:
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, int | float | dict) and not isinstance(value, bool) else None
