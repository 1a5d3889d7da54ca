"""``anygauge import``: the file, the report, bad input."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from anygauge.cli import main

SFT = (
    "A=( --hf-checkpoint org/model --prompt-data a.jsonl --loss-type sft_loss --num-rollout 3 --num-epoch 2 "
    "--lr-decay-style constant )"
)


def test_a_config_is_written_that_passes_the_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "my run.sh", tmp_path / "c.toml"
    script.write_text(SFT)
    assert main(["import", "slime", str(script), "--out", str(out), "--backend", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no counterpart: 1\n  num-epoch: set run.steps" in printed.err
    assert "the config passes `anygauge train --dry-run --no-file-check`\n" in printed.err
    assert tomllib.loads(out.read_text())["run"]["name"] == "my-run"
    assert main(["train", str(out), "--dry-run", "--no-file-check", "--backend", "cpu"]) == 0
    capsys.readouterr()
    assert main(["import", "slime", str(script), "--out", str(out)]) == 1
    assert "c.toml exists" in capsys.readouterr().err


def test_the_report_names_the_keys_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a.sh"
    script.write_text("python train.py --hf-checkpoint $WHERE/m --custom-rm-path a.b")
    assert main(["import", "slime", str(script), "--backend", "cpu"]) == 0
    printed = capsys.readouterr()
    assert tomllib.loads(printed.out)["rollout"]["engine"] == "sglang"
    assert "its value $WHERE/m is not known from the text; set model.path" in printed.err
    assert "the config is not complete yet:\n  model: not set" in printed.err


def test_a_value_that_the_schema_refuses_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a.py"
    script.write_text("GRPOConfig(learning_rate='1e-6x', beta=0.1)")
    assert main(["import", "trl", str(script)]) == 0
    printed = capsys.readouterr()
    assert "1e-6x" not in printed.out
    assert "train.lr: '1e-6x' is not written: must be a valid number" in printed.err


def test_a_missing_sglang_is_no_fault_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a.sh"
    script.write_text(
        "python train.py --hf-checkpoint org/model --prompt-data a.jsonl --label-key a --rm-type math "
        "--n-samples-per-prompt 8 --rollout-max-response-len 64 --colocate"
    )
    main(["import", "slime", str(script), "--backend", "cpu"])
    assert capsys.readouterr().err.splitlines()[-1].startswith("the config passes `anygauge train --dry-run")


@pytest.mark.parametrize(
    ("functions", "reward"),
    [
        ("own", {"function": "my_rewards:own"}),
        (
            '[own, "accuracy_reward", lambda x: 0.0, "p.q.own_too"]',
            {
                "parts": {
                    "own": {"function": "my_rewards:own"},
                    "accuracy_reward": {"function": "math"},
                    "part_2": {"function": "my_rewards:NAME"},
                    "own_too": {"function": "p.q:own_too"},
                }
            },
        ),
    ],
)
def test_functions_that_must_be_moved_are_to_be_uncommented(
    functions: str, reward: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of them alone would be another objective."""
    script = tmp_path / "a.py"
    script.write_text(f"GRPOTrainer('m', {functions})")
    assert main(["import", "trl", str(script), "--backend", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "reward" not in tomllib.loads(printed.out)
    needed = printed.err.partition("not complete yet:")[2]
    assert "reward.function: not set" in needed
    assert tomllib.loads(printed.out.replace("# reward.", "reward."))["reward"] == reward


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"echo", "is no script or config of slime"),
        (b"A=\x1b[2J", "line 1, has a control character"),
        (b"\xff\xfe", "cannot be read"),
        (b"#" * 262_145, "more than 262,144 bytes"),
    ],
)
def test_bad_files_are_refused(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a.sh"
    script.write_bytes(content)
    assert main(["import", "slime", str(script)]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert "[AG201]" in printed


def test_what_is_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("pipe", "not a regular file"),
        ("none", "cannot be read"),
        ("", "not a regular file"),
    ):
        assert main(["import", "trl", str(tmp_path / name)]) == 1
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("[AG201]") == 1


def test_names_in_a_file_stay_in_their_line_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a\n[x]\ny = 1.sh"
    script.write_text(
        "A=( --hf-checkpoint 'm\"\nz = 1' --sglang-a.b.c 1 --sglang-tp-size 2 --loss-type sft_loss )"
    )
    main(["import", "slime", str(script), "--backend", "cpu"])
    config = tomllib.loads(capsys.readouterr().out)
    assert config["model"]["path"] == 'm"\nz = 1'
    assert "x" not in config


def test_a_name_in_the_file_names_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("run_name: mine\nmodel_name_or_path: org/model\n")
    assert main(["import", "trl", str(tmp_path / "a.yaml"), "--backend", "cpu"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["run"]["name"] == "mine"
