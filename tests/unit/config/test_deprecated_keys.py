"""Old names of config keys work with a warning that names the new key."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.config import Config
from anygauge.config.deprecated_keys import RENAMED, renamed_keys
from anygauge.config.load import dump_config
from anygauge.config.tree import Tree, flatten, put
from anygauge.config.validate import keys
from anygauge.run_directory.resume import is_changed

NEW = {pattern: f"{pattern.rpartition('.')[0]}.{new}" for pattern, new in RENAMED.items()}


@pytest.mark.parametrize("pattern", RENAMED)
def test_an_old_name_is_read_with_a_warning(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    old, new = pattern.replace("*", "any"), NEW[pattern].replace("*", "any")
    tree: Tree = {}
    put(tree, old, "a value")
    put(tree, f"{old}_other", 2)
    renamed, problems = renamed_keys(tree)
    assert (flatten(renamed), problems) == ({new: "a value", f"{old}_other": 2}, [])
    assert caplog.messages == [f"{old} is deprecated; write {new} instead"]


@pytest.mark.parametrize(("old", "new"), [("auto", False), (False, True), (["auto"], ["auto"])])
def test_a_value_whose_meaning_changed_is_translated(old: object, new: object) -> None:
    assert renamed_keys({"rollout": {"graphs": old}}, warn=False)[0] == {"rollout": {"enforce_eager": new}}


def test_new_names_are_keys_and_old_ones_are_not() -> None:
    known = {path for path, _ in keys()}
    assert known.issuperset(new for new in NEW.values() if "*" not in new)
    assert known.isdisjoint(RENAMED)


def test_both_names_are_a_problem() -> None:
    tree = {"placement": {"num_workers": 2, "train_workers": 4}}
    renamed, [problem] = renamed_keys(tree, warn=False)
    assert renamed == {"placement": {"train_workers": 4}}
    assert (problem.path, problem.found) == ("placement.num_workers", 2)
    assert "placement.train_workers, which is set too" in problem.hint


def test_a_file_and_a_command_line_may_use_old_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from anygauge.config.load import load_config
    from anygauge.plugins import load_plugins

    text = """
run = { name = "old" }
model = "model"
data = { train = ["rows.jsonl"] }
reward = { function = "math" }
algorithm = { aggregation = "sample_mean" }

[on.cpu]
placement = { num_workers = 2 }
reward.per = "sample"
"""
    path = tmp_path / "old.toml"
    path.write_text(text)
    config = load_config(
        path,
        ["--rollout.partial=true", "--rollout.over_sampling=2"],
        backend="cpu",
        plugins=load_plugins(only=["cpu"]),
        check_files=False,
    ).config
    assert [message.split(" is deprecated; write ") for message in caplog.messages] == [
        ["algorithm.aggregation", "algorithm.loss_aggregation instead"],
        ["on.cpu.placement.num_workers", "on.cpu.placement.train_workers instead"],
        ["on.cpu.reward.per", "on.cpu.reward.scope instead"],
        ["rollout.partial", "rollout.partial_rollout instead"],
    ]
    assert config.algorithm.loss_aggregation == "sample_mean"
    assert config.placement.train_workers == 2
    assert config.rollout.partial_rollout


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "old"},
            "model": {"path": "model"},
            "data": {"train": [{"path": "rows.jsonl"}]},
            "algorithm": {"loss_aggregation": "sample_mean"},
            "placement": {"train_workers": 2},
        }
    )
    written = dump_config(config)
    for pattern, new in RENAMED.items():
        table, _, old = pattern.rpartition(".")
        head, header, rest = written.partition(f"\n[{table}]")
        written = head + header + rest.replace(f"\n{new} = ", f"\n{old} = ", 1)
    written = written.replace("graphs = false", 'graphs = "auto"')
    assert all(line in written for line in ("num_workers = 2", 'graphs = "auto"', 'per = "sample"'))
    (tmp_path / "config.toml").write_text(written)
    assert not is_changed(tmp_path / "config.toml", config)
