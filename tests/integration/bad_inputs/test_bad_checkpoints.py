"""Damaged models, checkpoints and runs: each ends in an error with a code, and nothing is lost."""

from __future__ import annotations

import fcntl
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anygauge.config.load import load_config, write_resolved
from anygauge.plugins import Plugins
from anygauge.run_directory.checkpoints import CheckpointWriter
from anygauge.trainer.inputs import read_inputs
from anygauge_hooks.errors import AnygaugeError

Attempt = Callable[..., AnygaugeError]

generated = settings.get_profile("bad_inputs")


# -------------------------------------------------------------------------
# Models
# -------------------------------------------------------------------------


def index_alone(content: bytes) -> Callable[[Path], None]:
    """Return what puts an index in the place of the single file, which would be read before it."""

    def damage(model: Path) -> None:
        (model / "model.safetensors").unlink()
        (model / "model.safetensors.index.json").write_bytes(content)

    return damage


def cut(name: str, kept: float) -> Callable[[Path], None]:
    """Return what leaves only the first part of a file."""

    def damage(model: Path) -> None:
        path = model / name
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])

    return damage


def write(name: str, content: bytes) -> Callable[[Path], None]:
    """Return what replaces a file."""
    return lambda model: (model / name).write_bytes(content) and None


def edit(name: str, **values: Any) -> Callable[[Path], None]:
    """Return what changes keys of a JSON file."""

    def damage(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def remove(*names: str) -> Callable[[Path], None]:
    """Return what removes files."""
    return lambda model: [(model / name).unlink() for name in names] and None


HEADER = struct.pack("<Q", 2**62)
DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "no config": remove("config.json"),
    "no weights": remove("model.safetensors"),
    "no tokenizer": remove("tokenizer.json", "tokenizer_config.json"),
    "nothing": lambda model: [path.unlink() for path in model.iterdir()] and None,
    "empty config": write("config.json", b""),
    "config is a list": write("config.json", b"[]"),
    "config is null": write("config.json", b"null"),
    "config is no text": write("config.json", b"\xff\xfe\x00"),
    "torn config": cut("config.json", 0.5),
    "no architecture": edit("config.json", architectures=None),
    "empty architectures": edit("config.json", architectures=[]),
    "unknown architecture": edit("config.json", architectures=["NoSuchForCausalLM"]),
    "small vocabulary": edit("config.json", vocab_size=3),
    "empty weights": write("model.safetensors", b""),
    "short weights": write("model.safetensors", b"\x01\x02"),
    "huge header": write("model.safetensors", HEADER),
    "header is not JSON": write("model.safetensors", struct.pack("<Q", 4) + b"abcd"),
    "torn weights": cut("model.safetensors", 0.9),
    "half a header": cut("model.safetensors", 0.001),
    "weights are a page": write("model.safetensors", b"<html>404</html>"),
    "weights are a pointer": write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
    "bad index": index_alone(b"{"),
    "index is a list": index_alone(b"[]"),
    "index of nothing": index_alone(b'{"metadata": {}}'),
    "index of an absent file": index_alone(b'{"weight_map": {"a": "absent.safetensors"}}'),
    "torn tokenizer": cut("tokenizer.json", 0.5),
    "empty tokenizer": write("tokenizer.json", b""),
    "tokenizer is a list": write("tokenizer.json", b"[]"),
    "tokenizer of nothing": write("tokenizer.json", b"{}"),
    "more layers than are described": edit("config.json", num_hidden_layers=3),
    "code": edit(
        "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}, architectures=["EvilForCausalLM"]
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_models(attempt: Attempt, workplace: Path, tmp_path: Path, name: str) -> None:
    model = Path(shutil.copytree(workplace / "model", tmp_path / "model"))
    DAMAGES[name](model)
    attempt(("model.path", str(model)))


@generated
@given(kept=st.floats(0, 0.999))
def test_torn_weights(attempt: Attempt, workplace: Path, kept: float) -> None:
    model = workplace / "torn"
    if not model.exists():
        shutil.copytree(workplace / "model", model)
    whole = (workplace / "model" / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: int(len(whole) * kept)])
    assert "model.safetensors" in str(attempt(("model.path", str(model))))


# -------------------------------------------------------------------------
# Checkpoints and runs
# -------------------------------------------------------------------------


class OneRank:
    """Answers a checkpoint writer as a group of one worker does."""

    def call(self, method: str, **arguments: Any) -> list[Any]:
        if method == "save_checkpoint":
            directory = Path(arguments["path"])
            (directory / "rank-00000.json").write_text(json.dumps({"rank": 0}))
            (directory / "rank-00000.safetensors").write_bytes(bytes(1000))
        return [True]


@pytest.fixture(scope="module")
def stopped(workplace: Path, plugins: Plugins) -> Path:
    """Return the directory of a run that ended after step 20, to be copied."""
    directory = workplace / "stopped"
    (directory / "logs").mkdir(parents=True)
    loaded = load_config(workplace / "run.toml", [("run.overwrite", False)], backend="cpu", plugins=plugins)
    write_resolved(loaded.config, directory / "config.toml")
    (directory / "environment.json").write_text("{}\n")
    (directory / "metrics.jsonl").write_text('{"train/step": 20}\n')
    source = read_inputs(loaded.config, plugins).source
    writer = CheckpointWriter(directory, loaded.config, OneRank())  # type: ignore[arg-type]
    writer.start(20, {"step": 20, "version": 20, "source": source.state_dict()})
    assert writer.finish() is not None
    writer.close()
    return directory


CHECKPOINT = "checkpoints/step-00000020"
RUN_DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "no manifest": remove(f"{CHECKPOINT}/manifest.json"),
    "empty manifest": write(f"{CHECKPOINT}/manifest.json", b""),
    "torn manifest": cut(f"{CHECKPOINT}/manifest.json", 0.5),
    "manifest is a list": write(f"{CHECKPOINT}/manifest.json", b"[]"),
    "manifest is null": write(f"{CHECKPOINT}/manifest.json", b"null"),
    "manifest is no text": write(f"{CHECKPOINT}/manifest.json", b"\xff\xfe"),
    "another format": edit(f"{CHECKPOINT}/manifest.json", format=99),
    "no format": edit(f"{CHECKPOINT}/manifest.json", format=None),
    "files are a list": edit(f"{CHECKPOINT}/manifest.json", files=[]),
    "no files": edit(f"{CHECKPOINT}/manifest.json", files={}),
    "files without sizes": edit(f"{CHECKPOINT}/manifest.json", files={"driver.json": {}}),
    "more ranks": edit(f"{CHECKPOINT}/manifest.json", world_size=4),
    "no driver": remove(f"{CHECKPOINT}/driver.json"),
    "torn driver": cut(f"{CHECKPOINT}/driver.json", 0.7),
    "edited driver": edit(f"{CHECKPOINT}/driver.json", step=21),
    "no tensors": remove(f"{CHECKPOINT}/rank-00000.safetensors"),
    "empty tensors": write(f"{CHECKPOINT}/rank-00000.safetensors", b""),
    "torn tensors": cut(f"{CHECKPOINT}/rank-00000.safetensors", 0.999),
    "one bit": write(f"{CHECKPOINT}/rank-00000.safetensors", bytes(999) + b"\x01"),
    "no scalars": remove(f"{CHECKPOINT}/rank-00000.json"),
    "edited scalars": edit(f"{CHECKPOINT}/rank-00000.json", rank=1),
    "an empty checkpoint": lambda run: [path.unlink() for path in (run / CHECKPOINT).iterdir()] and None,
    "no config": remove("config.toml"),
    "no environment": remove("environment.json"),
    "torn config": cut("config.toml", 0.5),
    "empty config": write("config.toml", b""),
    "config is no text": write("config.toml", b"\xff\xfe"),
}


@pytest.fixture
def damaged(workplace: Path, stopped: Path) -> Iterator[Path]:
    """Return a copy of the stopped run, among the runs."""
    directory = workplace / "runs" / "damaged"
    shutil.copytree(stopped, directory)
    yield directory
    shutil.rmtree(directory)


RESUME = (("run.name", "damaged"), ("run.overwrite", False), ("run.resume", True))


@pytest.mark.parametrize("name", RUN_DAMAGES)
def test_damaged_runs(attempt: Attempt, damaged: Path, name: str) -> None:
    RUN_DAMAGES[name](damaged)
    attempt(*RESUME)


OTHER_RUNS: list[tuple[str, Any]] = [
    ("train.lr", 0.5),
    ("run.seed", 7),
    ("model.path", "chat"),
    ("rollout.temperature", 0.5),
    ("rollout.samples_per_prompt", 4),
    ("algorithm.clip_low", 0.1),
    ("reward.function", "f1"),
    ("data.shuffle", False),
    ("run.task", "sft"),
]


@pytest.mark.parametrize(("path", "value"), OTHER_RUNS, ids=[path for path, _ in OTHER_RUNS])
def test_resuming_another_run(attempt: Attempt, damaged: Path, path: str, value: Any) -> None:
    assert path.split(".")[1] in str(attempt(*RESUME, (path, value)))


def test_resuming_with_other_rows(attempt: Attempt, damaged: Path, workplace: Path) -> None:
    data = workplace / "train.jsonl"
    before = data.read_bytes()
    data.write_bytes(before.replace(b"7+2=", b"9+9="))
    try:
        attempt(*RESUME)
    finally:
        data.write_bytes(before)


def test_a_run_that_goes_on_elsewhere(attempt: Attempt, damaged: Path) -> None:
    with (damaged / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use" in str(attempt(*RESUME))


def test_there_are_more_than_sixty() -> None:
    assert len(DAMAGES) + len(RUN_DAMAGES) + len(OTHER_RUNS) >= 60
