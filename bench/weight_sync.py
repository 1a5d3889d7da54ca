"""How fast trained weights get to servers, beside a bare broadcast of the same bytes.

    python bench/weight_sync.py                      # 512 MiB of bfloat16 weights, one server, five rounds
    python bench/weight_sync.py --mib 1024 --buckets 128

The server is the fake engine in a process of its own: it takes and keeps the bytes as SGLang's loader does,
and runs no model. In each round every transport moves a whole version, and two bare processes broadcast one
buffer of the same size with gloo, in turn; the median seconds are compared. `delta` then moves smaller steps,
and its bytes on the wire are compared with those of the elements that changed and of the whole version: steps
of Adam with learning rates of 1e-6 and 1e-5, in which every element moves by the whole rate, and rows of some
tensors (new experts, new tokens). A network slower than the printed rate makes the whole version take longer
than all of `delta` did. Ends with status 1 if `distributed` has less than 60 % of the bare broadcast's rate,
or if `delta` moves more than 1.1 times the changed bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from anygauge.config.schema import WeightSync
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.weight_sync.broadcast import Rendezvous, join_group
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.pusher import WeightPusher
from anygauge.weight_sync.receiver import Receiver
from anygauge.weight_sync.report import SyncReport
from anygauge.weight_sync.sharing import shared_memory
from anygauge.weight_sync.transports.delta import DeltaTransport
from anygauge.weight_sync.transports.disk import DiskTransport
from anygauge.weight_sync.transports.distributed import DistributedTransport
from anygauge.weight_sync.transports.tensor import TensorTransport
from anygauge_hooks.weights import WeightTransport
from anygauge_tests.fake_engine import FakeServer

GOAL_RATE, GOAL_BYTES = 0.6, 1.1
DEADLINE_S = 300.0
WIDTH = 2048
MIB = 2**20
RATES = (1e-6, 1e-5)


def weights(size: int) -> dict[str, Tensor]:
    """Return the float32 master weights of matrices that are so many bytes in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 * WIDTH
    return {
        f"model.layers.{layer}.mlp.down_proj.weight": 0.02 * torch.randn(rows, WIDTH, generator=generator)
        for layer in range(max(1, size // (2 * rows * WIDTH)))
    }


def listen(port: int, size: int, rounds: int) -> None:
    """Take a bare broadcast several times; the other process of the comparison."""
    torch.set_num_threads(1)
    group = join_group(
        "127.0.0.1", port, rank=1, world_size=2, name="bare", backend="gloo", timeout_s=DEADLINE_S
    )
    data = torch.empty(size, dtype=torch.uint8)
    for _ in range(rounds):
        group.start(data)
    group.close()


class Bare:
    """Two processes and nothing between them but a broadcast."""

    def __init__(self, size: int, rounds: int) -> None:
        rendezvous = Rendezvous("127.0.0.1", timeout_s=DEADLINE_S)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=listen, args=(rendezvous.port, size, rounds), daemon=True)
        self._process.start()
        self._data = torch.zeros(size, dtype=torch.uint8)
        self._group = join_group(
            rendezvous.host,
            rendezvous.port,
            rank=0,
            world_size=2,
            name="bare",
            backend="gloo",
            timeout_s=DEADLINE_S,
            store=rendezvous.store,
        )

    def seconds(self) -> float:
        """Broadcast the buffer once."""
        start = time.perf_counter()
        self._group.start(self._data)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the other process."""
        self._process.join()
        self._group.close()


def push(pusher: WeightPusher, tensors: Mapping[str, Tensor], version: int, peer: SGLangPeer) -> SyncReport:
    """Move a version, or stop."""
    report = pusher.push(tensors.items(), version, [peer])
    if report.failed:
        sys.exit(f"{report.transport}: {report.failed[0].error}")
    return report


def make(name: str, directory: Path, bucket_bytes: int) -> WeightPusher:
    """Return a sender, without verification: it is of the first update of a run, and not of each."""
    transports: dict[str, Callable[[], WeightTransport]] = {
        "tensor": TensorTransport,
        "disk": lambda: DiskTransport(directory, directory / "none"),
        "distributed": lambda: DistributedTransport("cpu", {"cpu": "gloo"}, deadline_s=DEADLINE_S),
        "delta": lambda: DeltaTransport(deadline_s=DEADLINE_S),
    }
    allocate = shared_memory if name == "tensor" else partial(torch.empty, dtype=torch.uint8)
    options = WeightSync(transport=name, bucket_bytes=bucket_bytes, verify="none", deadline_s=DEADLINE_S)
    return WeightPusher(options, transports[name](), Buffers(allocate))


def changed_bytes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> int:
    """Return the bytes of the elements that differ."""
    return sum(int((old[name] != tensor).sum()) * tensor.itemsize for name, tensor in new.items())


def steps(master: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the next versions: after steps of Adam, and after other rows in every fourth tensor."""
    generator = torch.Generator().manual_seed(1)
    signs = {name: _signs(tensor) for name, tensor in tensors.items()}
    after = {}
    for rate in RATES:
        master = {name: tensor + signs[name] * rate for name, tensor in master.items()}
        after[f"step of {rate:.0e}"] = {name: tensor.bfloat16() for name, tensor in master.items()}
    rows = {name: tensor.bfloat16() for name, tensor in master.items()}
    for tensor in list(rows.values())[::4]:
        tensor[64:192] = torch.randn(128, WIDTH, generator=generator).bfloat16() * 0.02
    return {**after, "rows": rows}


def _signs(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)).sign()


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--buckets", type=int, default=64, help="MiB of a bucket")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    master = weights(given.mib * MIB)
    tensors = {name: tensor.bfloat16() for name, tensor in master.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    names = ("distributed", "tensor", "disk")
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", *names)}
    with tempfile.TemporaryDirectory() as directory, FakeServer() as server:
        peer = SGLangPeer(address=server.address)
        pushers = {name: make(name, Path(directory) / name, given.buckets * MIB) for name in names}
        bare = Bare(size, given.rounds + 1)
        for version in range(given.rounds + 1):  # the first one makes groups and buffers
            found = {"bare": bare.seconds()}
            for name, pusher in pushers.items():
                found[name] = push(pusher, tensors, version, peer).seconds["total"]
            if version:
                for name, value in found.items():
                    seconds[name].append(value)
        bare.close()
        for pusher in pushers.values():
            pusher.close()
        moved = delta(server.address, master, tensors, given.buckets * MIB)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{size / MIB:.0f} MiB in {len(tensors)} tensors, "
        f"buckets of {given.buckets} MiB, {given.rounds} rounds"
    )
    for name, value in medians.items():
        rate = size / MIB / value
        print(f"{name:12} {value:7.3f} s  {rate:7.0f} MiB/s  {medians['bare'] / value:6.2f} of bare")
    for name, (wire, changed, passed) in moved.items():
        print(
            f"delta, {name:13} {changed:12,} bytes changed ({changed / size:.2%}), {wire:12,} moved: "
            f"{wire / changed:.3f} of them, {wire / size:.2%} of all, {passed:.2f} s, "
            f"pays off below {8e-9 * (size - wire) / passed:.2f} Gbit/s"
        )
    is_fast = medians["bare"] / medians["distributed"] >= GOAL_RATE
    is_small = all(wire <= GOAL_BYTES * changed for wire, changed, _ in moved.values())
    print("goals reached" if is_fast and is_small else "a goal is missed")
    return 0 if is_fast and is_small else 1


def delta(
    address: str, master: Mapping[str, Tensor], tensors: Mapping[str, Tensor], bucket_bytes: int
) -> dict[str, tuple[int, int, float]]:
    """Return for each step the bytes that moved, those of the elements that changed, and the seconds."""
    beside = Receiver(
        SGLangPeer(address=address), host="127.0.0.1", bucket_bytes=bucket_bytes, deadline_s=DEADLINE_S
    )
    peer = SGLangPeer(address=address, receiver=beside.address, secret=beside.secret)
    pusher = make("delta", Path(), bucket_bytes)
    push(pusher, tensors, 1, peer)
    before, found = tensors, dict[str, tuple[int, int, float]]()
    for version, (name, after) in enumerate(steps(master, tensors).items(), start=2):
        report = push(pusher, after, version, peer)
        found[name] = (report.wire_bytes, changed_bytes(before, after), report.seconds["total"])
        before = after
    pusher.close()
    beside.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
