"""The families of GLM that see, against transformers: pixels, the text of videos, positions, towers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForMultimodalLM, Glm4vConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from anygauge.data.media.expand import Expander, Measurement
from anygauge.data.problems import BadMediaError
from anygauge.engines.megatron.weights.mapping import canonical_shape, division_problems, model_rules
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError, MediaError
from anygauge_hooks.media import Content, Decoded, Header, Measured, Media, MediaLimits
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec
from anygauge_models.image_processing import Budget
from anygauge_tests.batches import TrainSample
from anygauge_tests.media import DictStore
from anygauge_tests.transformers_parity import ParityPair, build, sample
from anygauge_tests.vision_models import write_vision_model

FAMILIES = ("glm4v", "glm46v", "glm4v_moe")
WRITTEN = {"glm4v": Glm4vProcessor, "glm46v": Glm46VProcessor, "glm4v_moe": Glm4vProcessor}
"""Whose way to write times a directory without settings has."""
IMAGE, VIDEO = Budget(512, 6000), Budget(512, 12_000)


@pytest.fixture(scope="module", params=FAMILIES)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    found: ModelSpec = load_plugins().named("register_models")[request.param]
    return found


@pytest.fixture(scope="module")
def reference(spec: ModelSpec) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(**spec.tiny()), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_processor(spec: ModelSpec, directory: Path = Path("missing")) -> Any:
    assert spec.media is not None
    found = spec.media.make_processor(directory, spec.tiny())
    return replace(found, image=IMAGE, video=VIDEO)  # type: ignore[type-var]


def picture(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), dtype=np.uint8)


# -------------------------------------------------------------------------
# On the host
# -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(20, 40), (50, 33), (5, 9), (100, 120), (16, 16), (8, 90)])
def test_images_become_the_pixels_of_transformers(spec: ModelSpec, size: tuple[int, int]) -> None:
    limits = {"shortest_edge": IMAGE.smallest, "longest_edge": IMAGE.largest}
    theirs = Glm4vImageProcessorPil(patch_size=8, size=limits)
    image = picture(*size)
    expected = theirs(images=[Image.fromarray(image)], return_tensors="pt")
    processor = make_processor(spec)
    measured = processor.measure("image", Header(size=size), MediaLimits())
    content = processor.load("image", Decoded(frames=[image]), measured)
    assert [list(measured.grid)] == expected["image_grid_thw"].tolist()
    assert measured.pieces == (("", expected["pixel_values"].shape[0] // 4),)
    actual = packed(spec, [content])["hidden_states"]
    torch.testing.assert_close(actual, expected["pixel_values"], rtol=2e-7, atol=5e-7)
    with pytest.raises(MediaError, match="200 times"):
        processor.measure("image", Header(size=(16, 16 * 201)), MediaLimits())


def test_limits_of_a_run_are_those_of_a_single_image(spec: ModelSpec) -> None:
    processor = make_processor(spec)
    measured = processor.measure("image", Header(size=(64, 64)), MediaLimits(max_pixels=32 * 32))
    assert measured.size == (32, 32)


@pytest.mark.parametrize(("frames", "fps"), [(9, 4.0), (10, 4.0), (1, 24.0), (40, 2.0)])
def test_videos_are_written_as_transformers_writes_them(spec: ModelSpec, frames: int, fps: float) -> None:
    processor = make_processor(spec)
    header = Header(size=(30, 44), frames=frames, fps=fps)
    measured = processor.measure("video", header, MediaLimits(max_frames=12))
    time, height, width = measured.grid
    shown = [*measured.times, *measured.times[-1:] * (len(measured.times) % 2)]
    assert time == len(shown) // 2
    assert written(measured) == f"<|begin_of_video|>{theirs(spec.name, shown, measured)}<|end_of_video|>"
    assert [count for _, count in measured.pieces] == [height * width // 4] * time + [0]
    decoded = Decoded(frames=[picture(30, 44)] * len(measured.times), times=measured.times)
    content = processor.load("video", decoded, measured)
    assert content.data.shape == (2 * time, *measured.size, 3)
    assert len(packed(spec, [content])["hidden_states"]) == time * height * width


def written(measured: Measured) -> str:
    return "".join(text + "<|image|>" * count for text, count in measured.pieces)


def theirs(family: str, times: Sequence[float], measured: Measured) -> str:
    """Return what transformers puts in the place of a video, for which it wants torchvision."""
    kind: Any = WRITTEN[family]
    this = SimpleNamespace(image_token="<|image|>", video_processor=SimpleNamespace(merge_size=2))
    this.replace_frame_token_id = lambda *args, **kwargs: kind.replace_frame_token_id(this, *args, **kwargs)
    metadata = SimpleNamespace(fps=1.0, timestamps=list(times))
    video = {"video_grid_thw": np.array([measured.grid]), "video_metadata": [metadata]}
    found: str = kind.replace_video_token(this, video, 0)
    return found


def test_the_directory_says_how_times_are_written(spec: ModelSpec, tmp_path: Path) -> None:
    header = Header(size=(16, 16), frames=4, fps=2.0)
    for named, time in (("Glm4vProcessor", "1<|"), ("Glm46VProcessor", "1.0 seconds<|")):
        settings = tmp_path / "preprocessor_config.json"
        settings.write_text(f'{{"processor_class": "{named}", "image_mean": [0.481455, 0.457828, 0.408211]}}')
        pieces = make_processor(spec, tmp_path).measure("video", header, MediaLimits()).pieces
        assert pieces[-1][0] == f"<|end_of_image|>{time}end_of_video|>"
    settings.write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    with pytest.raises(ConfigError, match="image_mean"):
        make_processor(spec, tmp_path)


def test_sequences_have_what_transformers_writes(spec: ModelSpec, tmp_path: Path) -> None:
    processor = make_processor(spec)
    names = [
        f"<|{name}|>" for kind in ("image", "video") for name in (f"begin_of_{kind}", kind, f"end_of_{kind}")
    ]
    tokenizer = tiny_tokenizer(tmp_path, alphabet="0123456789.abcdefghijklmnopqrstuvwxyz ")
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    places = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    processor.kinds = dict.fromkeys(("image", "video"), places["<|image|>"])
    video = processor.measure("video", Header(size=(30, 44), frames=9, fps=2.0), MediaLimits())
    image = processor.measure("image", Header(size=(20, 40)), MediaLimits())
    expander = Expander(processor, tokenizer, processor.marks)
    marks = processor.marks
    found, media = expander.expand(
        tokenizer(f"a {marks['video']} b {marks['image']}")["input_ids"],
        iter([Measurement("video", video, "v", ""), Measurement("image", image, "i", "")]),
    )
    seen = "<|begin_of_image|>" + "<|image|>" * image.pieces[0][1] + "<|end_of_image|>"
    assert found == tokenizer(f"a {written(video)} b {seen}")["input_ids"]
    assert [each.num_tokens for each in media] == [math.prod(each.grid) // 4 for each in (video, image)]
    assert all(
        found[start : start + n] == [places["<|image|>"]] * n for each in media for start, n in each.spans
    )
    for name in ("<|image|>", "<|video|>"):
        with pytest.raises(BadMediaError, match="holds"):
            expander.expand(tokenizer(f"a {name}")["input_ids"], iter(()))
    processor.kinds = dict.fromkeys(("image", "video"), 3)
    for kind in ("image", "video"):
        with pytest.raises(
            ConfigError, match=rf"image_token_id.*{places['<|image|>']} '<\|image\|>'"
        ) as raised:
            Expander(processor, tokenizer, {kind: processor.marks[kind]})
        assert f"Token 3 is the placeholder of {kind}" in str(raised.value)


def test_places_are_held_by_image_tokens_and_none_is_sampled(spec: ModelSpec) -> None:
    assert spec.media is not None
    assert make_processor(spec).kinds == {"image": 58, "video": 58}
    assert spec.media.forbidden(spec.tiny()) == (58, 59)


# -------------------------------------------------------------------------
# Positions and towers
# -------------------------------------------------------------------------


def laid_out(seed: int) -> tuple[torch.Tensor, torch.Tensor, list[Media]]:
    """Return a row of text, images and videos: its tokens, what each is to transformers, and its media."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    kinds: list[int] = []
    media: list[Media] = []

    def add(count: int, token: int, kind: int) -> tuple[int, int]:
        tokens.extend([token] * count)
        kinds.extend([kind] * count)
        return len(tokens) - count, count

    for _ in range(int(random.integers(1, 5))):
        add(int(random.integers(1, 6)), 7, 0)
        time = int(random.integers(1, 4))
        height, width = (2 * int(each) for each in random.integers(1, 5, 2))
        kind = 1 + int(random.integers(0, 2))
        spans = []
        for frame in range(time if kind == 2 else 1):
            add(int(frame > 0), 8, 0)
            spans.append(add(height * width // 4, 58, kind))
        grid = (len(spans), height, width)
        media.append(Media("video" if kind == 2 else "image", f"{len(media)}", tuple(spans), grid))
    add(int(random.integers(0, 4)), 9, 0)
    return torch.tensor([tokens]), torch.tensor([kinds]), media


def grids(media: Sequence[Media], kind: str) -> torch.Tensor | None:
    found = [each.grid for each in media if each.kind == kind]
    return torch.tensor(found) if found else None


def test_positions_are_those_of_transformers(spec: ModelSpec, reference: Any) -> None:
    assert spec.media is not None
    for seed in range(20):
        tokens, kinds, media = laid_out(seed)
        expected, _ = reference.model.get_rope_index(
            tokens, kinds, image_grid_thw=grids(media, "image"), video_grid_thw=grids(media, "video")
        )
        actual = spec.media.positions(spec.tiny(), tokens.shape[1], media)
        assert actual.tolist() == expected[:, 0].tolist()


def test_each_pair_of_a_head_turns_by_its_own_axis(spec: ModelSpec, reference: Any) -> None:
    positions = torch.tensor([[0, 1, 5, 5], [0, 1, 6, 7], [0, 1, 7, 6]])
    module = reference.model.language_model.rotary_emb
    expected = module(torch.zeros(1), positions[:, None])
    for actual, theirs in zip(megatron_model(spec).rotary(spec.tiny(), positions), expected, strict=True):
        pairs = theirs[0, :, ::2] if spec.name != "glm4v_moe" else theirs[0, :, : theirs.shape[-1] // 2]
        torch.testing.assert_close(actual, torch.cat((pairs, pairs), -1), rtol=0, atol=0)


def packed(spec: ModelSpec, contents: Sequence[Content]) -> dict[str, Any]:
    assert spec.media is not None
    (tower,) = spec.media.towers(spec.tiny())
    return dict(tower.inputs(spec.tiny(), contents, torch.device("cpu")))


CONTENTS = (
    Content("image", picture(32, 16)),
    Content("video", picture(4, 16, 48)),
    Content("image", picture(16, 16)),
)


def test_the_tower_is_that_of_transformers(spec: ModelSpec, reference: Any) -> None:
    assert spec.media is not None
    (tower,) = spec.media.towers(spec.tiny())
    module = tower.build(spec.tiny()).eval()
    own = dict(module.named_parameters())
    theirs = reference.model.visual
    assert {f"{tower.name}.{name}" for name in own} == {
        rule.canonical
        for rule in model_rules(spec, spec.tiny())
        if rule.canonical.startswith(f"{tower.name}.")
    }
    module.load_state_dict(theirs.state_dict())
    inputs = packed(spec, CONTENTS)
    assert inputs.pop("lengths") == [8, 12, 12, 4]
    features, levels = tower.outputs(module(**inputs))
    expected = torch.cat(
        [one_by_one(reference, inputs, *place) for place in ((0, 0, 8), (1, 8, 24), (3, 32, 4))]
    )
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)
    assert list(levels) == []
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    (features * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in theirs.named_parameters():
        error = (own[name].grad - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: {error}"
    theirs.zero_grad()


def one_by_one(reference: Any, inputs: dict[str, Any], row: int, start: int, count: int) -> torch.Tensor:
    """Return transformers' features of one of :data:`CONTENTS`; it makes itself what depends on the grid."""
    pixels, (_, height, width) = inputs["hidden_states"][start : start + count], inputs["grid_thw"][row]
    grid = torch.stack([torch.tensor(count) // (height * width), height, width])[None]
    if grid[0, 0] > 1:
        return torch.cat(list(reference.model.get_video_features(pixels, grid).pooler_output))
    return torch.cat(list(reference.model.get_image_features(pixels, grid).pooler_output))


def test_a_micro_batch_without_media_has_a_content_of_one_feature(spec: ModelSpec) -> None:
    assert spec.media is not None
    (tower,) = spec.media.towers(spec.tiny())
    inputs = packed(spec, [tower.blank(spec.tiny())])
    assert inputs.pop("lengths") == [4]
    assert len(tower.outputs(tower.build(spec.tiny())(**inputs))[0]) == 1


def test_flops_of_a_tower_are_two_per_weight_that_a_patch_meets(spec: ModelSpec, reference: Any) -> None:
    assert spec.media is not None
    met = 0.0
    for name, weight in reference.model.visual.named_parameters():
        if weight.dim() > 1 and "position_embedding" not in name:
            met += weight.numel() * (1 if "blocks" in name or "patch_embed" in name else 1 / 4)
    attention = 2 * 2 * 32 * 16
    media = Media("image", "", ((0, 4),), (1, 4, 4))
    assert spec.media.flops(spec.tiny(), media) == 2 * 16 * (met + attention)


def test_the_published_dense_model_has_the_tensors_of_transformers_and_can_be_divided() -> None:
    """GLM-4.1V-9B, whose sizes are what its config in transformers says by itself."""
    spec = load_plugins().named("register_models")["glm4v"]
    config = Glm4vConfig()
    with torch.device("meta"):
        tensors = AutoModelForMultimodalLM.from_config(config).state_dict()
    hf = {"model_type": "glm4v", **config.to_dict()}
    hf["text_config"]["rope_parameters"]["partial_rotary_factor"] = 0.5
    rules = model_rules(spec, hf)
    assert {name for rule in rules for name in rule.hf} == tensors.keys()
    shapes = [canonical_shape(rule, [tensors[name].shape for name in rule.hf]) for rule in rules]
    assert sum(math.prod(shape) for shape in shapes) / 1e9 == pytest.approx(10.29, abs=0.005)
    assert not list(division_problems((rule, shape, 2) for rule, shape in zip(rules, shapes, strict=True)))
    cos, _ = megatron_model(spec).rotary(hf, torch.tensor([[5], [6], [7]]))
    angle = torch.tensor([5.0] * 8 + [6.0] * 12 + [7.0] * 12) * 10_000.0 ** (-torch.arange(32) / 32)
    torch.testing.assert_close(cos[0, :32], angle.cos())


# -------------------------------------------------------------------------
# In the trainer
# -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(spec: ModelSpec, context: WorkerContext, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_vision_model(spec, tmp_path_factory.mktemp(spec.name))
    reference = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    store = DictStore(dict(zip("abc", CONTENTS, strict=True)))
    tall, small = (Media("image", key, ((1, n),), (1, h, 2)) for key, n, h in (("a", 2, 4), ("c", 1, 2)))
    video = Media("video", "b", ((2, 3), (7, 3)), (2, 2, 6))
    framed = [62, 60, -1, -1, -1, 61, 60, -1, -1, -1, 61, 63]
    holder = {"image": 58, "video": 58}
    samples = [
        sample([9], holder),
        sample([3, (tall, [60, -1, -1, 61]), 5], holder),
        sample([1, (tall, [60, -1, -1, 61]), 2, (small, [60, -1, 61]), 4], holder),
        sample([2, (video, framed), 4], holder),  # transformers takes no image beside it
    ]
    policy = build(path, context, ("image", "video"))
    return ParityPair(spec, path, store, samples, policy, reference, given, context)


def given(both: ParityPair, sample: TrainSample) -> dict[str, Any]:
    """Return what transformers is given of a sample; positions it counts itself."""
    found: dict[str, Any] = {"mm_token_type_ids": torch.zeros(1, len(sample.tokens), dtype=torch.int64)}
    for number, kind, pixels in ((1, "image", "pixel_values"), (2, "video", "pixel_values_videos")):
        media = [each for each in sample.media if each.kind == kind]
        if not media:
            continue
        for start, count in (span for each in media for span in each.spans):
            found["mm_token_type_ids"][0, start : start + count] = number
        found[f"{kind}_grid_thw"] = torch.tensor([each.grid for each in media])
        found[pixels] = packed(both.spec, [both.store.get(each.key) for each in media])["hidden_states"]
    return found


def test_logits_and_gradients_equal_transformers(both: Any) -> None:
    """Compare text, an image shared by two samples, two images in one, and a video, in one micro-batch."""
    both.check(["visual.blocks.1", "visual.merger", "visual.embeddings"])


def test_the_embedded_engine_has_the_log_probabilities_of_the_trainer(both: Any) -> None:
    both.check_sampling(("image", "video"), 4)


def test_without_media_it_is_a_model_of_text(both: Any) -> None:
    both.check_text()


def test_another_image_gives_other_logits(both: Any) -> None:
    with torch.no_grad():
        right = both.logits()
        turned = [content._replace(data=255 - content.data) for content in CONTENTS]
        store = DictStore(dict(zip("abc", turned, strict=True)))
        wrong = replace(both, store=store).logits()
    torch.testing.assert_close(right[:9], wrong[:9], rtol=0, atol=1e-5)  # of text
    assert (right - wrong).abs().max() > 0.05


def test_weights_come_out_as_they_went_in_and_transformers_reads_them(both: Any, tmp_path: Path) -> None:
    both.check_export(tmp_path / "out")
