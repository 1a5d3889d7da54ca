"""``anygauge eval``: what it finds on a checkpoint, an export and a run is what the run itself found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import main
from anygauge.testing.tiny import tiny_qwen3

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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        assert main(["train", str(root / "eval.toml"), "--backend", "cpu"]) == 0
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


def evaluate(root: Path, *arguments: str) -> dict[str, Any]:
    out = root / "found.json"
    assert main(["eval", str(root / "eval.toml"), "--backend", "cpu", "--out", str(out), *arguments]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_run_evaluates_every_data_set(finished: Path) -> None:
    lines = evaluations(finished)
    assert len(lines) == 3
    assert {"eval/sums", "eval/first", "eval/sums-truncated_ratio", "passrate/sums-pass@4"} <= lines[0].keys()
    assert lines[0] != lines[1] != lines[2]


@pytest.mark.parametrize(
    ("source", "position"), [("runs/run/checkpoints/step-00000001", 1), ("runs/run/hf", 2)]
)
def test_it_finds_what_the_run_found(
    finished: Path, capsys: pytest.CaptureFixture[str], source: str, position: int
) -> None:
    assert evaluate(finished, "--checkpoint", str(finished / source)) == evaluations(finished)[position]
    assert any(line.startswith("eval/sums ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("config", "source", "text"),
    [
        ("eval", "nowhere", "nowhere is no Hugging Face directory, no checkpoint and no run with one"),
        ("no_data", "model", "The config has no evaluation data"),
    ],
)
def test_bad_use(
    finished: Path, capsys: pytest.CaptureFixture[str], config: str, source: str, text: str
) -> None:
    arguments = ["eval", str(finished / f"{config}.toml"), "--backend", "cpu"]
    assert main([*arguments, "--checkpoint", str(finished / source)]) == 1
    assert text in capsys.readouterr().err
