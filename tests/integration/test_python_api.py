"""The Python API as a script and a notebook use it."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import anygauge
from anygauge import Run, evaluate, generate, train
from anygauge.cli import main
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.errors import AnygaugeError, CheckpointError, ConfigError, DataError
from anygauge_hooks.rl import Group
from anygauge_tests.code_blocks import blocks
from anygauge_tests.fork_server import ForkServers
from anygauge_tests.recipe import tiny_recipe

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("api_script.py")
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(4)]
SMALL: Mapping[str, Any] = {
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 4},
    "placement": {"threads_per_worker": 1},
    "data.cache": "cache",
}

forked = pytest.mark.usefixtures("forked_actors")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_qwen3(tmp_path / "tiny", init_std=0.3)


def made(**options: Any) -> Run:
    """Train with a reward that has no importable name."""
    return train(*options.pop("args"), reward=lambda response: len(response) / 4, **options)


@forked
def test_a_run_beside_a_running_loop(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook's cell has a loop. The run is stopped by its callback, resumed, evaluated and asked."""
    steps: list[tuple[int, float]] = []
    settings: Any = {**SMALL, "run": {"name": "r", "steps": 3}}

    def trl(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        assert all(columns["completion_ids"])
        return [float(text.startswith(own)) for text, own in zip(completions, answer, strict=True)]

    async def length(response: str) -> float:
        await asyncio.sleep(0)
        return len(response) / 4

    rewards: Any = [trl, (length, 0.5)]

    def on_step(step: int, metrics: Mapping[str, float]) -> bool:
        steps.append((step, metrics["rollout/raw_reward"]))
        return step == 2

    begun: list[int] = []

    def longest(groups: Sequence[Group], metrics: Mapping[str, float]) -> Mapping[str, float]:
        lengths = [len(sample.response_tokens) for group in groups for sample in group.samples]
        assert metrics["rollout/response_len/max"] == max(lengths)
        return {"longest": max(lengths)}

    async def cell() -> Run:
        watching: Any = {"on_step": on_step, "before_step": begun.append, "metrics": [longest]}
        return train(model, ROWS, rewards, eval_data=ROWS[:2], **watching, **settings)

    run = asyncio.run(cell())
    assert begun == [step for step, _ in steps] == [1, 2]
    rows = [row for row in run.metrics_list if row["step"]]
    assert [row["custom/longest"] for row in rows] == [row["rollout/response_len/max"] for row in rows]
    assert all(0 <= row["reward/trl"] <= 1 and row["reward/length"] > 0 for row in rows)
    assert [(row["step"], row.get("rollout/raw_reward")) for row in run.metrics_list] == [(0, None), *steps]
    assert [row["step"] for row in run.metrics_list if "eval/eval" in row] == [0, 2]
    assert run.outcome == "finished"
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.name == "step-00000002"
    assert {sample["step"] for sample in run.samples} == {1, 2}
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert re.findall(r"^step (\d)/3 ", printed, re.MULTILINE) == ["1", "2"]

    resumed = train(model, iter(ROWS), rewards, eval_data=ROWS[:2], resume=True, **settings)
    assert resumed.metrics_list[:2] == run.metrics_list[:2]
    assert resumed.metrics_list[-1]["step"] == 3

    metrics = evaluate(run, reward=rewards)
    assert metrics["eval/step"] == 3
    assert metrics["eval/eval"] == pytest.approx(resumed.metrics_list[-1]["eval/eval"])
    with pytest.raises(ConfigError, match=r"'python.trl'; a Python program gave this function"):
        evaluate(run)


@forked
def test_a_run_of_the_command_line_is_opened_and_asked(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, run__steps=1, save__every=None)
    assert main(["train", str(recipe), "--backend", "cpu"]) == 0
    run = Run.load(tmp_path / "run")
    assert (run.outcome, run.config.run.steps, run.checkpoint) == ("finished", 1, tmp_path / "run" / "hf")
    assert run.metrics_list[0]["train/entropy_loss"] > 0
    assert run.report().startswith(str(tmp_path / "run"))
    assert "srcdoc" in run.report()._repr_html_()
    assert "run: finished, 1 step</b>" in run._repr_html_()
    assert run.health is not None
    assert (run.health.step, run.health.status, run.health.firing) == (1, "ok", ())
    (run.directory / "health.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"health\.json cannot be read"):
        _ = run.health

    greedy = run.generate(["1+2=", "2+2="], temperature=0)
    assert [len(text) <= 4 for text in greedy] == [True, True]  # as many tokens as the run's responses have
    assert greedy == generate(run.model, ["1+2=", "2+2="], temperature=0, max_new_tokens=4)
    drawn = run.generate("1+2=", samples_per_prompt=3, seed=1)
    assert len(drawn) == 3
    assert (
        drawn
        == run.generate("1+2=", samples_per_prompt=3, seed=1)
        != run.generate("1+2=", samples_per_prompt=3)
    )

    metrics = evaluate(run, [{"prompt": "1+2=", "label": greedy[0]}], eval={"temperature": 0.0})
    assert metrics["eval/eval"] == 1.0


@forked
def test_a_file_is_the_base_and_a_callback_may_raise(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, run__steps=3)

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise ZeroDivisionError(step)

    with pytest.raises(ZeroDivisionError, match="2") as caught:
        train(recipe, on_step=on_step, overwrite=True)
    assert caught.traceback[-1].name == "on_step"
    assert {each.path for each in caught.traceback} == {Path(__file__)}, "no frame of anygauge"
    assert Run(tmp_path / "run").outcome == "failed"


def fail_at(step: int) -> Callable[..., None]:
    """Return a callback that raises at a step."""
    return lambda now, *_: 1 / (now - step) and None


@forked
@pytest.mark.parametrize(
    "failing",
    [
        {"on_step": fail_at(2)},
        {"metrics": lambda step: {"half": 1 / (step - 2)}},
        {"before_step": fail_at(3)},
        {"before_step": lambda step: step == 3 and Path("broken").touch()},
    ],
    ids=["after", "metrics", "before", "reward"],
)
def test_what_is_learned_before_an_error_is_saved(tmp_path: Path, failing: Mapping[str, Any]) -> None:
    def scored(response: str) -> float:
        if Path("broken").exists():
            raise ZeroDivisionError
        return 1.0

    evaluated = {"eval__data": [tmp_path / "data.jsonl"], "eval__interval": 2}
    recipe = tiny_recipe(tmp_path, run__steps=3, reward__function=None, **evaluated)
    with pytest.raises((ZeroDivisionError, AnygaugeError)) as caught:
        train(recipe, reward=scored, **failing)
    if isinstance(caught.value, AnygaugeError):
        assert "\n  --resume goes on from the last checkpoint.\n" in str(caught.value)
    run = Run(tmp_path / "run")
    assert run.last_checkpoint is not None, "the steps that it took are lost"
    assert run.last_checkpoint.name == "step-00000002"
    assert [row["step"] for row in run.metrics_list] == [0, 1, 2]
    assert run.health is not None
    assert run.health.step == 2
    Path("broken").unlink(missing_ok=True)
    resumed = train(recipe, reward=scored, resume=True)
    assert [row["step"] for row in resumed.metrics_list if "eval/data" in row] == [0, 2, 3]


def test_a_run_that_is_refused_leaves_no_directory(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.lrr: found 1; unknown key; did you mean train\.lr\?"):
        made(args=(model, ROWS), train={"lrr": 1})
    with pytest.raises(ConfigError, match=r"run\.name: found 'a/b'; must begin with a letter"):
        made(args=(model, ROWS), run={"name": "a/b"})
    with pytest.raises(ConfigError, match=r"run\.name: found 'aaa.*must have at most"):
        made(args=(model, ROWS), run={"name": "a" * 300})
    with pytest.raises(ConfigError, match=r"eval\.data\[0\]\.name: found 'gsm8k/test'; must begin"):
        made(args=(model, ROWS), eval_data={"gsm8k/test": ROWS})
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match=r"data\.train\[0\]: found 'none\.jsonl'; no such file"):
        made(args=(model, "none.jsonl"))


@forked
def test_an_earlier_run_keeps_its_rows(model: Path, tmp_path: Path) -> None:
    settings: Any = {**SMALL, "run": {"name": "r", "steps": 1}, "save": {"every": None, "hf_at_end": False}}
    run = made(args=(model, ROWS), **settings)
    first = [path.name for path in (run.directory / "inputs").iterdir()]
    with pytest.raises(CheckpointError, match="is not empty"):
        made(args=(model, ROWS[:8]), **settings)
    assert [path.name for path in (run.directory / "inputs").iterdir()] == first
    made(args=(model, ROWS[:8]), overwrite=True, **settings)
    second = [path.name for path in (run.directory / "inputs").iterdir()]
    assert len(second) == 1
    assert second != first
    with pytest.raises(CheckpointError, match="has no export of its model, and no checkpoint") as caught:
        run.generate("1+2=")
    assert len(caught.traceback) == 1, "no frame of anygauge"


def test_a_prompt_that_cannot_be_used_is_named_with_what_helps(model: Path) -> None:
    with pytest.raises(
        DataError, match=r"prompts: row 1: (?s:.*)Correct these prompts, or leave them out"
    ) as caught:
        generate(model, ["1+2=", "1+2=" * 4000], max_new_tokens=8)
    assert "data." not in str(caught.value)


def test_a_data_frame_needs_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'anygauge\[pandas\]'"):
        _ = Run(tmp_path).metrics


def test_a_data_frame_has_a_row_for_each_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"train/step": 3, "train/loss": 0.5}\n')
    assert Run(tmp_path).metrics["train/loss"].to_dict() == {3: 0.5}


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run directory"):
        Run.load(tmp_path)


def test_a_run_that_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "run" / "config.toml"
    config.parent.mkdir()
    config.write_text("")
    run = Run("run")
    monkeypatch.chdir(config.parent)
    assert run.health is None
    config.unlink()
    for ask in ("health", "last_checkpoint", "checkpoint", "model"):
        with pytest.raises(CheckpointError, match="is not a run directory"):
            getattr(run, ask)


def test_an_interrupt_ends_a_script_and_its_processes(
    model: Path, tmp_path: Path, fork_servers: ForkServers
) -> None:
    reading, writing = os.pipe()
    arguments = [str(model), str(tmp_path / "runs")]
    with open(writing, "wb"):
        script = fork_servers.start(str(SCRIPT), arguments, output=writing, has_own=True)
    printed = []
    with open(reading) as lines:
        for line in lines:
            printed.append(line)
            if line.startswith("ready"):
                script.send_signal(signal.SIGINT)
    assert script.wait(60) == 0, "".join(printed)
    ready = next(line.split() for line in printed if line.startswith("ready"))
    assert int(ready[1]) > 0
    assert printed[-1] == "interrupted interrupted 0 True True\n", "".join(printed)


@forked
def test_the_uploads_of_the_guide_find_complete_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks(ROOT / "docs" / "howto.md", "python")
    assert "EVERY = 100\n" in code
    tiny_recipe(tmp_path, run__directory="runs", run__steps=3, run__report=False)
    uploads: list[tuple[str, bool]] = []

    def upload_folder(*positional: Any, **options: Any) -> None:
        arguments = inspect.signature(huggingface_hub.HfApi.upload_folder).bind(None, *positional, **options)
        path = Path(arguments.arguments["folder_path"])
        uploads.append((path.name, any(path.glob("*.safetensors"))))

    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)
    exec(code.replace("EVERY = 100\n", "EVERY = 1\n"), {"__name__": "guide"})
    assert uploads == [("hf-step-1", True), ("hf-step-2", True), ("hf", True)]


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells, in one namespace beside a running loop, as Jupyter runs them."""
    notebook = json.loads((ROOT / "examples" / "first_run.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert len([line for line in cells[0].splitlines() if line]) == 5
    names: dict[str, Any] = {"__name__": "__main__"}

    async def run_cells() -> None:
        for cell in cells:
            exec(compile(cell, "<cell>", "exec"), names)

    asyncio.run(run_cells())
    rewards = [row["rollout/raw_reward"] for row in names["run"].metrics_list]
    assert rewards[0] < 0.2 < 0.8 < rewards[-1]
    assert names["digits_run"].metrics_list[-1]["step"] < 20
    assert "\x1b" not in capsys.readouterr().out


def test_every_name_has_an_example_and_types() -> None:
    for name in set(anygauge.__all__) - {"__version__", "Config"}:
        item = getattr(anygauge, name)
        assert "Example" in (inspect.getdoc(item) or ""), name
        for function in (item, *(each for each in vars(item).values() if inspect.isfunction(each))):
            if inspect.isfunction(function) and not function.__name__.startswith("_"):
                assert "return" in function.__annotations__, function
