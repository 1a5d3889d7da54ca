"""The trainer against transformers, with images: log-probabilities, and gradients of decoder and tower."""

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

from anygauge.plugins import Plugins
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config
from anygauge_tests.media import DictStore
from anygauge_tests.vision_models import mixed_samples, random_image, reference_log_probs, write_vision_model

MakeEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def store() -> DictStore:
    return DictStore()


@pytest.fixture(scope="module")
def checkpoint(plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = plugins.get("register_models", "qwen3_vl")
    text = {**spec.tiny()["text_config"], "num_hidden_layers": 3}  # what is added after the last is not seen
    return write_vision_model(spec, tmp_path_factory.mktemp("vl"), text_config=text)


@pytest.fixture(scope="module")
def hf(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def samples(hf: dict[str, Any], store: DictStore) -> list[TrainSample]:
    return mixed_samples(hf, store)


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins, checkpoint: Path, store: DictStore) -> MakeEngine:
    def make(**train: Any) -> Any:
        config = engine_config(
            {"path": checkpoint, "modalities": ["image"]},
            train={"lr": 1e-3, "micro_batch_tokens": 96, "clip_grad": 0.0, **train},
        )
        found = replace(context, media=store)
        return plugins.get("register_train_engines", "megatron").make(config, found)

    return make


@pytest.fixture(scope="module")
def expected(
    checkpoint: Path, hf: dict[str, Any], samples: Sequence[TrainSample], plugins: Plugins, store: DictStore
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return log-probabilities, and the gradients of their mean, by transformers."""
    model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    spec = plugins.get("register_models", "qwen3_vl")
    found = [reference_log_probs(model, hf, sample, spec, store) for sample in samples]
    (-torch.cat(found).mean()).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return [each.detach() for each in found], gradients


def take_step(engine: Any, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
    """Return the gradients of a step on the mean log-probability, under Hugging Face names."""
    from anygauge.engines.megatron.weights.mapping import hf_tensors

    batches.train_step(engine, samples)
    stored = engine.policy.tensors
    return dict(hf_tensors((rule, stored[rule.canonical].main_grad) for rule in engine.policy.rules))


def test_log_probs_equal_transformers(
    make_engine: MakeEngine, samples: list[TrainSample], expected: tuple[list[Tensor], Any]
) -> None:
    """Text, one image, and several, in one micro-batch and alone."""
    engine = make_engine()
    assert len(engine._pack(batches.make_batch(samples)).plans) == 1
    together = batches.log_probs(engine, samples, temperature=1.0)
    alone = [batches.log_probs(engine, [each], temperature=1.0)[0] for each in samples]
    for found in (together, alone):
        for actual, wanted in zip(found, expected[0], strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)
    assert torch.cat(together).std() > 0.1


def test_another_image_is_another_answer(
    make_engine: MakeEngine,
    samples: list[TrainSample],
    expected: tuple[list[Tensor], Any],
    hf: dict[str, Any],
    store: DictStore,
) -> None:
    (media,) = samples[1].media
    swapped = media._replace(key=random_image(store, hf, 4, 4, 99).key)
    (wrong,) = batches.log_probs(make_engine(), [samples[1]._replace(media=(swapped,))], temperature=1.0)
    assert (wrong - expected[0][1]).abs().max() > 1e-2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_equal_transformers(
    make_engine: MakeEngine,
    samples: list[TrainSample],
    expected: tuple[Any, dict[str, Tensor]],
    recompute: str,
) -> None:
    actual, wanted = take_step(make_engine(recompute=recompute), samples), expected[1]
    assert actual.keys() == wanted.keys()
    assert sum("visual" in name for name in wanted) > 30
    for name, gradient in actual.items():
        error = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-5, f"{name}: {error}"


def test_the_kernels_of_the_table_are_in_the_tower(make_engine: MakeEngine) -> None:
    from anygauge.engines.megatron.media.towers import ATTENTION
    from anygauge.engines.norms import TableLayerNorm

    tower = make_engine().policy.chunks[0].visual
    assert tower.config._attn_implementation == ATTENTION
    assert not any(type(module) is torch.nn.LayerNorm for module in tower.modules())
    assert sum(isinstance(module, TableLayerNorm) for module in tower.modules()) == 7


def test_bfloat16_is_near(
    make_engine: MakeEngine, samples: list[TrainSample], expected: tuple[list[Tensor], Any]
) -> None:
    from anygauge.engines.megatron.media.towers import Patches3d

    engine = make_engine(dtype="bfloat16", recompute="full")
    assert all(each.dtype == torch.bfloat16 for each in engine.policy.chunks[0].visual.parameters())
    assert isinstance(engine.policy.chunks[0].visual.patch_embed.proj, Patches3d)
    found = batches.log_probs(engine, samples, temperature=1.0)
    assert (torch.cat(found) - torch.cat(expected[0])).abs().max() < 0.2
    take_step(engine, samples)


@pytest.mark.parametrize("kernel", [(4, 4), (2, 4, 4)])
def test_a_convolution_of_single_patches_is_a_product(kernel: tuple[int, ...]) -> None:
    from anygauge.engines.megatron.media.towers import bind

    kind = torch.nn.Conv2d if len(kernel) == 2 else torch.nn.Conv3d
    layer = kind(3, 8, kernel, stride=kernel)  # type: ignore[arg-type]
    single, several = torch.randn(5, 3, *kernel), torch.randn(5, 3, *(2 * size for size in kernel))
    before = [layer(x) for x in (single, several)]
    bind(layer, None, torch.bfloat16)  # type: ignore[arg-type]
    assert type(layer) is not kind
    for x, expected in zip((single, several), before, strict=True):
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "replaced"),
    [
        ("qwen3_vl", {"LayerNorm", "Conv3d", "VisionAttention"}),
        ("glm4v", {"LayerNorm", "RMSNorm", "Conv2d", "Conv3d", "VisionAttention"}),
    ],
)
def test_what_is_replaced_in_towers_is_listed(
    context: WorkerContext, plugins: Plugins, family: str, replaced: set[str]
) -> None:
    from anygauge.engines.megatron.media.towers import bind
    from anygauge.kernels.table import resolve_kernels

    spec = plugins.get("register_models", family)
    (tower,) = spec.media.towers(spec.tiny())
    ours, theirs = tower.build(spec.tiny()), tower.build(spec.tiny())
    bind(ours, resolve_kernels(plugins, context.backend), torch.bfloat16)
    pairs = zip(ours.modules(), theirs.modules(), strict=True)
    names = {type(before).__name__ for now, before in pairs if type(now) is not type(before)}
    endings = ("RMSNorm", "VisionAttention")
    assert {next((end for end in endings if name.endswith(end)), name) for name in names} == replaced
    ledger = (Path(__file__).parents[3] / "docs/seams.md").read_text().partition("\n## In towers\n")[2]
    listed = ledger.partition("\n## ")[0]
    assert all(f"{name}` |" in listed for name in (*replaced, "AttentionInterface"))
