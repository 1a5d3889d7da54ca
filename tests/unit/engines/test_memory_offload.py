"""Offloading of a train engine, which loses nothing that it moves to the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import anygauge_cpu.plugin
from anygauge.engines.memory_offload import DeviceMemory, HostCopies
from anygauge.plugins import Plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge.weight_sync.checksum import checksum
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import AsleepError
from anygauge_hooks.serving import MemoryState
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample, weights
from anygauge_tests.engine_config import engine_config
from anygauge_tests.optimizers import Joining, taking

Make = Callable[..., Any]
DTYPES = ("float32", "bfloat16", "remainders")
"""Dtypes of the weights; the last is bfloat16, with an optimizer that takes remainders."""


@pytest.fixture
def make(context: WorkerContext, plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def build(dtype: str, kind: str = "make") -> Any:
        if dtype == "remainders":
            dtype = "bfloat16"
            monkeypatch.setattr(anygauge_cpu.plugin, "fused_adamw", partial(taking, kind=Joining))
        path = tiny_qwen3(tmp_path / "model", vocab_size=64, head_dim=32, init_std=0.2)
        config = engine_config(path, train={"lr": 1e-3, "micro_batch_tokens": 64, "dtype": dtype})
        return getattr(plugins.get("register_train_engines", "megatron"), kind)(config, context)

    return build


def samples() -> list[TrainSample]:
    return batches.random_samples(((17, 4), (40, 4)), 18, 64)


def step(engine: Any) -> dict[str, float]:
    return batches.train_step(engine, samples())


def on_device(engine: Any) -> int:
    """Return the bytes of what the engine's tensors lie in."""
    found = [*engine._model_tensors(), *engine._optimizer_tensors(), *engine._gradients()]
    return sum({id(s): s.nbytes() for s in (tensor.untyped_storage() for tensor in found)}.values())


def bytes_of(engine: Any) -> int:
    storages = [tensor.untyped_storage() for tensor in engine._model_tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_after_sleep_are_those_without(make: Make, dtype: str) -> None:
    plain, sleeper = make(dtype), make(dtype)
    for turn in ("weights", "nothing"):
        assert step(plain) == step(sleeper)
        sleeper.set_memory_state(turn)
        sleeper.set_memory_state("everything")
    assert step(plain) == step(sleeper)
    expected = weights(plain)
    for name, tensor in weights(sleeper).items():
        assert torch.equal(tensor, expected[name]), name
    own = [state for part in (plain, sleeper) for state in [list(part._optimizer_tensors())]]
    assert all(torch.equal(one, other) for one, other in zip(*own, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_given_up_is_released(make: Make, dtype: str) -> None:
    engine = make(dtype)
    step(engine)
    model, whole = bytes_of(engine), on_device(engine)
    assert whole > 3 * model
    before = weights(engine)
    engine.set_memory_state("weights")
    assert bytes_of(engine) == on_device(engine) == model
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    engine.set_memory_state("nothing")
    assert on_device(engine) == 0
    engine.set_memory_state("weights")
    assert on_device(engine) == model
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    engine.set_memory_state("everything")
    assert on_device(engine) == whole


def test_what_is_not_kept_comes_back_as_zeros(context: WorkerContext) -> None:
    """A step does not write what lies between gradients, and Megatron's checks look at that too."""
    gradients = [torch.full((size,), torch.nan) for size in range(48, 80)]
    memory = DeviceMemory(context.device, weights=list, rest=list, temporary=lambda: gradients)
    memory.set_state("weights")
    assert all(gradient.untyped_storage().nbytes() == 0 for gradient in gradients)
    memory.set_state("everything")
    assert all(gradient.eq(0).all() for gradient in gradients)


def test_scratch_of_sequence_parallelism_is_given_up(make: Make) -> None:
    engine = make("float32")
    from megatron.core import parallel_state

    scratch = parallel_state.get_global_memory_buffer().buffer
    scratch["mpu", torch.float32] = torch.empty(8)
    engine.set_memory_state("everything")
    assert scratch
    engine.set_memory_state("weights")
    assert not scratch


def test_an_engine_asleep_says_so(make: Make, tmp_path: Path) -> None:
    engine = make("float32")
    wanted = {
        "log-probabilities": lambda: batches.log_probs(engine, samples(), temperature=1.0),
        "an optimizer step": lambda: step(engine),
        "a checkpoint": lambda: engine.save_checkpoint(str(tmp_path)),
        "the state of a checkpoint": lambda: engine.load_checkpoint(str(tmp_path)),
        "room for the weights of the reference": lambda: engine.load_role("reference", str(tmp_path)),
    }
    states: tuple[MemoryState, ...] = ("weights", "nothing")
    for state in states:
        engine.set_memory_state(state)
        for purpose, ask in wanted.items():
            with pytest.raises(AsleepError, match=f"asked for {purpose}, .* has {state}"):
                ask()
    for ask in (lambda: next(engine.weights()), lambda: engine.save_hf(str(tmp_path / "hf"))):
        with pytest.raises(AsleepError, match="takes weights on the device; it has nothing"):
            ask()


def test_other_kinds_of_engines_sleep_too(make: Make) -> None:
    frozen = make("float32", "make_forward_only")
    before = batches.log_probs(frozen, samples(), temperature=1.0)
    frozen.set_memory_state("nothing")
    assert bytes_of(frozen) == 0
    frozen.set_memory_state("everything")
    after = batches.log_probs(frozen, samples(), temperature=1.0)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    critic = make("float32", "make_critic")
    before = batches.values(critic, samples())
    critic.set_memory_state("nothing")
    with pytest.raises(AsleepError, match="asked for a forward pass"):
        batches.values(critic, samples())
    critic.set_memory_state("everything")
    assert all(
        torch.equal(one, other) for one, other in zip(before, batches.values(critic, samples()), strict=True)
    )


def test_host_copies_reuse_their_memory_and_cross_its_pieces(context: WorkerContext) -> None:
    copies = HostCopies(context.device, chunk_bytes=64)
    for number in range(2):
        tensors = [torch.arange(size, dtype=torch.float64) + number for size in (3, 20, 1, 9)]
        expected = [tensor.clone() for tensor in tensors]
        copies.take([tensor.untyped_storage() for tensor in tensors])
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        copies.give_back()
        assert all(map(torch.equal, tensors, expected))
        assert len(copies._chunks) == -(-33 * 8 // 64)


def test_what_a_sync_compares_can_still_be_given_up(make: Make) -> None:
    engine = make("float32")
    assert len({checksum(tensor) for _, tensor in engine.weights()}) > 1
    engine.set_memory_state("nothing")
    assert on_device(engine) == 0
