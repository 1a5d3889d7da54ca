"""One reader of a directory's weight files, for the check, the trainer and the rollout engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anygauge.config.model_files import missing_parts, read_model
from anygauge.engines.hf_directory import open_tensors
from anygauge.hub.weight_files import INDEX, weight_files
from anygauge.plugins import load_plugins
from anygauge.serving.embedded.weights import read_weights
from anygauge_hooks.errors import CheckpointError

WRONG = {
    "no JSON": ("{", "cannot be read"),
    "not UTF-8": (b"\xff", "cannot be read"),
    "a list": ("[]", "cannot be read"),
    "no map": ("{}", "cannot be read"),
    "a map that is none": ('{"weight_map": 3}', "cannot be read"),
    "an empty map": ('{"weight_map": {}}', "names no file"),
    "a number for a file": ('{"weight_map": {"a": 3}}', "names 3, which is not a file"),
    "a list for a file": ('{"weight_map": {"a": []}}', "cannot be read"),
    "a file elsewhere": ('{"weight_map": {"a": "../x.safetensors"}}', "is not a file of this directory"),
    "an absolute file": ('{"weight_map": {"a": "/x.safetensors"}}', "is not a file of this directory"),
    "a file that is missing": ('{"weight_map": {"a": "x.safetensors"}}', "x.safetensors"),
}


@pytest.fixture
def directory(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def test_a_single_file_comes_before_an_index_as_in_transformers(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
    assert {path.name for path in weight_files(directory)} == names
    assert missing_parts(directory) == read_model(directory, load_plugins(only=["cpu", "models"]))[1] == []
    assert not caplog.messages
    both = {name: tensor for path in weight_files(directory) for name, tensor in load_file(path).items()}
    other = {name: tensor + 1 for name, tensor in both.items()}
    save_file(other, directory / "model.safetensors", metadata={"format": "pt"})
    assert weight_files(directory) == [directory / "model.safetensors"]
    assert read_model(directory, load_plugins(only=["cpu", "models"]))[1] == []
    warned = f"{directory}: model.safetensors is read, as transformers does, and not {INDEX}"
    assert caplog.messages == [warned]
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    name, tensor = next((name, value) for name, value in model.state_dict().items() if name in other)
    assert tensor.equal(other[name].float())


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_index_is_an_error_of_every_reader(directory: Path, case: str) -> None:
    text, expected = WRONG[case]
    (directory / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=expected), open_tensors(directory):
        pass
    with pytest.raises(CheckpointError, match=expected):
        next(read_weights(directory))
    assert any(expected in problem for problem in missing_parts(directory))


def test_a_torn_file_is_an_error_of_every_reader(directory: Path) -> None:
    path = weight_files(directory)[0]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"), open_tensors(directory):
        pass
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        next(read_weights(directory))
    assert any("torn" in problem or "bytes" in problem for problem in missing_parts(directory))
