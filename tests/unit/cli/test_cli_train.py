"""``anygauge train``: what it resolves, prints and hands over."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from anygauge.cli import main
from anygauge.config import LoadedConfig
from anygauge.distributed.garbage import freeze_living_objects
from anygauge.health.record import health_of, write_health
from anygauge.health.rules import RULES, Limit
from anygauge.health.watch import watch_rules
from anygauge.plugins import Plugins
from anygauge_hooks.types import ConfigProblem

CONFIG = """
[run]
name = "t"
[model]
path = "model"
[data]
train = ["train.jsonl"]
[reward]
function = "exact_match"
[train]
lr = 1e-3
[on.npu.train]
lr = 2e-3
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "c.toml").write_text(CONFIG)
    return "c.toml"


def dry(config: str, *more: str) -> list[str]:
    return ["train", config, "--dry-run", "--no-file-check", *more]


def test_a_dry_run_prints_the_resolved_config_and_nothing_else(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(dry(config, "--backend", "cpu", "--run.seed", "3")) == 0
    printed = capsys.readouterr()
    resolved = tomllib.loads(printed.out)
    assert resolved["run"]["seed"] == 3
    assert resolved["train"]["lr"] == 1e-3
    assert printed.err.startswith("backend: cpu (asked for; a dry run does not probe it)\n")


@pytest.mark.parametrize("key", ["shlex:split", '"shlex:split"', '"os.path:relpath"'])
def test_a_key_may_name_a_function_of_the_users(
    config: str, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """A shell takes unprotected quotes off; a name without dots is read all the same."""
    name = key.strip('"')
    option = "comments" if name == "shlex:split" else "start"
    override = [f"--rollout.filters=['{name}']", f"--rollout.filter_options.{key}.{option}", "a.b"]
    assert main(dry(config, "--backend", "cpu", *override)) == 0
    resolved = tomllib.loads(capsys.readouterr().out)
    assert resolved["rollout"]["filter_options"] == {name: {option: "a.b"}}


def test_a_dry_run_is_for_a_backend_that_is_absent_too(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(dry(config, "--backend=npu")) == 0
    assert tomllib.loads(capsys.readouterr().out)["train"]["lr"] == 2e-3


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_an_option_takes_back_the_other_one_of_the_file(
    config: str, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    other = {"resume": "overwrite", "overwrite": "resume"}[option]
    Path(config).write_text(CONFIG.replace("[run]", f"[run]\n{other} = true"))
    assert main(dry(config, "--backend", "cpu", f"--{option}")) == 0
    run = tomllib.loads(capsys.readouterr().out)["run"]
    assert (run[option], run[other]) == (True, False)


def test_resume_and_overwrite_together_are_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(dry(config, "--resume", "--overwrite"))
    assert "give one of them" in capsys.readouterr().err
    assert main(dry(config, "--backend", "cpu", "--run.resume=true", "--run.overwrite=true")) == 1
    assert "run.overwrite deletes the run that run.resume continues" in capsys.readouterr().err


def test_what_a_plugin_fills_in_is_printed_with_its_reason(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(dry(config, "--backend", "cpu")) == 0
    assert "filled in: train.dtype = 'float32' (cpu: " in capsys.readouterr().err


def test_every_problem_is_printed_and_the_status_is_1(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", config, "--backend", "cpu", "--dry-run", "--train.lrr", "1", "--train.engine=x"]
    assert main(argv) == 1
    errors = capsys.readouterr().err
    assert "c.toml has 4 problems:" in errors
    for text in (
        "did you mean train.lr?",
        "train.engine: found 'x'",
        "data.train[0]",
        "model.path",
        "[AG201]",
    ):
        assert text in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["c.toml", "--no-file-check"], "--no-file-check needs --dry-run"),
        (["--keys", "c.toml"], "--keys takes no config"),
        (["--keys", "--train.lr", "1"], "--keys takes no config"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    config: str, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments])
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: anygauge train CONFIG.toml")
    assert text in errors


def test_an_unknown_backend_and_a_missing_file(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--backend", "abacus"]) == 1
    assert "Unknown backend 'abacus'" in capsys.readouterr().err
    assert main(["train", "d.toml", "--backend", "cpu"]) == 1
    assert "Config files there: c.toml." in capsys.readouterr().err


def test_a_directory_in_place_of_a_config_names_those_in_it(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("configs").mkdir()
    Path("configs/in.toml").touch()
    assert main(["train", "configs", "--backend", "cpu"]) == 1
    assert "Config files there: configs/in.toml." in capsys.readouterr().err
    Path("configs/in.toml").unlink()
    assert main(["train", "configs", "--backend", "cpu"]) == 1
    assert "`anygauge init` writes one" in capsys.readouterr().err


def test_a_run_gets_the_loaded_config_and_modules_of_the_current_directory(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[LoadedConfig] = []
    checks: list[bool] = []

    @contextmanager
    def start_run(loaded: LoadedConfig, plugins: Plugins, *, check: Callable[[], None]) -> Iterator[str]:
        assert checks == [False], "the models are checked while the processes come up"
        check()
        yield "started"

    def train_started(
        loaded: LoadedConfig,
        plugins: Plugins,
        started: str,
        *,
        when_built: Callable[[], None],
        should_stop: object,
    ) -> SimpleNamespace:
        assert (started, when_built) == ("started", freeze_living_objects)
        seen.append(loaded)
        watch = watch_rules({rule.name: Limit(0.0, "key") for rule in RULES})
        watch.step(3, {"rollout/lag/max": 1.0})
        write_health(tmp_path, health_of(watch, 3, []))
        return SimpleNamespace(step=3, total_steps=3, directory=str(tmp_path))

    for name, function in {"start": start_run, "run": train_started}.items():
        stub = ModuleType(f"anygauge.trainer.{name}")
        setattr(stub, function.__name__, function)
        monkeypatch.setitem(sys.modules, stub.__name__, stub)

    def checked(*_: object, checks_models: bool, **__: object) -> list[ConfigProblem]:
        checks.append(checks_models)
        return []

    monkeypatch.setattr("anygauge.config.load.check", checked)
    (tmp_path / "my_rewards_of_a_test.py").write_text("")
    assert main(["train", config, "--backend", "cpu", "--reward.function=my_rewards_of_a_test:f"]) == 0
    assert checks == [False, True]
    assert seen[0].config.run.name == "t"
    assert "run.name" in seen[0].user_keys
    assert str(tmp_path) in sys.path
    printed = capsys.readouterr().err
    assert f"done: 3 of 3 steps; everything is in {tmp_path}\n" in printed
    assert f"health: stale_weights fired at the end: see `anygauge report {tmp_path}`" in printed
