"""A Hugging Face directory that cannot be written: said in one line, and nothing left behind."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from anygauge.engines import hf_directory as hf
from anygauge_hooks.errors import CheckpointError


def weights() -> Iterator[tuple[str, Tensor]]:
    yield "w", torch.zeros(2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    return tmp_path / "source"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("I/O error")])
def test_a_full_disk(error: Exception, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(hf, "save_file", save_file)
    with pytest.raises(CheckpointError, match=r"hf cannot be written: .*\n.*--resume") as caught:
        hf.write_directory(source.parent / "hf", source, weights(), torch.float32)
    assert caught.value.__cause__ is error
    assert [path.name for path in source.parent.iterdir()] == ["source"]


def test_a_target_below_a_file(source: Path) -> None:
    target = source / "config.json" / "hf"
    with pytest.raises(CheckpointError, match=r"cannot be written: .*Not a directory"):
        hf.write_directory(target, source, weights(), torch.float32)
