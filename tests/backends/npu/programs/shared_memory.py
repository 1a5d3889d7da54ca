"""A tensor of a simulated NPU in two processes. Run by ``test_simulation.py``, inside the launcher.

The second process sees the second device alone, as its only one.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys

import torch
from torch_npu.multiprocessing import reductions

from anygauge.weight_sync.sharing import serialized
from simulation.simulated import install

DEVICE = 6
"""Which argument of torch-npu's function says the device: an id, which the receiver looks up."""


def main() -> None:
    """Share a tensor, let another process write into it, and print what it holds then."""
    install()
    shared = torch.arange(8.0, device="npu:1")[2:6]
    other = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, serialized(shared)],
        env=os.environ | {"ASCEND_RT_VISIBLE_DEVICES": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    sys.stdout.write(f"{other.stdout}{shared.cpu().tolist()}\n")


def write(text: str) -> None:
    """Map the tensor on the device that has its id, print it, and write into it."""
    install()
    ids = {str(torch.npu.get_device_properties(i).uuid): i for i in range(torch.npu.device_count())}
    rebuild = reductions.rebuild_npu_tensor
    reductions.rebuild_npu_tensor = lambda *given: rebuild(
        *given[:DEVICE], ids[given[DEVICE]], *given[DEVICE + 1 :]
    )
    found = pickle.loads(base64.b64decode(text))
    sys.stdout.write(f"{found.cpu().tolist()} {found.device}\n")
    found.mul_(10)


if __name__ == "__main__":
    write(sys.argv[1]) if len(sys.argv) > 1 else main()
