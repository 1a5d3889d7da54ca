"""A run that waits for a checkpoint says how far it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anygauge.run_directory.write_progress import WriteProgress, expected_bytes

GIB = 2**30


def write(path: Path, size: int) -> None:
    """Write a file that has some of the bytes of a tensor of 20 GiB; none of them takes room."""
    tensor = {"dtype": "F32", "shape": [5 * GIB], "data_offsets": [0, 20 * GIB]}
    header = json.dumps({"__metadata__": {"by": "a test"}, "weight": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, size)


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_bytes_rate_and_the_time_that_is_left_are_said_every_few_seconds(
    tmp_path: Path, clock: Clock
) -> None:
    lines: list[str] = []
    (tmp_path / "critic").mkdir()
    progress = WriteProgress(tmp_path, "step-4", lines.append, clock)
    for clock.now, size in ((1.0, 4), (2.0, 4 * GIB), (6.9, 5 * GIB), (7.0, 14 * GIB), (12.0, 21 * GIB)):
        write(tmp_path / "critic" / "rank-00000.safetensors", size)
        progress.update()
    start = "waiting for the checkpoint step-4: "
    assert lines == [
        f"{start}4.0 of 20.0 GiB written, 2.00 GiB/s, 8 s left",
        f"{start}14.0 of 20.0 GiB written, 2.00 GiB/s, 3 s left",
        f"{start}21.0 of 21.0 GiB written, being flushed and verified",
    ]


def test_what_is_written_before_the_wait_does_not_count_in_the_rate(tmp_path: Path, clock: Clock) -> None:
    lines: list[str] = []
    write(tmp_path / "rank-00000.safetensors", 8 * GIB)
    progress = WriteProgress(tmp_path, "step-4", lines.append, clock)
    clock.now = 2.0
    progress.update()
    assert lines == ["waiting for the checkpoint step-4: 8.0 of 20.0 GiB written"]


def test_a_header_that_is_not_whole_yet_is_no_error(tmp_path: Path, clock: Clock) -> None:
    lines: list[str] = []
    progress = WriteProgress(tmp_path, "step-4", lines.append, clock)
    for content in (b"", b"\x10\0\0\0\0\0\0\0{", b"\xff" * 9):
        (tmp_path / "rank-00000.safetensors").write_bytes(content)
        clock.now += 10.0
        progress.update()
    nothing = "waiting for the checkpoint step-4: 0.0 of 0.0 GiB written, being flushed and verified"
    assert lines == [nothing] * 3


def test_the_size_of_an_export_is_that_of_the_model_in_another_dtype(tmp_path: Path) -> None:
    assert expected_bytes(tmp_path, 2) == 0
    for name in ("model-1.safetensors", "model-2.safetensors"):
        write(tmp_path / name, GIB)
    assert expected_bytes(tmp_path, 2) == 2 * 5 * GIB * 2
    (tmp_path / "model-3.safetensors").write_bytes(b"no header")
    assert expected_bytes(tmp_path, 2) == 0
