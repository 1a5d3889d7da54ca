"""Cost of the replica check, which ranks make every ``train.replica_check_every`` steps (10 by default).

    python bench/replica_check.py --gib 0.25                       # checksums alone, on the host
    python bench/replica_check.py --backend cuda --gib 4 --tensors 400
    python bench/replica_check.py --steps 40 --shape tiny thin     # whole checks between steps of two ranks

A check reads at most 4 GiB of weights and gradients. Half of the bytes are bfloat16 weights and half float32
gradients, each divided into this number of tensors. ``per step`` is the time over the ten steps from one
check to the next. The exchange through the store is in the figures of ``--steps`` alone.

With ``--steps``, two data-parallel ranks on one host take train steps of a model with random weights; every
second step makes a check. The cost is the median of the check itself on rank 0, the sums of gradients before
and after their reduction and waiting for the other rank included, over ten times the median of steps without
one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel_step import TIMEOUT_S, Layout, Steps
from train_step import SHAPES

from anygauge.distributed.process_groups import destroy_process_group, init_process_group
from anygauge.plugins import load_plugins
from anygauge.weight_sync.checksum import digests
from anygauge_hooks.engines import WorkerContext

STEPS, REPEATS, RANKS = 10, 7, 2


def main() -> None:
    """Print one line, or one for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--steps", type=int, help="measure whole checks in this number of train steps")
    parser.add_argument("--shape", nargs="+", default=["tiny"], choices=sorted(SHAPES))
    parser.add_argument("--sequences", type=int, default=8, help="of each rank, with --steps")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence, with --steps")
    args = parser.parse_args()
    if args.steps is None:
        print(checksums(args))
        return
    for shape in args.shape:
        print(between_steps(shape, args), flush=True)


def checksums(args: argparse.Namespace) -> str:
    """Return the line of the checksums alone."""
    plugins = load_plugins()
    device = plugins.make_device(plugins.get("register_backends", args.backend), 0)
    half = int(args.gib * 2**30 / 2 / args.tensors)
    tensors = [
        torch.randn(half // dtype.itemsize // 64 * 64, device=device.torch_device, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for _ in range(args.tensors)
    ]
    seconds = []
    for _ in range(REPEATS):
        device.synchronize()
        start = time.perf_counter()
        digests(tensors).cpu()
        seconds.append(time.perf_counter() - start)
    check = statistics.median(seconds[1:])
    total = sum(tensor.nbytes for tensor in tensors)
    return (
        f"{total / 2**30:.2f} GiB in {len(tensors)} tensors: {check * 1e3:.2f} ms a check, "
        f"{total / check / 1e9:.0f} GB/s, {check / STEPS * 1e3:.3f} ms per step"
    )


# -------------------------------------------------------------------------
# Between train steps
# -------------------------------------------------------------------------


def between_steps(shape: str, args: argparse.Namespace) -> str:
    """Return the line of whole checks, from two ranks of their own."""
    plugins = load_plugins()
    backend = plugins.get("register_backends", args.backend)
    network: dict[str, Any] = {"interface": None, "ip_version": "any", "timeout_s": TIMEOUT_S}
    network["train_engine"] = "megatron"
    os.environ |= plugins.worker_env(backend, role="actor", deterministic=False, **network)
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPES[shape]))
        ranks = [
            context.Process(target=run_rank, args=(rank, directory, vars(args), out), daemon=True)
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        size, steps, checks = out.get(timeout=TIMEOUT_S * 5)
        for rank in ranks:
            rank.join(10)
            rank.kill()
    step, check = statistics.median(steps), statistics.median(checks)
    return (
        f"{shape}, {size / 2**20:.1f} MiB: {step * 1e3:.1f} ms a step, {check * 1e3:.2f} ms a check, "
        f"{check / STEPS / step:.2%} of a step"
    )


def run_rank(rank: int, directory: str, options: dict[str, Any], out: Any) -> None:
    """Take steps, every second one with a check, and put the seconds of both into a queue."""
    torch.set_num_threads(1)
    plugins = load_plugins()
    backend = plugins.get("register_backends", options["backend"])
    plugins.prepare_worker(backend, "actor", "before_vendor_import")
    device = plugins.make_device(backend, rank)
    from anygauge.engines.megatron.prepare import prepare_megatron

    prepare_megatron(plugins, backend)
    store = dist.FileStore(f"{directory}/store")
    init_process_group(
        plugins, backend, store, rank=rank, world_size=RANKS, timeout_s=TIMEOUT_S, single_host=True
    )
    context = WorkerContext(rank=rank, world_size=RANKS, backend=backend, device=device, plugins=plugins)
    taken = Steps(Layout(world=RANKS), Path(directory), context, options)
    from anygauge.engines.megatron import reduction_check

    replicas: Any = taken.engine._replicas
    reductions: Any = taken.engine._reductions
    steps: list[float] = []
    checks: list[float] = []

    spent: list[float] = []

    def timed(function: Any) -> Any:
        def call(*given: Any) -> Any:
            device.synchronize()
            start = time.perf_counter()
            try:
                return function(*given)
            finally:
                device.synchronize()
                spent.append(time.perf_counter() - start)

        return call

    replicas.check_step, reductions.report = timed(replicas.check_step), timed(reductions.report)
    reduction_check.weighted_sum = timed(reduction_check.weighted_sum)
    for number in range(options["steps"]):
        replicas._every = number % 2
        spent.clear()
        start = time.perf_counter()
        taken.take()
        device.synchronize()
        if replicas._every:
            checks.append(sum(spent))
        else:
            steps.append(time.perf_counter() - start)
    if rank == 0:
        size = sum(each.tensor.nbytes for each in (*replicas._weights, *replicas._gradients))
        out.put((size, steps[1:], checks[1:]))
    dist.barrier()
    destroy_process_group()


if __name__ == "__main__":
    main()
