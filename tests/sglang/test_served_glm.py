"""GLM-4.1V at a real server: its log-probs for images are those of the trainer's model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForMultimodalLM

from anygauge.config.schema import RolloutClient
from anygauge.config.validate import validate
from anygauge.plugins import Plugins
from anygauge.rollout.client import EngineClient, Pictures
from anygauge.rollout.sglang.server import make_server
from anygauge.testing.media import DictStore
from anygauge.testing.sights import write_seeing
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.media import Content, Media
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

PATCH = 16
SIZES = {"wide": (32, 96), "square": (64, 64), "other": (64, 64)}
MARKS = [f"<|{part}{kind}|>" for kind in ("image", "video") for part in ("begin_of_", "", "end_of_")]
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def write(plugins: Plugins, path: Path) -> dict[str, Any]:
    """Write a complete directory, and return its config."""
    spec = plugins.get("register_models", "glm4v")
    tokenizer = tiny_tokenizer(path, texts=["what is in the picture "] * 4)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in MARKS])
    tokenizer.save_pretrained(path)
    tiny = spec.tiny()
    keys = [f"{kind}{part}" for kind in ("image", "video") for part in ("_start", "", "_end")]
    ids = dict(zip(keys, tokenizer.convert_tokens_to_ids(MARKS), strict=True))
    write_seeing(
        spec,
        path,
        text_config={**tiny["text_config"], "vocab_size": -(-len(tokenizer) // 32) * 32},
        vision_config={**tiny["vision_config"], "patch_size": PATCH, "image_size": 4 * PATCH},
        **{f"{key}_token_id": token for key, token in ids.items()},
    )
    settings = {
        "processor_class": "Glm4vProcessor",
        "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 2 * 256 * 256},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    for name, kind in (("preprocessor", "image"), ("video_preprocessor", "video")):
        found = {**settings, f"{kind}_processor_type": f"Glm4v{kind.title()}Processor"}
        (path / f"{name}_config.json").write_text(json.dumps(found))
    hf: dict[str, Any] = json.loads((path / "config.json").read_text())
    return hf


def ask(address: str, store: DictStore, requests: Sequence[GenerateRequest]) -> list[Generation]:
    async def run() -> list[Generation]:
        client = EngineClient(address, RolloutClient(request_timeout_s=120), pictures=Pictures(store))
        try:
            return await asyncio.gather(*map(client.generate, requests))
        finally:
            await client.close()

    return asyncio.run(run())


def test_log_probs_are_those_of_the_model(plugins: Plugins, tmp_path: Path) -> None:
    hf = write(plugins, tmp_path / "model")
    media = plugins.get("register_models", "glm4v").media
    assert media is not None
    reference: Any = AutoModelForMultimodalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    store = DictStore(
        {key: Content("image", rng.integers(0, 255, (*size, 3), np.uint8)) for key, size in SIZES.items()}
    )
    forbidden = tuple(media.forbidden(hf))
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, forbidden=forbidden)
    start, pad, end = (hf[f"image{part}_token_id"] for part in ("_start", "", "_end"))

    def request(name: str, *parts: int | str) -> GenerateRequest:
        tokens: list[int] = []
        shown: list[Media] = []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
                continue
            height, width = (side // PATCH for side in SIZES[part])
            shown.append(Media("image", part, ((len(tokens) + 1, height * width // 4),), (1, height, width)))
            tokens += [start, *[pad] * (height * width // 4), end]
        return GenerateRequest(name, tuple(tokens), params, seed=1, media=tuple(shown))

    def difference(asked: GenerateRequest, said: Generation, swapped: str = "") -> float:
        keys = [swapped or each.key for each in asked.media]
        (tower,) = media.towers(hf)
        inputs = tower.inputs(hf, [store.get(key) for key in keys], torch.device("cpu"))
        whole = (*asked.tokens, *said.tokens)
        positions = torch.from_numpy(media.positions(hf, len(whole), asked.media))
        with torch.no_grad():
            logits = reference(
                input_ids=torch.tensor([whole]),
                pixel_values=inputs["hidden_states"],
                image_grid_thw=inputs["grid_thw"],
                position_ids=positions[:, None],
            ).logits[0]
        left = logits.index_fill(1, torch.tensor(forbidden), -torch.inf).log_softmax(-1)
        right = left[len(asked.tokens) - 1 : -1].gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        return float((torch.tensor(said.log_probs) - right).abs().max())

    tree = {
        "run": {"name": "glm", "directory": str(tmp_path / "run")},
        "model": {"path": str(tmp_path / "model"), "modalities": ["image"]},
        "data": {"train": ["none.jsonl"]},
        "train": {"dtype": "float32"},
        "rollout": {
            "engine": "sglang",
            "max_batch_tokens": 8192,
            "sglang": {"context_length": 512, "max_running_requests": 16},
        },
        "placement": {"start_timeout_s": 600.0},
    }
    checked = validate(tree)
    assert not checked.problems, checked.problems
    backend = plugins.get("register_backends", "cpu")
    device = plugins.make_device(backend, 0)
    context = WorkerContext(rank=0, world_size=2, backend=backend, device=device, plugins=plugins)
    server = make_server(checked.config, context)
    try:
        requests = [request("one", 5, "square", 7, 8), request("two", 5, "wide", 9, "square", 7)]
        answers = ask(server.start(), store, requests)
    finally:
        server.close()
    for asked, said in zip(requests, answers, strict=True):
        assert len(said.tokens) == 12
        assert difference(asked, said) < 1e-4
    assert difference(requests[0], answers[0], "other") > 0.1
