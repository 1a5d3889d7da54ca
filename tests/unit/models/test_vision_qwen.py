"""The Qwen families that see against transformers: pixels, positions, logits, gradients, weights, exports."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_size

from anygauge.engines.megatron.weights.mapping import model_rules
from anygauge.plugins import load_plugins
from anygauge.serving.embedded.weights import copy_weights
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError, MediaError
from anygauge_hooks.media import Decoded, Header, Measured, Media, MediaLimits
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_tests.batches import TrainSample, make_batch
from anygauge_tests.embedded import sample_all
from anygauge_tests.engine_config import engine_config
from anygauge_tests.toy_tower import Store
from anygauge_tests.vision_models import with_vision_tower

FAMILIES: Mapping[str, ModelSpec] = load_plugins().named("register_models")
NAMES = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
LIMITS = MediaLimits(min_pixels=256, max_pixels=2048)
IMAGE, VIDEO, START, END = 60, 61, 62, 63


# -------------------------------------------------------------------------
# A tiny model and samples
# -------------------------------------------------------------------------


def tiny(name: str) -> dict[str, Any]:
    """Return a config of a model that sees, whose initial values are far from uniform."""
    hf = dict(FAMILIES[name].tiny())
    if "text_config" not in hf:
        hf = with_vision_tower(FAMILIES[name])
    parts = {part: {**hf[part], "initializer_range": 0.1} for part in ("text_config", "vision_config")}
    return {**hf, **parts}


def write(name: str, path: Path) -> Path:
    fields = tiny(name)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng(devices=[]):
        # With 0 a decay rate's gradients nearly cancel over the tokens: rounding alone is 1e-5 of their sum.
        torch.manual_seed(2)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for each, tensor in model.named_parameters():
                if tensor.dim() == 1:
                    tensor.add_(torch.randn_like(tensor) * 0.1)
                if each.endswith("A_log"):  # with the initial ones a state is gone after a token
                    tensor.sub_(3.0)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    save_file(published(FAMILIES[name], load_file(file)), file, {"format": "pt"})
    return path


class Samples:
    """Makes samples of text, images and videos, whose contents are in a store."""

    def __init__(self, spec: ModelSpec, hf: Mapping[str, Any]) -> None:
        assert spec.media is not None
        self.processor = spec.media.make_processor(Path("nowhere"), hf)
        self.store = Store()
        self.random = np.random.default_rng(0)

    def text(self, count: int) -> list[int]:
        return self.random.integers(0, IMAGE, count).tolist()

    def image(self, height: int, width: int) -> tuple[list[int], Media]:
        frame = self.random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        measured = self.processor.measure("image", Header((height, width)), LIMITS)
        return self._placed("image", Decoded([frame]), measured)

    def video(self, frames: int, height: int, width: int) -> tuple[list[int], Media]:
        header = Header((height, width), frames=frames, fps=2.0)
        measured = self.processor.measure("video", header, LIMITS)
        taken = self.random.integers(0, 256, (len(measured.times), height, width, 3), dtype=np.uint8)
        return self._placed("video", Decoded(list(taken), measured.times), measured)

    def _placed(self, kind: Any, raw: Decoded, measured: Measured) -> tuple[list[int], Media]:
        key = str(len(self.store))
        self.store[key] = self.processor.load(kind, raw, measured)
        tokens, spans = [], []
        for _, count in measured.pieces:
            tokens += [*self.text(2), START]
            spans += [(len(tokens), count)] if count else []
            tokens += [self.processor.kinds[kind]] * count + [END]
        return tokens, Media(kind, key, tuple(spans), measured.grid, measured.seconds)

    def sample(self, *parts: int | tuple[list[int], Media]) -> TrainSample:
        tokens: list[int] = []
        media: list[Media] = []
        for part in parts:
            if not isinstance(part, int):
                media.append(part[1].moved(len(tokens)))
            tokens += self.text(part) if isinstance(part, int) else part[0]
        return TrainSample(tokens, 2, [1] * 2, [-0.5] * 2, [1.0] * 2, media=tuple(media))


def mixed(samples: Samples) -> list[TrainSample]:
    """Return text alone, an image twice, two of other shapes, and an image with a video of odd frames."""
    one = samples.image(40, 30)
    return [
        samples.sample(9),
        samples.sample(3, one, 5),
        samples.sample(1, samples.image(16, 16), 2, samples.image(20, 90), 4),
        samples.sample(2, one, 6, samples.video(5, 24, 32), 3),
    ]


@dataclass(frozen=True)
class Model:
    """A family's tiny model in the trainer and in transformers."""

    spec: ModelSpec
    path: Path
    store: Store
    samples: Sequence[TrainSample]
    policy: Any
    reference: Any
    context: WorkerContext

    def logits(self) -> Tensor:
        """Return the trainer's logits of all samples in one micro-batch, ``[T, V]``."""
        from anygauge.engines.megatron.inputs import micro_batches
        from anygauge.engines.megatron.media.batch import StageReader
        from anygauge.engines.megatron.scope import make_scope

        policy, reader = self.policy, None
        if policy.has_towers:
            reader = StageReader(policy.spec.media, policy.hf, self.store, is_first_stage=True)
        device = torch.device("cpu")
        batches = micro_batches(make_batch(self.samples), 1000, policy.rotary, device, media=reader)
        (batch,) = batches.readers(1)[0]
        with make_scope(self.context.device):
            packed = policy.chunks[0](**batch.inputs).flatten(0, 1)
        lengths = [len(self.samples[index].tokens) for index in batch.indices]
        parts = dict(zip(batch.indices, packed.split(lengths), strict=True))
        return torch.cat([parts[index] for index in sorted(parts)])

    def expected(self) -> Tensor:
        """Return transformers' logits, one sample after another."""
        return torch.cat([self._reference(each) for each in self.samples])

    def _reference(self, sample: TrainSample) -> Tensor:
        tokens = torch.tensor([sample.tokens])
        kinds = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
        given: dict[str, Any] = {}
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if media := [each for each in sample.media if each.kind == kind]:
                given[pixels] = torch.cat([processed(self.store[each.key].data) for each in media])
                given[f"{kind}_grid_thw"] = torch.tensor([each.grid for each in media])
        found: Tensor = self.reference(input_ids=tokens, mm_token_type_ids=kinds, **given).logits[0]
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that the trainer's parameters have, by name of the checkpoint."""
        parameters = [each for chunk in self.policy.chunks for each in chunk.parameters()]
        values = [each.detach().clone() for each in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.grad)
            found = {name: tensor.clone() for name, tensor in self.policy.weights()}
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        return found


def processed(data: Any) -> Tensor:
    """Return the patches of prepared frames, as the image processor of transformers cuts them."""
    frames = data if data.ndim == 4 else data[None].repeat(2, axis=0)
    if data.ndim == 3:
        found: Tensor = processor_of(8)(images=[Image.fromarray(data)], return_tensors="pt")["pixel_values"]
        return found
    cut = [Qwen2VLImageProcessorPil.patchify(None, frame.transpose(2, 0, 1), 8, 2, 1)[0] for frame in frames]
    pairs = torch.from_numpy(np.stack(cut)).unflatten(0, (-1, 2)).unflatten(-1, (3, 64))
    return (pairs.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1) / 255 - 0.5) / 0.5


def processor_of(patch: int) -> Any:
    size = {"shortest_edge": LIMITS.min_pixels, "longest_edge": LIMITS.max_pixels}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2, size=size, **half)


@pytest.fixture(scope="module", params=NAMES)
def model(
    request: pytest.FixtureRequest, context: WorkerContext, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    from anygauge.engines.megatron.model import initialize_parallel
    from anygauge.engines.megatron.scope import make_scope

    spec = FAMILIES[request.param]
    path = write(request.param, tmp_path_factory.mktemp(request.param))
    samples = Samples(spec, tiny(request.param))
    with make_scope(context.device):
        initialize_parallel(seed=0, timeout_s=60)
    reference = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    policy = build(path, context)
    return Model(spec, path, samples.store, mixed(samples), policy, reference, context)


def build(path: Path, context: WorkerContext, modalities: Sequence[str] = ("image", "video")) -> Any:
    from anygauge.engines.megatron.model import build_policy
    from anygauge.engines.megatron.scope import make_scope

    config = engine_config({"path": path, "modalities": modalities})
    with make_scope(context.device):
        return build_policy(config, context.plugins, context.backend, context.device)


# -------------------------------------------------------------------------
# The model
# -------------------------------------------------------------------------


def test_logits_and_gradients_equal_transformers(model: Model) -> None:
    """Compare text, an image shared by two samples, two images in one, and a video, in one micro-batch."""
    actual, expected = model.logits(), model.expected()
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)
    targets = torch.tensor([token for each in model.samples for token in each.tokens]).roll(-1)
    for logits in (actual, expected):
        torch.nn.functional.cross_entropy(logits, targets).backward()
    wanted, found = reference_gradients(model), model.gradients()
    assert found.keys() == wanted.keys()
    assert {name for name in found if ".visual." in name}
    for name, gradient in found.items():
        assert wanted[name].norm() > 1e-5, name
        error = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-5, f"{name}: {error}"


def reference_gradients(model: Model) -> dict[str, Tensor]:
    parameters = dict(model.reference.named_parameters())
    values = {name: each.detach().clone() for name, each in parameters.items()}
    with torch.no_grad():
        for each in parameters.values():
            each.copy_(each.grad)
        with tempfile.TemporaryDirectory() as directory:
            model.reference.save_pretrained(directory)
            found = load_file(Path(directory) / "model.safetensors")
        for name, value in values.items():
            parameters[name].copy_(value)
    return published(model.spec, found)


def published(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what transformers wrote with stacks of experts as they are published."""
    if spec.name == "qwen3_5_moe":
        return stacked(tensors)
    turned = any(rule.transposed for rule in megatron_model(spec).weight_rules(tiny(spec.name)))
    return {
        name: tensor.mT.contiguous() if turned and ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with those of all experts of a layer in one, gates above ups."""
    found = {name: tensor for name, tensor in tensors.items() if not re.search(r"experts\.\d", name)}
    for name in tensors:
        if name.endswith("experts.0.gate_proj.weight"):
            stem = name.removesuffix("0.gate_proj.weight")
            gates, ups, downs = (
                torch.stack([tensors[f"{stem}{expert}.{kind}_proj.weight"] for expert in range(8)])
                for kind in ("gate", "up", "down")
            )
            found |= {f"{stem}gate_up_proj": torch.cat([gates, ups], 1), f"{stem}down_proj": downs}
    return found


def test_another_image_gives_other_logits(model: Model) -> None:
    with torch.no_grad():
        right = model.logits()
        one, other = (model.store[key] for key in ("0", "1"))
        swapped = {**model.store, "0": one._replace(data=255 - one.data)}
        wrong = replace(model, store=Store(swapped)).logits()
    assert other.data.shape != one.data.shape
    assert (right - wrong).abs().max() > 0.05


def test_weights_come_out_as_they_went_in_and_transformers_reads_them(model: Model, tmp_path: Path) -> None:
    from anygauge.engines.hf_directory import write_directory

    expected = load_file(model.path / "model.safetensors")
    actual = dict(model.policy.weights())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    write_directory(tmp_path / "out", model.path, actual.items(), torch.float32)
    read = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    copied = AutoModelForMultimodalLM.from_config(read.config).eval()
    copy_weights(copied, actual.items())
    with torch.no_grad():
        wanted = model.expected()
        for other in (read, copied):
            found = replace(model, reference=other).expected()
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_the_embedded_engine_sees_what_the_trainer_sees(model: Model) -> None:
    """With weights that were pushed; prompts with the same images, pixels and positions."""
    from anygauge.serving.embedded.engine import TransformersEngine
    from anygauge.serving.embedded.multimodal import MultimodalContext

    tiny_tokenizer(model.path, alphabet="".join(map(chr, range(0x4E00, 0x4E00 + 62))))
    assert model.spec.media is not None
    senses = MultimodalContext(model.spec.media, model.policy.hf, ("image", "video"), model.store)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    engine = TransformersEngine(model.path, max_batch_tokens=10_000, multimodal=senses, **options)
    parameters = [each for chunk in model.policy.chunks for each in chunk.parameters()]
    values = [each.detach().clone() for each in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.05)
        engine.update_weights(model.policy.weights(), 1)
        prompts = [
            Prompt(index=index, tokens=tuple(each.tokens), text="", media=each.media)
            for index, each in enumerate(model.samples)
        ]
        params = SamplingParams(max_new_tokens=4, ignore_eos=True, forbidden=(IMAGE, VIDEO))
        groups = sample_all(engine, prompts, params, [[1, 2]] * len(prompts))
        drawn = [
            replace_tokens(model.samples[sample.prompt_index], sample.response_tokens)
            for group in groups
            for sample in group
        ]
        logits = replace(model, samples=drawn).logits()
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    logits[:, [IMAGE, VIDEO]] = -torch.inf
    ends = np.cumsum([len(each.tokens) for each in drawn]).tolist()
    for sample, end in zip((each for group in groups for each in group), ends, strict=True):
        chosen = torch.tensor(sample.response_tokens)
        expected = logits[end - 5 : end - 1].log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.log_probs), expected, rtol=0, atol=1e-5)


def replace_tokens(sample: TrainSample, response: Sequence[int]) -> TrainSample:
    return sample._replace(tokens=[*sample.tokens, *response])


def test_without_media_it_is_a_model_of_text(model: Model) -> None:
    policy = build(model.path, model.context, modalities=())
    assert policy.tensors.keys() == {name for name in model.policy.tensors if not name.startswith("visual.")}
    text = replace(model, policy=policy, samples=model.samples[:1])
    with torch.no_grad():
        torch.testing.assert_close(text.logits(), text.expected(), rtol=0, atol=1e-5)


# -------------------------------------------------------------------------
# Positions
# -------------------------------------------------------------------------

PART = st.one_of(
    st.tuples(st.just("text"), st.integers(1, 5)),
    st.tuples(st.just("image"), st.tuples(st.integers(1, 5), st.integers(1, 5))),
    st.tuples(st.just("video"), st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PART, max_size=6))
def test_positions_are_those_of_transformers(parts: list[tuple[str, Any]]) -> None:
    tokens, media = [1], []
    for kind, size in parts:
        if kind == "text":
            tokens += [1] * size
            continue
        time, height, width = size if kind == "video" else (1, *size)
        spans = []
        for _ in range(time):
            tokens += [1, START]
            spans.append((len(tokens), height * width))
            tokens += [IMAGE if kind == "image" else VIDEO] * (height * width) + [END]
        media.append(Media(kind, "", tuple(spans), (time, 2 * height, 2 * width)))
    ids = torch.tensor([tokens])
    grids = {
        f"{kind}_grid_thw": torch.tensor([each.grid for each in media if each.kind == kind])
        for kind in {each.kind for each in media}
    }
    this = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *args, **kwargs: Qwen3VLModel.get_vision_position_ids(
            None, *args, **kwargs
        ),
    )
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    expected, delta = Qwen3VLModel.get_rope_index(this, ids, kinds, **grids)
    spec = FAMILIES["qwen3_vl"]
    assert spec.media is not None
    found = spec.media.positions(spec.tiny(), len(tokens), media[::-1])
    assert found.dtype == np.int64
    assert np.array_equal(found, expected[:, 0].numpy())
    assert found[:, -1].max() + 1 == len(tokens) + delta.item()


# -------------------------------------------------------------------------
# Pixels
# -------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 150), st.integers(1, 150), st.integers(0, 9))
def test_patches_are_those_of_the_processor(height: int, width: int, seed: int) -> None:
    samples = Samples(FAMILIES["qwen3_vl"], tiny("qwen3_vl"))
    frame = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found, measured = load(samples, "image", Header((height, width)), [frame])
    expected = processor_of(8)(images=[Image.fromarray(frame)], return_tensors="pt")
    assert [list(measured.grid)] == expected["image_grid_thw"].tolist()
    assert measured.pieces == (("", expected["image_grid_thw"].prod().item() // 4),)
    torch.testing.assert_close(found["hidden_states"], expected["pixel_values"], rtol=0, atol=2e-7)


def load(
    samples: Samples, kind: Any, header: Header, frames: Sequence[Any], limits: MediaLimits = LIMITS
) -> tuple[Mapping[str, Any], Measured]:
    measured = samples.processor.measure(kind, header, limits)
    content = samples.processor.load(kind, Decoded(list(frames), measured.times), measured)
    media = FAMILIES["qwen3_vl"].media
    assert media is not None
    (tower,) = media.towers(tiny("qwen3_vl"))
    return tower.inputs(tiny("qwen3_vl"), [content], torch.device("cpu")), measured


@pytest.mark.parametrize(
    ("frames", "fps", "size"),
    [(40, 24.0, (20, 36)), (3, 2.0, (8, 60)), (301, 29.97, (48, 48)), (9, 0, (5, 5))],
)
def test_frames_and_times_are_those_of_the_video_processor(
    frames: int, fps: float, size: tuple[int, int]
) -> None:
    samples = Samples(FAMILIES["qwen3_vl"], tiny("qwen3_vl"))
    limits = MediaLimits(fps=2.0, max_frames=12, max_pixels=1024, min_pixels=256)
    header = Header(size, frames=frames, fps=fps)
    measured = samples.processor.measure("video", header, limits)
    taking = SimpleNamespace(fps=2.0, min_frames=4, max_frames=12)
    metadata = SimpleNamespace(total_num_frames=frames, fps=fps or None)
    indices = Qwen3VLVideoProcessor.sample_frames(taking, metadata)
    rate = fps or 24.0
    assert [round(time * rate) for time in measured.times] == indices.tolist()
    budget = {"min_pixels": 256 * len(indices), "max_pixels": 1024 * len(indices)}
    assert measured.size == video_size(len(indices), *size, temporal_factor=2, factor=16, **budget)
    shown = Qwen3VLProcessor._calculate_timestamps(None, indices, rate, 2)
    assert measured.grid == (len(shown), measured.size[0] // 8, measured.size[1] // 8)
    count = measured.grid[1] * measured.grid[2] // 4
    text = "".join(piece + "." * number for piece, number in measured.pieces)
    frame = "<|vision_start|>" + "." * count + "<|vision_end|>"
    assert text == "".join(f"<{time:.1f} seconds>{frame}" for time in shown)


def test_settings_of_a_directory_go_before_those_of_the_family(tmp_path: Path) -> None:
    spec, hf = FAMILIES["qwen3_vl"], tiny("qwen3_vl")
    assert spec.media is not None
    before = spec.media.make_processor(tmp_path, hf)
    size = {"shortest_edge": 256, "longest_edge": 1024}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size, "image_mean": [0.5] * 3}))
    after = spec.media.make_processor(tmp_path, hf)
    assert before.fingerprint() != after.fingerprint()
    header = Header((90, 90))
    assert before.measure("image", header, MediaLimits()).size == (256, 256)
    assert after.measure("image", header, MediaLimits()).size == (32, 32)
    assert after.measure("image", header, MediaLimits(max_pixels=300)).size == (16, 16)
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {"image_mean": [0.4] * 3}})
    )
    with pytest.raises(ConfigError, match=re.escape("image_mean = [0.4, 0.4, 0.4] is not supported by the")):
        spec.media.make_processor(tmp_path, hf)


EDGES = {"shortest_edge": 256, "longest_edge": 1024}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_omni_moe", "glm4v", "glm_omni"])
@pytest.mark.parametrize(
    "settings",
    [
        {"do_resize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"do_normalize": False},
        {"resample": 0},
        {"patch_size": 32},
        {"patch_size": {"height": 8, "width": 8}},
        {"merge_size": 1},
        {"temporal_patch_size": 1},
        {"cap_pixels_per_frame": True},
        {"size": {"height": 32, "width": 32}},
        {"size": {"min_pixels": 256, "max_pixels": 1024}},
        {"size": None},
        {"size": 32},
        {"size": EDGES, "max_pixels": "many"},
    ],
)
def test_pixels_that_are_made_otherwise_are_refused(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    media = FAMILIES[family].media
    assert media is not None
    path = tmp_path / "preprocessor_config.json"
    made = {
        **{"do_resize": True, "do_rescale": True, "rescale_factor": 0.00392156862745098},
        **{"do_normalize": None, "resample": 3, "size": EDGES},
    }
    path.write_text(json.dumps(made))
    media.make_processor(tmp_path, tiny(family))
    path.write_text(json.dumps(made | settings))
    *_, key = settings
    with pytest.raises(ConfigError, match=f"{'size' if key == 'max_pixels' else key} = "):
        media.make_processor(tmp_path, tiny(family))


@pytest.mark.parametrize(
    ("kind", "header", "words"),
    [
        ("image", Header((2, 402)), "402x2 pixels, and one side may be 200 times the other"),
        ("image", Header((0, 0)), "0x0 pixels"),
        ("video", Header((32, 32), frames=1, fps=24.0), "a video of 1 frames, 1 of which are taken"),
    ],
)
def test_what_the_model_cannot_take_is_an_error(kind: Any, header: Header, words: str) -> None:
    samples = Samples(FAMILIES["qwen3_vl"], tiny("qwen3_vl"))
    with pytest.raises(MediaError, match=re.escape(words)):
        samples.processor.measure(kind, header, LIMITS)


# -------------------------------------------------------------------------
# What a family declares
# -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_placeholders_are_forbidden_and_the_blank_is_one_feature(name: str) -> None:
    spec, hf = FAMILIES[name], tiny(name)
    assert spec.media is not None
    assert tuple(spec.media.forbidden(hf)) == (IMAGE, VIDEO)
    (tower,) = spec.media.towers(hf)
    inputs = dict(tower.inputs(hf, [tower.blank(hf)], torch.device("cpu")))
    assert inputs.pop("lengths") == (4,)
    features, levels = tower.outputs(tower.build(hf)(**inputs))
    assert features.shape == (1, 64)
    assert len(levels) == tower.levels(hf)


@pytest.mark.parametrize("name", NAMES)
def test_flops_of_a_tower_are_two_per_weight_that_a_patch_meets(name: str) -> None:
    """And those of the scores, which are of all pairs of patches of a frame."""
    spec, hf = FAMILIES[name], tiny(name)
    assert spec.media is not None
    (tower,) = spec.media.towers(hf)
    met = 0.0
    for weight, tensor in tower.build(hf).named_parameters():
        if tensor.dim() > 1 and "pos_embed" not in weight:
            met += tensor.numel() / (4 if "merger" in weight else 1)
    vision, frame = hf["vision_config"], 8 * 6
    scores = vision["depth"] * 2 * vision["hidden_size"] * frame
    media = Media("video", "", ((0, 12), (14, 12), (28, 12)), (3, 8, 6))
    assert spec.media.flops(hf, media) == pytest.approx(2 * 3 * frame * (met + scores))


PUBLISHED = {
    "lm_head.weight": 1,
    "model.language_model.embed_tokens.weight": 1,
    "model.language_model.norm.weight": 1,
    **{
        f"model.language_model.layers.N.{name}.weight": 36
        for name in (
            *("input_layernorm", "post_attention_layernorm"),
            *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            *("self_attn.q_norm", "self_attn.k_norm"),
            *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        )
    },
    "model.visual.pos_embed.weight": 1,
    **{
        f"model.visual.{name}.{part}": count
        for part in ("weight", "bias")
        for count, names in (
            (1, ("patch_embed.proj", "merger.norm", "merger.linear_fc1", "merger.linear_fc2")),
            (27, [f"blocks.N.{x}" for x in ("norm1", "norm2", "attn.qkv", "attn.proj")]),
            (27, [f"blocks.N.mlp.{x}" for x in ("linear_fc1", "linear_fc2")]),
            (3, [f"deepstack_merger_list.N.{x}" for x in ("norm", "linear_fc1", "linear_fc2")]),
        )
        for name in names
    },
}
"""How many tensors of a name the index of a published checkpoint has: Cosmos-Reason2-8B, a Qwen3-VL-8B."""


def test_names_are_those_of_a_published_checkpoint() -> None:
    spec, hf = FAMILIES["qwen3_vl"], tiny("qwen3_vl")
    hf["text_config"]["num_hidden_layers"], hf["tie_word_embeddings"] = 36, False
    hf["vision_config"] |= {"depth": 27, "deepstack_visual_indexes": [8, 16, 24]}
    names = [name for rule in model_rules(spec, hf) for name in rule.hf]
    assert len(names) == len(set(names)) == 750
    assert Counter(re.sub(r"\.\d+\.", ".N.", name) for name in names) == PUBLISHED


@pytest.mark.parametrize("part", [64, 32])
def test_stacks_that_might_lie_either_way_are_refused(part: int) -> None:
    spec, hf = FAMILIES["qwen3_vl_moe"], tiny("qwen3_vl_moe")
    hf["text_config"]["moe_intermediate_size"] = part
    with pytest.raises(ConfigError, match=f"moe_intermediate_size = {part} is not supported by"):
        megatron_model(spec).transformer_config(hf)


def test_what_is_left_out_has_the_default_of_transformers() -> None:
    spec, hf = FAMILIES["qwen3_vl"], tiny("qwen3_vl")
    full = AutoConfig.for_model("qwen3_vl").to_dict()
    del hf["image_token_id"], hf["video_token_id"]
    assert spec.media is not None
    assert tuple(spec.media.forbidden(hf)) == (full["image_token_id"], full["video_token_id"])
    for key in ("patch_size", "spatial_merge_size", "temporal_patch_size", "in_channels"):
        without = {**hf, "vision_config": {k: v for k, v in hf["vision_config"].items() if k != key}}
        with_default = {**hf, "vision_config": {**hf["vision_config"], key: full["vision_config"][key]}}
        media = Media("image", "", ((0, 4),), (1, 4, 4))
        assert spec.media.flops(without, media) == spec.media.flops(with_default, media)
        positions = [spec.media.positions(each, 9, [media]) for each in (without, with_default)]
        assert np.array_equal(*positions)
