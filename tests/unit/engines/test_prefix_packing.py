"""Samples that share a prompt give what they give alone: log-probs, gradients, loads of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.config import Config
from anygauge.config.schema import Train
from anygauge.engines.fsdp.plugin import _unsupported
from anygauge.engines.megatron.model_checks import check_model
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_family
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config

MakeEngine = Callable[..., Any]
GROUPS = ((20, (5, 1, 12)), (7, (9, 9)), (11, (3,)), (1, (2, 4)))
"""Tokens of each prompt, and of the responses to it."""
SILENT = 1
"""A sample that nothing is learned from."""
WHOLE = sum(prompt + own for prompt, responses in GROUPS for own in responses)
SHARED = sum(prompt + sum(responses) for prompt, responses in GROUPS)


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins, tmp_path: Path) -> MakeEngine:
    def make(family: str, modalities: Sequence[str] = (), **train: Any) -> Any:
        path = tiny_family(tmp_path / family, plugins.get("register_models", family))
        engine = plugins.get("register_train_engines", "megatron")
        return engine.make(config_of(path, modalities, **train), context)

    return make


def config_of(path: Path, modalities: Sequence[str] = (), **train: Any) -> Config:
    return engine_config(
        {"path": path, "modalities": modalities}, train={"dtype": "float32", "lr": 1e-3, **train}
    )


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    """Return the samples with those of different groups in turn."""
    generator = torch.Generator().manual_seed(1)
    grouped = []
    for length, responses in GROUPS:
        prompt = torch.randint(4, 60, (length,), generator=generator).tolist()
        grouped.append([sample_of(prompt, own, generator) for own in responses])
    mixed = [group[turn] for turn in range(3) for group in grouped if turn < len(group)]
    mixed[SILENT] = mixed[SILENT]._replace(loss_mask=[0] * mixed[SILENT].response_length)
    return mixed


def sample_of(prompt: list[int], response: int, generator: torch.Generator) -> TrainSample:
    tokens = prompt + torch.randint(4, 60, (response,), generator=generator).tolist()
    advantages = torch.randn(response, generator=generator).tolist()
    return batches.sample_of(tokens, response)._replace(advantages=advantages)


def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    value = -(inputs.log_probs * inputs.advantages * inputs.loss_weights).sum()
    return value, {"entropy": (inputs.entropy * inputs.loss_weights).sum().detach()}


def results(engine: Any, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Return log-probs, and the metrics and gradients of a step."""
    log_probs = torch.cat(batches.log_probs(engine, samples, temperature=0.7))
    metrics = batches.train_step(
        engine,
        samples,
        loss,
        temperature=0.7,
        loss_weights=[[0.02 * bit for bit in sample.loss_mask] for sample in samples],
        entropy_grad=True,
    )
    learning = [(name, p) for name, p in engine.policy.chunks[0].named_parameters() if p.requires_grad]
    tensors = {name: p.main_grad.clone() for name, p in learning}
    tensors |= {name: buffer.clone() for name, buffer in engine.policy.chunks[0].named_buffers()}
    return {"metrics": dict(metrics), "log_probs": log_probs, **tensors}


def tokens_of(engine: Any) -> list[int]:
    """Return the tokens of each micro-batch of the last batch."""
    return [plan.inputs["input_ids"].numel() for plan in engine._packed.plans]


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("train", "tokens"),
    [
        ({"micro_batch_tokens": 1000}, [SHARED]),
        ({"micro_batch_tokens": 28, "recompute": "full"}, None),  # the first group does not fit
        ({"micro_batch_tokens": 1000, "lora": {"rank": 4}}, [SHARED]),
    ],
)
def test_a_shared_prompt_changes_nothing(
    make_engine: MakeEngine,
    samples: list[TrainSample],
    family: str,
    train: dict[str, Any],
    tokens: list[int] | None,
) -> None:
    expected = results(make_engine(family, **train), samples)
    engine = make_engine(family, prefix_packing=True, **train)
    found = results(engine, samples)
    sizes = tokens_of(engine)
    assert sizes == (tokens or sizes)
    assert SHARED <= sum(sizes) < WHOLE
    assert max(sizes) <= train["micro_batch_tokens"] or len(sizes) > 1
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    for name in expected.keys() - {"metrics"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_5", {}), ("qwen3_vl", {"modalities": ["image"]})],
    ids=["recurrent", "media"],
)
def test_other_models_pack_whole_samples(
    make_engine: MakeEngine, samples: list[TrainSample], family: str, options: dict[str, Any]
) -> None:
    engine = make_engine(family, prefix_packing=True, **options)
    batches.log_probs(engine, samples, temperature=1.0)
    assert tokens_of(engine) == [WHOLE]


def test_a_critic_has_the_same_values(
    context: WorkerContext, plugins: Plugins, samples: list[TrainSample], tmp_path: Path
) -> None:
    path = tiny_family(tmp_path, plugins.get("register_models", "qwen3"))
    make = plugins.get("register_train_engines", "megatron").make_critic
    expected, found = (make(config_of(path, prefix_packing=packing), context) for packing in (False, True))
    with torch.no_grad():
        for critic in (expected, found):
            parameters = dict(critic.policy.chunks[0].named_parameters())
            parameters["output_layer.weight"].copy_(torch.linspace(-1, 1, 64))
    values = [torch.cat(batches.values(critic, samples)) for critic in (expected, found)]
    assert tokens_of(found) == [SHARED]
    assert values[0].std() > 0.1
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-5)


def test_attention_of_a_provider_gets_whole_samples(make_engine: MakeEngine) -> None:
    policy = make_engine("qwen3").policy
    assert policy.can_pack_prefixes
    policy.chunks[0].decoder.layers[1].self_attention.core_attention = torch.nn.Identity()
    assert not policy.can_pack_prefixes


@pytest.mark.parametrize(
    ("family", "keys", "reason"),
    [
        ("qwen3", {"train": {"parallel": {"tensor": 2}}}, None),
        ("qwen3_vl", {}, None),
        ("qwen3", {"train": {"parallel": {"context": 2}}}, "context parallelism divides whole samples"),
        ("qwen3_moe", {"train": {"router_replay": True}}, "train.router_replay has the routes"),
        ("qwen3", {"train": {"provider": "mindspeed"}}, "layers of train.provider"),
        ("qwen3_vl", {"model": {"modalities": ["image"]}}, "prompts with media are not shared"),
        ("qwen3_5", {}, "layers of this model keep a state"),
    ],
)
def test_a_run_that_cannot_share_prompts_is_refused(
    family: str, keys: dict[str, dict[str, Any]], reason: str | None
) -> None:
    spec = load_plugins().named("register_models")[family]
    tables = {"run": {"name": "a"}, "model": {"path": "."}, "data": {"train": []}, **keys}
    tables["model"] = {"path": ".", **keys.get("model", {})}
    tables["train"] = {**keys.get("train", {}), "prefix_packing": True}
    config = Config.model_validate(tables)
    hf = {**spec.tiny(), "architectures": [spec.architectures[0]]}
    found = [each for each in check_model(config, "model.path", spec, hf) if "prefix" in each.path]
    assert [each.hint.startswith(reason or "") for each in found] == ([True] if reason else [])


def test_the_fsdp_engine_refuses_to_share_prompts() -> None:
    (problem,) = _unsupported(Train.model_validate({"engine": "fsdp", "prefix_packing": True}))
    assert (problem.path, problem.found) == ("train.prefix_packing", True)
