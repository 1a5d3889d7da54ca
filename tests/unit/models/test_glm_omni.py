"""GLM that sees and hears, against a composition of the modules of transformers that it is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor

from anygauge.engines.megatron.weights.mapping import model_rules
from anygauge.plugins import load_plugins
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError, MediaError
from anygauge_hooks.media import Content, Decoded, Header, Media, MediaLimits
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec
from anygauge_models.glm4v_moe import GLM4V_MOE
from anygauge_tests.batches import TrainSample
from anygauge_tests.composed import write_composed
from anygauge_tests.media import DictStore
from anygauge_tests.transformers_parity import ParityPair, build, check_fsdp_log_probs, sample
from anygauge_tests.vision_models import write_vision_model

OMNI: ModelSpec = load_plugins().named("register_models")["glm_omni"]
HF = OMNI.tiny()
HOLDER = {"image": 58, "video": 58, "audio": 55}
CPU = torch.device("cpu")
WINDOW = 104


# -------------------------------------------------------------------------
# On the host
# -------------------------------------------------------------------------


def make_processor() -> Any:
    assert OMNI.media is not None
    return OMNI.media.make_processor(Path("missing"), HF)


def sound(seconds: float) -> Any:
    count = round(seconds * 16_000)
    return np.random.default_rng(count).standard_normal(count).astype(np.float32) * 0.1


@pytest.mark.parametrize("seconds", [0.07, 0.6, 1.04, 2.5])
def test_sound_is_cut_into_windows_and_filled_up_with_silence(seconds: float) -> None:
    size = WINDOW * 160
    parts = [sound(seconds)[at : at + size] for at in range(0, round(seconds * 16_000), size)]
    theirs = WhisperFeatureExtractor(feature_size=16)(
        parts,
        sampling_rate=16_000,
        max_length=size,
        return_attention_mask=True,
        return_tensors="np",
    )
    processor = make_processor()
    measured = processor.measure("audio", Header(duration=seconds), MediaLimits())
    content = processor.load("audio", Decoded(samples=sound(seconds), rate=16_000), measured)
    expected = theirs["input_features"].transpose(0, 2, 1).reshape(-1, 16)
    np.testing.assert_allclose(content.data, expected, rtol=0, atol=1e-6)
    frames = theirs["attention_mask"].sum(-1)
    assert measured.grid == (frames.sum(), 1, 1)
    assert measured.pieces == (("", int((((frames + 1) // 2 - 4) // 4 + 1).sum())),)
    assert content.seconds == pytest.approx(seconds)


def test_what_has_no_feature_is_refused_and_images_are_those_of_the_vision_tower() -> None:
    processor = make_processor()
    with pytest.raises(MediaError, match=r"0\.07 are the fewest"):
        processor.measure("audio", Header(duration=0.06), MediaLimits())
    assert processor.measure("image", Header(size=(112, 112)), MediaLimits()).grid == (1, 14, 14)
    assert processor.kinds == HOLDER


def test_a_config_says_which_decoder_the_model_has() -> None:
    moe = {**HF, **{key: GLM4V_MOE.tiny()[key] for key in ("text_config", "vision_config")}}
    rules = {rule.canonical: rule.hf for rule in model_rules(OMNI, moe)}
    decoder = {f"language_model.{rule.canonical}": rule.hf for rule in model_rules(GLM4V_MOE, moe)}
    assert decoder.items() < rules.items()
    assert {name.split(".")[1] for name in rules.keys() - decoder.keys()} == {"audio_tower"}
    assert megatron_model(OMNI).transformer_config(moe) == megatron_model(GLM4V_MOE).transformer_config(moe)
    with pytest.raises(ConfigError, match=r"text_config\.model_type = 'llama'"):
        megatron_model(OMNI).transformer_config(
            {**HF, "text_config": {**HF["text_config"], "model_type": "llama"}}
        )
    with pytest.raises(ConfigError, match="intermediate_size 96"):
        megatron_model(OMNI).transformer_config(
            {**HF, "audio_config": {**HF["audio_config"], "intermediate_size": 96}}
        )


# -------------------------------------------------------------------------
# In the trainer
# -------------------------------------------------------------------------


PIXELS = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), dtype=np.uint8)


def spectrum(frames: int) -> Content:
    windows = -(-frames // WINDOW)
    data = np.random.default_rng(frames).standard_normal((windows * WINDOW, 16)).astype(np.float32)
    return Content("audio", data, frames / 100)


CONTENTS = {
    "tall": Content("image", PIXELS[0, :, :16]),
    "video": Content("video", PIXELS[:, :16]),
    "long": spectrum(150),
    "short": spectrum(20),
}
TALL = Media("image", "tall", ((1, 2),), (1, 4, 2)), [60, -1, -1, 61]
VIDEO = Media("video", "video", ((2, 3), (7, 3)), (2, 2, 6)), [62, 60, -1, -1, -1, 61, 60, -1, -1, -1, 61, 63]
LONG = Media("audio", "long", ((1, 18),), (150, 1, 1), 1.5), [56, *[-1] * 18, 57]
SHORT = Media("audio", "short", ((1, 2),), (20, 1, 1), 0.2), [56, -1, -1, 57]


@pytest.fixture(scope="module")
def both(context: WorkerContext, tmp_path_factory: pytest.TempPathFactory) -> ParityPair:
    path = tmp_path_factory.mktemp("glm_omni")
    reference = write_composed(path, HF)
    samples = [
        sample([9], HOLDER),
        sample([3, TALL, 5], HOLDER),
        sample([2, LONG, 3, SHORT, 4], HOLDER),
        sample([2, VIDEO, 1, TALL, 2, LONG, 3], HOLDER),
    ]
    policy = build(path, context, ("image", "video", "audio"))
    return ParityPair(OMNI, path, DictStore(CONTENTS), samples, policy, reference, given, context)


def given(both: ParityPair, sample: TrainSample) -> dict[str, Any]:
    """Return what the composition is given of a sample: positions, and what it sees and hears."""
    assert OMNI.media is not None
    visual, audio = OMNI.media.towers(HF)
    seen = [each for each in sample.media if each.kind != "audio"]
    heard = [each for each in sample.media if each.kind == "audio"]
    found: dict[str, Any] = {"seen": (), "heard": ()}
    found["positions"] = torch.from_numpy(OMNI.media.positions(HF, len(sample.tokens), sample.media))
    found["spans"] = [span for each in (*seen, *heard) for span in each.spans]
    if seen:
        inputs = visual.inputs(HF, [both.store.get(each.key) for each in seen], CPU)
        found["seen"] = inputs["hidden_states"], inputs["grid_thw"]
    if heard:
        inputs = audio.inputs(HF, [both.store.get(each.key) for each in heard], CPU)
        frames = [min(WINDOW, each.grid[0] - at) for each in heard for at in range(0, each.grid[0], WINDOW)]
        found["heard"] = inputs["spectrum"], torch.tensor(frames)
    return found


def test_logits_and_gradients_equal_those_of_the_composition(both: ParityPair) -> None:
    """Compare text, images, a video and sound in one micro-batch."""
    both.check(["visual.blocks.1", "audio_tower.layers.1", "multi_modal_projector.linear_2", "lm_head"])


def test_the_embedded_engine_has_the_log_probabilities_of_the_trainer(both: ParityPair) -> None:
    both.check_sampling(("image", "video", "audio"), 4)


def test_the_embedded_engine_leaves_out_the_towers_of_other_media(both: ParityPair) -> None:
    for kinds, samples in (((), both.samples[:1]), (("image", "video"), both.samples[:2])):
        policy = build(both.path, both.context, kinds)
        replace(both, policy=policy, samples=samples).check_sampling(kinds, 3)


def test_the_embedded_engine_builds_the_decoder_with_experts(both: ParityPair, tmp_path: Path) -> None:
    from anygauge.serving.embedded.weights import copy_weights
    from anygauge_hooks.models import TransformersModel

    moe = {**HF, **{key: GLM4V_MOE.tiny()[key] for key in ("text_config", "vision_config")}}
    decoder = load_file(write_vision_model(GLM4V_MOE, tmp_path) / "model.safetensors")
    dense = load_file(both.path / "model.safetensors").items()
    audio = {name: each for name, each in dense if "audio_tower" in name or "multi_modal_projector" in name}
    own = OMNI.engines["transformers"]
    assert isinstance(own, TransformersModel)
    model = own.build(moe, torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    copy_weights(model, (audio | decoder).items())  # refuses what is missing or unknown


def test_other_sound_gives_other_logits(both: ParityPair) -> None:
    contents = {**CONTENTS, "long": CONTENTS["long"]._replace(data=-CONTENTS["long"].data)}
    start = sum(len(each.tokens) for each in both.samples[:2])
    with torch.no_grad():
        right, wrong = both.logits(), replace(both, store=DictStore(contents)).logits()
    torch.testing.assert_close(right[:start], wrong[:start], rtol=0, atol=1e-5)
    assert (right - wrong)[start:].abs().max() > 0.01


def test_weights_come_out_as_they_went_in(both: ParityPair) -> None:
    expected = load_file(both.path / "model.safetensors")
    actual = dict(both.policy.weights())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_checkpoint_of_megatron_has_the_same_weights(both: ParityPair, tmp_path: Path) -> None:
    from anygauge.engines.megatron.conversion.convert import hf_to_megatron, megatron_to_hf

    assert hf_to_megatron(both.path, tmp_path / "megatron", both.context.plugins) == {}
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", both.context.plugins)
    expected = load_file(both.path / "model.safetensors")
    (file,) = (tmp_path / "back").glob("*.safetensors")
    actual = load_file(file)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_critic_has_its_head_where_the_output_layer_was(both: ParityPair) -> None:
    from anygauge.engines.megatron.layers.value_head import ValueHead

    critic = build(both.path, both.context, ("image", "video", "audio"), is_critic=True)
    assert isinstance(critic.chunks[0].language_model.output_layer, ValueHead)
    assert not hasattr(critic.chunks[0], "output_layer")


def test_without_sound_the_model_has_no_audio_tower(both: ParityPair) -> None:
    policy = build(both.path, both.context, ("image",))
    assert policy.tensors.keys() == {name for name in both.policy.tensors if ".audio_tower." not in name}


def test_a_blank_second_has_one_feature(both: ParityPair) -> None:
    assert OMNI.media is not None
    audio = OMNI.media.towers(HF)[1]
    inputs = dict(audio.inputs(HF, [audio.blank(HF)], CPU))
    assert inputs.pop("lengths") == (WINDOW // 2,)
    assert len(audio.outputs(audio.build(HF)(**inputs))[0]) == 1


def test_flops_of_sound_are_two_per_weight_that_a_position_meets(both: ParityPair) -> None:
    assert OMNI.media is not None
    tower = both.reference.model.audio_tower.named_parameters()
    weights = {name: each.numel() for name, each in tower if each.dim() > 1}
    met = 52 * sum(count * (2 if name == "conv1.weight" else 1) for name, count in weights.items())
    projector = both.reference.model.multi_modal_projector.parameters()
    met += 13 * sum(each.numel() for each in projector if each.dim() > 1)
    attention = 2 * 52 * 2 * 32 * 52
    assert OMNI.media.flops(HF, Media("audio", "", ((0, 13),), (WINDOW, 1, 1))) == 2 * (met + attention)


@pytest.mark.fsdp
@torch.no_grad()
def test_the_fsdp_engine_has_the_log_probabilities_of_the_trainer(both: ParityPair) -> None:
    check_fsdp_log_probs(both, ["image", "video", "audio"])
