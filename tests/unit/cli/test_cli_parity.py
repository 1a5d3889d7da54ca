"""``anygauge parity`` as a command: its table and its status."""

from __future__ import annotations

import pytest

from anygauge.cli import main


def test_the_command_prints_a_table_and_that_nothing_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "cpu", "cpu:kernels=reference", "--layers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "A  cpu, megatron, float32, 1 worker"
    assert lines[1] == "B  cpu, megatron, float32, kernels reference, 1 worker"
    assert {"op", "module", "layer", "parameter", "log-probs"} == {line.split()[1] for line in lines[3:-1]}
    assert {line.split()[0] for line in lines[3:-1]} == {"PASS"}
    assert lines[-1] == "no difference is beyond its limit"


def test_a_side_of_several_workers_is_compared_by_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "cpu:engine=fsdp,workers=2", "cpu:workers=2,tensor=2,dtype=bfloat16"]) == 0
    *table, note, last = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in table[3:]} == {"parameter", "log-probs"}
    assert note == "ops and layers are not compared: a side has more than one worker"
    assert last == "no difference is beyond its limit"


def test_a_model_that_is_nowhere_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "cpu", "cpu:dtype=fp16"]) == 1
    error = capsys.readouterr().err
    assert "The config has 1 problem:\n  train.dtype: found 'fp16'; must be" in error, "no file was written"
    assert main(["parity", "cpu", "cpu", "--model", "nowhere"]) == 1
    assert "--model nowhere is neither a directory nor a model family." in capsys.readouterr().err


def test_a_side_is_not_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "cpu", "cpu:dtype=float32"]) == 1
    error = capsys.readouterr().err
    assert "both are cpu, megatron, float32, 1 worker." in error
    assert "cpu:kernels=reference" in error
    assert "[AG201]" in error
