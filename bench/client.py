"""Compare the throughput of the client with that of SGLang's own benchmark client, on the same requests.

Run with the Python of an environment that has SGLang, this project (``make test-sglang`` makes one) and
``datasets``, which SGLang's client imports: ``python bench/client.py --model DIRECTORY`` for a real server,
which is started here, or ``python bench/client.py --fake`` for one whose tokens cost time and no processor.
Each of ``--runs`` rounds gives the same token ids to both clients, one after the other, in turns the one
first; each client is a process of its own, warmed up with a request, and finds an empty cache. Both ask for
whole answers with log-probs, ``--concurrency`` requests under way, ``--samples`` of each prompt. The last
line is the median of the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEED = 42
SPARE = 16
"""Tokens of the context beyond those of a request, which SGLang keeps for itself."""
KEY = "ANYGAUGE_BENCH_KEY"
"""Environment variable of the key that the real server asks for: the same for requests and for its cache."""


def main() -> None:
    """Print each round and the median."""
    options = _options()
    if options.requests:
        print(json.dumps(asyncio.run(_generate_all(options))))
        return
    _make_importable()
    with tempfile.TemporaryDirectory() as directory, _server(options, Path(directory)) as (address, model):
        folder = Path(directory)
        requests = folder / "requests.json"
        requests.write_text(json.dumps(_rows(options, model)))
        _compare(options, address, model, requests, folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="Hugging Face directory that a real server serves")
    parser.add_argument("--backend", default="cpu", help="of the real server")
    parser.add_argument("--dtype", default="float32", help="of the real server")
    parser.add_argument("--sglang", type=json.loads, default={}, help="its further arguments, as JSON")
    parser.add_argument("--fake", action="store_true", help="a fake engine instead")
    parser.add_argument("--address", help="of a server that runs already")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--count", type=int, default=400, help="requests in a round")
    parser.add_argument("--samples", type=int, default=1, help="requests with the same prompt")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--requests", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--key", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def _server(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the address of a server and the directory of its tokenizer."""
    if options.address:
        yield options.address, options.model
    elif options.fake:
        from anygauge.testing.tiny import tiny_tokenizer
        from anygauge_tests.fake_engine import FakeServer, Options

        model = folder / "model"
        # SGLang's client makes tokens of every answer's text: it needs a tokenizer that knows any.
        tiny_tokenizer(model, texts=["1 + 2 = 3"])
        fake = Options(model_path=str(model), token_s=0.002, slots=options.concurrency, vocab_size=512)
        with FakeServer(fake) as server:
            yield server.address, model
    else:
        options.key = os.environ[KEY] = secrets.token_hex(16)
        server = _real(options, folder)
        try:
            yield server.start(), options.model
        finally:
            server.close()


def _real(options: argparse.Namespace, folder: Path) -> Any:
    from anygauge.config.validate import validate
    from anygauge.plugins import find_backend, load_plugins
    from anygauge.serving.sglang.server import make_server
    from anygauge_hooks.engines import WorkerContext

    plugins = load_plugins()
    backend = find_backend(plugins, plugins.named("register_backends"), options.backend)
    length = options.prompt_tokens + options.response_tokens
    tree = {
        "run": {"name": "client", "directory": str(folder)},
        "model": {"path": str(options.model)},
        "data": {"train": ["none.jsonl"]},
        "train": {"dtype": options.dtype},
        "rollout": {
            "engine": "sglang",
            "api_key": f"${KEY}",
            "admin_api_key": f"${KEY}",
            "max_batch_tokens": options.concurrency * length,
            "sglang": {
                "context_length": length + SPARE,
                "max_running_requests": options.concurrency,
                **options.sglang,
            },
        },
        "placement": {"start_timeout_s": 600},
    }
    checked = validate(tree)
    if checked.problems:
        raise SystemExit(checked.problems)
    device = plugins.make_device(backend, 0)
    context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    return make_server(checked.config, context)


def _rows(options: argparse.Namespace, model: Path) -> list[list[int]]:
    """Return the token ids that SGLang's client draws for its ``random-ids`` with this seed."""
    import numpy as np
    from sglang.benchmark.datasets.random import sample_random_requests

    tokenizer = _tokenizer(model)
    np.random.seed(SEED)
    rows = sample_random_requests(
        input_len=options.prompt_tokens,
        output_len=options.response_tokens,
        num_prompts=options.count // options.samples,
        range_ratio=1.0,
        tokenizer=tokenizer,
        dataset_path="",
        random_sample=False,
        return_text=False,
    )
    return [[int(token) for token in row.prompt] for row in rows for _ in range(options.samples)]


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _make_importable() -> None:
    """Do what SGLang's own imports need where torchvision is a build for another torch."""
    from anygauge_cpu.env import declare_missing_operators

    declare_missing_operators()


def _compare(options: argparse.Namespace, address: str, model: Path, requests: Path, folder: Path) -> None:
    count, length = options.count, options.response_tokens
    print(f"{count} requests of {options.prompt_tokens} + {length} tokens, {options.concurrency} under way")
    ratios = []
    for number in range(options.runs):
        ours, theirs = 0.0, 0.0
        for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            if side == "ours":
                ours = count * length / _ours(options, address, requests)
            else:
                theirs = count * length / _theirs(options, address, model, folder)
        ratios.append(ours / theirs)
        print(
            f"  round {number}: ours {ours:8.1f}, sglang's {theirs:8.1f} tokens per second: {ratios[-1]:.3f}"
        )
    print(f"median {statistics.median(ratios):.3f}")


def _ours(options: argparse.Namespace, address: str, requests: Path) -> float:
    """Return the seconds that our client takes, in a process of its own."""
    command = [sys.executable, __file__, "--address", address, "--requests", str(requests)]
    command += ["--concurrency", str(options.concurrency), "--response-tokens", str(options.response_tokens)]
    command += ["--key", options.key]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


async def _generate_all(options: argparse.Namespace) -> dict[str, float]:
    from anygauge.config.schema import RolloutClient
    from anygauge.serving.sglang.client import EngineClient
    from anygauge_hooks.rl import SamplingParams
    from anygauge_hooks.rollout import GenerateRequest
    from anygauge_hooks.sglang import ServerKeys

    params = SamplingParams(max_new_tokens=options.response_tokens, temperature=0.0, ignore_eos=True)
    prompts = [tuple(tokens) for tokens in json.loads(options.requests.read_text())]
    limits, keys = (
        RolloutClient(concurrency=options.concurrency),
        ServerKeys(api=options.key, admin=options.key),
    )
    client = EngineClient(options.address, limits, keys=keys)
    await client.generate(GenerateRequest("warm", prompts[0], params, seed=0))
    if not await client.flush_cache():
        raise SystemExit("The cache was not flushed.")
    began = time.perf_counter()
    found = await asyncio.gather(
        *(
            client.generate(GenerateRequest(str(i), tokens, params, seed=i))
            for i, tokens in enumerate(prompts)
        )
    )
    seconds = time.perf_counter() - began
    await client.close()
    assert all(len(each.tokens) == options.response_tokens for each in found)
    return {"seconds": seconds}


def _theirs(options: argparse.Namespace, address: str, model: Path, folder: Path) -> float:
    """Return the seconds that SGLang's benchmark client takes, in a process of its own."""
    output = folder / "theirs.jsonl"
    output.unlink(missing_ok=True)
    said = {
        "backend": "sglang",
        "base-url": address,
        "dataset-name": "random-ids",
        "model": model,
        "tokenizer": model,
        "num-prompts": options.count,
        "random-input-len": options.prompt_tokens,
        "random-output-len": options.response_tokens,
        "random-range-ratio": 1.0,
        "max-concurrency": options.concurrency,
        "seed": SEED,
        "output-file": output,
        "ready-check-timeout-sec": 0,
    }
    flags = ["--tokenize-prompt", "--disable-stream", "--return-logprob", "--flush-cache", "--disable-tqdm"]
    start = (
        "import sys, runpy\n"
        "from anygauge_cpu.env import declare_missing_operators\n"
        "declare_missing_operators()\n"
        "import sglang.benchmark.datasets.random as prompts\n"
        f"draw, samples = prompts.sample_random_requests, {options.samples}\n"
        "prompts.sample_random_requests = lambda *, num_prompts, **given: [\n"
        "    row for row in draw(num_prompts=num_prompts // samples, **given) for _ in range(samples)]\n"
        "runpy.run_module('sglang.benchmark.serving', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", start, *flags]
    command += [part for name, value in said.items() for part in (f"--{name}", str(value))]
    environment = {**os.environ, "OPENAI_API_KEY": options.key}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode or not output.exists():
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    found = SimpleNamespace(**json.loads(output.read_text().splitlines()[-1]))
    assert found.completed == options.count, found.completed
    return float(found.duration)


if __name__ == "__main__":
    main()
