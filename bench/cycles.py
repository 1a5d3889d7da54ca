"""Some hundred turns of generate, train, sleep, wake and sync on one device leave nothing behind.

    python bench/cycles.py --backend cuda                                # 300 with a real SGLang
    python bench/cycles.py --backend cpu --engine fake --cycles 40 --every 10   # the order alone

A tiny model, and trainers and servers on the same device: in every cycle the servers sleep while the trainer
works, and take its weights when they wake. Every so many cycles it prints the memory of the device as its
driver sees it, and what this process, the workers and the servers have of the host's. Ends with status 1 if
one of them is larger at the end than after the first of these, by more than what allocators keep. 300 cycles
on a GPU are thought to take five minutes, the server's start one of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from colocation import SIZES, prompts_of, start, train

from anygauge.serving.colocation import ColocationScheduler
from anygauge_hooks.rl import SamplingParams

MIB = 2**20
GROWTH = {"device": 32, "host": 96}
"""MiB that an allocator may keep."""


def host_mib() -> float:
    """Return the memory that this process and all below it have to themselves."""
    total = 0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_full_info().uss
    return total / MIB


def cycles(
    count: int, every: int, cycle: Callable[[int], float], device_mib: Callable[[], float]
) -> list[tuple[int, float, float]]:
    """Go through them, and return the memory after some."""
    found, seconds = [], []
    for number in range(1, count + 1):
        started = time.perf_counter()
        difference = cycle(number)
        seconds.append(time.perf_counter() - started)
        if number % every == 0:
            found.append((number, device_mib(), host_mib()))
            print(
                f"{number:>6}  device {found[-1][1]:9.1f} MiB  host {found[-1][2]:9.1f} MiB  "
                f"{statistics.median(seconds[-every:]):6.3f} s a cycle  log-probs differ by {difference:.1e}",
                flush=True,
            )
    return found


def run(arguments: argparse.Namespace, directory: Path, stack: ExitStack) -> bool:
    """Return whether nothing has grown."""
    loaded, workers, colocation, engines, maker = start(
        arguments,
        directory,
        stack,
        lambda workers: ColocationScheduler(lambda state: workers.call("set_memory_state", state=state)),
    )
    prompts, rollout = prompts_of(loaded), loaded.config.rollout
    params, count = SamplingParams(max_new_tokens=rollout.max_new_tokens), rollout.samples_per_prompt

    def cycle(number: int) -> float:
        seeds = [[number * 1000 + row * count + each for each in range(count)] for row in range(len(prompts))]
        groups = maker.sample(prompts, params, seeds)
        colocation.enter("train")
        difference = train(workers, loaded, groups)
        engines.sync(number)
        return difference

    def device_mib() -> float:
        memory = workers.call("memory")[0]
        return (memory["total"] - memory["free"]) / MIB

    found = cycles(arguments.cycles, arguments.every, cycle, device_mib)
    (_, device, host), (_, last_device, last_host) = found[0], found[-1]
    print(
        f"from cycle {found[0][0]} to {found[-1][0]}: device {last_device - device:+.1f} MiB, "
        f"host {last_host - host:+.1f} MiB"
    )
    is_host = arguments.backend == "cpu"
    return (is_host or last_device - device <= GROWTH["device"]) and last_host - host <= GROWTH["host"]


def main() -> int:
    """Run it and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--engine", default="sglang", choices=["sglang", "fake"])
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument(
        "--server", action="append", default=[], help="an argument of SGLang's server: NAME=VALUE"
    )
    arguments = parser.parse_args()
    if arguments.cycles < 2 * arguments.every:
        parser.error("--cycles must be twice --every at least: the memory is compared")
    with tempfile.TemporaryDirectory(prefix="anygauge-bench-") as directory, ExitStack() as stack:
        return 0 if run(arguments, Path(directory), stack) else 1


if __name__ == "__main__":
    sys.exit(main())
