"""The conformance suite of model families: the one of the docs passes, and a wrong one fails by its row."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
SUITE = "anygauge.testing.model_conformance"
Suite = Callable[..., tuple[int, str]]


@pytest.fixture
def family() -> str:
    """Return the module of the docs that adds a family."""
    (text,) = re.findall(r"`anygauge_ernie\.py`:\n\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return str(text)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_script: Callable[..., Any]) -> Suite:
    """Return a function that runs it where families may be found: its status, and what it printed."""
    monkeypatch.syspath_prepend(tmp_path)

    def suite(*arguments: str) -> tuple[int, str]:
        options = ("-q", "-p", "no:cacheprovider", "--pyargs", SUITE)
        process, output = start_script("pytest", *options, *arguments, directory=str(tmp_path))
        return process.wait(200), output.read_text()

    return suite


def test_the_family_of_the_docs_passes(tmp_path: Path, family: str, suite: Suite) -> None:
    (tmp_path / "right_family.py").write_text(family)
    status, printed = suite("--model", "right_family")
    assert status == 0, printed
    assert "18 passed" in printed


def test_a_family_with_other_angles_fails_in_its_layers(tmp_path: Path, family: str, suite: Suite) -> None:
    wrong = family.replace('"rotary_interleaved": True', "")
    assert wrong != family
    (tmp_path / "wrong_family.py").write_text(wrong)
    status, printed = suite("--model", "wrong_family", "-k", "megatron")
    assert status == 1, printed
    failed = re.findall(r"FAILED .*\[ernie4_5-megatron-(.*?)\]", printed)
    assert failed == ["layers", "log-probs", "packed", "gradients"]
    assert "the first to differ is model.layers.0" in printed


def test_a_module_that_is_not_there_is_named(suite: Suite) -> None:
    status, printed = suite("--model", "no_family")
    assert status == pytest.ExitCode.INTERRUPTED
    assert "--model no_family: neither an installed family (deepseek_v3, " in printed
    assert "nor a module with register_models: No module named 'no_family'" in printed
