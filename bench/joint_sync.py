"""How fast several senders give a server their parts of the weights, in turn, beside one sender of all.

    python bench/joint_sync.py                                    # gloo, 256 MiB, one and two senders
    python bench/joint_sync.py --backend cuda --mib 8192 --bucket 1024 --senders 1 2

Each sender is a process. All are on the first device and the server, a fake engine, is on the second, so two
GPUs do: a group for weights has one sender and the server, and the senders agree over gloo. A training run
cannot be placed like that, because NCCL wants a device for each of its ranks. Prints median seconds after two
updates that make groups and buffers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

WIDTH, MIB, SPARE_ROUNDS = 2048, 2**20, 2
DEADLINE_S = 120.0


def send(rank: int, senders: int, store: str, address: str, arguments: argparse.Namespace, out: Any) -> None:
    """Send one part of the weights several times; the first rank tells the seconds."""
    import torch
    import torch.distributed as dist

    from anygauge.plugins import load_plugins
    from anygauge.serving.sglang.weights import SGLangPeer
    from anygauge.weight_sync.pusher import make_pusher
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.sglang import WeightApi

    plugins = load_plugins()
    backend = plugins.get("register_backends", arguments.backend)
    plugins.prepare_worker(backend, "actor", "before_vendor_import")
    device = plugins.make_device(backend, 0)
    dist.init_process_group("gloo", store=dist.FileStore(store, senders), rank=rank, world_size=senders)
    context = WorkerContext(rank=rank, world_size=senders, backend=backend, device=device, plugins=plugins)
    pusher = make_pusher(make_config(arguments.bucket * MIB), context)
    peer = SGLangPeer(address=address, api=WeightApi(checksums="none"))
    count = arguments.mib * MIB // (2 * WIDTH * WIDTH) // senders
    own = [torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device.torch_device) for _ in range(count)]

    def part(sender: int) -> Iterator[tuple[str, Any]]:
        if sender == rank:
            yield from ((f"model.layers.{sender}.{number}.weight", each) for number, each in enumerate(own))

    for version in range(1, arguments.rounds + SPARE_ROUNDS + 1):
        device.synchronize()
        parts = {sender: part(sender) for sender in range(senders)}
        report = pusher.push_jointly(parts, version, [peer], rank=rank)
        if report is not None:
            assert not report.failed, report
            out.put((report.seconds["total"], report.seconds["move"], report.bytes))
    pusher.close()
    dist.destroy_process_group()


def make_config(bucket_bytes: int) -> Any:
    """Return a config with the transport and this size of buckets."""
    from anygauge_tests.engine_config import engine_config

    sync = {"transport": "distributed", "bucket_bytes": bucket_bytes, "verify": "none"}
    return engine_config("none", weight_sync={**sync, "deadline_s": DEADLINE_S})


def measure(senders: int, address: str, arguments: argparse.Namespace, visible: dict[str, str]) -> None:
    """Let so many senders send, and print the medians."""
    spawn = multiprocessing.get_context("spawn")
    out = spawn.Queue()
    rounds = arguments.rounds + SPARE_ROUNDS
    with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, visible):
        given = (senders, str(Path(directory) / "store"), address, arguments, out)
        processes = [spawn.Process(target=send, args=(rank, *given), daemon=True) for rank in range(senders)]
        for process in processes:
            process.start()
        found = [out.get(timeout=2 * DEADLINE_S) for _ in range(rounds)][SPARE_ROUNDS:]
        for process in processes:
            process.join()
    total, move = (statistics.median(each[side] for each in found) for side in (0, 1))
    rate = found[0][2] / total / 1e9
    print(f"{senders} senders: {total:.4f} s an update, {move:.4f} s of it sending, {rate:.2f} GB/s")


def main() -> None:
    """Measure each number of senders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--bucket", type=int, default=64, help="MiB")
    parser.add_argument("--senders", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    from anygauge.plugins import load_plugins
    from anygauge_tests.fake_engine import FakeServer, Options

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = load_plugins().get("register_backends", arguments.backend)
    name = backend.visible_devices_env
    own, other = ({name: number} if name else {} for number in ("0", "1"))
    with patch.dict(os.environ, other):
        server = FakeServer(Options(device=backend.device_type))
        server.start()
    with closing(server):
        for senders in arguments.senders:
            measure(senders, server.address, arguments, own)


if __name__ == "__main__":
    main()
