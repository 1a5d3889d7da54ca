"""Tiny worker classes for tests of launchers: they answer, add, raise, die and hang."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
import torch.distributed

from anygauge.config.schema import Config
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import DataError

__all__ = ["BrokenWorker", "ProbeWorker", "Unpicklable"]


class Unpicklable(Exception):
    """An exception that cannot leave its process."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class ProbeWorker:
    """Does what a test asks for."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        self.config = config
        self.context = context

    def echo(self, value: Any, *, suffix: str = "") -> tuple[int, Any, str]:
        """Return the rank and the arguments."""
        return self.context.rank, value, suffix

    def describe(self) -> dict[str, Any]:
        """Return facts about the process."""
        return {
            "pid": os.getpid(),
            "run": self.config.run.name,
            "world_size": torch.distributed.get_world_size(),
            "dist_backend": torch.distributed.get_backend(),
            "threads": torch.get_num_threads(),
            "device": self.context.device.type,
            "main_thread": threading.current_thread() is threading.main_thread(),
            "path": list(sys.path),
            "env": dict(os.environ),
        }

    def sum_ranks(self) -> float:
        """Return the sum of ``rank + 1`` over all ranks, by a collective."""
        value = torch.tensor([self.context.rank + 1.0], device=self.context.device.type)
        torch.distributed.all_reduce(value)
        return float(value.item())

    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        """Double a tensor in place and return it."""
        return tensor.mul_(2)

    def say(self, text: str) -> None:
        """Print to standard output."""
        sys.stdout.write(f"{text}\n")

    def fail(self, *, rank: int, kind: str) -> float:
        """Raise on one rank, while the others wait for it in a collective."""
        if self.context.rank == rank:
            _raise(kind)
        return self.sum_ranks()

    def die(self, *, rank: int, how: str) -> float:
        """End one rank's process, while the others wait for it in a collective."""
        if self.context.rank == rank:
            sys.stderr.write("last words\n")
            sys.stderr.flush()
            _end_process(how)
        return self.sum_ranks()

    def die_later(self, *, rank: int) -> None:
        """Return at once on one rank, whose process ends soon after; hang on the others."""
        if self.context.rank == rank:
            threading.Timer(0.1, os._exit, (9,)).start()
        else:
            self.hang()

    def hang(self) -> None:
        """Say so in the log, and wait for ever."""
        sys.stderr.write("hanging\n")
        sys.stderr.flush()
        threading.Event().wait()

    def start_child(self) -> int:
        """Start a process that would outlive this one, and return its id."""
        return os.posix_spawnp("sleep", ["sleep", "600"], os.environ)


class BrokenWorker:
    """Raises when it is made on rank 1."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        del config
        if context.rank == 1:
            raise DataError("no such data", hint="bring some")


def _raise(kind: str) -> None:
    if kind == "value":
        raise ValueError("this is the value")
    if kind == "data":
        raise DataError("bad row", hint="fix the row")
    raise Unpicklable("cannot", "travel")


def _end_process(how: str) -> None:
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.Signals[how])
