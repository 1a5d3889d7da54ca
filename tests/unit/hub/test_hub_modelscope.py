"""Names on ModelScope: its own client against a hub on loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import Config
from anygauge.hub import localized, pinned
from anygauge_hooks.errors import HubError

MakeConfig = Callable[..., Config]


@pytest.fixture
def make(model_scope: Any, make_config: MakeConfig) -> MakeConfig:
    """Return a function that makes a config of names on ModelScope."""

    def make(endpoint: str = model_scope.url, **tables: Any) -> Config:
        hub = {"source": "modelscope", **tables.pop("hub", {})}
        return make_config(endpoint, hub=hub, **tables)

    return make


def refused(config: Config) -> str:
    with pytest.raises(HubError) as caught:
        localized(config)
    return str(caught.value)


def test_a_name_becomes_a_directory_and_a_file(make: MakeConfig, checkpoint: Path, tmp_path: Path) -> None:
    local = localized(make())
    assert local.model.path.is_relative_to(tmp_path / "cache")
    names = {path.name for path in local.model.path.iterdir() if path.is_file()}
    assert names == {path.name for path in checkpoint.iterdir()}
    path, _, rows = local.data.train[0].path.partition("@[")
    assert Path(path).read_text() == '{"prompt": "1+1=", "label": "2"}\n'
    assert rows == ":1]"


def test_a_name_is_pinned_to_its_branch_and_then_comes_from_the_cache(
    make: MakeConfig, model_scope: Any
) -> None:
    config = make()
    fixed = pinned(config)
    assert (str(fixed.model.path), fixed.model.revision) == ("Tiny/Qwen3", "master")
    model_scope.asked.clear()
    assert localized(fixed).model.path == localized(config).model.path
    assert localized(make(hub={"offline": True})).model.path.is_dir()
    assert model_scope.asked == []


def test_a_partial_cache_is_completed(make: MakeConfig) -> None:
    path = localized(make()).model.path
    (path / "config.json").unlink()
    assert "lacks config.json of it" in refused(make(hub={"offline": True}))
    assert (localized(make()).model.path / "config.json").is_file()


def test_offline(make: MakeConfig, model_scope: Any) -> None:
    text = refused(make(hub={"offline": True}))
    assert "does not hold it, and hub.offline = true forbids a download" in text
    assert "`modelscope download --model Tiny/Qwen3`" in text
    assert model_scope.asked == []


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"model": "Tiny/nothing"}, "has no such model or revision"),
        ({"model": {"path": "Tiny/Qwen3", "revision": "v9"}}, "has no such model or revision"),
        ({"data": {"train": ["hf://datasets/Tiny/none/a.jsonl"]}}, "has no such dataset or revision"),
        ({"data": {"train": ["hf://datasets/Tiny/sums/main/none.jsonl"]}}, "no such file"),
    ],
)
def test_an_unknown_name(make: MakeConfig, tables: dict[str, Any], expected: str) -> None:
    assert expected in refused(make(**tables))


def test_a_private_model(make: MakeConfig, repositories: dict[str, Any]) -> None:
    repositories["Tiny/Qwen3"].access = "private"
    text = refused(make())
    assert "does not give this model to you" in text
    assert "modelscope login" in text


def test_a_hub_that_cannot_be_reached(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelscope_hub import _legacy_api

    monkeypatch.setattr(_legacy_api, "REPO_TREE_PAGE_MAX_ATTEMPTS", 1)  # else it waits between them
    text = refused(make("http://127.0.0.1:9"))
    assert "http://127.0.0.1:9 cannot be reached" in text
    assert 'hub.source = "huggingface"' in text


def test_without_the_client_the_error_says_how_to_get_it(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelscope_hub"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    assert "pip install 'anygauge[modelscope]'" in refused(make())
