"""Math grader: mathematical equivalence by the ``math-verify`` library, in a process of its own.

The library bounds its time with signals, which work on the main thread alone and cannot interrupt one long
integer operation (``2^(3^(4^5))`` takes a few characters to write). A process can be bounded in time and
memory whatever it computes, so the grader lives in one: it serves one request at a time, ends itself when a
request takes too long, and is replaced by the next request.

Run as a module it is the process; :class:`Grader` is its other end.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import select
import signal
import subprocess
import sys
from threading import Lock
from typing import Any

from anygauge_hooks.errors import RewardError

__all__ = ["Grader"]

logger = logging.getLogger(__name__)

_MAX_MEMORY = 2 << 30
"""Address space of the process, in bytes."""
_START_S = 60.0
"""CPU seconds that the imports may take."""
_WALL_FACTOR = 20
"""A request may wait for a busy host this many times longer than the CPU time it is allowed."""


class Grader:
    """Client of a grader process. Safe to use from several threads, which take turns."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equivalent(self, response: str, label: str, timeout_s: float) -> bool:
        r"""Return whether the answer in a response equals the expected one.

        :param response: The text of a sample.
        :param label: A number or expression, alone, in ``\boxed{}``, between ``$`` or after ``####``.
        :param timeout_s: CPU seconds; without a verdict by then the answer counts as wrong.
        :raises RewardError: The label holds no expression, or the process cannot work.
        """
        request = json.dumps([response, label, timeout_s]).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = _start()
            reply = _exchange(self._process, request, _START_S + _WALL_FACTOR * timeout_s)
            if reply is None:
                return self._without_verdict(response)
        verdict = json.loads(reply)
        if isinstance(verdict, str):
            raise RewardError(verdict, hint="data.label_key names the field of the expected answer.")
        return bool(verdict)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _without_verdict(self, response: str) -> bool:
        """Return the verdict on a request that the process did not survive: wrong."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.kill()
        code = process.wait()
        self.close()
        if code > 0:
            raise RewardError(
                f"The math grader ended with exit code {code}; its own error is on standard error.",
                hint="`python -m anygauge.rollout.math_grader < /dev/null` shows it.",
            )
        logger.warning("math: no verdict in time, counted as wrong: %.80r", response)
        return False


def _start() -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C is for the run, which closes the pipe, which ends the process.
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _exchange(process: subprocess.Popen[bytes], request: bytes, wall_s: float) -> bytes | None:
    """Return the line that answers a request, or ``None`` if the process ended or did not answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    ready, _, _ = select.select([process.stdout], [], [], wall_s)
    return process.stdout.readline() or None if ready else None


# -------------------------------------------------------------------------
# Inside the process
# -------------------------------------------------------------------------

_HASH_ANSWER = re.compile(r"####\s*([-+]?\s*(?:\\?\$)?\s*[-+]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*[1-9]\d*)?)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MINUS = "\u2212"
_DELIMITERS = ("\\boxed", "$", "\\(", "\\[")


def serve() -> None:
    """Answer requests on standard input until it is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    signal.setitimer(signal.ITIMER_PROF, _START_S)
    logging.disable()
    import math_verify  # noqa: F401 - before the first request, whose time it is not

    signal.setitimer(signal.ITIMER_PROF, 0)
    for line in sys.stdin.buffer:
        response, label, timeout_s = json.loads(line)
        # The default action of the signal ends the process, even inside an operation of C code.
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        verdict = _verdict(response, label)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(verdict).encode() + b"\n")
        sys.stdout.buffer.flush()


def _verdict(response: str, label: str) -> bool | str:
    from math_verify import verify

    gold = _gold(label)
    if not gold:
        return f"The label {label!r} holds no mathematical expression."
    return bool(verify(gold, _answer(response), timeout_seconds=None))


def _gold(label: str) -> list[Any]:
    """Parse a label, all of which is the answer."""
    text = label.rpartition("####")[2].strip().removesuffix(".")
    if any(delimiter in text for delimiter in _DELIMITERS):
        return _parse(text)
    return _parse(f"\\boxed{{{text}}}") or _parse(text)


def _answer(response: str) -> list[Any]:
    """Parse the answer of a response: boxed, else the last number after ``####``, else what is found last."""
    response = _BOX.sub(lambda _: "\\boxed{", response.replace(_MINUS, "-"))
    marked = _HASH_ANSWER.findall(response)
    if marked and "\\boxed" not in response:
        number = re.sub(r"[\s$,\\]", "", marked[-1])
        return _parse(f"\\boxed{{{number}}}")
    return _parse(response)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))


if __name__ == "__main__":
    serve()
