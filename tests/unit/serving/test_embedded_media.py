"""The embedded engine with images: log-probs, positions, and what shares a cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from anygauge.plugins import load_plugins
from anygauge.serving.embedded.engine import TransformersEngine
from anygauge.serving.embedded.multimodal import MultimodalContext
from anygauge.serving.embedded.weights import read_weights
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.testing.tiny_vision import add_vision_tokens, tiny_qwen3_vl
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Content, Media
from anygauge_hooks.models import text_config
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_tests.embedded import sample_all
from anygauge_tests.media import DictStore

HOST = torch.device("cpu")
PATCH = 8


class Given:
    """A model, and images of 16 x 16, 16 x 32 and 32 x 48 pixels."""

    def __init__(self, path: Path) -> None:
        tokenizer = add_vision_tokens(tiny_tokenizer(path, alphabet="0123456789+="))
        tiny_qwen3_vl(path, tokenizer, init_std=0.15, pixels=(16 * 16, 64 * 64))
        self.path = path
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        self.hf = text_config(self.model.config.to_dict())
        self.spec = load_plugins().model(["Qwen3VLForConditionalGeneration"])
        self.pad, self.start, self.end = (
            self.hf[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end")
        )
        rng = np.random.default_rng(0)
        sizes = {"small": (16, 16), "other": (16, 16), "wide": (16, 32), "large": (32, 48)}
        contents = {key: rng.integers(0, 255, (*size, 3), np.uint8) for key, size in sizes.items()}
        self.store = DictStore({key: Content("image", each) for key, each in contents.items()})

    def engine(self, **options: Any) -> TransformersEngine:
        senses = MultimodalContext(self.spec.media, self.hf, frozenset({"image"}), self.store)
        return TransformersEngine(
            self.path,
            **{
                "dtype": torch.float32,
                "device": HOST,
                "max_batch_tokens": 100_000,
                "multimodal": senses,
                **options,
            },
        )

    def prompt(self, index: int, *parts: int | str) -> Prompt:
        """Return a prompt of tokens, and of images by their keys."""
        tokens: list[int] = []
        media = []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
                continue
            height, width = (side // PATCH for side in self.store.get(part).data.shape[:2])
            count = height * width // 4
            media.append(Media("image", part, ((len(tokens) + 1, count),), (1, height, width)))
            tokens += [self.start, *[self.pad] * count, self.end]
        return Prompt(index=index, tokens=tuple(tokens), text="", media=tuple(media))

    def reference(self, sample: Sample, media: Sequence[Media]) -> torch.Tensor:
        """Return the log-probs of a response by transformers, with its own pixels and positions."""
        ids = torch.tensor([sample.prompt_tokens + sample.response_tokens])
        images = [self.store.get(medium.key).data for medium in media]
        arguments = {}
        if images:
            arguments = dict(_processor()(images=images, return_tensors="pt"))
            arguments["mm_token_type_ids"] = (ids == self.pad).int()
        with torch.no_grad():
            logits = self.model(input_ids=ids, **arguments).logits[0]
        logits = logits.index_fill(-1, torch.tensor(self.forbidden), -torch.inf)
        chosen = logits.log_softmax(-1)[len(sample.prompt_tokens) - 1 : -1]
        return chosen.gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]

    @property
    def forbidden(self) -> tuple[int, ...]:
        assert self.spec.media is not None
        found: tuple[int, ...] = self.spec.media.forbidden(self.hf)
        return found


def _processor() -> Any:
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    half = [0.5, 0.5, 0.5]
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=sizes, image_mean=half, image_std=half
    )


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return Given(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def engine(given: Given) -> TransformersEngine:
    return given.engine()


def prompts_of(given: Given) -> list[Prompt]:
    """Return prompts of different lengths: images of several sizes, several of them, none, one twice."""
    return [
        given.prompt(0, 1, 2, "large", 3),
        given.prompt(1, 4, "small", 5, 6, "wide"),
        given.prompt(2, 7, 8, 9),
        given.prompt(3, "wide", "wide", 1),
        given.prompt(4, 4, "other", 5, 6, "wide"),
    ]


def difference(given: Given, sample: Sample, media: Sequence[Media]) -> float:
    return float((torch.tensor(sample.log_probs) - given.reference(sample, media)).abs().max())


def test_log_probs_are_those_of_transformers_and_other_pixels_have_others(
    given: Given, engine: TransformersEngine
) -> None:
    prompts = prompts_of(given)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, forbidden=given.forbidden)
    groups = sample_all(engine, prompts, params, [[1, 2]] * len(prompts))
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in group:
            assert sample.media == prompt.media
            assert not set(sample.response_tokens) & set(given.forbidden)
            assert difference(given, sample, prompt.media) < 1e-5
    swapped = [prompts[1].media[0]._replace(key="other"), prompts[1].media[1]]
    assert difference(given, groups[1][0], swapped) > 0.05


def test_the_same_tokens_with_another_image_are_another_prompt(
    given: Given, engine: TransformersEngine
) -> None:
    prompts = [given.prompt(0, 1, "small", 2), given.prompt(1, 1, "other", 2)]
    assert prompts[0].tokens == prompts[1].tokens
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, forbidden=given.forbidden)
    [one], [other] = sample_all(engine, prompts, params, [[5], [5]])
    assert difference(given, one, prompts[0].media) < 1e-5
    assert difference(given, other, prompts[1].media) < 1e-5
    assert max(difference(given, one, prompts[1].media), difference(given, other, prompts[0].media)) > 0.05


def test_each_image_is_encoded_once_for_a_batch(given: Given, engine: TransformersEngine) -> None:
    tower = engine._model.model.visual
    seen: list[int] = []
    hook = tower.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    prompts = prompts_of(given)
    sample_all(engine, prompts, SamplingParams(max_new_tokens=2), [[1, 2, 3]] * len(prompts))
    hook.remove()
    assert seen == [4 + 4 + 8 + 24]


def test_what_cannot_be_shown_is_named(given: Given, engine: TransformersEngine) -> None:
    params = SamplingParams(max_new_tokens=1)
    missing = given.prompt(0, "small")
    missing = Prompt(
        index=3,
        tokens=missing.tokens,
        text="",
        source="a.jsonl:4",
        media=(missing.media[0]._replace(key="gone", source="x.png"),),
    )
    with pytest.raises(
        RolloutError, match=r"Request 3-1 \(a.jsonl:4\) shows image gone \(x.png\), which is not"
    ):
        sample_all(engine, [missing], params, [[1]])
    sound = Prompt(index=0, tokens=(1, 2), text="", media=(Media("audio", "k", ((1, 1),), (4, 1, 1)),))
    with pytest.raises(RolloutError, match="has audio, and the run's model takes image"):
        sample_all(engine, [sound], params, [[1]])


def test_new_weights_reach_the_tower(given: Given) -> None:
    engine = given.engine()
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    prompts = [given.prompt(0, 1, "small", 2)]
    before = sample_all(engine, prompts, params, [[5]])[0][0]
    generator = torch.Generator().manual_seed(3)
    engine.update_weights(
        (
            (
                name,
                tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
                if ".visual." in name
                else tensor,
            )
            for name, tensor in read_weights(given.path)
        ),
        1,
    )
    after = sample_all(engine, prompts, params, [[5]])[0][0]
    assert before.log_probs != after.log_probs
