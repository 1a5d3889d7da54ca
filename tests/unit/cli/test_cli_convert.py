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


@pytest.mark.parametrize(
    ("option", "function"), [("--to-megatron", "hf_to_megatron"), ("--to-hf", "megatron_to_hf")]
)
@pytest.mark.parametrize("exists", [False, True])
def test_each_direction(
    calls: list[tuple[str, Path, Path]], tmp_path: Path, option: str, function: str, exists: bool
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    if exists:
        target.mkdir()
    assert main(["convert", option, str(source), str(target)]) == 0
    assert calls == [(function, source, target)]


def test_nothing_is_overwritten(
    calls: list[tuple[str, Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "file").write_text("")
    assert main(["convert", "--to-hf", str(source), str(source)]) == 1
    assert "it is not empty" in capsys.readouterr().err
    assert main(["convert", "--to-hf", str(source), str(source / "file")]) == 1
    assert "it is a file" in capsys.readouterr().err
    assert main(["convert", "--to-hf", str(tmp_path / "nope"), str(tmp_path / "out")]) == 1
    assert "[AG501]" in capsys.readouterr().err
    assert calls == []
