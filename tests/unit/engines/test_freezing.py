"""``train.freeze`` by regular expression, on both engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.testing.tiny import tiny_family, tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_tests import batches
from anygauge_tests.batches import weights
from anygauge_tests.engine_config import engine_config

MakeConfig = Callable[..., Config]
MakeEngine = Callable[..., Any]
ENGINES = ("fsdp", "megatron")
SAMPLES = [batches.sample_of([(7 * place + length) % 40 for place in range(length)], 4) for length in (9, 14)]


@pytest.fixture(params=["qwen2", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path: Path, plugins: Plugins) -> Path:
    tiny_tokenizer(tmp_path, alphabet="0123456789+-*/=.")
    return tiny_family(tmp_path, plugins.get("register_models", request.param), tie_word_embeddings=False)


@pytest.fixture
def make_config(model: Path) -> MakeConfig:
    def make(engine: str, *freeze: str, **train: Any) -> Config:
        return engine_config(
            model, train={"engine": engine, "lr": 0.01, "clip_grad": 0.0, "freeze": freeze, **train}
        )

    return make


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins, make_config: MakeConfig) -> MakeEngine:
    def make(engine: str, *freeze: str, kind: str = "make", **train: Any) -> Any:
        spec = plugins.get("register_train_engines", engine)
        return getattr(spec, kind)(make_config(engine, *freeze, **train), context)

    return make


def step(engine: Any) -> dict[str, float]:
    return batches.train_step(engine, SAMPLES)


def changed(engine: Any) -> set[str]:
    """Return the weights that a step changes; an expert that no token chose stays as it is."""
    before = weights(engine)
    step(engine)
    return {name for name, tensor in weights(engine).items() if not tensor.equal(before[name])}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ENGINES)
def test_weights_that_match_stay_as_they_are(make_engine: MakeEngine, name: str, recompute: str) -> None:
    """The others learn, after a frozen embedding too."""
    whole = make_engine(name, recompute=recompute)
    frozen = r"model\.embed_tokens\..*|.*\.layers\.0\..*|.*\.(experts\..*|input_layernorm\.weight)"
    engine = make_engine(name, *frozen.split("|", 1), recompute=recompute)
    assert changed(engine) == {weight for weight in changed(whole) if not re.fullmatch(frozen, weight)}


def test_both_engines_take_the_same_steps(make_engine: MakeEngine) -> None:
    engines = [make_engine(name, r".*layers\.1\..*", r"lm_head\.weight") for name in ENGINES]
    for _ in range(3):
        one, other = (step(engine) for engine in engines)
        assert {name: other[name] for name in one} == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("name", ENGINES)
def test_an_expression_that_matches_nothing_is_refused(make_engine: MakeEngine, name: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'q_proj' matches no weight.*q_proj\.weight") as caught:
        make_engine(name, "q_proj")
    assert caught.value.code == "AG201"


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_left_to_train_is_refused(make_engine: MakeEngine, name: str) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        make_engine(name, ".*")
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        make_engine(name, "language")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("model", ["glm4_moe"], indirect=True)
def test_the_bias_of_a_router_is_not_trained(make_engine: MakeEngine, name: str) -> None:
    """No gradient changes it, so nothing is left to train beside it."""
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        make_engine(name, r".*\.(weight|bias)")


def test_a_part_of_a_fused_weight_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"q_proj\.weight is one tensor with .*k_proj\.weight"):
        make_engine("megatron", r".*\.q_proj\.weight")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_some_experts_of_a_layer_are_refused(make_engine: MakeEngine, name: str) -> None:
    with pytest.raises(ConfigError, match=r"experts\.1\.\w+\.weight.* is one tensor with "):
        make_engine(name, r".*\.experts\.1\..*")


@pytest.mark.parametrize("name", ENGINES)
def test_a_critic_has_no_output_layer_to_freeze(make_engine: MakeEngine, name: str) -> None:
    make_engine(name, r"lm_head\.weight", kind="make_critic")


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_the_same_weights_are_frozen_on_the_meta_device(
    make_config: MakeConfig, context: WorkerContext
) -> None:
    """No tensor has an address there."""
    from anygauge.engines.megatron.model import build_policy, initialize_parallel
    from anygauge.engines.megatron.scope import make_scope

    config = make_config("megatron", r".*layers\.1\.mlp\.experts\..*")
    on_meta: Any = SimpleNamespace(torch_device=torch.device("meta"))
    with make_scope(context.device):
        initialize_parallel(seed=0, timeout_s=60)
        with torch.device("meta"):
            policy = build_policy(config, context.plugins, context.backend, on_meta, load=False)
    frozen = {name for name, each in policy.chunks[0].named_parameters() if not each.requires_grad}
    assert frozen == {f"decoder.layers.1.mlp.experts.linear_fc{number}.weight" for number in (1, 2)}
