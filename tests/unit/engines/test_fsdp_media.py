"""Models with towers on the FSDP engine, against transformers and the Megatron engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMultimodalLM

from anygauge.config import Config
from anygauge.config.roles import critic_config
from anygauge.engines.fsdp.attention import ATTENTION, _Attention
from anygauge.engines.fsdp.start_check import _Check, _use_attention
from anygauge.engines.fsdp.weights import whole
from anygauge.plugins import Plugins
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError, MediaMismatchError
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config
from anygauge_tests.media import DictStore
from anygauge_tests.vision_models import mixed_samples, reference_log_probs, vision_sample, write_vision_model

MakeEngine = Callable[..., Any]
GRADIENTS: dict[str, float] = {
    "qwen3_vl": 1e-5,
    "qwen2_5_vl": 1e-5,
    "qwen3_vl_moe": 1e-5,
    "glm4v": 1e-5,
    "glm46v": 1e-5,
    "glm4v_moe": 1e-5,
    "qwen3_5": 5e-4,
    "qwen3_5_moe": 5e-4,
}
"""Largest relative errors of a gradient. Gradients of gated delta nets in transformers' own float32 are up to
1.2e-4 from those in float64."""
FAMILIES = [
    name if index < 2 else pytest.param(name, marks=pytest.mark.fsdp) for index, name in enumerate(GRADIENTS)
]


TWO_FAMILIES = pytest.mark.parametrize("family", list(GRADIENTS)[:2], indirect=True)
"""For what does not depend on the family."""


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


def make_config(path: Path, modalities: Sequence[str], **train: Any) -> Config:
    return engine_config(
        {"path": path, "modalities": modalities},
        train={"lr": 1e-3, "micro_batch_tokens": 96, "clip_grad": 0.0, **train},
    )


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins, checkpoint: Path, store: DictStore) -> MakeEngine:
    def make(
        kind: str = "make",
        *,
        modalities: Sequence[str] = ("image",),
        path: Path = checkpoint,
        engine: str = "fsdp",
        **train: Any,
    ) -> Any:
        config = make_config(path, modalities, engine=engine, **train)
        config = critic_config(config) if kind == "make_critic" else config
        spec = plugins.get("register_train_engines", engine)
        return getattr(spec, kind)(config, replace(context, media=store))

    return make


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
    """Take a step on the mean log-probability, and return its gradients under the names of the model."""
    gradients: dict[str, Tensor] = {}
    step = engine.optimizer.step

    def looking(*given: Any) -> None:
        named = {shard.name: shard.tensor.grad for shard in engine.shards}
        gradients.update({name: whole(each) for name, each in named.items() if each is not None})
        step(*given)

    engine.optimizer.step = looking
    train(engine, samples)
    engine.optimizer.step = step
    return gradients


def train(engine: Any, samples: Sequence[TrainSample]) -> dict[str, float]:
    """Take a step on the mean log-probability, and return its metrics."""
    metrics = batches.train_step(engine, samples)
    return dict(metrics)


def test_log_probs_equal_transformers(
    make_engine: MakeEngine, family: str, samples: list[TrainSample], expected: tuple[list[Tensor], Any]
) -> None:
    """Text, one image, and several, in one micro-batch and alone."""
    engine = make_engine()
    assert engine.root.is_packed == (not family.startswith("qwen3_5"))
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
    family: str,
    recompute: str,
) -> None:
    actual, wanted = take_step(make_engine(recompute=recompute), samples), expected[1]
    assert actual.keys() == wanted.keys()
    assert sum("visual" in name for name in wanted) > 20
    for name, gradient in actual.items():
        error = (gradient - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-3)
        assert error < GRADIENTS[family], f"{name}: {error}"


def test_steps_are_those_of_the_megatron_engine(
    make_engine: MakeEngine, family: str, samples: list[TrainSample]
) -> None:
    if family == "qwen3_5_moe":
        pytest.skip("Megatron's family takes published checkpoints, which transformers does not write")
    ours, theirs = make_engine(), make_engine(engine="megatron")
    for _ in range(3):
        one, other = (train(each, samples) for each in (ours, theirs))
        assert one == pytest.approx({name: other[name] for name in one}, rel=1e-5)
    after = [torch.cat(batches.log_probs(each, samples, temperature=1.0)) for each in (ours, theirs)]
    torch.testing.assert_close(*after, rtol=0, atol=1e-4)
    one, other = (
        each.top_k_log_probs(batches.make_batch(samples), 5, temperature=0.7) for each in (ours, theirs)
    )
    assert one.ids.equal(other.ids)
    torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=1e-4)


@TWO_FAMILIES
@pytest.mark.parametrize(("frozen", "learns"), [("vision", False), ("language", True)])
def test_frozen_parts_keep_their_weights(
    make_engine: MakeEngine, samples: list[TrainSample], frozen: str, learns: bool
) -> None:
    """The others have the gradients that they have otherwise."""
    engine, whole = make_engine(freeze=[frozen]), take_step(make_engine(), samples)
    before = {shard.name: shard.local.clone() for shard in engine.shards}
    gradients = take_step(engine, samples)
    assert gradients.keys() == {name for name in whole if ("visual" in name) == learns}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6, msg=name)
    for shard in engine.shards:
        assert shard.local.equal(before[shard.name]) == (shard.name not in gradients)


@TWO_FAMILIES
@pytest.mark.parametrize("rest", ["language", r"(?!model\.visual\.).*"])
def test_nothing_left_to_train_is_refused(make_engine: MakeEngine, rest: str) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        make_engine(freeze=["vision", rest])


@TWO_FAMILIES
def test_a_tower_takes_part_in_a_step_of_text(make_engine: MakeEngine, samples: list[TrainSample]) -> None:
    """Its gradients are zeros, and there: ranks that sum gradients wait for each other's."""
    gradients = take_step(make_engine(), samples[:1])
    assert any("visual" in name for name in gradients)
    assert all(("visual" in name) == (not gradient.any()) for name, gradient in gradients.items())


@TWO_FAMILIES
def test_a_tower_that_several_ranks_hold_runs_in_every_pass(
    make_engine: MakeEngine, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are gathered by all ranks together, also where nothing is learned."""
    engine, passes = make_engine(freeze=["vision"]), []
    (tower,) = engine.root.towers
    tower.module.register_forward_hook(lambda *_: passes.append(1))
    before = batches.log_probs(engine, samples[:1], temperature=1.0)[0]
    train(engine, samples[:1])
    assert not passes, "one rank alone has nobody who waits"
    engine = make_engine(freeze=["vision"])
    (tower,) = engine.root.towers
    tower.module.register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr("anygauge.engines.fsdp.towers.dist.get_world_size", lambda: 2)
    assert batches.log_probs(engine, samples[:1], temperature=1.0)[0].equal(before)
    assert len(passes) == 1


@TWO_FAMILIES
def test_the_layers_of_a_tower_are_recomputed(make_engine: MakeEngine, samples: list[TrainSample]) -> None:
    passes = {}
    for recompute in ("none", "full"):
        engine, calls = make_engine(recompute=recompute), []
        (tower,) = engine.root.towers
        tower.module.blocks[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        train(engine, samples)
        passes[recompute] = len(calls)
    assert passes == {"none": 1, "full": 2}


def test_a_run_of_text_has_no_tower(
    make_engine: MakeEngine,
    samples: list[TrainSample],
    expected: tuple[list[Tensor], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(modalities=())
    assert "visual. ...) are left out, here and in what is saved" in caplog.text
    assert not any("visual" in name for name, _ in engine.weights())
    (log_probs,) = batches.log_probs(engine, samples[:1], temperature=1.0)
    torch.testing.assert_close(log_probs, expected[0][0], rtol=0, atol=1e-5)


@TWO_FAMILIES
def test_placeholders_are_never_sampled(
    make_engine: MakeEngine, samples: list[TrainSample], hf: dict[str, Any]
) -> None:
    """All other tokens together have probability 1, whichever op computes them."""
    for fused in (True, False):
        top_k = make_engine(fused_loss=fused).top_k_log_probs(
            batches.make_batch(samples), 64, temperature=1.0
        )
        assert top_k.ids.shape[1] == 62
        assert not {hf["image_token_id"], hf["video_token_id"]} & set(top_k.ids.flatten().tolist())
        total = top_k.log_probs[:, :-1].exp().sum(1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)


def test_an_export_has_the_names_of_the_checkpoint(
    make_engine: MakeEngine, samples: list[TrainSample], checkpoint: Path, tmp_path: Path
) -> None:
    engine = make_engine()
    before = load_file(checkpoint / "model.safetensors")
    exported = dict(engine.weights())
    assert exported.keys() == before.keys()
    assert all(exported[name].equal(before[name]) for name in before)
    take_step(engine, samples)
    engine.save_hf(str(tmp_path / "out"))
    _, info = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"] | info["mismatched_keys"]
    again = batches.log_probs(make_engine(path=tmp_path / "out"), samples, temperature=1.0)
    assert torch.cat(again).equal(torch.cat(batches.log_probs(engine, samples, temperature=1.0)))


@TWO_FAMILIES
def test_roles_and_critics_are_shown_the_images(
    make_engine: MakeEngine, samples: list[TrainSample], store: DictStore, checkpoint: Path
) -> None:
    swapped = samples[1]._replace(media=(samples[1].media[0]._replace(key=_swapped(store)),))
    engine, critic = make_engine(), make_engine("make_critic")
    engine.load_role("reference", str(checkpoint))
    own, other = batches.log_probs(engine, [samples[1], swapped], temperature=1.0, role="reference")
    assert (own - other).abs().max() > 1e-2
    critic.root.score.weight.data.fill_(0.1)
    own, other = batches.values(critic, [samples[1], swapped])
    assert (own - other).abs().max() > 1e-3


def _swapped(store: DictStore) -> str:
    """Store another image of the size of the first one, and return its key."""
    content = store.get("4x4-0")
    store.put("swapped", content._replace(data=255 - content.data))
    return "swapped"


@TWO_FAMILIES
def test_adapters_of_decoder_and_tower_are_trained(
    make_engine: MakeEngine, samples: list[TrainSample], expected: tuple[list[Tensor], Any], tmp_path: Path
) -> None:
    engine = make_engine(lora={"rank": 2, "export": "merged"})
    before = torch.cat(batches.log_probs(engine, samples, temperature=1.0))
    torch.testing.assert_close(before, torch.cat(expected[0]), rtol=0, atol=1e-5)
    for _ in range(2):
        gradients = take_step(engine, samples)
    assert all(".lora_" in name and gradient.any() for name, gradient in gradients.items())
    assert any("visual" in name for name in gradients)
    engine.save_hf(str(tmp_path / "out"))
    after = torch.cat(batches.log_probs(engine, samples, temperature=1.0))
    assert (after - before).abs().max() > 1e-3
    merged = torch.cat(batches.log_probs(make_engine(path=tmp_path / "out"), samples, temperature=1.0))
    torch.testing.assert_close(merged, after, rtol=0, atol=1e-5)


@TWO_FAMILIES
def test_media_may_be_listed_in_any_order(
    make_engine: MakeEngine, samples: list[TrainSample], expected: tuple[list[Tensor], Any]
) -> None:
    reversed_sample = samples[3]._replace(media=samples[3].media[::-1])
    (log_probs,) = batches.log_probs(make_engine(), [reversed_sample], temperature=1.0)
    torch.testing.assert_close(log_probs, expected[0][3], rtol=0, atol=1e-5)


@TWO_FAMILIES
def test_a_micro_batch_has_each_image_once(make_engine: MakeEngine, samples: list[TrainSample]) -> None:
    """Its cost counts when samples are divided into micro-batches."""
    engine = make_engine()
    (plan,) = engine._plan(batches.make_batch(samples))
    part = plan.to(torch.device("cpu"), engine._media).inputs["media"]["visual"]
    assert (part.count, len(part.rows)) == (4 + 3 + 6, 4 + 4 + 3 + 6)
    divided = make_engine(micro_batch_tokens=40)
    spec = replace(divided._media.spec, flops=lambda hf, media: 1e12 * (media.num_tokens != 4))
    divided._media = replace(divided._media, spec=spec)
    plans = divided._plan(batches.make_batch(samples))
    assert sorted(sorted(plan.indices) for plan in plans) == [[0, 1, 2], [3]]


@TWO_FAMILIES
def test_logits_of_another_formula_are_refused(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Check, "logit_scale", lambda self: None)
    with pytest.raises(ConfigError, match="no product of hidden states and a weight"):
        make_engine()
    assert make_engine(modalities=()).root.logit_scale is None


@TWO_FAMILIES
def test_media_that_are_not_there_are_refused(make_engine: MakeEngine, samples: list[TrainSample]) -> None:
    engine = make_engine()
    (medium,) = samples[1].media
    lost = samples[1]._replace(media=(medium._replace(key="gone"),))
    with pytest.raises(MediaMismatchError, match="is not in the store"):
        batches.log_probs(engine, [lost], temperature=1.0)
    with pytest.raises(MediaMismatchError, match=r"its media \(none\) have 0"):
        batches.log_probs(engine, [samples[1]._replace(media=())], temperature=1.0)
    wide = samples[1]._replace(media=(medium._replace(key="2x6-1"),))
    with pytest.raises(MediaMismatchError, match="made 3 features, for 4 placeholders"):
        batches.log_probs(engine, [wide], temperature=1.0)


@TWO_FAMILIES
def test_kinds_without_a_tower_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="no tower for it"):
        make_engine(modalities=("audio",))


@TWO_FAMILIES
def test_the_kernels_of_the_table_are_in_the_tower(make_engine: MakeEngine) -> None:
    root = make_engine().root
    (tower,) = root.towers
    assert tower.module.config._attn_implementation == ATTENTION
    assert not any(type(module) is torch.nn.LayerNorm for module in root.modules())


@TWO_FAMILIES
def test_a_tower_of_another_attention_keeps_its_own(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that mixes its contents would be wrong for all but the first of them."""
    call = _Attention.__call__

    def mixed(self: Any, module: Any, *args: Any, is_causal: bool | None = None, **given: Any) -> Any:
        if is_causal is False:
            given["cu_seq_lens_q"] = given["cu_seq_lens_q"][[0, -1]]
        return call(self, module, *args, is_causal=is_causal, **given)

    monkeypatch.setattr(_Attention, "__call__", mixed)
    (tower,) = make_engine().root.towers
    assert tower.module.config._attn_implementation == "sdpa"
    assert "the tower 'visual' has its own attention: features differ by" in caplog.text


@TWO_FAMILIES
def test_bfloat16_is_near(
    make_engine: MakeEngine, samples: list[TrainSample], expected: tuple[list[Tensor], Any]
) -> None:
    engine = make_engine(dtype="bfloat16", recompute="full")
    log_probs = torch.cat(batches.log_probs(engine, samples, temperature=1.0))
    assert (log_probs - torch.cat(expected[0])).abs().mean() < 0.1
    take_step(engine, samples)


def test_matrices_of_published_experts_lie_the_other_way(
    plugins: Plugins, context: WorkerContext, tmp_path: Path
) -> None:
    """As in the published models of Qwen3-VL; exports have them so, too."""
    path = write_vision_model(plugins.get("register_models", "qwen3_vl_moe"), tmp_path)
    file = path / "model.safetensors"
    tensors = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    config = make_config(path, ("image",), engine="fsdp")
    engine = plugins.get("register_train_engines", "fsdp").make(config, context)
    exported = dict(engine.weights())
    assert exported.keys() == tensors.keys()
    assert all(exported[name].equal(tensor) for name, tensor in tensors.items())
    theirs = plugins.get("register_train_engines", "megatron").make(
        make_config(path, ("image",), engine="megatron"), context
    )
    text = [vision_sample(json.loads((path / "config.json").read_text()), [9], 4, 1)]
    one, other = (batches.log_probs(each, text, temperature=1.0)[0] for each in (engine, theirs))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
