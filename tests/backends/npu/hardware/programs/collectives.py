"""Start two ranks, run the collectives of training and weight transport, and print what failed as JSON.

python collectives.py
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from anygauge.plugins import load_plugins, select_backend

RANKS = 2
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def main() -> None:
    """Start the ranks and collect what they say."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    plugins = load_plugins()
    backend, _ = select_backend(plugins, "npu")
    network: dict[str, Any] = {"interface": None, "ip_version": "any"}
    env = plugins.worker_env(backend, role="actor", deterministic=False, timeout_s=120.0, **network)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), port],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    sys.stdout.write(json.dumps([json.loads(output.splitlines()[-1]) for output in outputs]) + "\n")


def rank_main(rank: int, port: int) -> None:
    """Join the group, run every check, and report."""
    plugins = load_plugins()
    backend, _ = select_backend(plugins, "npu")
    plugins.prepare_worker(backend, "actor", "before_vendor_import")
    device = plugins.make_device(backend, rank).torch_device
    timeout = timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0, timeout=timeout)
    options = plugins.first(
        "make_process_group_options", backend=backend, group_name="default", timeout_s=120.0
    )
    dist.init_process_group(
        backend.dist_backend,
        store=store,
        rank=rank,
        world_size=RANKS,
        timeout=timeout,
        pg_options=options,
    )
    failed = [name for name, check in checks(rank, device) if not check()]
    dist.barrier()
    report = {"rank": rank, "backend": dist.get_backend(), "failed": failed}
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(report) + "\n")


def checks(rank: int, device: torch.device) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield each check by its name; every rank runs them in this order."""
    other = 1 - rank

    def filled(value: float, dtype: torch.dtype = torch.float32, size: int = 1000) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    def all_reduce(dtype: torch.dtype) -> bool:
        tensor = filled(rank + 1, dtype)
        dist.all_reduce(tensor)
        return bool((tensor == 3).all())

    def gathered() -> bool:
        whole = filled(0, size=2000)
        dist.all_gather_into_tensor(whole, filled(rank + 1))
        return bool((whole[:1000] == 1).all() and (whole[1000:] == 2).all())

    def scattered() -> bool:
        part = filled(0, size=500)
        dist.reduce_scatter_tensor(part, filled(rank + 1))
        return bool((part == 3).all())

    def exchanged() -> bool:
        send, receive = [3, 5] if rank == 0 else [7, 2], [3, 7] if rank == 0 else [5, 2]
        result = filled(-1, size=sum(receive))
        dist.all_to_all_single(result, filled(rank, size=sum(send)), receive, send)
        return bool((result == torch.tensor([0.0] * receive[0] + [1.0] * receive[1], device=device)).all())

    def sent() -> bool:
        received = filled(-1)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, filled(rank), other), dist.P2POp(dist.irecv, received, other)]
        ):
            work.wait()
        return bool((received == other).all())

    def broadcast() -> bool:
        tensor = filled(rank, torch.uint8, 1 << 26)  # a bucket of weights
        dist.broadcast(tensor, 0)
        return bool((tensor == 0).all())

    def objects() -> bool:
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, {"rank": rank})
        return found == [{"rank": each} for each in range(RANKS)]

    for dtype in DTYPES:
        yield f"all_reduce {dtype}", lambda dtype=dtype: all_reduce(dtype)  # type: ignore[misc]
    yield from (("all_gather", gathered), ("reduce_scatter", scattered), ("all_to_all", exchanged))
    yield from (("send and receive", sent), ("broadcast", broadcast), ("objects", objects))


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else rank_main(*map(int, sys.argv[1:]))
