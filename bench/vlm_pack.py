"""Train steps on samples with images: packed micro-batches beside one sample at a time, on the CPU.

    python bench/vlm_pack.py                   # images of 48, 96 and 256 pixels, median of 5 runs
    python bench/vlm_pack.py --pixels 48 --runs 3

A tiny Qwen3-VL (decoder 2 x 64, tower 2 x 32, patches of 8 pixels) with a trained tower, 16 images, 4 samples
of each. All sides are the same engine and give the same gradients; what differs is ``micro_batch_tokens``.
Packed, samples of one image share its pass through the tower. "Apart" has an image of its own for each
sample, so that packing alone is seen. One thread; seconds are those of the processor, which other work on the
host does not change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anygauge.plugins import Plugins, load_plugins
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config
from anygauge_tests.media import DictStore
from anygauge_tests.vision_models import random_image, vision_sample, write_vision_model

IMAGES, SAMPLES, TEXT, RESPONSE = 16, 4, 12, 8
PATCH = 8
PACKED, ALONE = 16_384, 1
"""Values of ``train.micro_batch_tokens``; a sample that is longer is alone."""


def make_context(plugins: Plugins, store: DictStore) -> WorkerContext:
    """Return the context of a lone process."""
    backend = plugins.get("register_backends", "cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    context = WorkerContext(
        rank=0, world_size=1, backend=backend, device=plugins.make_device(backend, 0), plugins=plugins
    )
    return replace(context, media=store)


def make_engine(context: WorkerContext, model: Path, micro_batch_tokens: int) -> Any:
    """Return a train engine with images."""
    config = engine_config(
        {"path": model, "modalities": ["image"]}, train={"lr": 1e-4, "micro_batch_tokens": micro_batch_tokens}
    )
    return context.plugins.get("register_train_engines", "megatron").make(config, context)


def make_samples(model: Path, store: DictStore, side: int, *, shares: bool) -> list[TrainSample]:
    """Return all samples of a step, with images of so many patches a side.

    :param shares: Whether samples have an image in common.
    """
    hf = json.loads((model / "config.json").read_text())
    return [
        vision_sample(
            hf,
            [random_image(store, hf, side, side, image if shares else 1000 + number), TEXT],
            RESPONSE,
            number,
        )
        for number, image in enumerate(image for image in range(IMAGES) for _ in range(SAMPLES))
    ]


def train_step(engine: Any, samples: Sequence[TrainSample]) -> Callable[[], dict[str, float]]:
    """Return one optimizer step on all samples."""
    return lambda: batches.train_step(engine, samples)


def medians(runs: int, steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each step over alternated runs, warmed up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(runs + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def main() -> None:
    """Print tokens per second of each side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pixels", type=int, nargs="+", default=[48, 96, 256], help="sides of the images")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    plugins, store = load_plugins(), DictStore()
    context = make_context(plugins, store)
    with tempfile.TemporaryDirectory() as directory:
        model = write_vision_model(plugins.get("register_models", "qwen3_vl"), Path(directory))
        packed, alone = (make_engine(context, model, tokens) for tokens in (PACKED, ALONE))
        print("thousands of tokens per second of one processor")
        print("pixels  tokens  packed, images shared  packed, images apart  one at a time   ratios")
        for pixels in given.pixels:
            shared, apart = (
                make_samples(model, store, pixels // PATCH, shares=shares) for shares in (True, False)
            )
            count = sum(len(sample.tokens) for sample in shared)
            seconds = medians(
                given.runs,
                {
                    "shared": train_step(packed, shared),
                    "apart": train_step(packed, apart),
                    "alone": train_step(alone, shared),
                },
            )
            speeds = {name: count / each / 1e3 for name, each in seconds.items()}
            ratios = [speeds[name] / speeds["alone"] for name in ("shared", "apart")]
            print(
                f"{pixels:6}  {count:6}  {speeds['shared']:21.1f}  {speeds['apart']:20.1f}  "
                f"{speeds['alone']:13.1f}   {ratios[0]:.1f}, {ratios[1]:.1f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
