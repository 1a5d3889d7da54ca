"""4-bit weights below adapters (QLoRA) on the FSDP engine, against bitsandbytes' own layers.

Two processes are in ``tests/integration/test_lora_run.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.engines.fsdp import lora as fsdp_lora
from anygauge.engines.fsdp import model as fsdp_model
from anygauge.engines.fsdp import nf4
from anygauge.engines.fsdp.weights import whole
from anygauge.plugins import Plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_hooks.errors import CheckpointError, ConfigError
from anygauge_tests import batches
from anygauge_tests.engine_config import engine_config

bitsandbytes = pytest.importorskip("bitsandbytes")
MakeEngine = Callable[..., Any]
LORA = {"rank": 4, "base": "nf4"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SAMPLES = [
    batches.sample_of([(7 * step + start) % 16 for step in range(length)], response)
    for start, length, response in ((1, 17, 5), (2, 9, 8))
]


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Let bitsandbytes' functions run as they are: compiling them for the CPU takes seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins) -> MakeEngine:
    def make(path: Path, lora: dict[str, Any], **train: Any) -> Any:
        keys = {"engine": "fsdp", "lr": 0.02, "micro_batch_tokens": 64, "lora": lora, **train}
        config = engine_config(path, train=keys)
        return plugins.get("register_train_engines", "fsdp").make(config, context)

    return make


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model of whose weights one has no multiple of a block of elements."""
    return tiny_qwen3(tmp_path / "model", hidden=24, heads=2, head_dim=12, mlp=37, init_std=0.3)


def dequantized(model: Path) -> Path:
    """Write the model of the values that bitsandbytes' layers compute with, and return its directory."""
    target = model.with_name("dequantized")
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if name.split(".")[-2] in PROJECTIONS:
            weights[name] = of_layer(weight)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def of_layer(weight: Tensor) -> Tensor:
    out, size = weight.shape
    layer = bitsandbytes.nn.Linear4bit(size, out, bias=False, quant_type="nf4", compress_statistics=True)
    layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    packed = layer.to("cpu").weight
    values: Tensor = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    return values


def log_probs(engine: Any, **options: Any) -> Tensor:
    return torch.cat(list(batches.log_probs(engine, SAMPLES, temperature=1.0, **options)))


def likelihood(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return -(inputs.log_probs * inputs.loss_weights).sum(), {"tokens": inputs.loss_mask.sum()}


def take_step(engine: Any) -> dict[str, float]:
    return batches.train_step(engine, SAMPLES, likelihood)


def gradients(engine: Any) -> dict[str, Tensor]:
    """Return the gradients of a step that is then taken."""
    taken: dict[str, Tensor] = {}
    step = engine.optimizer.step

    def keep(*arguments: Any) -> None:
        learning = (shard for shard in engine.shards if shard.tensor.requires_grad)
        taken.update({shard.name: whole(shard.tensor.grad).clone() for shard in learning})
        step(*arguments)

    engine.optimizer.step = keep
    take_step(engine)
    engine.optimizer.step = step
    return taken


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "is_sharded"),
    [
        ({}, True),
        pytest.param({"recompute": "full"}, False, marks=pytest.mark.fsdp),
        ({"targets": ["q_proj", "down_proj"], "modules_to_save": ["k_proj"]}, False),
    ],
)
def test_it_trains_as_on_the_dequantized_weights(
    make_engine: MakeEngine,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    is_sharded: bool,
) -> None:
    """Log-probs, gradients of two steps and merged weights, all to 1e-5 in float32."""
    monkeypatch.setattr(fsdp_model, "is_sharded", lambda mesh: is_sharded)
    lora = {key: value for key, value in options.items() if key != "recompute"}
    train = {key: value for key, value in options.items() if key == "recompute"}
    engine = make_engine(model, {**LORA, **lora}, **train)
    expected = make_engine(dequantized(model), {"rank": 4, **lora}, **train)
    if "modules_to_save" in lora:  # which stay as they are
        restore(expected, model)
    for _ in range(2):
        close(log_probs(engine), log_probs(expected))
        wanted = gradients(expected)
        for name, gradient in gradients(engine).items():
            close(gradient, wanted.pop(name))
        assert not wanted
    merged = dict(engine.weights())
    for name, weight in expected.weights():
        close(merged.pop(name), weight)
    assert not merged


def restore(engine: Any, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    for shard in engine.shards:
        if shard.name.endswith("k_proj.weight"):
            shard.local.copy_(weights[shard.name])
    engine.root.weights_changed()


def test_the_reference_is_the_base_and_another_one_is_quantized_too(
    make_engine: MakeEngine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = Mock(wraps=nf4._functions)
    monkeypatch.setattr(nf4, "_functions", functions)
    engine = make_engine(model, LORA)
    assert functions.call_count == 1, "a trial for all layers"
    before = log_probs(engine)
    other = tiny_qwen3(tmp_path / "o", hidden=24, heads=2, head_dim=12, mlp=37, init_std=0.3, seed=5)
    engine.load_role("reference", str(model))
    engine.load_role("other", str(other))
    take_step(engine)
    after = log_probs(engine)
    assert log_probs(engine, role="reference").equal(before)
    assert log_probs(engine, role="other").equal(log_probs(make_engine(other, LORA)))
    assert log_probs(engine).equal(after)
    assert not after.equal(before)


@pytest.mark.fsdp
def test_a_checkpoint_has_adapters_alone_and_resumes_on_this_base(
    make_engine: MakeEngine, model: Path, tmp_path: Path
) -> None:
    engine = make_engine(model, LORA)
    take_step(engine)
    (directory := tmp_path / "saved").mkdir()
    engine.save_checkpoint(str(directory))
    engine._checkpoint._write.result()
    names = {key.partition("/")[2] for key in load_file(directory / "rank-00000.safetensors")}
    assert all(".lora_" in name for name in names)
    resumed = make_engine(model, LORA)
    resumed.load_checkpoint(str(directory))
    assert take_step(resumed) == take_step(engine)
    with pytest.raises(CheckpointError, match="checksum"):
        make_engine(model, {"rank": 4}).load_checkpoint(str(directory))


@pytest.mark.fsdp
def test_an_export_is_a_model_and_an_adapter(make_engine: MakeEngine, model: Path, tmp_path: Path) -> None:
    engine = make_engine(model, LORA)
    take_step(engine)
    engine.save_hf(str(tmp_path / "hf"))
    weights = dict(engine.weights())
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict().items():
        assert tensor.equal(weights.get(name, tensor)), name
    base, stored = dequantized(model), load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    assert len(stored) == 2 * 7 * len([name for name in weights if "q_proj" in name])
    adapted = make_engine(base, {"path": tmp_path / "hf" / "adapter"})
    close(log_probs(adapted), log_probs(engine))


@pytest.mark.fsdp
def test_a_sleep_changes_no_bit_and_frees_all(make_engine: MakeEngine, model: Path) -> None:
    engine, undisturbed = (make_engine(model, LORA) for _ in range(2))
    engine.set_memory_state("nothing")
    assert sum(tensor.untyped_storage().nbytes() for tensor in engine._model_tensors()) == 0
    engine.set_memory_state("everything")
    assert take_step(engine) == take_step(undisturbed)


def make_weight(rows: int, dtype: torch.dtype) -> nf4.Nf4Weight:
    device = torch.device("cpu")
    return nf4.Nf4Weight(torch.Size((rows, 512)), dtype, device, nf4._functions(device))


def test_sums_over_ranks_count_a_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checksum of the base is that of one process, since each rank has all of a weight."""
    weight = make_weight(2, torch.float32)
    weight.write(torch.ones(2, 512))
    place = torch.nn.Parameter(torch.empty(2, 512, device="meta"), requires_grad=False)
    sums = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        sums.append(int(fsdp_lora._sum(nf4.Nf4Shard("weight", place, weight))))
    assert sums[0] != 0
    assert sums[1] == 0


def test_an_element_takes_little_more_than_four_bits() -> None:
    weight = make_weight(512, torch.bfloat16)
    weight.write(torch.randn(512, 512))
    assert sum(tensor.nbytes for tensor in weight.tensors) / 512**2 == pytest.approx(0.516, abs=1e-3)
    assert weight.values().dtype == torch.bfloat16


def test_what_cannot_be_is_refused(
    make_engine: MakeEngine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="decoder layers have none"):
        make_engine(tmp_path / "gpt2", LORA)
    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", refuse)
    with pytest.raises(ConfigError, match="has no 4-bit weights on cpu: no kernel"):
        make_engine(model, LORA)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="needs bitsandbytes, which cannot be imported") as caught:
        make_engine(model, LORA)
    assert "anygauge[qlora]" in str(caught.value.hint)


def refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError("no kernel")
