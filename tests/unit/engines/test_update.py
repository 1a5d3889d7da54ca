"""The update of the weights: an optimizer that takes all with its step, and Megatron's way."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anygauge_cpu.plugin
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.kernels.remainders import join
from anygauge.plugins import Plugins
from anygauge.testing.conformance import test_fused_optimizer as fused_cases
from anygauge.testing.conformance.test_optimizer import SETTINGS, two_groups
from anygauge.testing.tiny import tiny_qwen3
from anygauge_cpu.device import CpuDevice
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import NonFiniteError
from anygauge_tests import batches
from anygauge_tests.engine_config import engine_config
from anygauge_tests.optimizers import Joining, Rounding, Taking, taking

VOCAB = 64
MakeEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, head_dim=32, init_std=0.2)


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins, checkpoint: Path) -> MakeEngine:
    def make(**train: Any) -> Any:
        config = engine_config(
            checkpoint, train={"lr": 1e-2, "micro_batch_tokens": 48, "weight_decay": 0.1, **train}
        )
        return plugins.get("register_train_engines", "megatron").make(config, context)

    return make


@pytest.fixture
def make_with(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Return a function that makes an engine with an optimizer of a kind."""

    def make(kind: type[Taking], **train: Any) -> Any:
        monkeypatch.setattr(anygauge_cpu.plugin, "fused_adamw", partial(taking, kind=kind))
        return make_engine(**{"dtype": "bfloat16", **train})

    return make


def masters(engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights of the model, of one rank, and what the optimizer has of them."""
    for part in engine.optimizer.chained_optimizers:
        for parameter in (each for group in part.model_float16_groups for each in group):
            yield parameter.detach().flatten(), parameter.main_param


def take_step(engine: Any, seed: int = 0) -> dict[str, float]:
    samples = batches.random_samples(((17, 15), (40, 38), (33, 31)), 18, VOCAB, seed=seed)
    return batches.train_step(
        engine, samples, loss_weights=[[0.01] * sample.response_length for sample in samples]
    )


class Preparing(Taking):
    """One that refuses a step for which it was not prepared."""

    prepared: Any = None

    def prepare(self, gradients: Any, copies: Any) -> None:
        self.prepared = gradients, copies

    def step_from(self, gradients: Any, scale: float, copies: Any) -> None:
        assert self.prepared is not None
        assert self.prepared[0] is gradients
        assert self.prepared[1] is copies
        super().step_from(gradients, scale, copies)
        self.prepared = None


def test_an_optimizer_is_prepared_for_each_step(make_with: MakeEngine) -> None:
    engine = make_with(Preparing)
    assert [take_step(engine, seed)["grad_norm"] > 0 for seed in range(2)] == [True, True]
    assert {part.optimizer.steps for part in engine.optimizer.chained_optimizers} == {2}


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_are_gathered_once_after_the_steps_of_all_parts(
    context: WorkerContext, plugins: Plugins, overlap: bool
) -> None:
    """Experts that ranks divide have an optimizer of their own; the chunks are those of all weights."""
    prepare_megatron(plugins, context.backend)
    from anygauge.engines.megatron.update import Update

    happened: list[str] = []
    chunks = [SimpleNamespace(start_param_sync=partial(happened.append, f"gather {name}")) for name in "ab"]
    parts = [
        SimpleNamespace(
            optimizer=SimpleNamespace(
                step_from=lambda *given: happened.append("step"),
                prepare=lambda *given: None,
                takes_remainders=False,
                param_groups=[],
            ),
            **{name: [] for name in ("shard_fp32_groups", "model_fp32_groups", "model_float16_groups")},
            ddp_config=SimpleNamespace(overlap_param_gather=overlap),
            model_chunks=list(chunks),
        )
        for _ in range(2)
    ]
    optimizer: Any = SimpleNamespace(chained_optimizers=parts)
    Update(optimizer, 1.0, torch.device("cpu")).step(1.0)
    assert happened == ["step", "step", *([] if overlap else ["gather a", "gather b"])]


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_step_does_what_megatrons_three_do(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, dtype: str, clip: float
) -> None:
    engines = [make_engine(dtype=dtype, clip_grad=clip)]
    monkeypatch.setattr(anygauge_cpu.plugin, "fused_adamw", taking)
    engines.append(make_engine(dtype=dtype, clip_grad=clip))
    for seed in range(3):
        expected, actual = (take_step(engine, seed) for engine in engines)
        assert actual == expected
        for one, other in zip(*(engine.chunks[0].named_parameters() for engine in engines), strict=True):
            assert one[0] == other[0]
            assert one[1].equal(other[1]), one[0]
    inner = engines[1].optimizer.chained_optimizers[0].optimizer
    assert inner.steps == 3, "the method was called"


def test_the_norm_is_that_of_all_gradients_and_clipping_keeps_to_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anygauge_cpu.plugin, "fused_adamw", taking)
    engine = make_engine(clip_grad=0.01)
    metrics = take_step(engine)
    gradients = [weight.main_grad.flatten() for weight in engine.chunks[0].parameters()]
    assert metrics["grad_norm"] > 0.1
    assert metrics["grad_norm"] == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-5)
    (inner,) = (part.optimizer for part in engine.optimizer.chained_optimizers)
    averages = torch.cat([state["exp_avg"].flatten() for state in inner.state.values()])
    assert averages.norm().item() == pytest.approx(0.01 * (1 - 0.9), rel=1e-3)


@pytest.mark.parametrize("case", [name for name in vars(fused_cases) if name.startswith("test_")])
def test_the_optimizer_of_these_tests_passes_the_suite(case: str) -> None:
    """The backend of the host makes none with such a step, so the suite has nothing to test there."""
    build = partial(Joining, **SETTINGS, fused=True)
    function = getattr(fused_cases, case)
    arguments: dict[str, Any] = {"make": lambda each: build(two_groups(each)), "device": CpuDevice()}
    for prepares in (False, True) if "prepares" in inspect.signature(function).parameters else (None,):
        function(**arguments, **({} if prepares is None else {"prepares": prepares}))


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_remainders_and_weights_are_what_float32_weights_would_be(make_with: MakeEngine, clip: float) -> None:
    engines = [make_with(kind, clip_grad=clip) for kind in (Rounding, Joining)]
    for seed in range(4):
        expected, actual = (take_step(engine, seed) for engine in engines)
        assert actual == expected
        for (wide, whole), (weight, remainder) in zip(*map(masters, engines), strict=True):
            assert (whole.dtype, remainder.dtype) == (torch.float32, torch.int16)
            assert weight.equal(wide)
            assert join(weight, remainder).equal(whole)
    assert sum(remainder.count_nonzero() for _, remainder in masters(engines[1]))


@pytest.mark.parametrize(
    "train",
    [
        {"dtype": "float32"},
        {"megatron": {"grad_reduce_in_fp32": False}},
        {"megatron": {"use_distributed_optimizer": False}},
    ],
    ids=["float32", "bfloat16-gradients", "replicated"],
)
def test_where_there_is_nothing_to_join_the_optimizer_has_whole_weights(
    make_with: MakeEngine, train: dict[str, Any]
) -> None:
    engine = make_with(Joining, **train)
    take_step(engine)
    found = [weight for group in engine.optimizer.param_groups for weight in group["params"]]
    assert found
    assert {weight.dtype for weight in found} == {torch.float32}


def storages() -> dict[int, tuple[torch.dtype, int]]:
    """Return the type and bytes of what all tensors lie in, by address."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    return {
        each.untyped_storage().data_ptr(): (each.dtype, each.untyped_storage().nbytes()) for each in found
    }


def test_no_float32_weights_are_left(make_with: MakeEngine) -> None:
    first = make_with(Joining)
    take_step(first)  # a process keeps tensors of its first step, such as rotary angles
    before = storages()
    engine = make_with(Joining)
    count = sum(weight.numel() for weight, _ in masters(engine))

    def held() -> dict[torch.dtype, float]:
        found: Counter[torch.dtype] = Counter()
        for address, (dtype, size) in storages().items():
            if address not in before:
                found[dtype] += size
        return {dtype: size / count for dtype, size in found.items()}

    new = held()
    assert new[torch.float32] == pytest.approx(4, rel=0.01), "gradients alone"
    take_step(engine)
    new = held()
    assert new[torch.bfloat16] == pytest.approx(2, rel=0.01)
    assert new[torch.int16] == pytest.approx(2, rel=0.01)
    assert new[torch.float32] == pytest.approx(4 + 8, rel=0.01), "gradients and moments"


def test_the_weights_of_another_role_leave_remainders_alone(make_with: MakeEngine, tmp_path: Path) -> None:
    engines = [make_with(kind) for kind in (Rounding, Joining)]
    other = tiny_qwen3(tmp_path / "other", vocab_size=VOCAB, head_dim=32, init_std=0.1)
    for engine in engines:
        engine.load_role("reference", str(other))
    for seed in range(3):
        for engine in engines:
            with engine._roles.use("reference"):
                pass
        expected, actual = (take_step(engine, seed) for engine in engines)
        assert actual == expected
        for (_, whole), (weight, remainder) in zip(*map(masters, engines), strict=True):
            assert join(weight, remainder).equal(whole)


def test_a_step_that_is_not_finite_leaves_every_bit(make_with: MakeEngine) -> None:
    engine, other = make_with(Joining), make_with(Joining)
    for each in (engine, other):
        take_step(each)
    norm = engine.chunks[0].module.decoder.final_layernorm
    damage = norm.register_forward_hook(lambda *call: call[-1] * torch.nan)
    with pytest.raises(NonFiniteError):
        take_step(engine, 1)
    damage.remove()
    assert take_step(engine, 2) == take_step(other, 2)
    for found, expected in zip(masters(engine), masters(other), strict=True):
        assert all(one.equal(two) for one, two in zip(found, expected, strict=True))


def test_megatron_does_not_take_remainders_for_weights(make_with: MakeEngine) -> None:
    engine = make_with(Joining)
    for method in ("reload_model_params", "step", "zero_grad"):
        with pytest.raises(AttributeError, match="shard_fp32_from_float16_groups"):
            getattr(engine.optimizer, method)()
