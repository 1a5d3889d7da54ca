"""Two real SGLang servers as a run has them, and what becomes of requests when they are struck."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import psutil

from anygauge.config import Config
from anygauge.config.validate import validate
from anygauge.plugins import load_plugins
from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.served_engines import ServedEngines
from anygauge.serving.server_sources import StartedServers
from anygauge.serving.server_workers import ServerWorker
from anygauge.serving.servers import Servers
from anygauge.testing.tiny import tiny_qwen3
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.pusher import WeightPusher
from anygauge.weight_sync.sharing import shared_memory
from anygauge.weight_sync.transports.tensor import TensorTransport
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.chaos_summary import RequestSummary
from anygauge_tests.pauses import pause_all, resume_all

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FaultOutcome", "ServedOutcome", "run_served_chaos"]

Fault = Literal["kill", "hang", "pause", "bad update", "die in update"]
SERVERS, UNDER_WAY, TOKENS = 2, 8, 64
TOLERANCE = 1e-3
"""Tolerance of log-probs: the two sets of weights are 100 times as far apart."""
QUIET_S = 900.0
"""For both servers to serve again after a fault."""


class FaultOutcome(NamedTuple):
    """A fault, and how the servers came out of it."""

    fault: Fault
    seconds: float
    """Until both served the current weights again."""
    answers: int
    """Requests meanwhile."""
    restarts: int


@dataclass
class ServedOutcome(RequestSummary):
    """Result of a chaos run against real servers."""

    faults: list[FaultOutcome] = field(default_factory=list)


def run_served_chaos(seed: int, folder: Path) -> ServedOutcome:
    """Strike real servers with each fault once, in an order of the seed, while requests go on.

    The log-probs of each token are compared with what the weights of its version give.

    :param folder: For models and logs.
    """
    with ExitStack() as stack:
        return _ServedChaosRun(seed, folder, stack).run()


class _Workers:
    """A worker for each server, in this process."""

    def __init__(self, config: Config) -> None:
        plugins = load_plugins()
        backend = plugins.get("register_backends", "cpu")
        device = plugins.make_device(backend, 0)
        make = partial(WorkerContext, world_size=SERVERS, backend=backend, device=device, plugins=plugins)
        self.workers = [ServerWorker(config, make(rank=rank)) for rank in range(SERVERS)]

    def call(self, method: str, *, timeout_s: float | None = None, **given: Any) -> list[Any]:
        """Do what a group of workers does."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(lambda worker: getattr(worker, method)(**given), self.workers))


class _Trainers:
    """Sends one set of weights as odd versions, the other as even ones."""

    def __init__(self, config: Config, models: Sequence[Any]) -> None:
        self._models = models
        self._transport = TensorTransport()
        self.pusher = WeightPusher(config.weight_sync, self._transport, Buffers(shared_memory))
        self._send = self._transport.send
        self.is_damaged = False
        """Whether the next update has a tensor that no server takes."""

    def strike_at_bucket(self, strike: Callable[[], None]) -> None:
        """Let something happen as soon as a bucket of the next update was taken."""

        def send(bucket: Any, update: Any) -> None:
            self._send(bucket, update)
            self._transport.send = self._send  # type: ignore[method-assign]
            strike()

        self._transport.send = send  # type: ignore[method-assign]

    def call(self, method: str, *, version: int, peers: Sequence[Any], senders: Sequence[int]) -> list[Any]:
        """Do what the workers that train do."""
        assert method == "push_weights"
        assert not any(senders), "there is one"
        return [self.pusher.push(self._weights(version), version, peers)]

    def _weights(self, version: int) -> Iterator[tuple[str, Tensor]]:
        is_damaged, self.is_damaged = self.is_damaged, False
        for name, tensor in self._models[version % 2].state_dict().items():
            if name != "lm_head.weight":  # tied
                cut = is_damaged and name.endswith("o_proj.weight")
                yield name, tensor.detach()[1:].contiguous() if cut else tensor.detach()


class _ServedChaosRun:
    def __init__(self, seed: int, folder: Path, stack: ExitStack) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._draw = Random(seed)
        paths = [
            tiny_qwen3(folder / str(number), init_std=0.2, dtype="float32", seed=number) for number in (0, 1)
        ]
        self._models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]
        config = _config(folder, paths[0])
        self._workers = _Workers(config)
        stack.callback(self._workers.call, "close")
        self._trainers = _Trainers(config, self._models)
        stack.callback(self._trainers.pusher.close)
        self._loop = stack.enter_context(EventLoop())
        self._servers = Servers(config, StartedServers(config, self._workers), self._loop)  # type: ignore[arg-type]
        stack.callback(self._servers.close)
        self._engines = ServedEngines(config, self._servers, self._trainers, self._loop)  # type: ignore[arg-type]
        self._version = 0
        self._numbers = itertools.count()
        self._over = False
        self._said: list[tuple[GenerateRequest, Generation]] = []
        self.outcome = ServedOutcome()

    def run(self) -> ServedOutcome:
        """Strike with each fault, and look at every answer at the end."""
        faults = list(get_args(Fault))
        self._draw.shuffle(faults)
        workers = [self._loop.start(self._work()) for _ in range(UNDER_WAY)]
        for fault in faults:
            self._inject(fault)
        self._over = True
        for each in workers:
            each.result(QUIET_S)
        for request, generation in self._said:
            self._check(request, generation)
        return self.outcome

    def _inject(self, fault: Fault) -> None:
        self._wait_for(UNDER_WAY)
        starts, answered, began = self._starts(), len(self._said), time.monotonic()
        self._strikes()[fault]()
        while self._is_hurt():
            self._wait_for(1)
            if time.monotonic() - began > QUIET_S:
                self.outcome.problems.append(f"{fault}: {self._servers.describe()} after {QUIET_S:g} s")
                break
        self._sync()
        seconds = time.monotonic() - began
        self.outcome.faults.append(
            FaultOutcome(fault, seconds, len(self._said) - answered, self._starts() - starts)
        )

    def _is_hurt(self) -> bool:
        """Return whether a server is lost, or up again without weights; look after the struck one."""
        time.sleep(0.1)
        return bool(self._servers.lost() or self._servers.behind) or not all(
            worker._server.is_alive() for worker in self._workers.workers
        )

    def _starts(self) -> int:
        return sum(worker._starts for worker in self._workers.workers)

    # ---- requests ----

    async def _work(self) -> None:
        while not self._over:
            number = next(self._numbers)
            params = SamplingParams(max_new_tokens=TOKENS)
            request = GenerateRequest(str(number), (3, 1 + number % 13), params, number)
            self.outcome.sent += 1
            try:
                generation = await self._servers.pool.generate(request)
            except AnygaugeError as error:
                self.outcome.problems.append(f"request {number}: {error}")
                continue
            self.outcome.answers[number] += 1
            self._said.append((request, generation))

    def _wait_for(self, count: int) -> None:
        """Wait for some more answers, as a step of a run does."""
        wanted = len(self._said) + count

        async def there() -> None:
            while len(self._said) < wanted:
                await asyncio.sleep(0.02)

        self._engines.wait(there(), "answers")

    def _check(self, request: GenerateRequest, generation: Generation) -> None:
        import torch

        prompt, versions = list(request.tokens), generation.weight_versions
        self.outcome.mixed += len(set(versions)) > 1
        for number in {version % 2 for version in versions}:
            with torch.no_grad():
                logits = self._models[number](torch.tensor([[*prompt, *generation.tokens]])).logits[0]
            rows = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
            right = rows.gather(1, torch.tensor(generation.tokens)[:, None])[:, 0].tolist()
            for place, version in enumerate(versions):
                if version % 2 == number and abs(right[place] - generation.log_probs[place]) > TOLERANCE:
                    self.outcome.problems.append(
                        f"request {request.id} has a token that is not of version {version}"
                    )
                    break

    # ---- faults ----

    def _strikes(self) -> Mapping[Fault, Callable[[], None]]:
        return {
            "kill": lambda: self._signal(signal.SIGKILL),
            "hang": lambda: self._signal(signal.SIGSTOP),
            "pause": self._pause,
            "bad update": self._bad_update,
            "die in update": self._die_in_update,
        }

    def _tree(self) -> list[int]:
        """Return the processes of a server that is drawn."""
        pid = int(self._draw.choice(self._servers.serving).facts["pid"])
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]

    def _signal(self, number: int) -> None:
        for pid in self._tree():
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            ends = time.monotonic() + QUIET_S
            while not self._servers.lost() and time.monotonic() < ends:
                time.sleep(0.05)  # until its deadline finds it

    def _pause(self) -> None:
        self._loop.run(pause_all(self._servers.pool))
        time.sleep(self._draw.uniform(0.2, 1.0))
        self._loop.run(resume_all(self._servers.pool))

    def _sync(self) -> None:
        self._version += 1
        self._engines.sync(self._version)

    def _bad_update(self) -> None:
        self._trainers.is_damaged = True
        self._sync()

    def _die_in_update(self) -> None:
        victims = self._tree()
        self._trainers.strike_at_bucket(lambda: os.kill(victims[0], signal.SIGKILL))
        self._sync()


def _config(folder: Path, model: Path) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "run", "directory": str(folder), "timeout_s": QUIET_S},
        "model": {"path": str(model)},
        "data": {"train": ["none.jsonl"]},
        "train": {"dtype": "float32"},
        "rollout": {
            "engine": "sglang",
            "max_batch_tokens": 8192,
            "client": {"concurrency": 8, "probe_every_s": 1.0, "probe_timeout_s": 10.0, "attempts": 20},
            "sglang": {"context_length": 256, "max_running_requests": 8, "skip_server_warmup": True},
        },
        "placement": {"rollout_workers": SERVERS, "start_timeout_s": QUIET_S},
        "weight_sync": {"transport": "tensor", "bucket_bytes": 1 << 16, "deadline_s": 300},
    }
    checked = validate(tree)
    assert not checked.problems, checked.problems
    return checked.config
