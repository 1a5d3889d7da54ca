"""Writing a directory keeps one shard in memory, and never two: measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import re, sys
from pathlib import Path
import torch
from anygauge.engines.hf_directory import write_directory

MIB = 2**20
def weights(sizes):
    for number, size in enumerate(sizes):
        yield f"w{number}", torch.full((size * MIB // 4,), float(number))
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

root, sizes = Path(sys.argv[1]), [int(each) for each in sys.argv[2:]]
(root / "source").mkdir()
(root / "source" / "config.json").write_text("{}")
write_directory(root / "warm", root / "source", weights([1, 1]), torch.float32, shard_bytes=MIB)
before = peak()
write_directory(root / "out", root / "source", weights(sizes), torch.float32, shard_bytes=100 * MIB)
print(peak() - before)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sizes", "files", "largest"),
    [([10] * 20, 2, 100), ([10] * 9 + [250] + [10] * 5, 3, 250), ([250, 90, 90], 3, 250)],
    ids=["small", "one larger than a shard", "the first larger than a shard"],
)
def test_peak_memory_is_less_than_two_shards(
    tmp_path: Path, sizes: list[int], files: int, largest: int
) -> None:
    """All sizes are in MiB; a file has 100, unless one tensor has more."""
    command = [sys.executable, "-c", MEASURE, str(tmp_path), *map(str, sizes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == files
    assert largest * 0.8 < int(done.stdout) < 2 * largest
