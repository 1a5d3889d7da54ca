"""No code of a checkpoint runs unless the config lets it."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

from anygauge.config.model_files import missing_parts, read_model
from anygauge.config.schema import Config
from anygauge.engines.hf_directory import open_tensors
from anygauge.plugins import load_plugins
from anygauge.serving.embedded.engine import TransformersEngine
from anygauge.trainer.inputs import load_tokenizer
from anygauge_hooks.errors import CheckpointError

MakeConfig = Callable[..., Config]
CONFIGURATION = """
from pathlib import Path
from transformers import Qwen3Config
Path({marker!r}).touch()
class EvilConfig(Qwen3Config):
    model_type = "evil"
"""
MODELING = """
from pathlib import Path
from transformers import Qwen3ForCausalLM
from .configuration_evil import EvilConfig
Path({marker!r}).touch()
class EvilForCausalLM(Qwen3ForCausalLM):
    config_class = EvilConfig
"""
TOKENIZATION = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).touch()
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


class Pickled:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the file that is there if code of the checkpoint has run."""
    return tmp_path / "it-ran"


@pytest.fixture
def evil(checkpoint: Path, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint with Python files and pickled weights, which transformers could do without."""
    # transformers copies the files of a checkpoint there, and puts it on sys.path.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "evil"
    shutil.copytree(checkpoint, path)
    for name, text in (
        ("configuration", CONFIGURATION),
        ("modeling", MODELING),
        ("tokenization", TOKENIZATION),
    ):
        (path / f"{name}_evil.py").write_text(text.format(marker=str(marker)))
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled(marker)))
    classes = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
    }
    edit(path / "config.json", auto_map=classes)
    edit(
        path / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_evil.EvilTokenizer"]}
    )
    return path


def edit(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def engine(path: Path, **options: Any) -> TransformersEngine:
    return TransformersEngine(
        path, dtype=torch.float32, device=torch.device("cpu"), max_batch_tokens=64, **options
    )


def load_all(path: Path, config: Config) -> None:
    """Read a checkpoint in every way that a run does."""
    read_model(
        path,
        load_plugins(only=["cpu", "models"]),
        trust_remote_code=config.model.trust_remote_code,
    )
    load_tokenizer(config)
    engine(path, trust_remote_code=config.model.trust_remote_code).close()
    with open_tensors(path) as tensors:
        assert tensors.names


def test_a_checkpoint_that_needs_no_code_loads_without_it(
    evil: Path, marker: Path, make_config: MakeConfig
) -> None:
    load_all(evil, make_config(model=str(evil)))
    assert not marker.exists()


def test_code_runs_where_it_may(evil: Path, marker: Path, make_config: MakeConfig) -> None:
    edit(evil / "config.json", model_type="evil")
    load_all(evil, make_config(model={"path": str(evil), "trust_remote_code": True}))
    assert marker.exists()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "config.json",
            ("auto_map in its config.json", "modeling_evil.EvilForCausalLM", "model_type 'evil'"),
        ),
        (
            "tokenizer_config.json",
            ("auto_map in its tokenizer_config.json", "tokenization_evil.EvilTokenizer"),
        ),
    ],
)
def test_a_checkpoint_that_needs_code_is_refused(
    evil: Path, marker: Path, file: str, expected: tuple[str, ...]
) -> None:
    if file == "config.json":
        edit(evil / file, model_type="evil")
    else:
        (evil / "tokenizer.json").unlink()
    _, problems = read_model(evil, load_plugins(only=["cpu", "models"]))
    (text,) = [problem for problem in problems if "needs code" in problem]
    assert all(part in text for part in (*expected, "model.trust_remote_code = true"))
    _, problems = read_model(evil, load_plugins(only=["cpu", "models"]), trust_remote_code=True)
    assert not [problem for problem in problems if "needs code" in problem]
    assert not marker.exists()


def test_what_slips_through_is_refused_by_the_engine(
    evil: Path, marker: Path, make_config: MakeConfig
) -> None:
    edit(evil / "config.json", model_type="evil")
    with pytest.raises(CheckpointError, match=r"model\.trust_remote_code = true"):
        engine(evil)
    edit(evil / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    with pytest.raises(CheckpointError):
        load_tokenizer(make_config(model=str(evil)))
    assert not marker.exists()


def test_pickled_weights_are_no_weights(evil: Path, marker: Path) -> None:
    for path in evil.glob("*.safetensors*"):
        path.unlink()
    assert any("has no safetensors weights" in problem for problem in missing_parts(evil))
    with pytest.raises(CheckpointError, match="has no safetensors weights"):
        engine(evil)
    with pytest.raises(CheckpointError, match="has no safetensors weights"), open_tensors(evil):
        pass
    assert not marker.exists()
    pickle.loads((evil / "pytorch_model.bin").read_bytes())
    assert marker.exists()
