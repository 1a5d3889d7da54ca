"""Qwen3-Omni's thinker, which sees and hears, against transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM, WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from anygauge.engines.megatron.weights.mapping import model_rules
from anygauge.plugins import load_plugins
from anygauge.serving.embedded.weights import copy_weights
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError, MediaError
from anygauge_hooks.media import Content, Decoded, Header, Media, MediaLimits
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec
from anygauge_tests.batches import TrainSample
from anygauge_tests.media import DictStore
from anygauge_tests.transformers_parity import ParityPair, build, check_fsdp_log_probs, sample
from anygauge_tests.vision_models import write_vision_model

OMNI: ModelSpec = load_plugins().named("register_models")["qwen3_omni_moe"]
HF = OMNI.tiny()
AUDIO, IMAGE, VIDEO = 59, 60, 61
HOLDER = {"audio": AUDIO, "image": IMAGE, "video": VIDEO}
CPU = torch.device("cpu")


def sound(seconds: float) -> Any:
    count = round(seconds * 16_000)
    return np.random.default_rng(count).standard_normal(count).astype(np.float32) * 0.1


def towers() -> dict[str, Any]:
    assert OMNI.media is not None
    return {tower.name: tower for tower in OMNI.media.towers(HF)}


def make_processor(directory: Path = Path("missing")) -> Any:
    assert OMNI.media is not None
    return OMNI.media.make_processor(directory, HF)


# -------------------------------------------------------------------------
# On the host
# -------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.03, 0.5, 1.0, 1.00631, 2.3456])
def test_features_of_sound_are_those_of_transformers(seconds: float) -> None:
    theirs = WhisperFeatureExtractor(feature_size=16)(
        sound(seconds), sampling_rate=16_000, padding=True, truncation=False, return_tensors="np"
    )["input_features"][0].T
    processor = make_processor()
    measured = processor.measure("audio", Header(duration=seconds), MediaLimits())
    content = processor.load("audio", Decoded(samples=sound(seconds), rate=16_000), measured)
    assert measured.grid == (len(theirs), 1, 1)
    assert np.array_equal(content.data, theirs)
    assert content.data.dtype == np.float32


def test_features_are_as_many_as_a_header_has_said_also_where_it_is_wrong() -> None:
    processor = make_processor()
    measured = processor.measure("audio", Header(duration=1.0), MediaLimits())
    for seconds in (0.99, 1.0, 1.2):
        raw = Decoded(samples=sound(seconds), rate=16_000)
        assert len(processor.load("audio", raw, measured).data) == measured.grid[0] == 100


def test_placeholders_of_sound_are_counted_as_by_transformers() -> None:
    processor = make_processor()
    frames = torch.arange(2, 1200)
    expected = _get_feat_extract_output_lengths(frames).tolist()
    limits = MediaLimits()
    headers = [Header(duration=int(each) / 100) for each in frames]
    assert [processor.measure("audio", each, limits).pieces[0][1] for each in headers] == expected


def test_what_cannot_be_heard_is_refused(tmp_path: Path) -> None:
    for seconds, limits in ((0.01, MediaLimits()), (3.0, MediaLimits(max_seconds=2.5))):
        with pytest.raises(MediaError, match=f"{seconds}"):
            make_processor().measure("audio", Header(duration=seconds), limits)
    (tmp_path / "preprocessor_config.json").write_text('{"feature_size": 128, "hop_length": 160}')
    with pytest.raises(ConfigError, match="feature_size"):
        make_processor(tmp_path)
    with pytest.raises(ConfigError, match="n_window"):
        megatron_model(OMNI).transformer_config(
            {**HF, "audio_config": {**HF["audio_config"], "n_window": 25}}
        )


def test_a_video_is_one_row_of_placeholders_whose_time_is_in_whole_positions() -> None:
    processor = make_processor()
    header = Header(size=(700, 900), frames=50, fps=10.0)
    measured = processor.measure("video", header, MediaLimits(fps=1.5, max_pixels=4096))
    time, height, width = measured.grid
    assert measured.pieces == (("", time * height * width // 4),)
    assert (measured.seconds * 13) == pytest.approx(round(measured.seconds * 13))
    frames = [np.zeros((70, 90, 3), np.uint8)] * len(measured.times)
    content = processor.load("video", Decoded(frames=frames, times=measured.times), measured)
    assert content.data.shape == (2 * time, *measured.size, 3)


# -------------------------------------------------------------------------
# Positions and the tower of sound
# -------------------------------------------------------------------------


def laid_out(seed: int) -> TrainSample:
    """Return a row of text, images, videos and sound."""
    random = np.random.default_rng(seed)
    parts: list[Any] = []
    for number in range(int(random.integers(1, 6))):
        parts.append(int(random.integers(1, 6)))
        kind = ("image", "video", "audio")[int(random.integers(3))]
        if kind == "audio":
            parts.append(heard(str(number), int(random.integers(2, 400))))
        else:
            time = int(random.integers(1, 4)) if kind == "video" else 1
            height, width = (2 * int(each) for each in random.integers(1, 5, 2))
            parts.append(seen(str(number), kind, (time, height, width), int(random.integers(1, 30)) / 13))
    return sample([*parts, int(random.integers(0, 4)) + 2], HOLDER)


def seen(key: str, kind: Any, grid: tuple[int, int, int], seconds: float = 0.0) -> tuple[Media, list[int]]:
    count = grid[0] * grid[1] * grid[2] // 4
    return Media(kind, key, ((1, count),), grid, seconds), [62, *[-1] * count, 63]


def heard(key: str, frames: int) -> tuple[Media, list[int]]:
    count = int(_get_feat_extract_output_lengths(torch.tensor(frames)))
    return Media("audio", key, ((1, count),), (frames, 1, 1)), [56, *[-1] * count, 57]


def told(media: Sequence[Media]) -> dict[str, Any]:
    """Return the arguments of transformers that say how large media are."""
    found: dict[str, Any] = {}
    for kind in ("image", "video"):
        if grids := [each.grid for each in media if each.kind == kind]:
            found[f"{kind}_grid_thw"] = torch.tensor(grids)
    return found


def test_positions_are_those_of_transformers(both: Any) -> None:
    assert OMNI.media is not None
    for seed in range(30):
        row = laid_out(seed)
        tokens = torch.tensor([row.tokens])
        seconds = torch.tensor([each.seconds for each in row.media if each.kind == "video"])
        expected, _ = both.reference.get_rope_index(
            tokens,
            **told(row.media),
            attention_mask=torch.ones_like(tokens),
            audio_seqlens=torch.tensor([each.grid[0] for each in row.media if each.kind == "audio"]),
            second_per_grids=seconds,
        )
        actual = OMNI.media.positions(HF, len(row.tokens), row.media)
        torch.testing.assert_close(torch.from_numpy(actual).float(), expected[:, 0], rtol=0, atol=1e-4)


def spectrum(frames: int) -> Content:
    data = np.random.default_rng(frames).standard_normal((frames, 16)).astype(np.float32)
    return Content("audio", data)


def test_sound_has_the_same_features_whatever_it_is_packed_with(both: Any) -> None:
    """Those of transformers, where it is at least a chunk long."""
    tower = towers()["audio_tower"]
    module = both.reference.model.audio_tower
    contents = [spectrum(frames) for frames in (250, 37, 100, 431)]
    with torch.no_grad():
        inputs = tower.inputs(HF, contents, CPU)
        lengths = inputs.pop("lengths")
        together = tower.outputs(module(**inputs))[0]
        assert sum(lengths) == len(together)
        assert max(lengths) == 26
        parts = together.split([int(_get_feat_extract_output_lengths(len(each.data))) for each in contents])
        for content, part in zip(contents, parts, strict=True):
            alone = tower.inputs(HF, [content], CPU)
            del alone["lengths"]
            torch.testing.assert_close(tower.outputs(module(**alone))[0], part, rtol=0, atol=1e-6)
            if len(content.data) < 100:
                continue
            features = torch.from_numpy(content.data.T.copy())
            expected = module(features, feature_lens=torch.tensor([len(content.data)])).last_hidden_state
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-6)


def test_flops_of_sound_are_two_per_weight_that_a_feature_meets(both: Any) -> None:
    assert OMNI.media is not None
    named = both.reference.model.audio_tower.named_parameters()
    weights = {name: each.numel() for name, each in named if each.dim() > 1}
    places = {"conv2d1.weight": 8 * 50, "conv2d2.weight": 4 * 25, "conv2d3.weight": 2 * 13}
    met = sum(count * places.get(name, 13) for name, count in weights.items())
    attention = 2 * 13 * 2 * 32 * 13
    assert OMNI.media.flops(HF, Media("audio", "", ((0, 13),), (100, 1, 1))) == 2 * (met + attention)


# -------------------------------------------------------------------------
# In the trainer
# -------------------------------------------------------------------------


PIXELS = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), dtype=np.uint8)
CONTENTS = {
    "tall": Content("image", PIXELS[0, :, :16]),
    "small": Content("image", PIXELS[1, :16, :16]),
    "video": Content("video", PIXELS[:, :16], 1.0),
    "long": spectrum(250),
    "short": spectrum(37),
}


@pytest.fixture(scope="module")
def both(context: WorkerContext, tmp_path_factory: pytest.TempPathFactory) -> Any:
    audio = {**HF["audio_config"], "initializer_range": 0.1}
    path = write_vision_model(OMNI, tmp_path_factory.mktemp("omni"), audio_config=audio)
    reference = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    store = DictStore(CONTENTS)
    tall, small = seen("tall", "image", (1, 4, 2)), seen("small", "image", (1, 2, 2))
    video = seen("video", "video", (2, 2, 6), 1.0)
    samples = [
        sample([9], HOLDER),
        sample([3, tall, 5], HOLDER),
        sample([1, tall, 2, small, 4], HOLDER),
        sample([2, heard("long", 250), 3, heard("short", 37), 4], HOLDER),
        sample([2, video, 1, heard("long", 250), 2, small, 3], HOLDER),
    ]
    policy = build(path, context, ("image", "video", "audio"))
    return ParityPair(OMNI, path, store, samples, policy, reference, given, context)


def given(both: ParityPair, sample: TrainSample) -> dict[str, Any]:
    """Return what transformers is given of a sample; positions it counts itself."""
    found = {**told(sample.media), "attention_mask": torch.ones(1, len(sample.tokens), dtype=torch.int64)}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if contents := [both.store.get(each.key) for each in sample.media if each.kind == kind]:
            found[pixels] = towers()["visual"].inputs(HF, contents, CPU)["hidden_states"]
    if seconds := [each.seconds for each in sample.media if each.kind == "video"]:
        found["video_second_per_grid"] = torch.tensor(seconds)
    if sounds := [both.store.get(each.key).data for each in sample.media if each.kind == "audio"]:
        longest = max(len(each) for each in sounds)
        padded = [np.pad(each, ((0, longest - len(each)), (0, 0))).T for each in sounds]
        found["input_features"] = torch.from_numpy(np.stack(padded))
        lengths = torch.tensor([len(each) for each in sounds])
        found["feature_attention_mask"] = (torch.arange(longest)[None] < lengths[:, None]).long()
    return found


def test_logits_and_gradients_equal_transformers(both: Any) -> None:
    """Compare text, images, a video and sound in one micro-batch."""
    both.check(["visual.blocks.1", "visual.merger_list.1", "audio_tower.conv2d1", "audio_tower.layers.1"])


def test_the_embedded_engine_has_the_log_probabilities_of_the_trainer(both: Any) -> None:
    both.check_sampling(("image", "video", "audio"), 4)


def test_without_media_it_is_a_model_of_text(both: Any) -> None:
    both.check_text()


@pytest.mark.parametrize(("kind", "first"), [("audio", 3), ("video", 4), ("image", 1)])
def test_another_medium_gives_other_logits(both: Any, kind: str, first: int) -> None:
    most = 1 if kind == "audio" else 255
    changed = DictStore(
        {
            key: content._replace(data=most - content.data) if content.kind == kind else content
            for key, content in CONTENTS.items()
        }
    )
    start = sum(len(each.tokens) for each in both.samples[:first])
    with torch.no_grad():
        right, wrong = both.logits(), replace(both, store=changed).logits()
    torch.testing.assert_close(right[:start], wrong[:start], rtol=0, atol=1e-5)
    assert (right - wrong)[start:].abs().max() > 0.01


@pytest.mark.parametrize("prefix", ["", "thinker."])
def test_the_embedded_engine_takes_what_the_trainer_gives(both: Any, prefix: str) -> None:
    """Also under the names of a published model, whose parts that speak it has not."""
    module = AutoModelForMultimodalLM.from_config(both.reference.config)
    copy_weights(module, ((f"{prefix}{name}", each) for name, each in both.policy.weights()))
    expected = both.reference.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def test_weights_come_out_as_they_went_in_and_transformers_reads_them(both: Any, tmp_path: Path) -> None:
    both.check_export(tmp_path / "out")


def test_a_published_directory_is_trained_and_sampled_from(both: Any, tmp_path: Path) -> None:
    tensors = load_file(both.path / "model.safetensors")
    published = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    spoken = {"talker.lm_head.weight": torch.zeros(1), "code2wav.bias": torch.zeros(1)}
    save_file(published | spoken, tmp_path / "model.safetensors")
    alone = json.loads((both.path / "config.json").read_text())
    name = "Qwen3OmniMoeForConditionalGeneration"
    config = {"architectures": [name], "model_type": "qwen3_omni_moe", "thinker_config": alone}
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy = build(tmp_path, both.context, ("image", "video", "audio"))
    actual = dict(policy.weights())
    assert actual.keys() == published.keys()
    assert all(torch.equal(actual[name], published[name]) for name in published)
    pair = replace(both, path=tmp_path, policy=policy, samples=both.samples[2:4])
    pair.check_sampling(("image", "audio"), 2)
    with torch.no_grad():
        engine = check_fsdp_log_probs(pair, ["image", "video", "audio"])
    exported = dict(engine.weights())
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], published[name]) for name in published)


def test_a_published_directory_has_the_thinker_as_a_part() -> None:
    name = "Qwen3OmniMoeForConditionalGeneration"
    whole = {"architectures": [name], "thinker_config": HF, "talker_config": {}}
    alone = {rule.canonical: rule.hf for rule in model_rules(OMNI, HF)}
    published = {rule.canonical: rule.hf for rule in model_rules(OMNI, whole)}
    assert published == {name: tuple(f"thinker.{each}" for each in hf) for name, hf in alone.items()}
    assert OMNI.unused_weights(whole) == ("talker.", "code2wav.")
    assert megatron_model(OMNI).transformer_config(whole) == megatron_model(OMNI).transformer_config(HF)
    assert OMNI.media is not None
    assert OMNI.media.forbidden(whole) == (IMAGE, VIDEO, AUDIO)
    assert [tower.hf_prefixes for tower in OMNI.media.towers(whole)] == [
        ("thinker.visual.",),
        ("thinker.audio_tower.",),
    ]


@pytest.mark.fsdp
@torch.no_grad()
def test_the_fsdp_engine_has_the_log_probabilities_of_the_trainer(both: ParityPair) -> None:
    check_fsdp_log_probs(both, ["image", "video", "audio"])
