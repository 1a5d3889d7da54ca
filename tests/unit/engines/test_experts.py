"""Experts in the engine: how evenly they are used, biases that even it out, and routes that are replayed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.config import Config
from anygauge.config.check import check
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_hooks.errors import ConfigError, NonFiniteError, RouterReplayError
from anygauge_hooks.kernels import KernelImpl, KernelOp
from anygauge_hooks.types import BackendSpec
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config

MakeEngine = Callable[..., Any]
LENGTHS = ((17, 5), (5, 1), (40, 20), (2, 1), (33, 30))


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins) -> MakeEngine:
    def make(path: Path, **train: Any) -> Any:
        return plugins.get("register_train_engines", "megatron").make(config_of(path, **train), context)

    return make


def config_of(path: Path, **train: Any) -> Config:
    return engine_config(path, train={"lr": 1e-3, "micro_batch_tokens": 64, "clip_grad": 0.0, **train})


@pytest.fixture(scope="module")
def checkpoint(plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GLM-4.5 with three layers, the first without experts."""
    fields = dict(plugins.get("register_models", "glm4_moe").tiny())
    config = AutoConfig.for_model(fields.pop("model_type"), initializer_range=0.1, **fields)
    path = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    return batches.random_samples(LENGTHS, 4, 64)


def routers_of(engine: Any) -> list[Any]:
    from anygauge.engines.megatron.layers.moe import routers

    return list(routers(engine.policy.chunks))


# -------------------------------------------------------------------------
# Kernels
# -------------------------------------------------------------------------

FACTS: dict[KernelOp, dict[str, tuple[Any, ...]]] = {
    "topk_router": {
        "experts": (8,),
        "topk": (2,),
        "score_function": ("sigmoid",),
        "pre_softmax": (False,),
        "num_groups": (None,),
        "group_topk": (None,),
        "has_expert_bias": (True,),
    },
    "token_permute": {"experts": (8,), "topk": (2,)},
    "token_unpermute": {"topk": (2,)},
}
"""Facts about the model of these tests. A kernel that is limited to them serves no module with others."""


def test_routers_and_dispatchers_run_the_kernels_of_the_table(
    context: WorkerContext, checkpoint: Path, samples: list[TrainSample]
) -> None:
    from anygauge.kernels import reference

    called: list[str] = []

    def recorded(op: KernelOp) -> KernelImpl:
        def fn(*args: Any, **options: Any) -> Any:
            called.append(op)
            return getattr(reference, op)(*args, **options)

        return KernelImpl(op=op, fn=fn, source="recorded", limits=FACTS[op], priority=1)

    def register_kernels(backend: BackendSpec) -> list[KernelImpl]:
        return [recorded(op) for op in FACTS]

    plugins = load_plugins()
    make = plugins.get("register_train_engines", "megatron").make
    expected = make(config_of(checkpoint), replace(context, plugins=plugins))
    plugins.register(SimpleNamespace(register_kernels=hookimpl(register_kernels)), name="recorded")
    engine = make(config_of(checkpoint), replace(context, plugins=plugins))
    assert batches.train_step(engine, samples) == batches.train_step(expected, samples)
    passes = ["topk_router", "token_permute", "token_unpermute"]
    assert called == passes * (len(called) // 3)
    assert called


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_weights_of_a_router_in_float64_reach_kernels_in_float32(
    context: WorkerContext, checkpoint: Path, samples: list[TrainSample], dtype: str
) -> None:
    from anygauge.kernels import reference

    found: set[torch.dtype] = set()

    def permute(tokens: Any, probs: torch.Tensor, routing_map: Any, topk: int) -> Any:
        found.add(probs.dtype)
        return reference.token_permute(tokens, probs, routing_map, topk)

    def register_kernels(backend: BackendSpec) -> list[KernelImpl]:
        return [KernelImpl(op="token_permute", fn=permute, source="recorded", priority=1)]

    plugins = load_plugins()
    plugins.register(SimpleNamespace(register_kernels=hookimpl(register_kernels)), name="recorded")
    make = plugins.get("register_train_engines", "megatron").make
    config = config_of(checkpoint, megatron={"moe_router_dtype": dtype})
    batches.train_step(make(config, replace(context, plugins=plugins)), samples)
    assert found == {torch.float32}


# -------------------------------------------------------------------------
# Load
# -------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_tells_how_uneven_the_experts_of_each_layer_were_used(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample], recompute: str
) -> None:
    engine = make_engine(checkpoint, recompute=recompute)
    batches.log_probs(engine, samples, temperature=1.0)  # is not counted
    second = routers_of(engine)[1]
    with torch.no_grad():
        second.expert_bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0]))
    metrics = batches.train_step(engine, samples)
    # all tokens go to two of the eight experts
    assert metrics["moe/load_max_over_mean/layer_2"] == pytest.approx(4.0)
    assert 1.0 <= metrics["moe/load_max_over_mean/layer_1"] < 4.0
    assert metrics["moe/load_max_over_mean"] == pytest.approx(4.0)
    assert "moe/load_max_over_mean/layer_0" not in metrics
    assert second.load.sum() == 0


def test_each_token_is_counted_once(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[torch.Tensor] = []
    engine = make_engine(checkpoint, recompute="full")
    loads = "anygauge.engines.megatron.engine.expert_load"
    monkeypatch.setattr(loads, lambda *_: counted.extend(r.load.clone() for r in routers_of(engine)) or {})
    batches.train_step(engine, samples)
    tokens = sum(length for length, _ in LENGTHS)
    assert [int(load.sum()) for load in counted] == [2 * tokens, 2 * tokens]


def test_samples_that_teach_nothing_move_neither_loads_nor_biases(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample]
) -> None:
    """Those of ranks without work, and those that could not be scored."""
    idle = [sample._replace(loss_mask=[0] * sample.response_length) for sample in samples[2:]]
    found, wanted = (make_engine(checkpoint, megatron={"moe_router_bias_update_rate": 0.25}) for _ in "ab")
    one, other = batches.train_step(found, [*samples[:2], *idle]), batches.train_step(wanted, samples[:2])
    assert load_of(one) == load_of(other)
    for mine, theirs in zip(routers_of(found), routers_of(wanted), strict=True):
        assert torch.equal(mine.expert_bias, theirs.expert_bias)
        assert mine.expert_bias.any()


def load_of(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("moe/")}


# -------------------------------------------------------------------------
# Biases
# -------------------------------------------------------------------------


def test_biases_move_against_the_load_by_the_rate(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample]
) -> None:
    engine = make_engine(checkpoint, megatron={"moe_router_bias_update_rate": 0.25})
    bias = torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0])
    router = routers_of(engine)[0]
    with torch.no_grad():
        router.expert_bias.copy_(bias)
    batches.train_step(engine, samples)
    expected = bias + torch.tensor([-0.25, -0.25] + [0.25] * 6)
    assert torch.equal(router.expert_bias, expected)
    weights = dict(engine.weights())
    assert torch.equal(weights["model.layers.1.mlp.gate.e_score_correction_bias"], expected)


def test_biases_stay_without_a_rate(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample]
) -> None:
    engine = make_engine(checkpoint)
    before = [router.expert_bias.clone() for router in routers_of(engine)]
    batches.train_step(engine, samples)
    assert all(torch.equal(a, b.expert_bias) for a, b in zip(before, routers_of(engine), strict=True))


def test_biases_stay_where_a_step_is_refused(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample]
) -> None:
    engine = make_engine(checkpoint, megatron={"moe_router_bias_update_rate": 0.25})
    batches.train_step(engine, samples)
    before = {name: tensor.clone() for name, tensor in engine.weights()}

    def broken(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return inputs.log_probs.sum() * math.inf, {}

    with pytest.raises(NonFiniteError, match="no weight was changed"):
        batches.train_step(engine, samples, broken)
    assert all(tensor.equal(before[name]) for name, tensor in engine.weights())


def test_the_reference_has_its_own_biases(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample]
) -> None:
    engine = make_engine(checkpoint)
    engine.load_role("reference", str(checkpoint))
    expected = batches.log_probs(engine, samples, temperature=1.0)
    with torch.no_grad():
        for router in routers_of(engine):
            router.expert_bias.copy_(torch.arange(8.0))
    actor = batches.log_probs(engine, samples, temperature=1.0)
    reference = batches.log_probs(engine, samples, temperature=1.0, role="reference")
    assert all(torch.equal(a, b) for a, b in zip(reference, expected, strict=True))
    assert not torch.allclose(torch.cat(actor), torch.cat(expected))
    assert torch.equal(routers_of(engine)[0].expert_bias, torch.arange(8.0))


# -------------------------------------------------------------------------
# Replay
# -------------------------------------------------------------------------

RECOMPUTES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "experts": {"megatron": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
}


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_step_uses_the_experts_that_the_log_prob_pass_chose(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample], recompute: str
) -> None:
    """Other micro-batches, in another order, with routers that would choose otherwise now."""
    expected = make_engine(checkpoint)
    engine = make_engine(checkpoint, router_replay=True, **RECOMPUTES[recompute])
    batches.log_probs(engine, samples, temperature=1.0)
    with torch.no_grad():
        for router in routers_of(engine):
            router.expert_bias.copy_(torch.arange(8.0))  # chooses, and weighs nothing
    chosen = [samples[3], samples[0], samples[4]]
    found, wanted = batches.train_step(engine, chosen), batches.train_step(expected, chosen)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_without_replay_the_routers_choose_again(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample]
) -> None:
    """The control of the test above."""
    losses = []
    for bias in (torch.zeros(8), torch.arange(8.0)):
        engine = make_engine(checkpoint)
        batches.log_probs(engine, samples, temperature=1.0)
        with torch.no_grad():
            for router in routers_of(engine):
                router.expert_bias.copy_(bias)
        losses.append(batches.train_step(engine, samples)["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


def test_a_step_without_a_capture_is_refused(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample]
) -> None:
    engine = make_engine(checkpoint, router_replay=True)
    with pytest.raises(RouterReplayError, match="A sample of 17 tokens has no captured routes; those of 0 "):
        batches.train_step(engine, samples)
    engine.load_role("reference", str(checkpoint))
    batches.log_probs(engine, samples, temperature=1.0, role="reference")
    with pytest.raises(RouterReplayError, match="those of 0 samples"):
        batches.train_step(engine, samples)
    batches.log_probs(engine, samples[:4], temperature=1.0)
    with pytest.raises(RouterReplayError, match=r"A sample of 33 tokens .* those of 4 samples"):
        batches.train_step(engine, samples)
    batches.log_probs(engine, samples[4:], temperature=1.0)
    with pytest.raises(RouterReplayError, match=r"A sample of 17 tokens .* those of 1 samples"):
        batches.train_step(engine, samples)  # a pass forgets what those before it captured


def test_a_layer_that_captured_nothing_is_refused(
    make_engine: MakeEngine, checkpoint: Path, samples: list[TrainSample]
) -> None:
    from anygauge.engines.megatron.layers.routing import Routes

    engine = make_engine(checkpoint, router_replay=True)
    batches.log_probs(engine, samples, temperature=1.0)
    routes = Routes(is_replay=True, experts={2: torch.zeros(1, 2)})
    with pytest.raises(RouterReplayError, match=r"Layer 1 has no captured routes .*; captured: 2"):
        routes.take(1)
    plan = engine._packed.plans[0]
    with pytest.raises(RouterReplayError, match="captured routes of 0 layers, this rank has 2 with experts"):
        engine._routes.keep(plan.sequences, plan.parts, Routes(is_replay=False))


def test_a_model_without_experts_has_no_routes(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.router_replay is set, and .* has no experts"):
        make_engine(tiny_qwen3(tmp_path), router_replay=True)


# -------------------------------------------------------------------------
# Heads of multi-token prediction
# -------------------------------------------------------------------------


def test_what_is_left_out_is_told_and_no_config_that_is_written_promises_it(
    make_engine: MakeEngine, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_engine(checkpoint)
    assert not caplog.messages
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(checkpoint, source)
    weights = load_file(source / "model.safetensors")
    heads = {f"model.layers.3.{name}.weight": torch.ones(2) for name in ("eh_proj", "mlp.gate")}
    save_file({**weights, **heads}, source / "model.safetensors", {"format": "pt"})
    hf = json.loads((source / "config.json").read_text())
    told = {"num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps({**hf, **told}))

    make_engine(source).save_hf(str(target))

    (message,) = caplog.messages
    assert "2 tensors (model.layers.3. ...) are left out" in message
    assert load_file(target / "model-00001-of-00001.safetensors").keys() == weights.keys()
    written = json.loads((target / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    assert "quantization_config" not in written
    make_engine(target)


# -------------------------------------------------------------------------
# Config
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (
            {"algorithm": {"old_log_probs": "rollout"}, "train": {"router_replay": True}},
            "train.router_replay",
        ),
        ({"train": {"megatron": {"moe_aux_loss_coeff": 0.1}}}, "train.megatron.moe_aux_loss_coeff"),
        ({"train": {"megatron": {"moe_z_loss_coeff": 0.1}}}, "train.megatron.moe_z_loss_coeff"),
        (
            {"train": {"megatron": {"moe_expert_capacity_factor": 1.0}}},
            "train.megatron.moe_expert_capacity_factor",
        ),
    ],
)
def test_what_would_train_experts_otherwise_is_refused(
    plugins: Plugins, checkpoint: Path, changes: dict[str, Any], path: str
) -> None:
    config = Config.model_validate({**config_of(checkpoint).model_dump(), **changes})
    backend = plugins.get("register_backends", "cpu")
    assert path in {problem.path for problem in check(config, backend, plugins, check_files=False)}
