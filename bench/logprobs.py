"""Log-probs of a real SGLang server against those of the train engine, in float32, for the same tokens.

    .venv-sglang/bin/python bench/logprobs.py

There are two sets of weights, A and B, each in a train engine. The server gets one after the other from them,
by a transport of runs; then it answers prompts, and the engine computes the log-probs of what it said. Last,
the weights change from B to A in the middle of long responses (``weight_sync.pause = "retract"``): the tokens
before are compared with B, those after with A, as the versions of the tokens say. The control compares them
with the other weights, from which they must be far. Ends with status 1 if a difference is above 1e-4.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from anygauge_cpu.env import declare_missing_operators

# Before anything of transformers is imported, as the backend does in processes of its own.
declare_missing_operators()

import torch.distributed as dist  # noqa: E402

from anygauge.config import Config  # noqa: E402
from anygauge.config.validate import validate  # noqa: E402
from anygauge.engines.megatron.prepare import prepare_megatron  # noqa: E402
from anygauge.plugins import load_plugins  # noqa: E402
from anygauge.runtime.event_loop import EventLoop  # noqa: E402
from anygauge.serving.sglang.client import EngineClient  # noqa: E402
from anygauge.serving.sglang.server import make_server  # noqa: E402
from anygauge.testing.tiny import tiny_qwen3  # noqa: E402
from anygauge.weight_sync.pusher import make_pusher  # noqa: E402
from anygauge_hooks.engines import TrainEngine, WorkerContext  # noqa: E402
from anygauge_hooks.rl import SamplingParams  # noqa: E402
from anygauge_hooks.rollout import GenerateRequest, Generation  # noqa: E402
from anygauge_hooks.sglang import ServerKeys  # noqa: E402
from anygauge_tests import batches  # noqa: E402
from anygauge_tests.progress import watched  # noqa: E402

MOST = 1e-4
LEAST = 0.1
"""Least mean difference of log-probs between different weights."""
VOCABULARY = 2048
"""So many that the token which ends a response is rare."""
CONTEXT = 1024


class Said(NamedTuple):
    """A response and what it follows."""

    prompt: tuple[int, ...]
    answer: Generation


def main() -> int:
    """Print the table; the exit status tells whether all differences are small."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--long", type=int, default=900, help="tokens of a response whose weights change")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = stack.enter_context(opened(Path(folder)))
        rows = [row for name in "AB" for row in bench.same_version(name, options.prompts, options.tokens)]
        rows += bench.across_an_update(options.long)
    print(f"{'':<46} {'tokens':>7} {'max':>10} {'mean':>10}")
    for row in rows:
        print(f"{row.what:<46} {len(row.found):>7} {max(row.found):>10.2e} {row.mean:>10.2e}")
    return 0 if all(row.is_right for row in rows) else 1


class Row(NamedTuple):
    """Absolute differences of the log-probs of some tokens."""

    what: str
    found: Sequence[float]
    control: bool = False
    """Whether they must be large."""

    @property
    def mean(self) -> float:
        """Mean of the differences."""
        return sum(self.found) / len(self.found)

    @property
    def is_right(self) -> bool:
        """Whether they are as they must be."""
        return self.mean > LEAST if self.control else max(self.found) <= MOST


class Bench:
    """A server, and a train engine for each set of weights."""

    def __init__(
        self,
        engines: dict[str, TrainEngine],
        push: Callable[[TrainEngine, int], None],
        client: EngineClient,
        keys: ServerKeys,
        loop: EventLoop,
    ) -> None:
        self._engines, self._push, self._client, self._loop = engines, push, client, loop
        self._keys = keys
        self._version = 0

    def send(self, name: str) -> None:
        """Give the server a set of weights."""
        self._version += 1
        self._push(self._engines[name], self._version)

    def same_version(self, name: str, prompts: int, tokens: int) -> list[Row]:
        """Compare responses of one version."""
        self.send(name)
        rows = []
        for temperature in (1.0, 0.7):
            asked = [self._request(number, tokens, temperature) for number in range(prompts)]
            answers = self._loop.run(self._all(asked))
            said = [Said(each.tokens, answer) for each, answer in zip(asked, answers, strict=True)]
            versions = {version for each in said for version in each.answer.weight_versions}
            assert versions == {self._version}, versions
            found = self._differences(name, said, temperature)
            rows.append(Row(f"weights {name}, temperature {temperature}", found))
        return rows

    def across_an_update(self, tokens: int) -> list[Row]:
        """Compare long responses in whose middle the weights change from B to A."""
        asked = [self._request(1000 + number, tokens, 1.0) for number in range(8)]
        begun: Counter[int] = Counter()
        running = [self._loop.start(self._long(each, begun)) for each in asked]
        pairs = list(zip(asked, running, strict=True))
        while any(begun[each.seed] < tokens // 4 and not answer.done() for each, answer in pairs):
            self._loop.run(asyncio.sleep(0.01))
        self.send("A")
        answers = zip(asked, (each.result() for each in running), strict=True)
        said = [Said(each.tokens, answer) for each, answer in answers if len(set(answer.weight_versions)) > 1]
        if not said:
            raise SystemExit("Every response was over before its weights could change: take a larger --long.")
        after = [[version == self._version for version in each.answer.weight_versions] for each in said]
        compared = {name: self._differences(name, said, 1.0) for name in "AB"}
        late = [each for own in after for each in own]
        return [
            Row("before the update, against B", _picked(compared["B"], late, wanted=False)),
            Row("after it, against A", _picked(compared["A"], late, wanted=True)),
            Row("control: before it, against A", _picked(compared["A"], late, wanted=False), control=True),
            Row("control: after it, against B", _picked(compared["B"], late, wanted=True), control=True),
        ]

    async def _all(self, asked: Sequence[GenerateRequest]) -> list[Generation]:
        return await asyncio.gather(*map(self._client.generate, asked))

    async def _long(self, request: GenerateRequest, begun: Counter[int]) -> Generation:
        def count(tokens: int) -> None:
            begun[request.seed] = tokens

        return await watched(self._client.address, request, count, self._keys)

    def _request(self, number: int, tokens: int, temperature: float) -> GenerateRequest:
        prompt = tuple(1 + (number * 7 + place * 5) % (VOCABULARY - 4) for place in range(4 + number % 5))
        params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
        return GenerateRequest(f"{self._version}-{number}-{temperature}", prompt, params, number)

    def _differences(self, name: str, said: Sequence[Said], temperature: float) -> list[float]:
        samples = [
            batches.sample_of([*prompt, *answer.tokens], len(answer.tokens)) for prompt, answer in said
        ]
        right = batches.log_probs(self._engines[name], samples, temperature=temperature)
        return [
            abs(float(ours) - theirs)
            for own, each in zip(right, said, strict=True)
            for ours, theirs in zip(own, each.answer.log_probs, strict=True)
        ]


def _picked(found: Sequence[float], late: Sequence[bool], *, wanted: bool) -> list[float]:
    return [each for each, is_late in zip(found, late, strict=True) if is_late is wanted]


@contextmanager
def opened(folder: Path) -> Iterator[Bench]:
    """Start a server, and build the train engines in this process."""
    plugins = load_plugins()
    backend = plugins.get("register_backends", "cpu")
    prepare_megatron(plugins, backend)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    context = WorkerContext(
        rank=0, world_size=1, backend=backend, device=plugins.make_device(backend, 0), plugins=plugins
    )
    # Weights so large that a wrong scale or a wrong token shows in the log-probs.
    seeds = {"A": 0, "B": 1}
    models = {
        name: tiny_qwen3(folder / name, init_std=0.2, dtype="float32", seed=seed, vocab_size=VOCABULARY)
        for name, seed in seeds.items()
    }
    configs = {name: config_of(folder, model) for name, model in models.items()}
    make = plugins.get("register_train_engines", "megatron").make
    engines = {name: make(config, context) for name, config in configs.items()}
    with (
        closing(make_server(configs["A"], context)) as server,
        closing(make_pusher(configs["A"], context)) as pusher,
        EventLoop() as loop,
    ):
        address = server.start()
        peer = replace(server.peer(), dtype="float32")
        client = EngineClient(address, configs["A"].rollout.client, keys=peer.keys)

        def push(engine: TrainEngine, version: int) -> None:
            report = pusher.push(engine.weights(), version, [peer])
            assert not report.failed, report
            assert report.unverified == (), "every parameter of the server was compared"

        yield Bench(engines, push, client, peer.keys, loop)
        loop.run(client.close())
    dist.destroy_process_group()


def config_of(folder: Path, model: Path) -> Config:
    """Return the config of a server and a train engine in float32."""
    tree: dict[str, Any] = {
        "run": {"name": "run", "directory": str(folder)},
        "model": {"path": str(model)},
        "data": {"train": ["none.jsonl"]},
        "train": {"dtype": "float32", "micro_batch_tokens": 4096},
        "rollout": {
            "engine": "sglang",
            "max_batch_tokens": 8192,
            "sglang": {"context_length": CONTEXT, "max_running_requests": 16, "skip_server_warmup": True},
        },
        "placement": {"rollout_workers": 1, "start_timeout_s": 600},
        "weight_sync": {"transport": "tensor", "pause": "retract", "verify": "always", "deadline_s": 300},
    }
    checked = validate(tree)
    if checked.problems:
        raise SystemExit(str(checked.problems))
    return checked.config


if __name__ == "__main__":
    sys.exit(main())
