"""Time of the checksums of one replica check, which a rank takes every ``train.replica_check_every`` steps.

    python bench/replica_check.py --gib 0.25                       # on the host
    python bench/replica_check.py --backend cuda --gib 4 --tensors 400

A check reads at most 4 GiB of weights and gradients. Half of the bytes are bfloat16 weights and half float32
gradients, each divided into this number of tensors. ``per step`` is the time over the ten steps from one
check to the next. The time of the exchange through the store is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from anygauge.plugins import load_plugins
from anygauge.weight_sync.checksum import digests

STEPS, REPEATS = 10, 7


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--tensors", type=int, default=200)
    args = parser.parse_args()
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
    print(
        f"{total / 2**30:.2f} GiB in {len(tensors)} tensors: {check * 1e3:.2f} ms a check, "
        f"{total / check / 1e9:.0f} GB/s, {check / STEPS * 1e3:.3f} ms per step"
    )


if __name__ == "__main__":
    main()
