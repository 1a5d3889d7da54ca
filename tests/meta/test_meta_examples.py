"""Every example loads for every backend, on a host that has none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.config import dump_config, load_config
from anygauge.plugins import load_plugins

BACKENDS = ("cpu", "cuda", "npu")
DIRECTORY = Path(__file__).parents[2] / "examples"
EXAMPLES = {path.name: path for path in sorted(DIRECTORY.rglob("*.toml"))}


@pytest.fixture(autouse=True)
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agents of the recipes be found, as their first lines say."""
    for folder in ("arithmetic", "geo3k_vlm_multi_turn"):
        monkeypatch.syspath_prepend(DIRECTORY / folder)


def test_the_two_recipes_are_there() -> None:
    assert {"arithmetic_grpo.toml", "gsm8k_grpo.toml"} <= set(EXAMPLES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_loads(name: str, backend: str, tmp_path: Path) -> None:
    plugins = load_plugins()
    loaded = load_config(EXAMPLES[name], backend=backend, plugins=plugins, check_files=False)
    assert loaded.backend.name == backend
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_config(loaded.config))
    again = load_config(resolved, backend=backend, plugins=plugins, check_files=False)
    assert again.config == loaded.config
