"""Probes of ``anygauge doctor`` that are forked as :mod:`anygauge_tests.fork_server` does it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anygauge_tests.fork_server import ForkServers

__all__ = ["forked_probes"]


@contextmanager
def forked_probes(processes: ForkServers, doctor: Any) -> Iterator[None]:
    """Let the probes of ``anygauge doctor`` be forked, meanwhile.

    :param doctor: The module of the command, a layer above this one.
    """

    def run_probes(questions: Iterable[Sequence[str]], timeout_s: float) -> list[dict[str, Any]]:
        with ExitStack() as stack:
            nothing = stack.enter_context(Path("/dev/null").open("wb"))
            outputs: list[IO[bytes]] = []
            probes = []
            for question in questions:
                outputs.append(stack.enter_context(TemporaryFile()))
                probe = processes.start(
                    "anygauge.cli.probe", question, output=outputs[-1].fileno(), errors=nothing.fileno()
                )
                probes.append(probe)
                stack.callback(probe.kill)
            codes = [probe.wait(timeout_s) for probe in probes]
            assert not any(codes), codes
            return [_answer(output) for output in outputs]

    cold, doctor._run_probes = doctor._run_probes, run_probes
    try:
        yield
    finally:
        doctor._run_probes = cold


def _answer(output: IO[bytes]) -> dict[str, Any]:
    output.seek(0)
    answer: dict[str, Any] = json.loads(output.read())
    return answer
