"""Count which of the functions that Megatron hands to its jit fuser a run calls.

Run as ``python bench/jit_fuser.py``: for the tiny model of each family, log-probs and a train step on the
CPU, with a fuser that counts in the place of the backend's. What is not called need not be compiled.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import load_plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.engine_config import engine_config

DECORATED: list[str] = []
CALLS: Counter[str] = Counter()
LENGTHS = (17, 40, 33)


@hookimpl(tryfirst=True)
def make_jit_fuser() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that counts."""
    return counted


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the calls of a function under its name."""
    name = f"{function.__module__}.{function.__qualname__}".removeprefix("megatron.core.")
    DECORATED.append(name)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return function(*args, **kwargs)

    return call


def make_engine(context: WorkerContext, fields: Mapping[str, Any]) -> Any:
    """Return an engine of a model of which there is no file."""
    from anygauge.engines.megatron.engine import MegatronEngine

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(fields))
        config = engine_config(directory)
        return MegatronEngine(config, context, build=drawn_policy)


def drawn_policy(*args: Any) -> Any:
    """Build a model with drawn weights."""
    from anygauge.engines.megatron.model import build_policy

    policy = build_policy(*args, load=False)
    for parameter in (each for chunk in policy.chunks for each in chunk.parameters()):
        torch.nn.init.normal_(parameter, std=0.02)
    return policy


def train(engine: Any, vocab_size: int) -> None:
    """Ask for log-probs, then take a step."""
    samples = [
        batches.sample_of(torch.randint(vocab_size, (length,)).tolist(), length - 2) for length in LENGTHS
    ]
    batches.log_probs(engine, samples, temperature=1.0)
    batches.train_step(engine, samples)


def main() -> None:
    """Print a line for each family."""
    plugins = load_plugins(only=["cpu", "models"])
    backend = plugins.get("register_backends", "cpu")
    plugins.register(SimpleNamespace(make_jit_fuser=make_jit_fuser), "counting")
    prepare_megatron(plugins, backend)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = plugins.make_device(backend, 0)
    context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    print(f"{'family':14} {'decorated':>9} {'called':>6}  which")
    for name, spec in plugins.named("register_models").items():
        fields = spec.tiny()
        engine = make_engine(context, fields)
        CALLS.clear()
        train(engine, fields.get("text_config", fields)["vocab_size"])
        which = ", ".join(f"{function} {count}x" for function, count in CALLS.items())
        print(f"{name:14} {len(DECORATED):9} {CALLS.total():6}  {which or 'none'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
