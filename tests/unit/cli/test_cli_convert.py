"""``anygauge convert`` calls the engine, and overwrites nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

import anygauge.engines.megatron.conversion
from anygauge.cli import main
from anygauge.plugins import Plugins


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, Path]]:
    """Replace the conversion and return the list of its calls."""
    calls: list[tuple[str, Path, Path]] = []
    stub = ModuleType("anygauge.engines.megatron.conversion.convert")

    def record(name: str) -> None:
        def convert(
            source: Path,
            target: Path,
            plugins: Plugins,
            *,
            workers: int | None,
            check: bool,
            model: Path | None,
        ) -> dict[str, int]:
            assert model in (None, Path("model"))
            assert isinstance(plugins, Plugins)
            assert (workers, check) in ((None, False), (3, True))
            calls.append((name, source, target))
            return {"model.\x1blayers.61.": 12}

        setattr(stub, name, convert)

    record("hf_to_megatron")
    record("megatron_to_hf")
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(anygauge.engines.megatron.conversion, "convert", stub, raising=False)
    return calls


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """Return a directory that looks like what each option converts."""
    hf, megatron = tmp_path / "hf_source", tmp_path / "megatron_source"
    for file in (hf / "config.json", megatron / "hf/config.json", megatron / "model/metadata.json"):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    return {"--to-megatron": hf, "--to-hf": megatron}


@pytest.mark.parametrize(
    ("option", "function", "text"),
    [
        ("--to-megatron", "hf_to_megatron", r"left out: 12 tensors (model.\x1blayers.61. ...)"),
        ("--to-hf", "megatron_to_hf", r"left out: 12 rows of model.\x1blayers.61."),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_each_direction(
    calls: list[tuple[str, Path, Path]],
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    function: str,
    text: str,
    exists: bool,
) -> None:
    source, target = sources[option], tmp_path / "out"
    if exists:
        target.mkdir()
    assert main(["convert", option, str(source), str(target)]) == 0
    assert calls == [(function, source, target)]
    assert text in capsys.readouterr().out


def test_workers_and_check(
    calls: list[tuple[str, Path, Path]],
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["convert", "--to-hf", str(sources["--to-hf"]), str(tmp_path / "out")]
    assert main([*command, "--workers", "3", "--check"]) == 0
    out = capsys.readouterr().out
    assert "the same to the bit" in out
    with pytest.raises(SystemExit):
        main([*command, "--workers", "0"])
    assert "must be a whole number of at least 1, not '0'" in capsys.readouterr().err
    assert len(calls) == 1


def test_nothing_is_overwritten(
    calls: list[tuple[str, Path, Path]],
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = sources["--to-hf"]
    assert main(["convert", "--to-hf", str(source), str(source)]) == 1
    assert "it is not empty" in capsys.readouterr().err
    assert main(["convert", "--to-hf", str(source), str(source / "hf/config.json")]) == 1
    assert "it is a file" in capsys.readouterr().err
    assert main(["convert", "--to-hf", str(source), str(source / "new")]) == 1
    assert "it is inside" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert main(["convert", "--to-hf", str(source), str(tmp_path / "link")]) == 1
    assert "it is a link" in capsys.readouterr().err
    assert main(["convert", "--to-hf", str(tmp_path / "nope"), str(tmp_path / "out")]) == 1
    assert "[AG501]" in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize(
    ("option", "other", "texts"),
    [
        ("--to-megatron", "--to-hf", ("is not a Hugging Face directory", "did you mean --to-hf?")),
        ("--to-hf", "--to-megatron", ("is not a Megatron checkpoint", "did you mean --to-megatron?")),
    ],
)
def test_the_wrong_direction_names_the_other(
    calls: list[tuple[str, Path, Path]],
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    other: str,
    texts: tuple[str, str],
) -> None:
    assert main(["convert", option, str(sources[other]), str(tmp_path / "out")]) == 1
    errors = capsys.readouterr().err
    assert all(text in errors for text in texts)
    (tmp_path / "empty").mkdir()
    assert main(["convert", option, str(tmp_path / "empty"), str(tmp_path / "out")]) == 1
    errors = capsys.readouterr().err
    assert texts[0] in errors
    assert "did you mean" not in errors
    assert "model.path" not in errors
    assert calls == []


@pytest.mark.parametrize(
    ("option", "function"), [("--to-megatron", "hf_to_megatron"), ("--to-hf", "megatron_to_hf")]
)
def test_the_checkpoint_of_a_run(
    calls: list[tuple[str, Path, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    function: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    step, target = tmp_path / "run" / "checkpoints" / "step-00000040", tmp_path / "out"
    step.mkdir(parents=True)
    (step / "rank-00000.json").write_text("{}")
    command = ["convert", option, str(step), str(target)]
    assert main(command) == 1
    assert "config.toml does not name its model" in capsys.readouterr().err
    (tmp_path / "run" / "config.toml").write_text('model.path = "model"')
    assert main(command) == 1
    assert "a run of model, which is not a Hugging Face directory here" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main(command) == 1
    assert "manifest.json" in capsys.readouterr().err
    assert calls == []
    (step / "manifest.json").write_text('{"format": 1, "world_size": 0, "files": {}}')
    (step / "driver.json").write_text(
        '{"step": 40, "state": {"step": 40, "version": 40, "source": {}}, "files": {}, "packages": {}}'
    )
    for more in ((), ("--model", "model")):
        assert main([*command, *more]) == 0
    assert calls == [(function, step, target)] * 2


def test_a_model_is_for_the_checkpoint_of_a_run(
    calls: list[tuple[str, Path, Path]],
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = str(sources["--to-hf"])
    assert main(["convert", "--to-hf", source, str(tmp_path / "out"), "--model", source]) == 1
    assert "is not a checkpoint of a run" in capsys.readouterr().err
    assert calls == []
