"""Figures and comparisons of the scripts in ``bench/`` that look at commits; their runs take minutes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
PROJECT = """
[project]
name = "sample-{name}"
version = "2.5"
entry-points."anygauge.plugins" = {{ {name} = "{name}.plugin" }}

[tool.hatch.build.targets.wheel]
packages = ["code/{name}"]
"""
NAMED = """
import importlib.metadata as metadata, inner, outer
points = [(each.name, each.dist.version) for each in metadata.entry_points(group="anygauge.plugins")]
print(outer.__file__, inner.__file__, [each for each in points if each[0] in ("inner", "outer")])
"""
CODE = '''"""Of a module."""

import os
from typing import (
    Any,
)

__all__ = ["Saved"]

# a comment
LIMIT = 3
"""What limits."""


class Saved:
    """That was saved."""

    config: Any
    make: Callable[[Any, int], str] | None = None
    outputs: Callable[[Any], str]
    options: Callable[[Mapping[str, Any]], Any]
    text = """
    two lines
    """

    def step_from(self, kernels: Any | None, other: Any) -> None:
        """Take a step."""
        found = hasattr(other, "step_from")
        try:
            found = found and getattr(other, "step_from", None)
        except (OSError, Exception):
            pass
        except ValueError:
            pass
        if backend.name != "cpu" or other.name == "cuda":
            pass
'''
CODE_LINES = 19
PROGRAM = """
import sys, threading
from ours.functions import caller, later

def switch(value):
    with open(sys.argv[1], "r+b") as file:
        file.write(bytes([value]))

caller()
switch(3)
caller()
thread = threading.Thread(target=later)
thread.start()
thread.join()
switch(0)
late = caller
late(extra=True)
"""
FUNCTIONS = """
def caller(extra=False):
    class Body:
        def method(self):
            return [each for each in (1, 2)]

    Body().method()
    if extra:
        never()

def later():
    (lambda: None)()

def never():
    pass
"""


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCH)
    return runpy.run_path(str(BENCH / name))


def write_tree(tree: Path) -> Path:
    """Write a source tree of two distributions."""
    for directory, name in ((tree, "outer"), (tree / "backends" / "one", "inner")):
        package = directory / "code" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (directory / "pyproject.toml").write_text(PROJECT.format(name=name))
    return tree


def test_a_tree_runs_with_its_own_packages_and_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = script("checkout.py", monkeypatch)
    tree = write_tree(tmp_path / "tree")
    variables = checkout["environment"](tree, tmp_path / "metadata", first=[tmp_path / "first"])
    said = subprocess.check_output([sys.executable, "-P", "-c", NAMED], env=variables, text=True)
    assert said.split()[:2] == [
        str(tree / "code/outer/__init__.py"),
        str(tree / "backends/one/code/inner/__init__.py"),
    ]
    assert "[('outer', '2.5'), ('inner', '2.5')]" in said
    checkout["check_packages"](tree, variables)
    (tmp_path / "first" / "inner").mkdir(parents=True)
    (tmp_path / "first" / "inner" / "__init__.py").touch()
    with pytest.raises(SystemExit, match=r"inner is imported from .*first"):
        checkout["check_packages"](tree, variables)


def test_each_row_of_the_code_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = script("code_metrics.py", monkeypatch)
    for area in metrics["AREAS"]:
        package = tmp_path / area / "anygauge"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("# nothing\n")
        (package / "saved.py").write_text(CODE)
        (package / "long.py").write_text(60 * "x = 1\n")
    packages = 'packages = ["core/anygauge"]'
    (tmp_path / "pyproject.toml").write_text(f"[tool.hatch.build.targets.wheel]\n{packages}\n")
    tree = metrics["read_tree"](tmp_path)
    figures = {title: metrics["value"](count(tree)) for title, count in metrics["ROWS"].items()}
    core = CODE_LINES + 60
    assert figures == {
        "code lines": str(4 * core),
        "code lines in wheels": str(core),
        "code lines of core without testing": str(core),
        "files under 60 lines, other than __init__.py": "4",
        "files in the fullest folder": "3",
        "names of one sample": "0",
        "comparisons with a backend's name in backends": "1",
        "Any for config, kernels or plugins in the contract": "3",
        "protocols found by hasattr": "1",
        "docstrings that open with What, Of, By or That": str(4 * 2),
        "attribute docstrings that do": "4",
        "modules with a retired word in their name": "4",
        "classes and functions with one": "4",
        "uses of a variable named found": str(4 * 3),
        "lines of the third-party backend": "0",
        "broad excepts in core without testing": "1",
        "the same in a thousand lines": f"{1000 / (1 + 60 + CODE.count(chr(10))):.2f}",
        "the same that guard no foreign code": "1",
    }


def test_every_broad_except_of_the_core_names_the_foreign_code_that_it_guards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = script("code_metrics.py", monkeypatch)
    assert metrics["unguarded"](metrics["read_tree"](BENCH.parent)) == []


def test_the_recorder_sees_the_functions_of_a_step_alone_and_in_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    road = script("road.py", monkeypatch)
    package, output, step_file = tmp_path / "ours", tmp_path / "output", tmp_path / "step"
    package.mkdir()
    (package / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "program.py").write_text(PROGRAM)
    output.mkdir()
    step_file.write_bytes(b"\0")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(BENCH / "recorder"), str(tmp_path))),
        "RECORDER_STEP_FILE": str(step_file),
        "RECORDER_OUTPUT": str(output),
        "RECORDER_ROOTS": f"{package}/",
    }
    subprocess.run([sys.executable, "-m", "program", str(step_file)], env=variables, check=True)
    recordings = road["read_recordings"](output, [tmp_path])
    names = {(each.module, each.name) for each in recordings["program"][3]}
    assert names == {
        ("ours.functions", "caller"),
        ("ours.functions", "caller.<locals>.Body.method"),
        ("ours.functions", "later"),
        ("ours.functions", "later.<locals>.<lambda>"),
    }
    assert recordings["program"].keys() == {3}


def test_a_road_is_what_every_step_enters_in_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    road = script("road.py", monkeypatch)
    lines = {
        "anygauge": ["3\t/src/ours/a/b.py\tf", "4\t/src/ours/a/b.py\tf", "4\t/src/ours/a/c.py\tg"],
        "worker": ["3\t/src/ours/a/c.py\tg", "3\t/src/ours/fake_engine/x.py\th"],
        "ours.fake_engine": ["3\t/src/ours/a/c.py\tk"],
    }
    for name, entries in lines.items():
        (tmp_path / name).write_text("\n".join([name, *entries]))
    recordings = road["read_recordings"](tmp_path, [Path("/src")])
    assert recordings.keys() == {"anygauge", "worker"}
    table = road["report"](recordings, lists=True).splitlines()
    assert "     2  functions of 2 modules in every step" in table
    assert "        single steps: 2 to 2; in any of 2: 2" in table
    assert {"     1  entered by anygauge", "     1  entered by worker", "     2  ours.a"} <= {*table}
    assert "ours.a.b:f" in table


def test_a_difference_of_one_bit_is_found_and_new_metrics_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = script("compatibility.py", monkeypatch)
    row = {"train/loss": 0.1, "train/nan": float("nan"), "perf/time": 1.0, "time": 2.0}
    base = bench["Result"]({3: bench["compared"](row)}, {"hf: weight": "aa", "hf: bias": "bb"})
    same = bench["Result"]({3: {**bench["compared"](row), "train/new": 1}}, dict(base.tensors))
    assert bench["differences"](base, same) == []
    other = bench["Result"]({3: {"train/loss": 0.10000000000000002}}, {"hf: weight": "ab"})
    assert bench["differences"](base, other) == [
        "step 3: train/loss: 0.1 -> 0.10000000000000002",
        "step 3: train/nan: nan -> missing",
        "hf: weight: other bits",
        "hf: bias: missing",
    ]


def test_a_killed_run_without_a_journal_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("compatibility.py", monkeypatch)
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    state = {"step": 2, "state": {"rollout": {"open": [{"journals": {"0": [{"tokens": [1]}]}}]}}}
    (checkpoint / "driver.json").write_text(json.dumps(state))
    bench["check_journal"](tmp_path)
    assert "1 open groups with a journal" in capsys.readouterr().out
    state["state"] = {"rollout": {"open": [{"journals": {"0": []}}]}}
    (checkpoint / "driver.json").write_text(json.dumps(state))
    with pytest.raises(SystemExit, match="no journal"):
        bench["check_journal"](tmp_path)


def test_a_difference_is_printed_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("compatibility.py", monkeypatch)
    compare, scenario = bench["compare"], bench["SCENARIOS"][0]
    results = {
        side: bench["Result"]({3: {"train/loss": float(side == "head")}}, {}) for side in ("base", "head")
    }
    monkeypatch.setitem(compare.__globals__, "make_run", lambda *arguments: None)
    monkeypatch.setitem(compare.__globals__, "go_on", lambda side, *rest: [("sync: resume", results[side])])
    assert compare("base", "base", tmp_path, scenario) is False
    assert "bit-equal" in capsys.readouterr().out
    assert compare("base", "head", tmp_path, scenario) is True
    assert "1 DIFFERENCES\n    step 3: train/loss: 0.0 -> 1.0\n" in capsys.readouterr().out


def test_two_trainers_are_compared_in_pairs_of_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("against_trl.py", monkeypatch)
    rewards = [step / 16 for step in range(16)]
    shared = {"rewards": rewards, "gib": 1.25}
    ours = [{"seconds": [9, 9, 9, 1.0, 2.0, 3.0], **shared}, {"seconds": [1], **shared, "gib": 1.5}]
    trl = [{"seconds": [9, 9, 9, 4.0, 4.0], **shared}, {"seconds": [8], **shared}]
    assert bench["report"](ours, trl) == 5.0
    printed = capsys.readouterr().out
    assert "ratio: 5.00 (pairs: 2.00, 8.00)" in printed
    assert "anygauge: 683 samples/s (runs: 512, 1,024), 1.50 GiB" in printed
    assert printed.count("reward: 0.031 0.156 0.281 0.406 0.531 0.656 0.781 0.906") == 2


def test_a_plan_beyond_a_bound_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("plan_check.py", monkeypatch)
    row = module["Row"]
    assert row("a", 10, 10.9, 100, 119).beyond == []
    assert row("a", 10, 8.9, 100, 79).beyond == ["memory", "time"]
    assert row("a", 0, 8.9, 100, 81).beyond == []  # a host tells no peak
    assert module["line"](row("a", 10, 11.1, 100, 100)).endswith("1.00  memory")


def test_every_case_of_a_plan_check_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("plan_check.py", monkeypatch)
    for case in (*module["CASES"].values(), *module["divided"](2, 4096).values()):
        gib, ms = module["planned"](case, "H200", "cuda")
        assert 0 < gib < 139.8
        assert ms > 0
    gib, _ = module["planned"](module["CASES"]["4b"], "H200", "cuda")
    assert gib == pytest.approx(93.0, abs=0.1)


def test_a_plan_check_of_two_devices_has_the_rows_before_a_rank_that_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = script("plan_check.py", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["plan_check", "--backend", "cpu", "--devices", "2", "--length", "64"])
    args = module["parse"]()
    args.runs = 1
    cases = {name: args.known[name] for name in ("tiny-tensor", "tiny-context")}
    wrong = replace(cases["tiny-tensor"].layout, parallel={"expert": 2})
    cases["tiny-context"] = replace(cases["tiny-context"], layout=wrong)
    environment = dict(os.environ)
    (row,) = module["divided_rows"](cases, args)
    assert (row.name, row.gib) == ("tiny-tensor", 0)  # a host tells no peak
    assert row.ms > 0
    assert "Megatron refuses" in capfd.readouterr().err
    assert dict(os.environ) == environment, "only that of the ranks hides devices"


def test_a_lone_rank_receives_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("lone_rank.py", monkeypatch)["_filled"](lambda output, _: output.tolist())
    assert run(torch.empty(5), torch.tensor([1.0, 2.0])) == [1, 2, 1, 2, 1]
    assert run(torch.empty(2), torch.empty(0)) == [0, 0], "there is nothing to repeat"
    whole = torch.arange(4.0)
    assert run(whole, whole[:2]) == [0, 1, 2, 3], "others' parts of a buffer stay"


def test_the_first_rank_takes_the_steps_of_each_division_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("plan_check.py", monkeypatch)
    options = ["--backend", "cpu", "--devices", "8", "--first-rank", "--length", "64"]
    monkeypatch.setattr(sys, "argv", ["plan_check", *options])
    args = module["parse"]()
    args.runs = 1
    names = ["tiny-context", "tiny-fsdp"]
    rows = list(module["divided_rows"]({name: args.known[name] for name in names}, args))
    assert [row.name for row in rows] == names
    case = module["divided"](2, 4096)["1.7b-tensor"]
    alone, together = (module["planned"](case, "H200", "cuda", exchanges=each) for each in (False, True))
    assert alone[0] == together[0]
    assert alone[1] < 0.9 * together[1]


def test_adapters_on_a_4_bit_base_take_a_step_without_a_file_of_weights() -> None:
    pytest.importorskip("bitsandbytes")
    sides = ["--alone", "--sides", "qlora", "--shape", "tiny", "--lengths", "8", "--runs", "1"]
    done = subprocess.run([sys.executable, BENCH / "train_step.py", *sides], capture_output=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["ms"] > 0


def test_a_wrong_input_falls_short_where_its_message_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    bench = runpy.run_path(str(BENCH / "wrong_inputs.py"))
    case = bench["Case"]("config", "train", ("train.lr", "a number"), never=("Optimizer",))
    said = "error: train.lr: must be a\n  number\n  [AG201]\n"

    def grade(status: int | None, output: str) -> str:
        text: str = bench["shortcomings"](bench["Outcome"](case, status, output, 1.0))
        return text

    assert grade(1, said) == ""
    assert grade(None, said) == "did not end in 60 s"
    assert grade(0, said) == "status 0 instead of 1"
    assert grade(1, said.replace("AG201", "AG301")) == "no [AG201]"
    assert grade(1, said.replace("number", "text")) == "does not say 'a number'"
    assert grade(1, f"{said}Optimizer") == "says 'Optimizer'"
    assert grade(1, f"Traceback (most recent call last):\n{said}").startswith("says 'Traceback")
    assert grade(1, f"\x1b[31m{said}") == r"says '\x1b'"
    assert grade(77, "") == "skipped"
    page = (BENCH.parent / "docs" / "stumbles.md").read_text(encoding="utf-8")
    assert f"with more: {len(bench['CASES'])} wrong inputs of" in page
