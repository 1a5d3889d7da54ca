"""The tests that need Ascend hardware: left out unless asked for, and failing where there is none."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest

HARDWARE = Path(__file__).parent / "hardware"
ROOT = Path(__file__).parents[3]


def test_they_are_deselected_by_default_and_all_marked() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "not npu_hw" in options["addopts"][-1]
    files = sorted(HARDWARE.glob("test_*.py"))
    assert len(files) >= 6
    assert all("pytestmark = [pytest.mark.npu_hw," in path.read_text() for path in files)
    assert not any("skip" in path.read_text() for path in HARDWARE.rglob("*.py"))


def test_no_ascend_and_a_simulated_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMULATED_NPU_DEVICES", raising=False)
    absence = runpy.run_path(str(HARDWARE / "conftest.py"))["absence"]
    assert absence(tmp_path) == "there is no /dev/davinci0"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci_manager").touch()
    assert absence(tmp_path) == "there is no /dev/davinci0"
    (tmp_path / "dev/davinci0").touch()
    assert absence(tmp_path) is None
    monkeypatch.setenv("SIMULATED_NPU_DEVICES", "2")
    assert absence(tmp_path) == "the device is a simulated one"
