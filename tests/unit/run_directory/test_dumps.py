"""Dumps keep every bit, and a file that is damaged or of another run is refused."""

from __future__ import annotations

import errno
import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from anygauge.data.media import store as stores
from anygauge.data.media.store import MappedFiles
from anygauge.run_directory import dumps
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import LossInputs
from anygauge_hooks.errors import CheckpointError, DataError
from anygauge_hooks.media import Content, Media
from anygauge_hooks.rl import Group, Prompt, Sample
from anygauge_tests.batches import TrainSample, make_batch, unpack_samples

MODEL = {"architectures": ["TinyForCausalLM"], "vocab_size": 16, "tokens": "0123"}
OTHER = MODEL | {"vocab_size": 8, "tokens": "4567"}
IMAGE = Media("image", "5be1", ((1, 4),), (1, 4, 4), source="rows:3 image 1")
VIDEO = Media("video", "77a0", ((0, 2), (4, 2)), (2, 2, 4), seconds=0.5)
HARD = (0.1, -1 / 3, 1e-310, -0.0, math.pi * 1e17, -math.inf)


def group(index: int = 0, **sample: Any) -> Group:
    prompt = Prompt(
        index=index,
        tokens=(5, 11),
        text="3+4=\u2028\ud800",
        label="7",
        metadata={"a": [1, {"b": None}]},
        media=(IMAGE,),
    )
    values: dict[str, Any] = {
        "prompt_index": index,
        "prompt_tokens": (5, 11),
        "response_tokens": tuple(range(len(HARD))),
        "log_probs": HARD,
        "loss_mask": (1, 1, 0, 1, 1, 1),
        "weight_versions": (0, 0, 0, 0, 1, 1),
        "text": "7\n\u2028",
        "finish_reason": "stop",
        "seed": 2**63 - 1,
        "reward": 0.1 + 0.2,
        "raw_reward": {"math": 1.0, "form": {"score": 0.25}},
        "media": (IMAGE, VIDEO),
    }
    return Group(prompt=prompt, samples=(Sample(**{**values, **sample}), Sample(**values)))


def training_batch() -> TrainBatch:
    def sample(first: int) -> TrainSample:
        return TrainSample(
            tokens=[first, *range(7)],
            response_length=len(HARD),
            loss_mask=[1, 1, 0, 1, 1, 1],
            rollout_log_probs=list(HARD),
            advantages=[1 / 7] * len(HARD),
            media=(IMAGE, VIDEO)[: first - 1],
        )

    batch = make_batch([sample(1), sample(2), sample(3)])
    batch.steps, batch.idle = [2, 1], [0, 1]
    batch.loss_weights = torch.tensor([value / 3 for value in HARD] * 3)
    batch.old_log_probs = torch.arange(3.0 * len(HARD)) / 3
    return batch


def bits(values: list[float]) -> list[int]:
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()


def store_in(directory: Path) -> MappedFiles:
    directory.mkdir()
    return MappedFiles(directory)


def test_what_was_seen_comes_back_the_same(tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    before, after = store_in(tmp_path / "before"), store_in(tmp_path / "after")
    before.put(IMAGE.key, Content("image", pixels))
    before.put(VIDEO.key, Content("video", pixels[None], 0.5))
    dumps.keep_media(tmp_path / "dumps", [IMAGE, VIDEO, IMAGE], before)
    dumps.keep_media(tmp_path / "dumps", [IMAGE], after)  # is there already, so nobody is asked for it
    dumps.restore_media(tmp_path / "dumps", [VIDEO, IMAGE], after)
    assert (after.get(IMAGE.key).data == pixels).all()
    assert after.get(VIDEO.key).data.shape == (1, 4, 4, 3)
    assert after.get(VIDEO.key).seconds == 0.5


def test_what_was_seen_and_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dumps/media/5be1, the image rows:3 image 1, does not exist"):
        dumps.restore_media(tmp_path / "dumps", [IMAGE], store_in(tmp_path / "after"))


# -------------------------------------------------------------------------
# Rollouts
# -------------------------------------------------------------------------


def test_groups_come_back_the_same(tmp_path: Path) -> None:
    path = dumps.rollout_path(tmp_path / "dumps", 7)
    groups = [group(0), group(1, reward=None, error="timeout", raw_reward=None)]
    dumps.write_groups(path, groups, MODEL)
    assert path.name == "rollout-00000007.jsonl.gz"
    read = dumps.read_groups(path)
    assert read == groups
    assert isinstance(read[0].samples[0], Sample)
    assert isinstance(read[0].samples[0].media[0], Media)
    assert bits(list(read[0].samples[0].log_probs)) == bits(list(HARD))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=4), st.text())
def test_any_float_and_any_text_survive(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl.gz"
    same = (0,) * len(values)
    wanted = group(
        response_tokens=same, log_probs=tuple(values), loss_mask=same, weight_versions=same, text=text
    )
    dumps.write_groups(path, [wanted], MODEL)
    [found] = dumps.read_groups(path)
    assert bits(list(found.samples[0].log_probs)) == bits(values)
    assert found.samples[0].text == text


def test_the_same_groups_make_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        dumps.write_groups(tmp_path / name, [group()], MODEL)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_json_does_not_know_is_written_plainly(tmp_path: Path) -> None:
    path = tmp_path / "rollout-00000001.jsonl.gz"
    dumps.write_groups(path, [group(reward=torch.tensor(0.5), raw_reward={"at": Path("x")})], MODEL)
    sample = dumps.read_groups(path)[0].samples[0]
    assert sample.reward == 0.5
    assert sample.raw_reward == {"at": "x"}


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def edited(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: gzip.compress(change(gzip.decompress(data)))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut, "not a dump that can be replayed"),
        (lambda data: b"", "holds no group"),
        (lambda data: b"plain text", "Not a gzipped file"),
        (lambda data: data[:40] + b"\x00\x01" + data[42:], "not a dump that can be replayed"),
        (edited(lambda text: text.partition(b"\n")[2] * 2), "its format is None"),
        (edited(lambda text: text.replace(b'"model"', b'"models"', 1)), "does not name its model"),
        (edited(lambda text: text[:-20]), "Expecting|delimiter|Unterminated"),
        (edited(lambda text: text.replace(b'"seed"', b'"sead"')), r"gz:2 is not a dump.*seed"),
        (edited(lambda text: text.replace(b'"loss_mask": [1, ', b'"loss_mask": [')), "one of each value"),
        (edited(lambda text: text.replace(b"5, 11", b'"five", 11')), "prompt.tokens.0"),
    ],
)
def test_a_damaged_rollout_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes], told: str) -> None:
    path = dumps.rollout_path(tmp_path, 1)
    dumps.write_groups(path, [group()], MODEL)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=told) as caught:
        dumps.read_groups(path)
    assert str(path) in str(caught.value)


def test_a_rollout_of_another_model_is_refused(tmp_path: Path) -> None:
    path = dumps.rollout_path(tmp_path, 1)
    dumps.write_groups(path, [group()], MODEL)
    assert dumps.read_groups(path, dict(MODEL)) == [group()]
    with pytest.raises(DataError, match="of another model: vocab_size 16 there, 8 here; tokens 0123 there"):
        dumps.read_groups(path, OTHER)


def test_the_facts_of_a_model_survive_a_tokenizer_that_is_saved_anew(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "same")
    tokenizer = json.loads((tmp_path / "same" / "tokenizer.json").read_text())
    (tmp_path / "same" / "tokenizer.json").write_text(json.dumps(tokenizer, indent=7, sort_keys=True))
    assert dumps.model_facts(tmp_path / "same") == dumps.model_facts(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert dumps.model_facts(tmp_path / "other") != dumps.model_facts(tmp_path / "one")


def test_a_missing_step_names_those_that_are_there(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        dumps.write_groups(dumps.rollout_path(tmp_path, step), [group()], MODEL)
    with pytest.raises(DataError, match=r"rollout-00000001\S+ to rollout-00000003"):
        dumps.read_groups(dumps.rollout_path(tmp_path, 4))
    with pytest.raises(DataError, match="no dump of a batch"):
        dumps.read_batches(tmp_path, 1, 1)


# -------------------------------------------------------------------------
# Batches
# -------------------------------------------------------------------------


def written(directory: Path, *, dp_rank: int = 0, dp_size: int = 1) -> Path:
    path = dumps.batch_path(directory, 7, dp_rank)
    current = [torch.arange(len(HARD)) / 7 for _ in range(3)]
    dumps.write_batch(path, training_batch(), current, dp_rank=dp_rank, dp_size=dp_size, model=MODEL)
    return path


def test_batches_come_back_the_same(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert path.name == "batch-00000007-dp-0.safetensors"
    found, wanted = dumps.read_batch(path, dp_size=1), training_batch()
    assert unpack_samples(found) == unpack_samples(wanted)
    assert (found.steps, found.idle) == (wanted.steps, wanted.idle)
    for name in ("rollout_log_probs", "loss_weights", "group_advantages"):
        one, other = (getattr(batch, name).view(torch.int32) for batch in (found, wanted))
        assert torch.equal(one, other), name
    assert found.advantages is None, "they are estimated again"
    log_probs = dumps.read_log_probs(path)
    assert log_probs.keys() == {"old", "current"}
    assert torch.equal(log_probs["old"][2], torch.arange(2.0 * len(HARD), 3.0 * len(HARD)) / 3)


def test_numbers_of_an_older_dump_are_rounded_as_the_loss_rounded_them(tmp_path: Path) -> None:
    """They were float64, and the mask an integer."""
    path = written(tmp_path)
    tensors = {
        name: each.double() if each.is_floating_point() else each for name, each in load_file(path).items()
    }
    tensors["weights"] = torch.tensor([1 / 3, 0.1, 0.7] * 6, dtype=torch.float64)
    with safe_open(path, framework="pt") as file:
        save_file(tensors, path, file.metadata())
    batch = dumps.read_batch(path, dp_size=1)
    assert torch.equal(batch.loss_weights, torch.tensor([1 / 3, 0.1, 0.7] * 6))
    assert batch.rollout_log_probs.dtype == torch.float32
    assert unpack_samples(batch) == unpack_samples(training_batch())


def test_each_rank_gets_its_own_batch_also_of_an_earlier_version(tmp_path: Path) -> None:
    paths = [written(tmp_path, dp_rank=dp_rank, dp_size=2) for dp_rank in range(2)]
    paths[1].rename(tmp_path / "batch-00000007-share-1.safetensors")
    assert len(dumps.read_batches(tmp_path, 7, 2)) == 2


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"of a run with 1 data-parallel workers; this one has 2(.|\n)*that it has 1"
    ):
        dumps.read_batch(written(tmp_path), dp_size=2)


def test_a_batch_of_another_model_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    assert dumps.read_batches(tmp_path, 7, 1, MODEL)
    with pytest.raises(DataError, match="of another model: vocab_size 16 there"):
        dumps.read_batches(tmp_path, 7, 1, OTHER)


def test_a_damaged_batch_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for damaged in (
        cut(whole),
        b"",
        whole.replace(b'"weights"', b'"weighty"'),
        whole.replace(b'format\\": 3', b'format\\": 2'),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="not a dump that can be replayed"):
            dumps.read_batch(path, dp_size=1)


# -------------------------------------------------------------------------
# What the loss saw
# -------------------------------------------------------------------------


def test_a_recorded_loss_returns_what_the_loss_does_and_undoes_the_packing() -> None:
    def inputs(values: list[float], samples: tuple[int, ...], lengths: tuple[int, ...]) -> LossInputs:
        x = torch.tensor(values, requires_grad=True)
        return LossInputs(
            log_probs=x, entropy=x, old_log_probs=x, rollout_log_probs=x, reference_log_probs=None,
            advantages=x, loss_mask=x, loss_weights=x, samples=samples, lengths=lengths,
        )  # fmt: skip

    loss = dumps.RecordedLoss(lambda inputs: (inputs.log_probs.sum(), {"n": inputs.loss_weights.sum()}))
    value, metrics = loss(inputs([1.0, 2.0, 3.0], (2, 0), (2, 1)))
    assert value.item() == metrics["n"].item() == 6.0
    assert value.requires_grad
    loss(inputs([4.0], (1,), (1,)))
    assert [part.tolist() for part in loss.take()] == [[3.0], [4.0], [1.0, 2.0]]
    assert loss.take() == []


# -------------------------------------------------------------------------
# Disks
# -------------------------------------------------------------------------


def write_rollout(directory: Path) -> None:
    dumps.write_groups(dumps.rollout_path(directory, 7), [group()], MODEL)


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_rollout, "rollout-00000007.jsonl.gz"), (written, "batch-00000007-dp-0.safetensors")],
)
def test_a_full_disk_is_an_error_about_the_dump(
    tmp_path: Path, write: Callable[[Path], object], name: str
) -> None:
    (tmp_path / f".{name}.partial").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=rf"{tmp_path / name} cannot be written: .*No space left"):
        write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_about_the_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = store_in(tmp_path / "shown")
    shown.put(IMAGE.key, Content("image", np.zeros((4, 4, 3), np.uint8)))

    def write(path: Path, content: Content) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores, "_write", write)
    with pytest.raises(
        CheckpointError, match=rf"media/{IMAGE.key} cannot be written: .*No space left"
    ) as caught:
        dumps.keep_media(tmp_path / "dumps", [IMAGE], shown)
    assert "debug.dump_rollouts" in str(caught.value.hint)
