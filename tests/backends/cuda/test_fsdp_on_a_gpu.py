"""The FSDP engine on a GPU against itself on the CPU (marker ``cuda``): the kernels of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

VOCAB = 64


@pytest.fixture(scope="module")
def contexts() -> Iterator[dict[str, WorkerContext]]:
    """Return the contexts of a lone process on both devices."""
    plugins = load_plugins()
    cpu, cuda = (plugins.get("register_backends", name) for name in ("cpu", "cuda"))
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield {
        backend.name: WorkerContext(
            rank=0, world_size=1, backend=backend, device=plugins.make_device(backend, 0), plugins=plugins
        )
        for backend in (cpu, cuda)
    }
    dist.destroy_process_group()


def make(context: WorkerContext, path: Path, **train: Any) -> Any:
    config = engine_config(path, train={"engine": "fsdp", "lr": 1e-3, "micro_batch_tokens": 64, **train})
    return context.plugins.get("register_train_engines", "fsdp").make(config, context)


def samples() -> list[TrainSample]:
    return batches.random_samples(((17, 5), (40, 20), (33, 30)), 18, VOCAB)


def take_steps(engine: Any) -> list[Mapping[str, float]]:
    return [batches.train_step(engine, samples()) for _ in range(3)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_a_4_bit_base_is_that_of_its_dequantized_weights(
    contexts: dict[str, WorkerContext], tmp_path: Path, dtype: str, tolerance: float
) -> None:
    pytest.importorskip("bitsandbytes")
    path = tiny_qwen3(tmp_path / "qwen3", vocab_size=VOCAB, head_dim=32, init_std=0.2)
    engine = make(contexts["cuda"], path, dtype=dtype, lora={"rank": 4, "base": "nf4"})
    assert {shard.local.device.type for shard in engine.root.quantized} == {"cuda"}
    file = path / "model.safetensors"
    values = {shard.name: shard.local.cpu() for shard in engine.root.quantized}
    save_file({**load_file(file), **values}, file, {"format": "pt"})
    plain = make(contexts["cuda"], path, dtype=dtype, lora={"rank": 4})
    for step, other in zip(take_steps(engine), take_steps(plain), strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=tolerance)
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=tolerance)


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_steps_are_those_on_the_cpu(
    contexts: dict[str, WorkerContext], tmp_path: Path, dtype: str, tolerance: float, lora: dict[str, int]
) -> None:
    path = tiny_qwen3(tmp_path / "qwen3", vocab_size=VOCAB, head_dim=32, init_std=0.2)
    # One after the other: transformers has one attention function by the engine's name in a process.
    ours = make(contexts["cuda"], path, dtype=dtype, lora=lora)
    layer = ours.root.layers[0]
    kinds = [type(part).__name__ for part in (layer.self_attn, layer.mlp, layer.input_layernorm)]
    assert kinds == ["TableQwen3Attention", "TableQwen3MLP", "TableRmsNorm"]
    steps = take_steps(ours)
    for step, other in zip(steps, take_steps(make(contexts["cpu"], path, lora=lora)), strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=tolerance)
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=tolerance)
