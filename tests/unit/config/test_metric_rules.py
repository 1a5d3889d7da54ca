"""Errors about functions of ``run.metrics`` before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.config.load import LoadedConfig
from anygauge_hooks.errors import ConfigError

Load = Callable[..., LoadedConfig]
FUNCTIONS = """
def fine(groups, metrics, step, unit=1.0): ...
def anything(*positional, **named): ...
def other(groups, prompts): ...
def positional(groups, /): ...
async def late(groups): ...
NUMBER = 1
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metric_functions_of_mine.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


def load_with(load: Load, *names: str) -> LoadedConfig:
    paths = [name if name == "nope" else f"metric_functions_of_mine:{name}" for name in names]
    return load({}, [f"--run.metrics={paths!r}".replace("'", '"')])


def test_functions_that_a_step_can_call(load: Load) -> None:
    assert len(load_with(load, "fine", "anything").config.run.metrics) == 2


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["nope"], "no plugin provides it; available: none; a function of your own is package"),
        (["other"], "takes prompts; a metric function gets groups, metrics, step by name"),
        (["positional"], "takes groups; a metric function gets groups, metrics, step by name"),
        (["late"], "an async function is not awaited here"),
        (["NUMBER"], "it is not a function"),
        (["fine", "fine"], "is named twice"),
    ],
)
def test_functions_that_it_cannot_call(load: Load, names: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match="has 1 problem:") as caught:
        load_with(load, *names)
    assert told in str(caught.value)
