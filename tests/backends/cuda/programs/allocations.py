"""Memory that torch's allocator gives back, and out-of-memory errors. Used by test_on_a_gpu.

``allocations.py share FILE`` writes down where a bucket is, and then runs out of memory; ``map FILE``, a
process that is no relative of the first, reads the bucket.
"""

from __future__ import annotations

import base64
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from anygauge.weight_sync.sharing import serialized
from anygauge_cuda import diagnosis
from anygauge_cuda.device import CudaDevice

SIZE = 64 << 20
PATIENCE_S = 60.0
DEVICE = 6
"""Which argument of torch's function is the device, told by its unique id."""


def share(file: Path) -> None:
    device = CudaDevice(0)
    held = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    print("trainer", segment(held)["is_expandable"])
    del held  # leaves a block of the size that is wanted next
    with device.shareable():
        bucket = torch.full((SIZE,), 3, dtype=torch.uint8, device="cuda")
    after = torch.ones(2 * SIZE, dtype=torch.uint8, device="cuda")
    print("bucket", segment(bucket)["is_expandable"], "after", segment(after)["is_expandable"])
    device.synchronize()
    temporary = file.with_suffix(".part")
    temporary.write_text(serialized(bucket))
    temporary.rename(file)
    wait_for(file.with_suffix(".read"))
    run_out_of_memory(device, file)


def segment(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what the allocator says of the memory that a tensor lies in."""
    at, found = tensor.data_ptr(), torch.cuda.memory_snapshot()
    return next(each for each in found if each["address"] <= at < each["address"] + each["total_size"])


def run_out_of_memory(device: CudaDevice, file: Path) -> None:
    diagnosis.write_diagnosis(str(file))
    try:
        torch.empty(device.memory()["total"], dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("snapshot", file.with_suffix(".memory.pickle").stat().st_size > 0)


def map_bucket(file: Path) -> None:
    rebuild = reductions.rebuild_cuda_tensor
    reductions.rebuild_cuda_tensor = lambda *given: rebuild(*given[:DEVICE], 0, *given[DEVICE + 1 :])
    torch.cuda.init()
    wait_for(file)
    bucket = pickle.loads(base64.b64decode(file.read_text()))
    print("mapped", int(bucket.sum()) == 3 * SIZE)
    del bucket
    torch.cuda.ipc_collect()
    file.with_suffix(".read").touch()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.02)


if __name__ == "__main__":
    {"share": share, "map": map_bucket}[sys.argv[1]](Path(sys.argv[2]))
