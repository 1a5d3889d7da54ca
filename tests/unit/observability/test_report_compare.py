"""Comparison of runs: one curve a run, the numbers of each, and what differs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from anygauge.cli import main
from anygauge.observability.report import MOST_RUNS, write_comparison
from anygauge_hooks.errors import CheckpointError


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return two runs that differ in a key and a fact; the second stopped early."""
    directories = [tmp_path / name for name in ("one_a", "two_b")]
    for index, directory in enumerate(directories):
        directory.mkdir()
        (directory / "config.toml").write_text(
            f'[run]\nname = "{directory.name}"\nsteps = 3\n[train]\nlr = 0.{index + 1}\nmin_lr = 0.0\n'
        )
        facts = {"anygauge": f"commit {index}", "memory": f"{index} GiB", "python": "3"}
        (directory / "environment.json").write_text(json.dumps(facts))
        rows = [
            {"rollout/step": step, "rollout/raw_reward": step + index, "rollout/lag/mean": 0.0}
            for step in range(1, 4 - index)
        ]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directories


def test_runs_share_charts_and_what_differs_is_listed(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *map(str, runs)]) == 0
    page = runs[0].parent / "compare-one_a-two_b.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert {name: values for name, (_, values) in data["metrics"].items()} == {
        "0:rollout/raw_reward": [1, 2, 3],
        "1:rollout/raw_reward": [2, 3],
        **{"0:rollout/lag/mean": [0.0] * 3, "1:rollout/lag/mean": [0.0] * 2},
    }
    flat = "".join(text.split())
    assert "<tr><th>train.lr</th><td>0.1</td><td>0.2</td></tr>" in flat
    assert "<tr><th>anygauge</th><td>commit0</td><td>commit1</td></tr>" in flat
    for same in ("train.min_lr", "run.name", "<th>memory", "<th>python"):
        assert same not in text
    assert "<th>Reward</th><td>3(from1)</td><td>3(from2)</td>" in flat
    assert "one_a<output>3</output>" in flat.replace('"', "")


def test_a_page_is_beside_the_first_run_also_where_that_is_the_working_directory(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs[0])
    page = Path("compare-one_a-two_b.html")
    assert write_comparison([Path(), Path("..", runs[1].name)]) == runs[0].parent / page
    monkeypatch.chdir(runs[0].parent)
    assert write_comparison([Path(run.name) for run in runs]) == page


def test_an_rl_run_and_an_sft_run_have_the_charts_of_both(runs: list[Path]) -> None:
    (runs[1] / "config.toml").write_text('[run]\ntask = "sft"\n')
    for run, own in zip(
        runs, (("rollout/raw_reward", "reward/format"), ("eval/a-loss", "train/tokens")), strict=True
    ):
        names = (*own, "train/loss", "custom/mine")
        rows = [
            {"step": n} | {name.split("/")[0] + "/step": n for name in names} | dict.fromkeys(names, n)
            for n in (1, 2)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = re.findall(r'id="chart-([\w-]+)-0"', write_comparison(runs).read_text())
    assert charts == ["reward", "reward-parts", "custom", "eval-loss", "loss", "trained-tokens"]
    page = write_comparison([runs[1], shutil.copytree(runs[1], runs[1].parent / "copy")]).read_text()
    assert re.findall(r'id="chart-([\w-]+)-0"', page) == ["loss", "eval-loss", "custom", "trained-tokens"]


def test_hostile_names_are_text_and_equal_names_are_told_apart(runs: list[Path]) -> None:
    hostile = r"</script><b>\1"
    for run in runs:
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(config.replace(f'"{run.name}"', f"'{hostile}'"))
    text = write_comparison(runs, runs[0] / "out.html").read_text()
    assert "<b>\\1" not in text
    assert str(runs[0]) in text
    (runs[1] / "config.toml").unlink()
    assert "&lt;/script&gt;&lt;b&gt;\\1 <output>" in write_comparison(runs, runs[0] / "out.html").read_text()


def test_too_many_runs_and_what_is_none_are_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="9 runs are too many"):
        write_comparison([runs[0]] * (MOST_RUNS + 1))
    with pytest.raises(CheckpointError, match="is not a run directory"):
        write_comparison([runs[0], tmp_path])
    with pytest.raises(CheckpointError, match="is named twice"):
        write_comparison([runs[0], runs[1], runs[0].parent / "." / runs[0].name])
