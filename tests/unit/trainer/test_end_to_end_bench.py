"""Calculations of ``bench/end_to_end.py``; the runs themselves take minutes."""

from __future__ import annotations

import json
import runpy
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config.validate import validate

SCRIPTS = Path(__file__).parents[3] / "bench"
Bench = dict[str, Any]
Call = Callable[..., list[str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(SCRIPTS)
    return runpy.run_path(str(SCRIPTS / "end_to_end.py"))


def metrics(step: int, reward: float, **others: float | None) -> dict[str, float | None]:
    times = {"perf/step_time": 1.0 + step, "perf/train_time": 0.5, "perf/tokens_per_s": 10.0 * step}
    learned = {"train/loss": 0.1, "train/train_rollout_logprob_abs_diff": 1e-6}
    return {**times, **learned, "rollout/reward": reward, "eval/eval": reward, **others}


def row_of(bench: Bench, rows: Sequence[Mapping[str, Any]], trained: str = "given", **keys: Any) -> Any:
    extra = keys.pop("extra", [])
    return {**bench["measured"](rows), "settings": {"trained": trained, "keys": keys, "extra": extra}}


@pytest.mark.parametrize("steps", [10, 30])
def test_a_model_that_was_given_has_to_learn(bench: Bench, steps: int) -> None:
    rising = [metrics(step, step / steps) for step in range(steps)]
    falling = [metrics(step, 1 - step / steps) for step in range(steps)]
    problems = bench["shortcomings"]
    assert problems(row_of(bench, rising)) == []
    assert problems(row_of(bench, falling)) == ["the reward did not rise"]
    assert problems(row_of(bench, falling, trained="experts")) == []
    assert problems(row_of(bench, falling[:9])) == []


def test_log_probs_that_differ_and_losses_that_are_not_finite_are_shortcomings(bench: Bench) -> None:
    rows = [metrics(step, step / 4) for step in range(4)]
    apart = {"train/train_rollout_logprob_abs_diff": 1e-2}
    far, problems = [{**row, **apart} for row in rows], bench["shortcomings"]
    assert problems(row_of(bench, far)) == []  # bfloat16
    keys = {"train.dtype": "float32"}
    assert problems(row_of(bench, far, **keys)) == ["log-probs differ by more than 0.0001"]
    given = row_of(bench, far, extra=["--train.lr", "1", "--train.dtype", "float32"])
    assert problems(given) == ["log-probs differ by more than 0.0001"]
    assert problems(row_of(bench, far, **keys, **{"rollout.schedule": "async"})) == []
    none = [{name: value for name, value in row.items() if name not in apart} for row in rows]
    assert problems(row_of(bench, none)) == ["log-probs differ by more than 0.1"]
    for name in ("train/loss", "train/value_loss", "rollout/reward", *apart):
        lost = [*rows[:3], {**metrics(3, 1.0), name: None}]  # JSON has no other word for NaN
        assert problems(row_of(bench, lost)) == ["a loss, a reward or a log-prob difference is not finite"]


def test_asynchronous_rows_are_compared_by_the_mean_of_their_steps(bench: Bench) -> None:
    """Their median leaves out the steps that wait for samples."""
    rows = [metrics(step, 0.1, **{"perf/step_time": 1.0 if step % 3 else 4.0}) for step in range(12)]
    seconds = [
        bench["step_seconds"](row_of(bench, rows, **{"rollout.schedule": each})) for each in ("sync", "async")
    ]
    assert seconds == [1.0, 2.0]


def test_figures_are_medians_of_the_warm_steps(bench: Bench) -> None:
    found = bench["measured"]([metrics(step, step / 8) for step in range(8)])
    assert (found["step_s"], found["tokens_per_s"]) == (6.0, 50.0)
    assert found["phases_s"] == {"perf/step_time": 6.0, "perf/train_time": 0.5}
    assert found["held_out"] == [0.0, 0.875]


def test_a_model_whose_heads_cannot_be_divided_is_replaced(bench: Bench, tmp_path: Path) -> None:
    model_of = bench["model_of"]
    for heads, groups, expected in ((9, 3, "dense"), (8, 2, "given"), (8, 1, "dense")):
        config = {"num_attention_heads": heads, "num_key_value_heads": groups}
        (tmp_path / "config.json").write_text(json.dumps(config))
        arguments = bench["parse"](["--model", str(tmp_path), "--backend", "cpu"])
        assert model_of("colocated-tp2", arguments) == expected
        assert (model_of("colocated", arguments), model_of("experts-ep2", arguments)) == ("given", "experts")


@pytest.mark.parametrize("options", [[], ["--embedded"], ["--task", "sums"]], ids=str)
def test_every_row_is_a_valid_config(bench: Bench, tmp_path: Path, options: list[str]) -> None:
    arguments = bench["parse"]([*options, "--backend", "cpu"])
    for row, (devices, *_) in bench["ROWS"].items():
        keys = {**bench["keys_of"](row, arguments), "model.path": "model", "data.train": ["data.jsonl"]}
        sets = {f"eval.datasets.{name}.files": ["data.jsonl"] for name in ("first", "eval")}
        checked = validate(bench["nested"]({**keys, **sets}))
        assert not checked.problems, (row, checked.problems)
        config = checked.config
        assert [*config.eval.datasets] == ["first", "eval"]
        workers, tensor = config.placement.train_workers, config.train.parallel
        assert not workers % (tensor.tensor * tensor.pipeline * tensor.context)
        servers = config.placement.rollout_workers * config.rollout.sglang.get("tp_size", 1)
        if not arguments.embedded:
            assert max(workers, servers) if config.placement.colocated else workers + servers == devices


@pytest.fixture
def call(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that calls the script and returns which rows it ran; the runs are made up."""
    ran: list[str] = []

    def train(command: Sequence[str], *, env: Mapping[str, str], **options: bool) -> SimpleNamespace:
        if "--keys" in command:
            return SimpleNamespace(stdout="  --placement.num_workers  (default 1)\n      of an old tree\n")
        config = Path(command[command.index("train") + 1])
        ran.append(config.stem + env.get("OTHER_TREE", ""))
        Path(env[bench["FIRST_TOKEN"]]).write_text(str(time.time() + 7))
        directory = config.parent / f"end-to-end-{config.stem}"
        directory.mkdir(exist_ok=True)
        (directory / "logs").mkdir(exist_ok=True)
        (directory / "logs" / "driver.log").write_text(
            "INFO a.b: start: config 1.25 s, data 3.75 s\nINFO c: d\n"
        )
        slow = 2.0 if "OTHER_TREE" in env else 1.0
        lines = [json.dumps(metrics(step, step / 4, **{"perf/step_time": slow})) for step in range(4)]
        (directory / "metrics.jsonl").write_text("\n".join(lines))
        return SimpleNamespace(returncode=0)

    names = bench["main"].__globals__
    monkeypatch.setitem(names, "subprocess", SimpleNamespace(run=train))
    monkeypatch.setitem(names, "short_id", lambda commit: f"id-of-{commit}")
    monkeypatch.setitem(names, "extract", lambda commit, directory: directory)
    monkeypatch.setitem(names, "environment", lambda *places, first: {"OTHER_TREE": "-other"})
    monkeypatch.setitem(names, "check_packages", lambda *places: None)

    def made_up(directory: Path, task: str, model: Path | None) -> dict[str, Any]:
        directory.mkdir(parents=True, exist_ok=True)
        return {"model.path": str(directory / "model")}

    monkeypatch.setitem(names, "make_inputs", made_up)

    def call(*given: str, rows: Sequence[str] = ("embedded", "colocated"), status: int = 0) -> list[str]:
        ran.clear()
        places = ("--store", str(tmp_path / "rows.jsonl"), "--directory", str(tmp_path / "runs"))
        with pytest.raises(SystemExit) as ended:
            bench["main"]([*places, "--backend", "cpu", "--rows", *rows, *given])
        assert int(ended.value.code or 0) == status
        return [*ran]

    return call


def stored(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_row_that_is_stored_is_not_run_again(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(rows=["embedded"]) == ["embedded"]
    assert call() == ["colocated"]
    assert call() == []
    assert call("--directory", str(tmp_path / "elsewhere")) == []
    shown = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[-9:]]
    rows, parts = shown[2:4], shown[7:9]
    assert [cells[0] for cells in (*rows, *parts)] == ["embedded", "colocated"] * 2
    assert all(cells[-2].startswith("7.") and cells[-2].endswith(" s") for cells in rows)
    heads = [shown[5].index(name) for name in ("driver config", "driver data", "driver workers")]
    assert [[cells[at] for at in heads] for cells in parts] == [["1.2 s", "3.8 s", "-"]] * 2
    assert len(stored(tmp_path)) == 2


def test_a_row_that_has_too_few_devices_is_named(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--devices", "1", rows=["embedded", "apart-ray"]) == ["embedded"]
    assert "skipped apart-ray: it needs 2 devices, and there are 1" in capsys.readouterr().out
    assert call("--devices", "1", rows=["apart-ray"], status=1) == []  # nothing was seen to run


def test_another_tree_runs_in_turns_and_is_compared(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["embedded", "embedded-other"]
    assert call("--against", "old", "--rounds", "2", rows=["embedded"]) == 2 * both
    assert "embedded: 0.500 of the seconds a step of id-of-old" in capsys.readouterr().out
    placement = tomllib.loads((tmp_path / "runs" / "embedded.toml").read_text())["placement"]
    assert placement == {"launcher": "local", "num_workers": 1}, "the name that the old tree, the last, knows"
    here = stored(tmp_path)[0]["label"]
    assert [(row["label"], row["round"]) for row in stored(tmp_path)] == [
        (here, 0),
        ("id-of-old", 0),
        (here, 1),
        ("id-of-old", 1),
    ]
    assert call("--label", "id-of-old", "--rounds", "2", "--compare", here, rows=["embedded"], status=1) == []
    assert f"embedded: 2.000 of the seconds a step of {here}; at most 1.03: slower" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        ["--steps", "4"],
        ["--task", "sums"],
        ["--backend", "cuda", "--devices", "2"],
        ["--train.lr=1e-3"],
        ["--label", "another"],
    ],
    ids=lambda change: change[0],
)
def test_a_row_of_other_settings_is_run_again(call: Call, tmp_path: Path, change: list[str]) -> None:
    assert call(rows=["embedded"]) == ["embedded"]
    assert call(*change, rows=["embedded"]) == ["embedded"]
    assert call(*change, rows=["embedded"]) == []
    assert len(stored(tmp_path)) == 2


def test_a_line_that_breaks_off_is_run_again(call: Call, tmp_path: Path) -> None:
    call()
    store = tmp_path / "rows.jsonl"
    content = store.read_bytes()
    store.write_bytes(content[:-10])
    assert call() == ["colocated"]
    assert stored(tmp_path)[0] == json.loads(content.splitlines()[0])
    assert [row["row"] for row in stored(tmp_path)] == ["embedded", "colocated"]
