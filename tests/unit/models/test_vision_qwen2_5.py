"""Qwen2.5-VL against transformers: pixels, windows, positions, logits, gradients, weights, sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_window_index

from anygauge.plugins import load_plugins
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError, MediaError
from anygauge_hooks.media import Decoded, Header, Media, MediaLimits
from anygauge_hooks.models import ModelSpec, text_config
from anygauge_models.positions import frame_by_frame
from anygauge_models.qwen2_5_vl.vision import windows
from anygauge_tests.batches import TrainSample
from anygauge_tests.media import DictStore
from anygauge_tests.transformers_parity import ParityPair, build
from anygauge_tests.vision_models import mixed_samples, write_vision_model

SPEC: ModelSpec = load_plugins().named("register_models")["qwen2_5_vl"]
HF = SPEC.tiny()
IMAGE, START, END = 60, 62, 63


# -------------------------------------------------------------------------
# On the host
# -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(20, 40), (50, 33), (3, 90), (100, 120), (16, 16)])
def test_images_become_the_pixels_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    limits = {"min_pixels": 512, "max_pixels": 6000}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(limits))
    theirs = Qwen2VLImageProcessorPil(
        patch_size=8, size={"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    )
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = theirs(images=[Image.fromarray(image)], return_tensors="pt")
    assert SPEC.media is not None
    processor = SPEC.media.make_processor(tmp_path, HF)
    measured = processor.measure("image", Header(size=size), MediaLimits())
    content = processor.load("image", Decoded(frames=[image]), measured)
    assert [list(measured.grid)] == expected["image_grid_thw"].tolist()
    assert measured.pieces == (("", expected["pixel_values"].shape[0] // 4),)
    (tower,) = SPEC.media.towers(HF)
    actual = tower.inputs(HF, [content], torch.device("cpu"))["hidden_states"]
    torch.testing.assert_close(actual, expected["pixel_values"], rtol=2e-7, atol=5e-7)
    with pytest.raises(MediaError, match="200 times"):
        processor.measure("image", Header(size=(16, 16 * 201)), MediaLimits())


def test_settings_of_another_family_are_refused(tmp_path: Path) -> None:
    assert SPEC.media is not None
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    with pytest.raises(ConfigError, match="image_mean"):
        SPEC.media.make_processor(tmp_path, HF)


SIDES = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=3), st.integers(1, 4))
def test_windows_are_those_of_transformers(sides: list[tuple[int, int]], side: int) -> None:
    grids = [(1, 2 * height, 2 * width) for height, width in sides]
    expected, boundaries = get_vision_window_index(torch.tensor(grids), 2, 16 * side, 8)
    order, lengths = windows(grids, 2, side)
    assert order.tolist() == expected.tolist()
    assert lengths == boundaries.diff().tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 5), st.tuples(SIDES, SIDES)), max_size=6))
def test_positions_are_those_of_transformers(parts: list[int | tuple[int, int]]) -> None:
    tokens, media = [1], []
    for part in parts:
        if isinstance(part, int):
            tokens += [1] * part
            continue
        height, width = part
        media.append(Media("image", "", ((len(tokens) + 1, height * width),), (1, 2 * height, 2 * width)))
        tokens += [START, *[IMAGE] * (height * width), END]
    ids = torch.tensor([tokens])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    this = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        get_vision_position_ids=lambda *args, **options: Qwen2_5_VLModel.get_vision_position_ids(
            None, *args, **options
        ),
    )
    grids = torch.tensor([each.grid for each in media]) if media else None
    expected, _ = Qwen2_5_VLModel.get_rope_index(this, ids, (ids == IMAGE).int(), grids)
    assert frame_by_frame(HF, len(tokens), media).tolist() == expected[:, 0].tolist()


# -------------------------------------------------------------------------
# The model
# -------------------------------------------------------------------------


def arguments(pair: ParityPair, sample: TrainSample) -> Mapping[str, Any]:
    """Return pixels for transformers, which finds windows and positions itself."""
    if not sample.media:
        return {}
    (tower,) = pair.spec.media.towers(HF)  # type: ignore[union-attr]  # it sees
    contents = [pair.store.get(media.key) for media in sample.media]
    return {
        "pixel_values": tower.inputs(HF, contents, torch.device("cpu"))["hidden_states"],
        "image_grid_thw": torch.tensor([media.grid for media in sample.media]),
        "mm_token_type_ids": (torch.tensor([sample.tokens]) == IMAGE).int(),
    }


@pytest.fixture(scope="module")
def pair(context: WorkerContext, tmp_path_factory: pytest.TempPathFactory) -> ParityPair:
    path = write_vision_model(SPEC, tmp_path_factory.mktemp("qwen2_5_vl"))
    store = DictStore()
    reference = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    policy = build(path, context, ["image"])
    return ParityPair(SPEC, path, store, mixed_samples(HF, store), policy, reference, arguments, context)


def test_logits_and_gradients_equal_transformers(pair: ParityPair) -> None:
    pair.check(["visual"])


def test_the_embedded_engine_sees_what_the_trainer_sees(pair: ParityPair) -> None:
    pair.check_sampling(["image"], 4)


def test_weights_come_out_as_they_went_in(pair: ParityPair) -> None:
    expected, actual = load_file(pair.path / "model.safetensors"), dict(pair.policy.weights())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_without_media_it_is_a_model_of_text(pair: ParityPair, context: WorkerContext) -> None:
    policy = build(pair.path, context, [])
    assert policy.tensors.keys() == {name for name in pair.policy.tensors if not name.startswith("visual.")}


def test_a_published_config_is_read() -> None:
    """Its decoder's keys are beside those of the tower, and its angles have a type of their own."""
    text = {**HF["text_config"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    del text["rope_parameters"], text["model_type"]
    flat = {key: value for key, value in HF.items() if key != "text_config"} | text
    assert SPEC.model_options(flat)["vocab_size"] == 64
    megatron: Any = SPEC.engines["megatron"]
    assert megatron.transformer_config(flat) == megatron.transformer_config(HF)
    positions = torch.arange(12).view(3, 4)
    ours, theirs = (megatron.rotary({**hf, "rope_theta": 1e4}, positions) for hf in (flat, text_config(HF)))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
