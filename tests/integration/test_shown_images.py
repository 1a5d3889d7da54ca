"""A whole run whose rollout function shows the policy a further image between two of its turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anygauge.testing.tiny import tiny_tokenizer
from anygauge.testing.tiny_vision import add_vision_tokens, tiny_qwen3_vl
from anygauge_hooks.rl import Prompt, Sample
from anygauge_tests.observer import Observer, run_with_observer
from anygauge_tests.recipe import tiny_recipe

pytestmark = pytest.mark.usefixtures("forked_actors")


async def closer(rollout: Any, prompt: Prompt, seed: int) -> Sample:
    """Show a detail once the policy has spoken, and let it speak again."""
    draft = rollout.draft()
    await draft.generate(max_new_tokens=2)
    detail = Image.new("RGB", (16, 16), (10 * prompt.index, 200, 0))
    seen = [{"type": "text", "text": "="}, {"type": "image", "image": detail}]
    assert draft.observe(*await rollout.look([{"role": "tool", "content": seen}], chat=False))
    await draft.generate(max_new_tokens=2)
    found: Sample = draft.sample()
    return found


@pytest.fixture
def vision_model(tmp_path: Path) -> Path:
    tokenizer = add_vision_tokens(tiny_tokenizer(tmp_path / "seeing", alphabet="0123456789+="))
    return tiny_qwen3_vl(tmp_path / "seeing", tokenizer, init_std=0.2)


def test_what_a_function_shows_is_trained_on_as_the_engine_saw_it(tmp_path: Path, vision_model: Path) -> None:
    rows = []
    for number in range(4):
        Image.new("RGB", (16, 32), (60 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append({"prompt": "1<image>+2=", "label": "3", "images": [f"{number}.png"]})
    (tmp_path / "seen.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = tiny_recipe(
        tmp_path,
        run__steps=1,
        model__path=vision_model,
        data__train=[tmp_path / "seen.jsonl"],
        data__multimodal_keys__image="images",
        rollout__function=f"{__name__}:closer",
        rollout__max_new_tokens=16,
    )
    observer = Observer()
    run_with_observer(recipe, observer)
    for group in observer.groups:
        for sample in group.samples:
            first, second = sample.media
            assert (first,) == group.prompt.media
            [(start, count)] = second.spans
            start -= len(sample.prompt_tokens)
            assert count == 1
            assert sample.loss_mask[start] == 0
            assert sum(sample.loss_mask) == 4
    keys = {sample.media[1].key for group in observer.groups for sample in group.samples}
    assert len(keys) == len(observer.groups), "the samples of a prompt share what they are shown"
    assert observer.metrics[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert not (tmp_path / "run" / "media").exists()


def test_a_run_of_text_draws_no_placeholder_of_a_model_that_could_see(
    tmp_path: Path, vision_model: Path
) -> None:
    """It would have drawn dozens: they are two of some twenty tokens."""
    hf = json.loads((vision_model / "config.json").read_text())
    holders = {hf["image_token_id"], hf["video_token_id"]}
    observer = Observer()
    run_with_observer(
        tiny_recipe(tmp_path, run__steps=1, model__path=vision_model, rollout__max_new_tokens=32), observer
    )
    said = [token for group in observer.groups for each in group.samples for token in each.response_tokens]
    assert len(said) > 200
    assert not holders & set(said)
    assert observer.metrics[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
