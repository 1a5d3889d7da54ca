"""Measure the data source on many rows: first pass, later start, drawing, and memory.

    python bench/data.py [--rows 1000000] [--directory DIR]

Rows are additions of two numbers with an answer and a level, about 50 bytes each. The first pass and the
later start run in processes of their own, so that the second finds nothing in memory that the first left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

BATCHES, BATCH = 1000, 128


def main() -> None:
    """Make the rows, measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, help="for the rows and the cache; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        path = Path(directory) / "train.jsonl"
        make_rows(path, arguments.rows)
        print(f"{arguments.rows} rows, {path.stat().st_size / 2**20:.0f} MiB")
        print(f"{'':<12}{'seconds':>9}{'memory after, MiB':>19}{'peak, MiB':>11}")
        for name, draw in (("first pass", False), ("later start", True)):
            measured = in_process(measure, path, draw)
            print_line(name, measured["start"])
        print_line("drawing", measured["draw"])
        print(f"  = {1000 * measured['draw'][0] / BATCHES:.2f} ms for a batch of {BATCH}")


def make_rows(path: Path, count: int) -> None:
    """Write additions with their answers."""
    numbers = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            one, other = numbers.randrange(1000), numbers.randrange(1000)
            row = {"prompt": f"{one}+{other}=", "label": str(one + other), "level": one % 7}
            stream.write(json.dumps(row) + "\n")


def print_line(name: str, measured: Sequence[float]) -> None:
    """Print seconds, memory after and peak."""
    seconds, after, peak = measured
    print(f"{name:<12}{seconds:9.2f}{after:19.0f}{peak:11.0f}")


def in_process(function: Callable[..., None], *arguments: object) -> dict[str, Sequence[float]]:
    """Return what a function sends from a fresh process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(sender, *arguments))
    process.start()
    sender.close()
    measured: dict[str, Sequence[float]] = receiver.recv()
    process.join()
    return measured


def measure(sender: Connection, path: Path, draw: bool) -> None:
    """Open the source and send seconds and MiB above what the process had before."""
    from anygauge.config.schema import Data, DataFile
    from anygauge.data.source import FileSource
    from anygauge.testing.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(path.parent / "model", alphabet="0123456789+=")
    tokenizer(["1+1="])
    before = psutil.Process().memory_info().rss
    config = Data(train=(DataFile(path=str(path)),), cache=path.parent / "cache")

    def since(started: float) -> tuple[float, float, float]:
        seconds = time.perf_counter() - started
        memory = (psutil.Process().memory_info().rss, peak_memory())
        return (seconds, *((number - before) / 2**20 for number in memory))

    started = time.perf_counter()
    source = FileSource(config, tokenizer, seed=1)
    measured = {"start": since(started)}
    if draw:
        started = time.perf_counter()
        for _ in range(BATCHES):
            source.next(BATCH)
        measured["draw"] = since(started)
    sender.send(measured)


def peak_memory() -> int:
    """Return the most memory that this process has had resident, in bytes."""
    status = Path(f"/proc/{os.getpid()}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
