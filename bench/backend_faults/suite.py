"""One run of the conformance suite in a process of its own, up to its first failure."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from backend_faults.fault import ask, backend_name

SUITE = "anygauge.testing.conformance"
SLOWEST = "-processes-", "test_kernels"
"""Parts of the names of tests that start processes, and of those that are the most."""
ARGUMENTS = (
    "-x",
    "-q",
    "--tb=short",
    "-c",
    "pytest.ini",
    "-p",
    "no:cacheprovider",
    "-p",
    "anygauge.testing.plugin",
)
"""No plugin but the suite's, and no settings of a checkout: the suite as it is where a backend is written."""
PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Exit statuses of pytest; a module that cannot be imported interrupts it."""
TESTS_OF: Mapping[str, Sequence[str]] = {
    "varlen_attention": ("varlen_attention", "test_kernels_attention"),
    "linear_logprob": ("linear_logprob", "test_kernels_loss"),
    "vocab_parallel_logprob": ("vocab_parallel_logprob", "test_kernels_loss"),
    "collectives": ("test_collectives",),
    "groups": ("test_collectives", "test_worker"),
    "device": ("test_device", "test_scope"),
    "optimizer": ("optimizer",),
    "register_backends": ("test_backend_spec", "4-processes-all_reduce_sum-float32"),
    "report_environment": ("test_backend_spec",),
    "worker_env": ("test_worker",),
    "prepare_worker": ("test_worker",),
    "make_jit_fuser": ("test_fuser",),
    "rollout_engine_args": ("test_config_hooks",),
    "adjust_config": ("test_config_hooks",),
    "check_config": ("test_config_hooks",),
    "register_weight_transports": ("test_weight_transports", "imports_no_torch"),
}
"""Words of the names of tests that may notice a fault, by its group. For other ops it is the op."""
PRELOADED = ("pytest", "torch", "torch.distributed", "anygauge.kernels.table", "anygauge.runtime.launch")
"""Imported once for all runs. No module of the suite: pytest rewrites their assertions as it imports them."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of the suite ended."""

    status: int | None
    """Exit status of pytest; negative for a crash; ``None`` if it took too long."""
    test: str = ""
    """First failure."""
    error: str = ""
    """First line of its message."""
    output: str = ""

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return self.status == PASSED

    @property
    def failed(self) -> bool:
        """Whether a test failed, or the process crashed or hung: not where pytest itself had a problem."""
        test_failed = bool(self.test) and self.status in (FAILED, INTERRUPTED)
        return test_failed or self.status is None or self.status < PASSED


class FirstFailure:
    """Pytest plugin that runs likely tests first, or one alone, and keeps the first failure."""

    def __init__(self, words: Sequence[str] = (), only: str = "", *, quick: bool = False) -> None:
        self.words, self.only, self.quick = words, only, quick
        self.test = self.error = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Sort the tests: those of the words come first, and slow ones last."""
        items[:] = [item for item in items if self.only in ("", name_of(item.nodeid))]
        if self.quick and self.words:
            items[:] = [item for item in items if likely(item.nodeid, self.words)]
        items.sort(
            key=lambda item: (not likely(item.nodeid, self.words), *(slow in item.nodeid for slow in SLOWEST))
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the first failure of a test, its fixtures included."""
        self._keep(report)

    def pytest_collectreport(self, report: Any) -> None:
        """Keep the first module that cannot be imported."""
        self._keep(report)

    def _keep(self, report: Any) -> None:
        if report.failed and not self.test:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.test, self.error = name_of(report.nodeid), (crash.message if crash else str(report.longrepr))


def name_of(test: str) -> str:
    """Return a test's module and name."""
    path, *rest = test.split("::")
    return "::".join((path.rpartition("/")[2], *rest))


def likely(test: str, words: Sequence[str]) -> bool:
    """Return whether a test's name has one of some words."""
    return any(word in name_of(test) for word in words)


def run_suite(
    backend: str,
    environment: Mapping[str, str],
    words: Sequence[str] = (),
    *,
    only: str = "",
    quick: bool = False,
    limit_s: float,
    suite: str = SUITE,
) -> Run:
    """Run the suite in a new process and an empty directory.

    :param words: Tests whose names have one of them come first.
    :param only: Name of the only test to run.
    :param quick: Run no others than those, where there are words.
    :param limit_s: A run that takes longer is ended with all of its processes.
    :param suite: Package of the tests.
    """
    context = processes(backend)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        plugin = FirstFailure(words, only, quick=quick)
        process = context.Process(
            target=_run, args=(suite, directory, backend, dict(environment), plugin, sender)
        )
        process.start()
        sender.close()
        process.join(limit_s)
        status = process.exitcode
        _end(process)
        output = Path(directory, "output")
        test, error = _received(receiver)
        return Run(status, test, error.partition("\n")[0], output.read_text() if output.exists() else "")


@cache
def processes(backend: str) -> Any:
    """Return how processes start: forked after the imports on the host, anew where a device is involved."""
    if device_type() != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def device_type() -> str:
    """Return the ``torch.device`` type of the backend under test."""
    specs = ask("register_backends", SimpleNamespace())
    return next((spec.device_type for spec in specs if spec.name == backend_name()), "")


def _run(
    suite: str, directory: str, backend: str, environment: Mapping[str, str], plugin: Any, sender: Connection
) -> None:
    import pytest

    os.setsid()  # so that the processes of the suite can be ended together
    os.environ.update(environment, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    os.chdir(directory)
    Path("pytest.ini").touch()
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    status = pytest.main(["--pyargs", suite, "--anygauge-backend", backend, *ARGUMENTS], plugins=[plugin])
    sender.send((plugin.test, plugin.error))
    os._exit(status)  # a process group that a fault broke may wait at the usual end


def _received(receiver: Connection) -> tuple[str, str]:
    """Return the first failure, or nothing where the process died before it could say."""
    try:
        test, error = receiver.recv()
    except EOFError:
        return "", ""
    return test, error


def _end(process: Any) -> None:
    """End a run and the processes that it started."""
    process.kill()  # it may not have its own group yet
    process.join()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
