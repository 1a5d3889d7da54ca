"""Where servers come from: in waves from the run's own workers, or from somebody else, who may come back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.serving import server_sources
from anygauge.serving.server_sources import AttachedServers, StartedServers
from anygauge.serving.server_workers import Serving
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.serving import EngineAwayError


def config(**rollout: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "model"},
            "data": {"train": ["t.jsonl"]},
            "rollout": {"engine": "stub", **rollout},
            "placement": {"start_timeout_s": 0.2},
        }
    )


class Workers:
    """Those of three servers, of which the first encodes for the second."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Mapping[str, Sequence[str]]]] = []

    def call(
        self, method: str, *, timeout_s: float, wave: int, encoders: Mapping[str, Sequence[str]]
    ) -> list[Any]:
        assert method == "serve"
        self.calls.append((wave, encoders))
        waves = (0, 1, 1)
        return [
            Serving(SGLangPeer(address=f"http://h:{rank}"), {}) if wave == of else None
            for rank, of in enumerate(waves)
        ]


def test_encoders_serve_before_those_that_ask_them_are_started() -> None:
    groups = [{}, {"kind": "encoder"}, {"model": "judge", "path": "j"}]
    workers = Workers()
    serving = StartedServers(config(groups=groups), workers).serve()  # type: ignore[arg-type]
    assert workers.calls == [(0, {}), (1, {"policy": ["http://h:0"]})]
    assert [server.address for server in serving] == ["http://h:0", "http://h:1", "http://h:2"]


class Somebodys:
    """A server of somebody else's."""

    def __init__(self, address: str) -> None:
        self.address, self.starts = address, 0
        self.error: Exception | None = None

    def start(self, encoders: Sequence[str] = ()) -> str:
        self.starts += 1
        if self.error is not None:
            raise self.error
        return self.address

    def peer(self) -> SGLangPeer:
        return SGLangPeer(address=self.address)

    def facts(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        return


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> tuple[AttachedServers, list[Somebodys]]:
    monkeypatch.setattr(server_sources, "RETURN_S", 0.01)
    made: list[Somebodys] = []

    def attach(config: Config, address: str) -> Any:
        made.append(Somebodys(address))
        return made[-1]

    addresses = ["http://a:1", "http://b:2"]
    return AttachedServers(config(external=addresses), RolloutEngineSpec(name="stub", attach=attach)), made


def test_one_that_never_comes_is_an_error_and_a_wrong_one_at_once(
    theirs: tuple[AttachedServers, list[Somebodys]],
) -> None:
    source, servers = theirs
    servers[1].error = EngineAwayError("nobody is there")
    with pytest.raises(
        RolloutError, match=r"An engine of rollout\.external does not answer: nobody is there"
    ):
        source.serve()
    assert servers[1].starts > 2
    servers[1].error, servers[1].starts = RolloutError("it has another tokenizer"), 0
    with pytest.raises(RolloutError, match="another tokenizer"):
        source.serve()
    assert servers[1].starts == 1


def test_one_that_was_lost_is_another_when_it_is_back(
    theirs: tuple[AttachedServers, list[Somebodys]],
) -> None:
    source, servers = theirs
    assert [server.incarnation for server in source.serve()] == [0, 0]
    servers[0].error = EngineAwayError("it is away")
    first, second = source.look({0: 0})
    assert first is None
    assert second is not None
    asked = servers[0].starts
    until(lambda: servers[0].starts > asked + 1)
    assert source.look({0: 0})[0] is None
    servers[0].error = None
    until(lambda: source.look({0: 0})[0] is not None)
    back = source.look({})[0]
    assert back is not None
    assert back.incarnation == 1
    source.close()


def until(holds: Any) -> None:
    ends = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.005)
