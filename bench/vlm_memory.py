"""Host memory for the decoded images of a step: each is stored once, however many samples show it.

    python bench/vlm_memory.py                         # 64 prompts x 8 samples, an image of a megapixel each
    python bench/vlm_memory.py --prompts 8 --workers 4

Rows name PNG files; the run's own source and loader draw a step's prompts and decode what they show, and
what is measured is their second step. Each worker, a process of its own, goes through its part of the samples
and reads pixels of all their images, which it keeps as long as a train step would. Memory is the proportional
set size (PSS) of the driver and its workers: a page that several have mapped counts once. Ends with status 1
if it grew by over 1.2 times the decoded images, if the store holds other than their bytes, or if anything
stays when the prompts are gone.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

ALLOWED = 1.2
MIB = 1 << 20


def make_rows(folder: Path, count: int, side: int) -> Path:
    """Write images, each another one, and the rows that name them."""
    rows = []
    for number in range(count):
        rng = np.random.default_rng(number)
        small = rng.integers(256, size=(16, 16, 3)).astype(np.uint8)
        Image.fromarray(small).resize((side, side)).save(folder / f"{number}.png", compress_level=1)
        rows.append({"prompt": "<image>what is it", "label": "a", "images": [f"{number}.png"]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(folder: Path, rows: Path) -> Any:
    """Return the config of a run with a tiny model that takes large images as they are."""
    from anygauge.config import Config
    from anygauge.testing.tiny import tiny_tokenizer
    from anygauge.testing.tiny_vision import add_vision_tokens, tiny_qwen3_vl

    tokenizer = add_vision_tokens(tiny_tokenizer(folder / "model", texts=["what is it"]))
    tiny_qwen3_vl(folder / "model", tokenizer, patch=16, pixels=(32 * 32, 1 << 24))
    return Config.model_validate(
        {
            "run": {"name": "bench", "steps": 1},
            "model": {"path": folder / "model"},
            "data": {"train": [{"path": str(rows)}], "multimodal_keys": {"image": "images"}},
            "reward": {"function": "exact_match"},
        }
    )


def read_all(folder: Path, keys: Sequence[str], pipe: Connection) -> None:
    """Read the images of samples as a worker does, and keep them until told to end."""
    from anygauge.data.media.store import MappedFiles

    pipe.send("ready")
    pipe.recv()
    store = MappedFiles(folder)
    held = [store.get(key).data for key in keys]
    pipe.send(sum(int(image[::2, ::2].sum()) for image in held))
    pipe.recv()


def total_pss(workers: Sequence[Any]) -> int:
    """Return the memory of this process and the workers, in bytes."""
    gc.collect()
    processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in workers)]
    return sum(process.memory_full_info().pss for process in processes)


def measure(args: argparse.Namespace, folder: Path) -> bool:
    """Print what a step takes, and return whether it is as it must be."""
    from anygauge.data.media.loader import LoadedSource, MediaLoader
    from anygauge.data.media.store import FileStore
    from anygauge.plugins import load_plugins
    from anygauge.trainer.inputs import read_inputs

    config = make_config(folder, make_rows(folder, args.prompts, args.pixels))
    inputs = read_inputs(config, load_plugins(only=["cpu", "models"]))
    store = FileStore(folder / "media")
    loader = MediaLoader(store, inputs.media)
    context = multiprocessing.get_context("spawn")
    prompts = inputs.source.all()
    samples = [medium.key for prompt in prompts for _ in range(args.samples) for medium in prompt.media]
    pipes, workers = [], []
    for number in range(args.workers):
        ours, theirs = context.Pipe()
        part = samples[number :: args.workers]
        workers.append(context.Process(target=read_all, args=(folder / "media", part, theirs)))
        workers[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    fresh = total_pss(workers)
    source = LoadedSource(inputs.source, loader)
    source.next(args.prompts)  # a step before: from it stay the buffers that threads decode in
    before = total_pss(workers)
    drawn = source.next(args.prompts)
    for pipe in pipes:
        pipe.send("read")
    sums = [pipe.recv() for pipe in pipes]
    grown, held = total_pss(workers) - before, store.bytes()
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send("end")
        worker.join()
    del drawn, prompts
    gc.collect()
    left, decoded = store.bytes(), args.prompts * args.pixels**2 * 3
    loader.close()
    print(f"{len(samples)} samples, {args.workers} workers, checksum {sum(sums)}")
    for name, size, note in (
        ("decoded images", decoded, f"{args.samples} times that with one for each sample"),
        ("the store", held, f"{left} bytes when the prompts are gone"),
        ("a step before", before - fresh, "what is left of it: buffers of the threads that decode"),
        ("driver and workers", grown, f"more than after that step: {grown / decoded:.2f} times the images"),
    ):
        print(f"{name:20}{size / MIB:8.1f} MiB, {note}")
    return held == decoded and not left and grown < ALLOWED * decoded


def main() -> int:
    """Measure in a directory of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=992, help="of a side; a multiple of 32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return 0 if measure(args, Path(name)) else 1


if __name__ == "__main__":
    sys.exit(main())
