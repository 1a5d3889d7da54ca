"""Models with towers on the FSDP engine, against transformers and the Megatron engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM

from anygauge.config import Config
from anygauge.engines.fsdp.start_check import _use_attention
from anygauge.plugins import Plugins
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.media import DictStore
from anygauge_tests.vision_models import mixed_samples, write_vision_model

MakeEngine = Callable[..., Any]
FAMILIES = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def store() -> DictStore:
    return DictStore()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = plugins.get("register_models", family)
    text = {
        **spec.tiny().get("text_config", spec.tiny()),
        "num_hidden_layers": 3,
    }  # what is added after the last is not seen
    return write_vision_model(spec, tmp_path_factory.mktemp(family), text_config=text)


@pytest.fixture(scope="module")
def hf(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def samples(hf: dict[str, Any], store: DictStore) -> list[TrainSample]:
    return mixed_samples(hf, store)


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins, checkpoint: Path, store: DictStore) -> MakeEngine:
    def make(
        kind: str = "make", *, modalities: Sequence[str] = ("image",), path: Path = checkpoint, **train: Any
    ) -> Any:
        train = {"engine": "fsdp", "lr": 1e-3, "micro_batch_tokens": 96, "clip_grad": 0.0, **train}
        config = Config.model_validate(
            {
                "run": {"name": "test", "steps": 10},
                "model": {"path": path, "modalities": modalities},
                "data": {"train": []},
                "reward": {"function": "none"},
                "train": train,
            }
        )
        spec = plugins.get("register_train_engines", train["engine"])
        return getattr(spec, kind)(config, replace(context, media=store))

    return make


def reference_log_probs(model: Any, hf: Any, sample: TrainSample, spec: Any, store: DictStore) -> Tensor:
    """Return what transformers says, which counts positions itself and runs its own tower."""
    ids = torch.tensor([sample.tokens])
    given: dict[str, Any] = {}
    if sample.media:
        (tower,) = spec.media.towers(hf)
        contents = [store.get(media.key) for media in sample.media]
        given["pixel_values"] = tower.inputs(hf, contents, ids.device)["hidden_states"]
        given["image_grid_thw"] = torch.tensor([media.grid for media in sample.media])
        given["mm_token_type_ids"] = (ids == hf["image_token_id"]).int()
    logits = model(input_ids=ids, **given).logits[0, -sample.response_length - 1 : -1]
    logits = logits.index_fill(1, torch.tensor(spec.media.forbidden(hf)), -torch.inf)
    answer = ids[0, -sample.response_length :]
    return logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]


@pytest.fixture(scope="module")
def expected(
    family: str,
    checkpoint: Path,
    hf: dict[str, Any],
    samples: Sequence[TrainSample],
    plugins: Plugins,
    store: DictStore,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return log-probabilities, and the gradients of their mean, by transformers."""
    model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    spec = plugins.get("register_models", family)
    log_probs = [reference_log_probs(model, hf, sample, spec, store) for sample in samples]
    (-torch.cat(log_probs).mean()).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return [each.detach() for each in log_probs], gradients


def take_step(engine: Any, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
    """Return the gradients of a step on the mean log-probability, under Hugging Face names."""
    count = sum(each.response_length for each in samples)
    gradients: dict[str, Tensor] = {}
    step = engine.optimizer.step

    def looking(*given: Any) -> None:
        named = {shard.name: shard.tensor.grad for shard in engine.shards}
        gradients.update({name: each.full_tensor() for name, each in named.items() if each is not None})
        step(*given)

    def loss(given: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -(given.log_probs * given.loss_weights).sum(), {}

    engine.optimizer.step = looking
    batches.train_step(
        engine,
        samples,
        loss,
        temperature=1.0,
        loss_weights=[[1 / count] * each.response_length for each in samples],
        old_log_probs=[each.rollout_log_probs for each in samples],
        reference_log_probs=None,
        entropy_grad=False,
    )
    engine.optimizer.step = step
    return gradients


def test_log_probs_equal_transformers(
    make_engine: MakeEngine, samples: list[TrainSample], expected: tuple[list[Tensor], Any]
) -> None:
    """Text, one image, and several, in one micro-batch and alone."""
    engine = make_engine()
    assert engine.root.is_packed
    assert len(engine._plan(batches.make_batch(samples))) == 1
    together = batches.log_probs(engine, samples, temperature=1.0)
    alone = [batches.log_probs(engine, [each], temperature=1.0)[0] for each in samples]
    engine.root.is_packed = False
    _use_attention(engine.root.decoder, "sdpa")
    padded = batches.log_probs(engine, samples, temperature=1.0)
    for log_probs in (together, alone, padded):
        for actual, wanted in zip(log_probs, expected[0], strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)
    assert torch.cat(together).std() > 0.1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_equal_transformers(
    make_engine: MakeEngine,
    samples: list[TrainSample],
    expected: tuple[Any, dict[str, Tensor]],
    recompute: str,
) -> None:
    actual, wanted = take_step(make_engine(recompute=recompute), samples), expected[1]
    assert actual.keys() == wanted.keys()
    assert sum("visual" in name for name in wanted) > 20
    for name, gradient in actual.items():
        error = (gradient - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-3)
        assert error < 1e-5, f"{name}: {error}"
