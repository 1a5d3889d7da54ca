"""A model that sees: what a rank does for the tests of media."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_cases  # type: ignore[import-not-found]
import parallel_worker  # type: ignore[import-not-found]

from anygauge.config import Config
from anygauge_hooks.engines import WorkerContext
from anygauge_tests.batches import TrainSample
from anygauge_tests.media import DictStore
from anygauge_tests.vision_models import random_audio, random_image, random_video, vision_sample


def samples(model: Path, store: DictStore) -> list[TrainSample]:
    """Return three steps of three samples: images, a video, text alone; and sound for a model that hears."""
    hf = json.loads((model / "config.json").read_text())
    one, wide, tall = (
        random_image(store, hf, *size, seed) for seed, size in enumerate(((4, 4), (2, 6), (6, 4)))
    )
    clip = random_video(store, hf, 2, 4, 2, 3)
    parts: list[list[Any]] = [
        [7],
        [3, one, 6],
        [11],
        *([9], [6], [13]),
        [2, one, 4],
        [1, clip, 8],
        [1, wide, 2, tall, 5],
    ]
    if "audio_config" in hf:
        features = 15 if hf["model_type"] == "glm_omni" else 16
        long, short = random_audio(store, hf, 120, features, 0), random_audio(store, hf, 40, 5, 1)
        for number, heard in ((0, [long, 2]), (4, [short, 1, long, 3]), (6, [short, 2])):
            parts[number] += heard
    return [vision_sample(hf, each, 3 + seed % 2, seed) for seed, each in enumerate(parts)]


@contextmanager
def vision_run(config: Config, context: WorkerContext) -> Iterator[tuple[Config, WorkerContext]]:
    """Let the actions of other files have samples with images."""
    store, before = DictStore(), parallel_worker.make_samples
    made = samples(config.model.path, store)
    hears = "audio_config" in json.loads((config.model.path / "config.json").read_text())
    kinds = ("image", "video", "audio") if hears else ("image", "video")
    model = config.model.model_copy(update={"modalities": kinds})
    for module in (parallel_worker, checkpoint_cases):
        module.make_samples = lambda *_: made
    try:
        yield config.model_copy(update={"model": model}), replace(context, media=store)
    finally:
        for module in (parallel_worker, checkpoint_cases):
            module.make_samples = before


def train(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Return what :func:`parallel_worker.train` does."""
    with vision_run(config, context) as (sees, where):
        return parallel_worker.train(sees, where, case)


def saved(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Return what :func:`checkpoint_cases.saved` does."""
    with vision_run(config, context) as (sees, where):
        return checkpoint_cases.saved(sees, where, case)


def resumed(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Return what :func:`checkpoint_cases.resumed` does."""
    with vision_run(config, context) as (sees, where):
        return checkpoint_cases.resumed(sees, where, case)
