"""``anygauge convert`` calls the engine, and overwrites nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

import anygauge.engines.megatron
from anygauge.cli import main
from anygauge.plugins import Plugins


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, Path]]:
    """Replace the conversion and return the list of its calls."""
    calls: list[tuple[str, Path, Path]] = []
    stub = ModuleType("anygauge.engines.megatron.convert")

    def record(name: str) -> None:
        def convert(source: Path, target: Path, plugins: Plugins) -> None:
            assert isinstance(plugins, Plugins)
            calls.append((name, source, target))

        setattr(stub, name, convert)

    record("hf_to_megatron")
    record("megatron_to_hf")
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(anygauge.engines.megatron, "convert", stub, raising=False)
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
    ("option", "function"), [("--to-megatron", "hf_to_megatron"), ("--to-hf", "megatron_to_hf")]
)
@pytest.mark.parametrize("exists", [False, True])
def test_each_direction(
    calls: list[tuple[str, Path, Path]],
    sources: dict[str, Path],
    tmp_path: Path,
    option: str,
    function: str,
    exists: bool,
) -> None:
    source, target = sources[option], tmp_path / "out"
    if exists:
        target.mkdir()
    assert main(["convert", option, str(source), str(target)]) == 0
    assert calls == [(function, source, target)]


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
    assert main(["convert", "--to-hf", str(tmp_path / "nope"), str(tmp_path / "out")]) == 1
    assert "[AG501]" in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize(
    ("option", "other", "texts"),
    [
        ("--to-megatron", "--to-hf", ("is no Hugging Face directory", "did you mean --to-hf?")),
        ("--to-hf", "--to-megatron", ("is no Megatron checkpoint", "did you mean --to-megatron?")),
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
