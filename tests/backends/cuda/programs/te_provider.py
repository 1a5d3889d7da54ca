"""Train with the stand-in for Transformer Engine and without it, and print what was seen, as JSON.

python te_provider.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import stand_in_te
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.config import Config
from anygauge.engines.megatron.plugin import register_train_engines
from anygauge.plugins import load_plugins
from anygauge_cuda import transformer_engine
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.engine_config import engine_config


def main(directory: str) -> None:
    """Compare engines in float32, and in bfloat16, which its attention is for."""
    stand_in_te.install()
    path = write_model(Path(directory) / "model")
    plugins = load_plugins(only=["cpu", "models"])
    backend = plugins.get("register_backends", "cpu")
    plugins.register(SimpleNamespace(get_spec_provider=get_spec_provider), "transformer_engine")
    (spec,) = register_train_engines()
    spec.prepare(plugins, backend)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = plugins.make_device(backend, 0)
    context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)

    def make(dtype: str, provider: str | None = transformer_engine.NAME) -> Any:
        return spec.make(config_of(path, dtype, provider), context)

    engines = make("float32", None), make("float32")
    report: dict[str, Any] = {"read": same_bits(exported(engines[1], path / "before"), weights(path))}
    report["norms"] = [train_twice(engine) for engine in engines]
    ours, theirs = (exported(engine, path / f"after{i}") for i, engine in enumerate(engines))
    report["difference"] = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    report["moved"] = not same_bits(theirs, weights(path))
    report["continued"] = [train_twice(each) for each in (engines[1], continued(engines[1], make, path))]
    report["before bfloat16"] = sorted(set(stand_in_te.CALLS))
    report["norms in bfloat16"] = [
        train_twice(make("bfloat16", each)) for each in (None, "transformer_engine")
    ]
    attended = stand_in_te.ARGUMENTS["DotProductAttention.forward"]
    report["masks"] = sorted({each["attn_mask_type"] for each in attended})
    layer = engines[1].policy.chunks[0].decoder.layers[1]
    report["classes"] = {name: type(module).__name__ for name, module in layer.named_modules()}
    report["extra state"] = any("_extra_state" in name for name in layer.state_dict())
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(report) + "\n")


def continued(engine: Any, make: Callable[..., Any], path: Path) -> Any:
    """Return an engine of our modules that goes on from a checkpoint of the other's."""
    directory = path / "checkpoint"
    directory.mkdir()
    engine.save_checkpoint(str(directory))
    while not engine.checkpoint_written():
        time.sleep(0.01)
    other = make("float32", None)
    other.load_checkpoint(str(directory))
    return other


def exported(engine: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return the weights under their Hugging Face names."""
    engine.save_hf(str(path))
    return weights(path)


def train_twice(engine: Any) -> list[float]:
    """Return the gradient norms of two steps."""
    return [train(engine)["grad_norm"] for _ in range(2)]


def write_model(path: Path) -> Path:
    """Write a Qwen3 with a dense layer and one of experts."""
    from anygauge_models.qwen3_moe import QWEN3_MOE

    fields = dict(QWEN3_MOE.tiny())
    config = AutoConfig.for_model(fields.pop("model_type"), initializer_range=0.1, **fields)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def config_of(path: Path, dtype: str, provider: str | None) -> Config:
    """Return the config of a run."""
    return engine_config(
        path, train={"lr": 1e-3, "micro_batch_tokens": 64, "dtype": dtype, "provider": provider}
    )


def train(engine: Any) -> Any:
    """Take a step on sequences of several lengths; return its metrics."""
    samples = batches.random_samples(((17, 15), (40, 38), (5, 3), (33, 31)), 0, 64)
    return batches.train_step(
        engine, samples, loss_weights=[[0.01] * sample.response_length for sample in samples]
    )


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory."""
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two directories hold the same."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@hookimpl
def get_spec_provider(config: Config) -> Any:
    """Answer for the backend of the host, which has no provider."""
    return transformer_engine.provide() if config.train.provider == transformer_engine.NAME else None


if __name__ == "__main__":
    main(*sys.argv[1:])
