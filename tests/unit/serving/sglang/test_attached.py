"""Servers that somebody else has started: whether they are what a run needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anygauge.config import Config
from anygauge.serving.sglang.attached import AttachedServer
from anygauge.serving.sglang.client import running_limit
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.serving import EngineAwayError
from anygauge_tests.fake_engine import FakeServer, Options

Make = Callable[..., Config]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[FakeServer]:
    with FakeServer(Options(model_path=str(model), tp_size=2, dp_size=3, context_length=300)) as found:
        yield found


def run_with(config: Make, model: Path, **rollout: object) -> Config:
    return config({"max_new_tokens": 200, **rollout}, model={"path": str(model)})


def test_a_server_tells_what_it_is_and_is_left_alone(config: Make, model: Path, server: FakeServer) -> None:
    attached = AttachedServer(run_with(config, model), server.address + "/")
    assert attached.start() == server.address
    facts, peer = attached.facts(), attached.peer()
    assert (facts["version"], facts["ranks"], facts["model"]) == ("0.5.23", "3", str(model))
    assert peer.max_running_requests == Options().slots // 3
    assert (peer.tensor_parallel, peer.api.has_session, peer.api.checksums) == (2, True, "sha256")
    attached.close()
    assert server.is_alive()
    assert attached.is_alive()


@pytest.mark.parametrize(
    ("answer", "limit"),
    [
        (
            {"internal_states": [{"effective_max_running_requests_per_dp": 96}], "max_running_requests": 200},
            96,
        ),
        ({"internal_states": [{}], "max_running_requests": 200}, 200),
        ({"internal_states": [{}], "max_running_requests": 200, "dp_size": 4}, 50),
        ({"internal_states": [], "max_running_requests": None}, None),
        ({"max_running_requests": "many"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_a_rank_is_read(answer: dict[str, object], limit: int | None) -> None:
    assert running_limit(answer) == limit


def test_all_that_differs_is_listed(config: Make, model: Path, server: FakeServer, tmp_path: Path) -> None:
    other = tiny_qwen3(tmp_path / "other")
    text = (other / "tokenizer.json").read_text().replace('"1"', '"7777"').replace('"2"', '"1"')
    (other / "tokenizer.json").write_text(text)
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace("Qwen3ForCausalLM", "LlamaForCausalLM")
    )
    attached = AttachedServer(run_with(config, other, max_new_tokens=1000), server.address)
    with pytest.raises(RolloutError) as caught:
        attached.start()
    for part in ("a Qwen3ForCausalLM; the run's model is a Llama", "its tokenizer makes", "300 tokens"):
        assert part in str(caught.value)


def test_a_server_that_is_away_can_be_asked_again(config: Make, model: Path) -> None:
    attached = AttachedServer(run_with(config, model), "http://127.0.0.1:9")
    with pytest.raises(EngineAwayError):
        attached.start()
    assert not attached.is_alive()
