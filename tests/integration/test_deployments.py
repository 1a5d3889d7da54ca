"""Whole runs whose servers are not alike, or not the run's own: fake ones, which speak as real ones do."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.rl import Group
from anygauge_hooks.types import RunInfo
from anygauge_tests.fake_engine import FakeServer, Options
from anygauge_tests.fake_engine.installed import install_fake_engine
from anygauge_tests.observer import versions_by_step
from anygauge_tests.recipe import tiny_recipe

pytestmark = pytest.mark.usefixtures("forked_actors")

GROUPS = """
[[rollout.groups]]
kind = "decode"

[[rollout.groups]]
kind = "prefill"

[[rollout.groups]]
kind = "encoder"

[[rollout.groups]]
model = "judge"
path = "{judge}"
"""
FUNCTION = """
from anygauge_hooks.rollout import GenerateRequest

async def judged(rollout, prompt, seed):
    draft = rollout.draft()
    await draft.generate()
    asked = GenerateRequest(f"judge-{seed}", draft.tokens, rollout.params, seed)
    verdict = await rollout.engines["judge"].generate(asked)
    return draft.sample(metadata={"versions": verdict.weight_versions, "said": len(verdict.tokens)})
"""


class Observer:
    """Keeps the groups, and does something after a step."""

    def __init__(self, after: Mapping[int, Any] | None = None) -> None:
        self.groups: list[Group] = []
        self.steps = 0
        self._after = after or {}

    @hookimpl
    def after_rollout(self, run: RunInfo, groups: Sequence[Group]) -> None:
        self.groups.extend(groups)

    @hookimpl
    def after_train_step(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        self.steps += 1
        if self.steps in self._after:
            self._after[self.steps]()


def run(directory: Path, observer: Observer, text: str = "", **keys: Any) -> RunInfo:
    known = {
        "run__steps": 3,
        "weight_sync__transport": "tensor",
        "weight_sync__bucket_bytes": 1 << 20,  # as in test_served_run
        "health__logprob_abs_diff_error": "none",  # fake engines make their log-probs up
        "run__timeout_s": 90,
    }
    path = tiny_recipe(directory, **{**known, **keys})
    path.write_text(path.read_text() + text)
    plugins = load_plugins()
    plugins.register(observer, "observer")
    return train(load_config(path, backend="cpu", plugins=plugins), plugins)


def test_a_run_over_all_kinds_of_servers_and_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode server dies in the second step; the encoder before any."""
    options = {"vocab_size": 18, "lengths": "uniform:2:4"}
    faults = ["", "die@generate:20", "", ""]
    monkeypatch.syspath_prepend(str(install_fake_engine(tmp_path / "plugin", faults, options)))
    (tmp_path / "plugin" / "asks_a_judge.py").write_text(FUNCTION)
    (tmp_path / "judge").mkdir()
    monkeypatch.delitem(sys.modules, "asks_a_judge", raising=False)
    observer = Observer()
    keys = {
        "rollout__engine": "fake",
        "rollout__function": "asks_a_judge:judged",
        "placement__rollout_workers": 4,
    }
    info = run(tmp_path, observer, GROUPS.format(judge=tmp_path / "judge"), **keys)
    assert info.step == 3
    assert versions_by_step(observer.groups, 4) == [{0}, {1}, {2}]
    verdicts = [sample.metadata for group in observer.groups for sample in group.samples]
    assert len(verdicts) == 48
    assert all(set(verdict["versions"]) == {0} and verdict["said"] for verdict in verdicts)


def test_engines_of_others_get_the_weights_and_take_part_again_when_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dies in the first step; it is back, and the second dies, in the second."""
    tiny_recipe(tmp_path)
    secret = {"api_key": "sk-of-somebody", "admin_api_key": "sk-of-their-admin"}
    for name, key in secret.items():
        monkeypatch.setenv(f"THEIR_{name.upper()}", key)
    options = Options(
        vocab_size=18,
        lengths="uniform:2:4",
        model_path=str(tmp_path / "model"),
        weight_version="17",
        **secret,
    )
    first, second = FakeServer(options), FakeServer(options)
    with first, second:
        first.port = int(first.address.rpartition(":")[2])
        observer = Observer({1: first.kill, 2: lambda: (first.start(), second.kill())})
        external = [first.address, second.address]
        keys = {"rollout__engine": "sglang", "rollout__external": external, "weight_sync__verify": "always"}
        keys |= {f"rollout__{name}": f"$THEIR_{name.upper()}" for name in secret}
        info = run(tmp_path, observer, run__steps=4, **keys)
        assert info.step == 4
        assert versions_by_step(observer.groups, 4) == [{0}, {1}, {2}, {3}]
        assert first.is_alive()
        assert int(first.state()["weight_version"]) >= 3
        assert not first.state()["paused"]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"$THEIR_API_KEY" in path.read_bytes() for path in written), "config.toml"
    assert not [path for path in written if b"sk-of" in path.read_bytes()]
