"""Names on the Hugging Face hub, against a hub on loopback."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download

from anygauge.config.schema import Config
from anygauge.hub import localized, pinned, unresolved
from anygauge_hooks.errors import HubError

MakeConfig = Callable[..., Config]
COMMIT = "5f3c" * 10
NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def config(hugging_face: Any, make_config: MakeConfig) -> Config:
    return make_config(hugging_face.url)


def refused(config: Config) -> str:
    """Return the text of the error that a config ends in."""
    with pytest.raises(HubError) as caught:
        localized(config)
    return str(caught.value)


# -------------------------------------------------------------------------
# What is found
# -------------------------------------------------------------------------


def test_a_local_path_is_left_alone(make_config: MakeConfig, checkpoint: Path, tmp_path: Path) -> None:
    config = make_config(model=str(checkpoint), data={"train": [str(tmp_path / "train.jsonl")]})
    assert localized(config) is config
    assert pinned(config) is config
    assert unresolved(config) == []


def test_a_name_becomes_a_directory_and_a_file(config: Config, checkpoint: Path) -> None:
    local = localized(config)
    assert (local.model.path / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    (file,) = local.data.train
    path, _, rows = file.path.partition("@[")
    assert Path(path).read_text() == '{"prompt": "1+1=", "label": "2"}\n'
    assert (rows, Path(path).name) == (":1]", "train.jsonl")


def test_only_what_a_run_needs_is_downloaded(config: Config, hugging_face: Any, checkpoint: Path) -> None:
    localized(config)
    weights = {path.name for path in checkpoint.glob("*.safetensors*")}
    assert len(weights) > 2
    assert hugging_face.downloaded() >= NEEDED | weights
    assert not hugging_face.downloaded() & {
        "pytorch_model.bin",
        "modeling_evil.py",
        "consolidated.pth",
        "README.md",
    }


def test_python_files_come_only_where_they_may_run(hugging_face: Any, make_config: MakeConfig) -> None:
    model = {"path": "Tiny/Qwen3", "trust_remote_code": True}
    localized(make_config(hugging_face.url, model=model))
    assert "modeling_evil.py" in hugging_face.downloaded()


def test_names_are_pinned_to_the_commit(config: Config) -> None:
    fixed = pinned(config)
    assert (str(fixed.model.path), fixed.model.revision) == ("Tiny/Qwen3", COMMIT)
    assert fixed.data.train[0].path == f"hf://datasets/Tiny/sums@{COMMIT}/main/train.jsonl@[:1]"
    assert pinned(fixed) == fixed
    assert localized(fixed) == localized(config).model_copy(update={"model": localized(fixed).model})
    assert [str(name) for name in unresolved(fixed)] == [f"Tiny/Qwen3@{COMMIT}", fixed.data.train[0].path]


def test_every_place_of_a_name(hugging_face: Any, make_config: MakeConfig) -> None:
    test = "hf://datasets/Tiny/sums@v1/main/test.jsonl"
    config = make_config(
        hugging_face.url,
        reference={"path": "Tiny/Qwen3@v1"},
        algorithm={"kl_coef": 0.1},
        eval={"data": [test], "datasets": {"own": {"files": [{"path": test, "weight": 2}]}}},
    )
    fixed, local = pinned(config), localized(config)
    assert str(fixed.reference.path) == f"Tiny/Qwen3@{COMMIT}"
    assert local.reference.path == local.model.path
    assert fixed.eval.data[0].path == f"hf://datasets/Tiny/sums@{COMMIT}/main/test.jsonl"
    (own,) = local.eval.datasets["own"].files
    assert Path(own.path).is_file()
    assert own.weight == 2
    assert localized(config, data=False).eval == config.eval


def test_an_unused_reference_is_not_looked_up(hugging_face: Any, make_config: MakeConfig) -> None:
    localized(make_config(hugging_face.url, reference={"path": "Tiny/nothing"}))


def test_the_cache_comes_before_the_network(config: Config, hugging_face: Any) -> None:
    first = localized(config)
    hugging_face.asked.clear()
    assert localized(config) == first
    assert localized(pinned(config)).model.path == first.model.path
    assert hugging_face.asked == []


def test_without_a_download_an_unknown_name_stays(config: Config, hugging_face: Any) -> None:
    assert localized(config, download=False) == config
    assert pinned(config, download=False) == config
    assert hugging_face.asked == []


def test_a_partial_cache_is_completed(config: Config, hugging_face: Any) -> None:
    weights = sorted(localized(config).model.path.glob("*.safetensors"))[0]
    os.remove(weights.resolve())
    weights.unlink()
    assert localized(config, download=False).model == config.model
    hugging_face.asked.clear()
    assert (localized(config).model.path / weights.name).is_file()
    assert hugging_face.downloaded() == {weights.name}


def test_workers_of_one_node_may_ask_at_the_same_time(config: Config) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(localized(config).model.path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert len(set(paths)) == 1


def test_a_token_opens_what_is_gated_or_private(
    config: Config, repositories: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    repositories["Tiny/Qwen3"].access = "gated"
    repositories["datasets/Tiny/sums"].access = "private"
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert localized(config).model.path.is_dir()


# -------------------------------------------------------------------------
# What is not
# -------------------------------------------------------------------------


def test_an_unknown_model(hugging_face: Any, make_config: MakeConfig) -> None:
    text = refused(make_config(hugging_face.url, model="models/Qwen3-8B"))
    assert "model.path = 'models/Qwen3-8B'" in text
    assert "has no such model, or it is private" in text
    assert "a local path that does not exist here" in text


def test_an_unknown_data_set_and_an_unknown_file(hugging_face: Any, make_config: MakeConfig) -> None:
    for path, expected in (
        ("hf://datasets/Tiny/Qwen3/a.jsonl", "has no such dataset, or it is private"),
        ("hf://datasets/Tiny/sums/main/nope.jsonl", "the data set has no such file"),
    ):
        text = refused(make_config(hugging_face.url, data={"train": [path]}))
        assert f"data.train[0] = '{path}'" in text
        assert expected in text


def test_an_unknown_revision(hugging_face: Any, make_config: MakeConfig) -> None:
    text = refused(make_config(hugging_face.url, model={"path": "Tiny/Qwen3", "revision": "v9"}))
    assert "no revision 'v9' of it" in text
    assert "model.revision" in text


def test_a_gated_model(config: Config, hugging_face: Any, repositories: dict[str, Any]) -> None:
    repositories["Tiny/Qwen3"].access = "gated"
    text = refused(config)
    assert f"Accept the license on {hugging_face.url}/Tiny/Qwen3" in text
    assert "hf auth login" in text
    assert "HF_TOKEN" in text


def test_a_private_model(config: Config, repositories: dict[str, Any]) -> None:
    repositories["Tiny/Qwen3"].access = "private"
    assert "or it is private" in refused(config)


def test_a_wrong_token(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    text = refused(config)
    assert "refused the access token (status 401)" in text
    assert "hf auth login" in text


@pytest.mark.parametrize("by", ["config", "environment"])
def test_offline(
    hugging_face: Any, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, by: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by == "environment")
    text = refused(make_config(hugging_face.url, hub={"offline": by == "config"}))
    assert f"{tmp_path / 'cache'} does not hold it" in text
    assert ("hub.offline = true" if by == "config" else "HF_HUB_OFFLINE=1") in text
    assert "`hf download Tiny/Qwen3`" in text
    assert "models--Tiny--Qwen3" in text
    assert hugging_face.asked == []


def test_offline_with_a_full_cache(config: Config, make_config: MakeConfig, hugging_face: Any) -> None:
    local = localized(config)
    hugging_face.asked.clear()
    assert localized(make_config(hugging_face.url, hub={"offline": True})).model == local.model
    assert hugging_face.asked == []


def test_offline_with_a_partial_cache(config: Config, make_config: MakeConfig, hugging_face: Any) -> None:
    path = localized(config).model.path
    (path / "config.json").unlink()
    text = refused(make_config(hugging_face.url, hub={"offline": True}))
    assert "lacks config.json of it" in text
    (path / "generation_config.json").unlink()
    (path / "config.json").write_text("{}")
    assert "lacks some files of it" in refused(make_config(hugging_face.url, hub={"offline": True}))


def test_a_hub_that_cannot_be_reached(make_config: MakeConfig, hugging_face: Any, tmp_path: Path) -> None:
    text = refused(make_config("http://127.0.0.1:9"))
    assert "http://127.0.0.1:9 cannot be reached" in text
    assert "hub.endpoint (or HF_ENDPOINT) to a mirror" in text
    assert 'hub.source = "modelscope"' in text
    assert str(tmp_path / "cache/models--Tiny--Qwen3") in text


def test_without_an_endpoint_the_librarys_own_is_taken(
    make_config: MakeConfig, hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in refused(make_config())


def test_a_hub_with_a_bad_day(config: Config, hugging_face: Any) -> None:
    hugging_face.status = 503
    text = refused(config)
    assert "answered with status 503" in text
    assert "HF_ENDPOINT" in text


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, "is full"), (errno.EACCES, "cannot be written")]
)
def test_a_cache_that_takes_no_more(
    config: Config, monkeypatch: pytest.MonkeyPatch, number: int, expected: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_download, "_download_to_tmp_and_move", fail)
    text = refused(config)
    assert expected in text
    assert "hub.cache" in text


def test_no_request_leaves_loopback(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: set[str] = set()
    connect = socket.socket.connect

    def record(self: socket.socket, address: Any) -> None:
        hosts.add(address[0])
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", record)
    localized(config)
    assert hosts == {"127.0.0.1"}
