"""One of two ranks over NCCL: ``two_gpus.py RANK FILE``. Rank 1 leaves rank 0 alone with the second sum.

Used by test_on_a_gpu. The store is at FILE; the log would be beside it.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.distributed import FileStore, all_reduce

from anygauge.distributed.process_groups import init_process_group
from anygauge.plugins import load_plugins

LIMIT_S = 6.0
os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "5000"  # torch waits a minute for what others have to say

rank, file = int(sys.argv[1]), sys.argv[2]
plugins = load_plugins(only=["cpu", "cuda"])
backend = plugins.get("register_backends", "cuda")
network = {"interface": None, "ip_version": "any", "timeout_s": LIMIT_S, "deterministic": False}
os.environ.update(plugins.worker_env(backend, role="actor", **network))
plugins.prepare_worker(backend, "actor", "before_vendor_import")
device = plugins.make_device(backend, rank)
plugins.prepare_worker(backend, "actor", "after_config", config=object(), log=f"{file}-{rank}.log")
init_process_group(
    plugins,
    backend,
    FileStore(file, 2),
    rank=rank,
    world_size=2,
    timeout_s=LIMIT_S,
    single_host=True,
)
group = torch.distributed.group.WORLD
options = group._get_backend(device.torch_device).options
print("options", options._timeout.total_seconds(), options.config.max_ctas, flush=True)
mine = torch.full((1 << 20,), float(rank + 1), device=device.torch_device)
all_reduce(mine)
device.synchronize()
print("sum", mine.mean().item(), flush=True)
if rank == 1:
    time.sleep(3 * LIMIT_S)
    os._exit(0)
all_reduce(mine)
device.synchronize()
print("not reached", flush=True)
