"""Count which of the functions that Megatron hands to its jit fuser a run calls.

Run as ``python bench/jit_fuser.py``: for the tiny model of each family, log-probs and a train step on the
CPU, with a fuser that counts in the place of the backend's. What is not called need not be compiled.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.rl import TrainSample

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


def write_model(path: Path, fields: dict[str, Any]) -> Path:
    """Write a directory with drawn weights."""
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def loss(inputs: Any) -> Any:
    """Return the likelihood, to be raised."""
    value = -(inputs.log_probs * inputs.weights).sum()
    return value, {"loss": value.detach()}


def train(engine: Any, vocab_size: int) -> None:
    """Ask for log-probs, then take a step."""
    samples = [
        TrainSample(
            tokens=torch.randint(vocab_size, (length,)).tolist(),
            response_length=length - 2,
            loss_mask=[1] * (length - 2),
            rollout_log_probs=[-0.5] * (length - 2),
            advantages=[1.0] * (length - 2),
        )
        for length in LENGTHS
    ]
    engine.log_probs(samples, temperature=1.0)
    weights = [[0.01] * sample.response_length for sample in samples]
    old = [sample.rollout_log_probs for sample in samples]
    options = {"temperature": 1.0, "reference_log_probs": None, "entropy_grad": False}
    engine.train_step(samples, loss, weights=weights, old_log_probs=old, **options)


def main() -> None:
    """Print a line for each family."""
    plugins = load_plugins(only=["cpu", "models"])
    backend = plugins.get("register_backends", "cpu")
    plugins.register(SimpleNamespace(make_jit_fuser=make_jit_fuser), "counting")
    plugins.get("register_train_engines", "megatron")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = plugins.make_device(backend, 0)
    context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    print(f"{'family':14} {'decorated':>9} {'called':>6}  which")
    for name, spec in plugins.named("register_models").items():
        CALLS.clear()
        with tempfile.TemporaryDirectory() as directory:
            fields = dict(spec.tiny())
            path = write_model(Path(directory), fields)
            config = Config.model_validate(
                {
                    "run": {"name": "count", "steps": 1},
                    "model": {"path": path},
                    "data": {"train": []},
                    "reward": {"function": "none"},
                }
            )
            engine = plugins.get("register_train_engines", "megatron").make(config, context)
            CALLS.clear()
            train(engine, fields["vocab_size"])
        which = ", ".join(f"{function} {count}x" for function, count in CALLS.items())
        print(f"{name:14} {len(DECORATED):9} {CALLS.total():6}  {which or 'none'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
