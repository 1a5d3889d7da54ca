"""Every field of Megatron's configs changes something in the engine, or is refused with the reason."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.config import Config
from anygauge.config.schema import Train
from anygauge.engines.megatron.config_fields import PASSED, config_fields, option_problems
from anygauge.plugins import Plugins
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_tests import batches
from anygauge_tests.engine_config import engine_config


@dataclass(frozen=True, slots=True)
class Recorded:
    """Results of two optimizer steps of a tiny model with experts."""

    weights: torch.Tensor
    buckets: list[int]
    """Sizes of the buffers that gradients are sent from."""
    calls: Counter[str]
    """How often Megatron's functions were called."""
    optimizer: type
    sums_in_bfloat16: bool
    """Whether matrix products of NVIDIA may sum in bfloat16."""


@dataclass(frozen=True, slots=True)
class Stages:
    """How two pipeline stages divide four layers, and how many micro-batches a rank takes where it has 3."""

    layers: list[int]
    micro_batches: int


Observe = Callable[[Mapping[str, Any]], Recorded]
Seen = Callable[[Recorded, Recorded], bool]


def weights(one: Recorded, other: Recorded) -> bool:
    return float((one.weights - other.weights).abs().max()) > 2e-5


def buckets(one: Recorded, other: Recorded) -> bool:
    return one.buckets != other.buckets


def calls_of(function: str) -> Seen:
    return lambda one, other: one.calls[function] != other.calls[function]


@dataclass(frozen=True, slots=True)
class Case:
    """A value of a field, the settings in which it matters, and what it changes."""

    value: Any
    seen: Seen = weights
    train: Mapping[str, Any] | None = None
    megatron: Mapping[str, Any] | None = None


REPLICATED = {"use_distributed_optimizer": False}
SGD = {**REPLICATED, "optimizer": "sgd"}
CASES = {
    "moe_router_bias_update_rate": Case(0.1),
    "moe_router_dtype": Case("fp64", calls_of("router in torch.float64")),
    "deallocate_pipeline_outputs": Case(True, calls_of("custom_backward")),
    "disable_bf16_reduced_precision_matmul": Case(
        True, lambda one, other: one.sums_in_bfloat16 and not other.sums_in_bfloat16, {"dtype": "bfloat16"}
    ),
    "recompute_method": Case("block", calls_of("checkpoint"), {"recompute": "full"}),
    "recompute_num_layers": Case(3, calls_of("checkpoint"), {"recompute": "full"}),
    "overlap_grad_reduce": Case(True, calls_of("register_grad_ready")),
    "overlap_param_gather": Case(True, calls_of("finish_param_sync"), megatron={"overlap_grad_reduce": True}),
    "bucket_size": Case(1000, buckets, megatron={"overlap_grad_reduce": True}),
    "pad_buckets_for_high_nccl_busbw": Case(True, buckets),
    "grad_reduce_in_fp32": Case(False, weights, {"dtype": "bfloat16"}),
    "use_distributed_optimizer": Case(False, lambda one, other: one.optimizer is not other.optimizer),
    "optimizer": Case("sgd", weights, megatron=REPLICATED),
    "sgd_momentum": Case(0.1, weights, megatron=SGD),
    "decoupled_weight_decay": Case(False, weights, {"weight_decay": 0.5}),
    "decoupled_lr": Case(1e-4),
    "decoupled_min_lr": Case(9e-3, weights, {"lr_schedule": "cosine"}, {"decoupled_lr": 1e-2}),
    "apply_wd_to_qk_layernorm": Case(True, weights, {"weight_decay": 0.5}),
}
"""Fields that one process shows."""
PIPELINED = {
    "num_layers_in_first_pipeline_stage": ({"num_layers_in_first_pipeline_stage": 1}, 1),
    "num_layers_in_last_pipeline_stage": ({"num_layers_in_last_pipeline_stage": 1}, 1),
    "pipeline_model_parallel_layout": ({"pipeline_model_parallel_layout": "Et|tttL"}, 1),
    "microbatch_group_size_per_vp_stage": ({"microbatch_group_size_per_vp_stage": 3}, 2),
}
"""Fields that pipelines read, and of how many parts for each stage."""


# -------------------------------------------------------------------------
# What they change
# -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GLM-4.5 of three layers, whose routers have biases and whose attention has norms."""
    fields = {**plugins.get("register_models", "glm4_moe").tiny(), "use_qk_norm": True}
    config = AutoConfig.for_model(fields.pop("model_type"), initializer_range=0.1, **fields)
    path = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def counted(context: WorkerContext) -> Iterator[Counter[str]]:
    """Count the calls of functions of Megatron."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets
    from megatron.core.pipeline_parallel import schedules

    from anygauge.engines.megatron.layers.moe import Router

    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            *((schedules, "custom_backward"), (tensor_parallel, "checkpoint")),
            *((Buckets, "register_grad_ready"), (Buckets, "finish_param_sync")),
        ):
            patch.setattr(owner, name, counting(getattr(owner, name), counts, name))
        patch.setattr(Router, "gating", counting_dtypes(Router.gating, counts, "router in"))
        yield counts


def counting_dtypes(function: Callable[..., torch.Tensor], counts: Counter[str], name: str) -> Any:
    def counted(*args: Any) -> torch.Tensor:
        result = function(*args)
        counts[f"{name} {result.dtype}"] += 1
        return result

    return counted


def counting(function: Callable[..., Any], counts: Counter[str], name: str) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return counted


@pytest.fixture(scope="module")
def observe(context: WorkerContext, checkpoint: Path, counted: Counter[str]) -> Observe:
    """Return a function from ``[train]`` to what it gives; the same for the same."""

    @cache
    def known(train: str) -> Recorded:
        counted.clear()
        allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        try:
            return trained(json.loads(train), checkpoint, context, counted)
        finally:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed

    return lambda train: known(json.dumps(train, sort_keys=True))


def trained(
    train: Mapping[str, Any], checkpoint: Path, context: WorkerContext, counted: Counter[str]
) -> Recorded:
    config = engine_config(checkpoint, train={"lr": 1e-2, "micro_batch_tokens": 32, **train})
    engine = context.plugins.get("register_train_engines", "megatron").make(config, context)
    for _ in range(2):
        take_step(engine)
    return Recorded(
        weights=torch.cat([weight.flatten().float() for _, weight in engine.weights()]),
        buckets=[
            bucket.grad_data.numel()
            for chunk in engine.chunks
            for buffer in chunk.buffers
            for bucket in buffer.buckets
        ],
        calls=Counter(counted),
        optimizer=type(engine.optimizer.chained_optimizers[0]),
        sums_in_bfloat16=torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )


def take_step(engine: Any) -> None:
    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = -(inputs.log_probs * inputs.advantages * inputs.loss_weights).sum()
        return value, {"loss": value.detach()}

    samples = [
        batches.sample_of(
            [(7 * place + length) % 50 for place in range(length)],
            length - 2,
            log_prob=0.0,
            advantage=length % 3 - 1.0,
        )
        for length in (17, 6, 23, 9)
    ]
    batches.train_step(
        engine, samples, loss, loss_weights=[[1 / 40] * sample.response_length for sample in samples]
    )


@pytest.mark.parametrize("name", CASES)
def test_a_field_that_passes_changes_something(name: str, observe: Observe) -> None:
    case = CASES[name]
    base = {**(case.train or {}), "megatron": {**(case.megatron or {})}}
    changed = {**base, "megatron": {**base["megatron"], name: case.value}}
    assert not list(option_problems(Train.model_validate(changed)))
    assert case.seen(observe(base), observe(changed))


@pytest.mark.parametrize("name", PIPELINED)
def test_a_field_of_pipelines_that_passes_changes_something(name: str, context: WorkerContext) -> None:
    options, parts = PIPELINED[name]
    train = Train.model_validate(
        {"parallel": {"pipeline": 2, "virtual_pipeline": parts}, "megatron": options}
    )
    assert not list(option_problems(train))
    assert stages(train) != stages(train.model_copy(update={"megatron": {}}))


def stages(train: Train) -> Stages:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    from anygauge.engines.megatron.options import megatron_options
    from anygauge.engines.megatron.ranks import common_count

    tree = {"run": {"name": "test"}, "model": {"path": "model"}, "data": {"train": []}}
    config = Config.model_validate(tree).model_copy(update={"train": train})
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    transformer = megatron_options(config, sizes).transformer
    part = 0 if train.parallel.virtual_pipeline > 1 else None
    return Stages(
        layers=[get_num_layers_to_build(transformer, vp_stage=part, pp_rank=rank) for rank in range(2)],
        micro_batches=common_count(3, config=transformer, device=torch.device("cpu")),
    )


# -------------------------------------------------------------------------
# What is refused
# -------------------------------------------------------------------------


def test_every_other_field_is_refused() -> None:
    assert {*CASES, *PIPELINED} == PASSED
    others = frozenset().union(*config_fields().values()) - PASSED
    assert len(others) > 200
    train = Train(megatron=dict.fromkeys(others, 1))
    assert {problem.path for problem in option_problems(train)} == {
        f"train.megatron.{name}" for name in others
    }


@pytest.mark.parametrize(
    ("train", "hint"),
    [
        ({"megatron": {"recompute_method": "block"}}, 'needs train.recompute = "full"'),
        ({"megatron": {"microbatch_group_size_per_vp_stage": 3}}, "virtual_pipeline above 1"),
        ({"megatron": {"bucket_size": 1000}}, "needs overlap_grad_reduce"),
        ({"megatron": {"bucket_size": 1000, "overlap_grad_reduce": False}}, "needs overlap_grad_reduce"),
        ({"megatron": {"decoupled_min_lr": 1e-3}}, "needs decoupled_lr"),
        ({"megatron": {"sgd_momentum": 0.1}}, 'needs optimizer = "sgd"'),
    ],
)
def test_a_field_that_changes_nothing_alone_says_what_it_needs(train: dict[str, Any], hint: str) -> None:
    [problem] = [each for each in option_problems(Train.model_validate(train)) if "alone" in each.hint]
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("megatron", "hint"),
    [
        ({"moe_router_dtype": "fp16"}, "must be 'fp32' or 'fp64'"),
        ({"recompute_method": "blocks"}, "must be 'uniform' or 'block'"),
        ({"optimizer": "muon"}, "must be 'adam' or 'sgd'"),
        ({"bucket_size": "x"}, "must be a valid integer"),
        ({"bucket_size": 1e6}, "must be a valid integer"),
        ({"bucket_size": True}, "must be a valid integer"),
        ({"bucket_size": 0}, "must be greater than 0"),
        ({"overlap_grad_reduce": 1}, "must be a valid boolean"),
        ({"decoupled_lr": -1.0}, "must be greater than or equal to 0"),
        ({"decoupled_lr": math.nan}, "must be a finite number"),
        ({"moe_router_bias_update_rate": "0.1"}, "must be a valid number"),
        ({"pipeline_model_parallel_layout": 2}, "must be a valid string or a valid list"),
        ({"overlap_param_gather": True, "use_distributed_optimizer": False}, "nothing is gathered"),
        ({"optimizer": "sgd"}, "takes Adam alone: add use_distributed_optimizer = false"),
    ],
    ids=str,
)
def test_a_value_that_megatron_cannot_take_is_refused(megatron: dict[str, Any], hint: str) -> None:
    [problem] = option_problems(Train(megatron=megatron))
    name, value = next(iter(megatron.items()))
    assert (problem.path, problem.found) == (f"train.megatron.{name}", value)
    assert hint in problem.hint


@pytest.mark.parametrize("name", sorted(PASSED))
def test_the_value_of_every_field_that_passes_is_checked(name: str) -> None:
    [problem] = option_problems(Train(megatron={name: {}}))
    assert "Megatron cannot take it" in problem.hint


def test_layers_that_are_recomputed_together_divide_all(observe: Observe) -> None:
    with pytest.raises(ConfigError, match=r"recompute_num_layers = 2 does not divide the 3 layers"):
        observe({"recompute": "full", "megatron": {"recompute_num_layers": 2}})
    block = {"recompute_num_layers": 2, "recompute_method": "block"}
    assert observe({"recompute": "full", "megatron": block}).calls["checkpoint"] == 2 * 2 * 2
