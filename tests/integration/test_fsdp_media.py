"""Whole runs of models with towers on the FSDP engine: rows with images and without, on two ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForMultimodalLM, Qwen2_5_VLConfig

from anygauge.testing.tiny import save_random, tiny_tokenizer
from anygauge.testing.tiny_vision import VISION_TOKENS, add_vision_tokens, tiny_qwen3_vl
from anygauge_tests.observer import Rewarding, run_with_observer

STEPS = 2


def write_model(directory: Path, family: str) -> None:
    """Write a tiny model with a token for each character of a sum."""
    tokenizer = add_vision_tokens(tiny_tokenizer(directory, alphabet="0123456789+="))
    if family == "qwen3_vl":
        tiny_qwen3_vl(directory, tokenizer, init_std=0.2)
        return
    ids = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    text = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    vision = {
        "depth": 2,
        "fullatt_block_indexes": [1],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": 8,
        "window_size": 32,
        "out_hidden_size": 32,
        "initializer_range": 0.2,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **dict(zip(names, ids, strict=True)))
    tokenizer.save_pretrained(directory)
    save_random(AutoModelForMultimodalLM, config, directory)
    settings = {"patch_size": 8, "min_pixels": 16 * 16, "max_pixels": 48 * 48}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))


def recipe(directory: Path, family: str) -> Path:
    """Write a config of four lines, and rows with an image, two or none."""
    write_model(directory / "model", family)
    rng = random.Random(0)
    rows = []
    for number in range(12):
        names = [f"{number}-{index}.png" for index in range(number % 3)]
        for name in names:
            size = rng.randint(16, 48), rng.randint(16, 48)
            Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).save(directory / name)
        rows.append({"prompt": "<image>" * len(names) + f"{number}+1=", "label": "", "images": names})
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = directory / "four.toml"
    path.write_text(
        f'model.path = "{directory}/model"\n'
        f'data = {{ train = ["{directory}/data.jsonl"], multimodal_keys = {{ image = "images" }} }}\n'
        'reward.function = "digits"\n'
        'train.engine = "fsdp"\n'
    )
    return path


def run(path: Path, workers: int) -> Sequence[Mapping[str, float]]:
    """Train, and return the metrics of each step."""
    observer = Rewarding()
    keys = {
        "run.name": f"workers-{workers}",
        "run.directory": path.parent,
        "run.steps": STEPS,
        "data.cache": path.parent / "cache",
        "rollout.prompts_per_step": 6,
        "rollout.samples_per_prompt": 4,
        "rollout.max_new_tokens": 4,
        "train.optimizer_steps": 2,
        "train.micro_batch_tokens": 24,
        "algorithm.old_log_probs": "recompute",
        "placement.launcher": "local",
        "placement.train_workers": workers,
        "placement.threads_per_worker": 1,
    }
    run_with_observer(path, observer, keys)
    return observer.metrics


@pytest.mark.fsdp
@pytest.mark.usefixtures("forked_actors")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_two_ranks_train_as_one(tmp_path: Path, family: str) -> None:
    """Ranks whose micro-batches have no image keep in step with the others."""
    path = recipe(tmp_path, family)
    two, one = run(path, 2), run(path, 1)
    assert len(two) == len(one) == STEPS
    for metrics in two:
        assert metrics["train/grad_norm"] > 0
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    # Samples of the second step are drawn by weights that differ in their last bits.
    for name in ("train/loss", "train/grad_norm"):
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-4, abs=1e-6)
    (export,) = (tmp_path / "workers-2").rglob("model.safetensors.index.json")
    model, info = AutoModelForMultimodalLM.from_pretrained(export.parent, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    start = AutoModelForMultimodalLM.from_pretrained(tmp_path / "model").state_dict()
    assert not [name for name, tensor in model.state_dict().items() if tensor.equal(start[name])]
