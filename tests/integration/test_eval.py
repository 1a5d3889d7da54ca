"""``anygauge eval``: what it finds on a checkpoint, an export and a run is what the run itself found."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import eval as evaluate_command
from anygauge.cli import main
from anygauge.testing.tiny import tiny_qwen3
from anygauge.trainer import start
from anygauge.trainer.evaluation_run import find_checkpoint, logs_of_failures
from anygauge_hooks.errors import CheckpointError, PlacementError, RewardError, WorkerFailedError

DATASETS = """
[eval]
interval = 1
[eval.datasets.sums]
files = ["{root}/sums.jsonl"]
samples_per_prompt = 4
[eval.datasets.first]
files = ["{root}/sums.jsonl@[:2]"]
label_key = "first"
temperature = 0.0
reward = {{function = "multiple_choice"}}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory with a config and its run of two steps, with a checkpoint of each."""
    root = tmp_path_factory.mktemp("eval")
    tiny_qwen3(root / "model", init_std=0.3)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b), "first": "A"} for a in range(2) for b in range(4)]
    (root / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "lengths.py").write_text("def length(response):\n    return len(response) / 4\n")
    base = f"""
        [run]
        name = "run"
        directory = "{root}/runs"
        steps = 2
        report = false
        [model]
        path = "{root}/model"
        [data]
        train = ["{root}/sums.jsonl"]
        cache = "{root}/cache"
        [reward]
        function = "lengths:length"
        [rollout]
        prompts_per_step = 4
        samples_per_prompt = 2
        max_new_tokens = 4
        [train]
        lr = 2e-3
        dtype = "float32"
        [save]
        every = 1
        [placement]
        launcher = "local"
        threads_per_worker = 1
        """
    (root / "no_data.toml").write_text(base)
    (root / "eval.toml").write_text(base + DATASETS.format(root=root))
    # what an evaluation of a Hugging Face directory needs, and less than a training does
    alone = base.replace("sums.jsonl", "not_there.jsonl").replace(f"{root}/model", f"{root}/not_there")
    (root / "alone.toml").write_text(
        f'{alone}\n[debug]\nmode = "train_only"\nreplay_rollouts = "not_there"\n{DATASETS.format(root=root)}'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        assert main(["train", str(root / "eval.toml"), "--backend", "cpu"]) == 0
        for other in ("exported", "damaged"):
            (root / other / "hf").mkdir(parents=True)
            (root / other / "hf/config.json").write_text("{}")
        for bad in ("foreign", "damaged/checkpoints/step-00000001"):
            (root / bad).mkdir(parents=True)
            (root / bad / "manifest.json").write_text("{}")
        yield root


def evaluations(root: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (root / "runs/run/metrics.jsonl").read_text().splitlines()]
    return [without_axes(line) for line in lines if "eval/sums" in line]


def without_axes(line: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in line.items()
        if name.startswith(("eval/", "passrate/")) and "step" not in name
    }


def evaluate(root: Path, *arguments: str, config: str = "eval") -> dict[str, Any]:
    out = root / "found.json"
    assert (
        main(["eval", str(root / f"{config}.toml"), "--backend", "cpu", "--out", str(out), *arguments]) == 0
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_run_evaluates_every_data_set(finished: Path) -> None:
    lines = evaluations(finished)
    assert len(lines) == 3
    assert {"eval/sums", "eval/first", "eval/sums-truncated_ratio", "passrate/sums-pass@4"} <= lines[0].keys()
    assert lines[0] != lines[1] != lines[2]


COMPARED = ("kl_coef", "kl_reward_coef", "distill_coef", "distill_kl_coef")
"""Keys for which a training reads further models."""


@pytest.mark.parametrize(
    ("source", "position", "config"),
    [("runs/run/checkpoints/step-00000001", 1, "eval"), ("runs/run/hf", 2, "alone")],
)
def test_it_finds_what_the_run_found(
    finished: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    position: int,
    config: str,
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(evaluate_command, "freeze_living_objects", lambda: frozen.append(1))
    others = [f"--{role}.path=not_there" for role in ("reference", "teacher", "critic")]
    others += ["--save.best=eval/sums", '--run.metrics=["not_there:metric"]']
    needed = ["--algorithm.advantage=gae", *(f"--algorithm.{key}=0.1" for key in COMPARED)]
    found = evaluate(finished, "--checkpoint", str(finished / source), *others, *needed, config=config)
    step = found.pop("eval/step", None)
    assert (found.pop("model", None), found.pop("checkpoint", None), step) == (
        (None, str(finished / source), position) if "step" in source else (str(finished / source), None, None)
    )
    assert found == evaluations(finished)[position]
    assert frozen == [1]
    assert any(line.startswith("eval/sums ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("config", "source", "text"),
    [
        ("eval", "nowhere", "nowhere is not a Hugging Face directory, no checkpoint and no run with one"),
        ("no_data", "model", "The config has no evaluation data"),
        (
            "eval",
            "no-run",
            "Name runs/NAME, runs/NAME/checkpoints/step-N, or a directory with",
        ),
        (
            "eval",
            "runs/run/checkpoints",
            "mean --checkpoint {root}/runs/run/checkpoints/step-00000002?",
        ),
        (
            "eval",
            "runs/run/checkpoints/step-7",
            "mean --checkpoint {root}/runs/run/checkpoints/step-00000002?",
        ),
        ("eval", "exported", "Did you mean --checkpoint {root}/exported/hf?"),
        (
            "eval",
            "foreign",
            "damaged or was not written by anygauge: its manifest.json names no format.\n  Use another",
        ),
        ("eval", "damaged", "Restore the files. Did you mean --checkpoint {root}/damaged/hf?"),
    ],
)
def test_bad_use(
    finished: Path, capsys: pytest.CaptureFixture[str], config: str, source: str, text: str
) -> None:
    arguments = ["eval", str(finished / f"{config}.toml"), "--backend", "cpu"]
    assert main([*arguments, "--checkpoint", str(finished / source)]) == 1
    assert text.format(root=finished) in capsys.readouterr().err


def test_a_name_on_a_hub_is_no_checkpoint() -> None:
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(Path("Some/Name"))
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("A model on a hub is named with --model.path Some/Name.")


def test_every_node_is_to_have_the_checkpoint(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = find_checkpoint(finished / "runs/run")
    assert checkpoint is not None
    asked = []

    def launch(*args: object, reads: object, **others: object) -> None:
        asked.append(reads)
        raise PlacementError("no room")

    monkeypatch.setattr(start, "launch_workers", launch)
    arguments = ["eval", str(finished / "eval.toml"), "--backend", "cpu"]
    assert main([*arguments, "--checkpoint", str(finished / "runs/run")]) == 1
    assert asked == [[checkpoint.path]]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", "[]", "its config.json is not an object"),
        ("config.json", "{", "needs a readable config.json"),
        ("tokenizer.json", None, "has no tokenizer: one of tokenizer.json"),
        ("model.safetensors", "", "its model.safetensors is torn"),
    ],
)
def test_a_model_is_checked_as_that_of_a_training(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | None,
    text: str,
) -> None:
    bad = shutil.copytree(finished / "model", tmp_path / "bad")
    (bad / name).unlink()
    if content is not None:
        (bad / name).write_text(content)
    arguments = ["eval", str(finished / "eval.toml"), "--backend", "cpu", "--checkpoint", str(bad)]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert f"model.path: found '{bad}' on the command line" in said
    assert text in said


def test_an_evaluation_that_fails_keeps_its_logs_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RewardError) as caught, logs_of_failures() as directory:
        raise RewardError("no sample could be scored", hint="Look.")
    assert caught.value.hint == f"Look. The logs are kept in {directory}/logs."
    assert list(tmp_path.iterdir()) == [directory]
    with pytest.raises(WorkerFailedError) as failed, logs_of_failures() as other:
        raise WorkerFailedError("actor 0 raised") from RewardError("why")
    assert f"The logs are kept in {other}/logs." in str(failed.value.__cause__)
    with pytest.raises(KeyboardInterrupt), logs_of_failures():
        raise KeyboardInterrupt
    with logs_of_failures():
        pass
    assert set(tmp_path.iterdir()) == {directory, other}


def test_an_evaluation_without_a_place_for_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with (
        pytest.raises(CheckpointError, match="logs of the evaluation cannot be") as caught,
        logs_of_failures(),
    ):
        pass
    assert "TMPDIR" in str(caught.value.hint)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CheckpointError, match="No space left"), logs_of_failures():
        raise OSError(errno.ENOSPC, "No space left")
    assert list(tmp_path.iterdir()) == []


def test_logs_that_cannot_be_removed_cost_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with logs_of_failures() as directory:
        directory.rmdir()
