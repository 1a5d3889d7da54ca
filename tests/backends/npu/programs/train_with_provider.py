"""Train a tiny Qwen3 on a simulated NPU in the phases of a worker, and print each run as JSON.

python train_with_provider.py DIRECTORY [PACKAGE]

With MindSpeed, whose package is in the folder PACKAGE, the first run takes this project's linears and the
second MindSpeed's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import absent_compilers
import torch.distributed as dist

from anygauge.config import Config
from anygauge.device import seed_everything
from anygauge.plugins import load_plugins, select_backend
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.engines import WorkerContext
from anygauge_tests.batches import random_samples, train_step
from anygauge_tests.engine_config import engine_config

STEPS = 3
LENGTHS = ((17, 5), (5, 1), (40, 20), (33, 30))
"""Tokens and response tokens of each sample."""


def main(directory: str, package: str = "") -> None:
    """Go through the phases of a worker, then train once for each choice of layers."""
    if package:
        sys.path.append(package)
        absent_compilers.install()
    log = str(Path(directory, "actor-0.log"))
    model = str(Path(directory, "model"))
    plugins = load_plugins()
    backend, _ = select_backend(plugins, "npu")
    choices = [{"strict": True, "linears": linears} for linears in (False, True)] if package else [None]
    configs = [config_of(model, options) for options in choices]
    plugins.get("register_train_engines", "megatron").prepare(plugins, backend)
    plugins.prepare_worker(backend, "actor", "before_vendor_import", config=configs[0], log=log)
    device = plugins.make_device(backend, 0)
    plugins.prepare_worker(backend, "actor", "after_config", config=configs[0], log=log)
    dist.init_process_group(backend.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    if not Path(model).exists():
        tiny_qwen3(model, vocab_size=64, head_dim=32, init_std=0.2)
    report = [trained(config, context) for config in configs]
    sys.stdout.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


def config_of(model: str, options: dict[str, Any] | None) -> Config:
    chosen = {"provider": "mindspeed", "provider_options": options} if options else {}
    return engine_config(model, train={"lr": 1e-2, "micro_batch_tokens": 64, "dtype": "float32", **chosen})


def trained(config: Config, context: WorkerContext) -> dict[str, Any]:
    """Return losses, gradient norms, and of each class in the model the module that its forward is from."""
    seed_everything(context.device, 1)
    engine = context.plugins.get("register_train_engines", "megatron").make(config, context)
    steps = [one_step(engine) for _ in range(STEPS)]
    classes = {type(module) for chunk in engine.policy.chunks for module in chunk.modules()}
    return {
        "losses": [step["loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "forwards": {
            f"{cls.__module__}.{cls.__qualname__}": cls.forward.__globals__["__name__"] for cls in classes
        },
        "devices": sorted({str(parameter.device) for parameter in engine.policy.chunks[0].parameters()}),
    }


def one_step(engine: Any) -> dict[str, float]:
    return train_step(engine, random_samples(LENGTHS, 18, 64))


if __name__ == "__main__":
    main(*sys.argv[1:])
