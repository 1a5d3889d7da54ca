"""Processes that all tests of a session share: starting them costs more than most cases."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from anygauge_tests.fork_server import ForkedProcess, ForkServers

WORKER = Path(__file__).with_name("parallel_worker.py")
START_S, CASE_S = 240.0, 120.0
"""Deadlines of the start of all processes, and of one case."""
SIZE = 4
CASES_PER_START = 12
"""Megatron's gradient hooks hold the model that holds them, and so every process group with its threads."""

MakeModel = Callable[..., Path]
Process = ForkedProcess | subprocess.Popen[bytes]


class Crew:
    """Ranks that wait for cases.

    :param backend: That they run on. Only those of the host are forked from warm processes.
    :param environ: Of the processes, beside what is set here.
    """

    def __init__(
        self,
        directory: Path,
        backend: str = "cpu",
        *,
        size: int = SIZE,
        cases_per_start: int = CASES_PER_START,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._directory, self._backend, self._size = directory, backend, size
        self._cases_per_start = cases_per_start
        self._environ = {**environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._numbers = itertools.count()
        self._ranks: list[tuple[Process, Connection]] = []
        # one for each rank: they differ in the seed of their hashes, as the processes of a run do
        self._warm = [ForkServers("cpu") for _ in range(size)] if backend == "cpu" else []
        self._cases = 0
        """Since the processes were started."""

    def run(self, *, world: int, limit_s: float = CASE_S, **case: Any) -> list[Any]:
        """Run a case on the first ranks and return what each returned.

        A rank that does not answer in time fails the test with the stacks of all ranks, and the processes are
        started anew for the next case. What is no error of the project fails it with its traceback.
        """
        if self._cases >= self._cases_per_start:
            self.close()
        if not self._ranks:
            self._start()
        self._cases += 1
        message = {"world": world, "number": next(self._numbers), **case}
        chosen = self._ranks[:world]
        for _, pipe in chosen:
            pipe.send_bytes(pickle.dumps(message))
        found = self._answers(chosen, limit_s)
        crashes = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(found) if kind == "crash"]
        if crashes:
            pytest.fail("\n".join(crashes), pytrace=False)
        return [value if kind == "value" else CaseError(value) for kind, value in found]

    def _start(self) -> None:
        self._cases = 0
        number = next(self._numbers)
        store = self._directory / f"store-{number}"
        for warm in self._warm:
            warm.prepare()
        for rank in range(self._size):
            ours, theirs = Pipe()
            given = (theirs.fileno(), rank, self._size, store, os.getpid(), self._backend)
            with (self._directory / f"rank-{rank}.log").open("ab") as log, theirs:
                process = self._start_rank(rank, [*map(str, given)], log.fileno(), theirs.fileno())
            self._ranks.append((process, ours))
        self._answers(self._ranks, START_S)

    def _start_rank(self, rank: int, arguments: list[str], log: int, pipe: int) -> Process:
        if self._warm:
            return self._warm[rank].start(
                str(WORKER), arguments, output=log, pass_fds=[pipe], env=self._environ
            )
        command = [sys.executable, str(WORKER), *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[pipe], env=self._environ)

    def _answers(self, ranks: Sequence[tuple[Process, Connection]], limit_s: float) -> list[Any]:
        deadline = time.monotonic() + limit_s
        found, problem = [], ""
        for rank, (process, pipe) in enumerate(ranks):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    problem = f"rank {rank} has not answered within {limit_s:g} s"
                    break
                found.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                problem = f"rank {rank} has ended with status {process.wait()}"
                break
        if problem:
            self._fail(problem)
        return found

    def _fail(self, reason: str) -> None:
        for process, _ in self._ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)  # prints the stacks of its threads
        for process, _ in self._ranks:
            with_limit(process, 1.0)
        logs = [path.read_text(errors="replace")[-8000:] for path in sorted(self._directory.glob("*.log"))]
        self.close()
        pytest.fail("\n\n".join([reason, *logs]), pytrace=False)

    def cool(self) -> None:
        """End what the processes were forked from."""
        for warm in self._warm:
            warm.close()

    def close(self) -> None:
        """End the processes."""
        ranks, self._ranks = self._ranks, []
        for process, pipe in ranks:
            pipe.close()
            process.kill()
        for process, _ in ranks:
            process.wait()


class CaseError:
    """The text of an error of the project that a rank raised."""

    def __init__(self, text: str) -> None:
        self.text = text


def with_limit(process: Process, limit_s: float) -> None:
    """Give a process time to print."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    with tempfile.TemporaryDirectory() as directory:
        ranks = Crew(Path(directory))
        yield ranks
        ranks.close()
        ranks.cool()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Write the Hugging Face directory of a tiny model of a family; the same one for the same arguments."""
    made: dict[str, Path] = {}

    def make(family: str, *, seed: int = 0, **changes: Any) -> Path:
        key = f"{family}-{seed}-{sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            write_model(made[key], family, changes, seed)
        return made[key]

    return make


def write_model(directory: Path, family: str, changes: dict[str, Any], seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from anygauge.plugins import load_plugins

    spec = load_plugins().named("register_models")[family]
    tiny = {**spec.tiny(), "initializer_range": 0.2, **changes}
    kind = tiny.pop("model_type")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **tiny))
    model.float().save_pretrained(directory)
