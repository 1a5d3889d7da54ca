"""Imports of a training worker before the driver has read its data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config.roles import Components
from anygauge.config.schema import Config
from anygauge.trainer.actors import ActorWorker

TREE = {
    "run": {"name": "p"},
    "model": {"path": "."},
    "data": {"train": ["d"]},
    "reward": {"function": "f"},
    "train": {"engine": "pencil"},
    "rollout": {"engine": "parrot"},
}
BOTH = {"register_train_engines pencil", "register_rollout_engines parrot"}


@pytest.mark.parametrize(
    ("components", "engines", "expected"),
    [
        (None, 0, BOTH),
        (Components(trains=True, generates=True), 1, {"register_train_engines pencil"}),
        (Components(trains=False, generates=True), 0, {"register_rollout_engines parrot"}),
        (Components(trains=True, generates=False), 0, {"register_train_engines pencil"}),
    ],
)
def test_the_engines_of_the_process_are_imported(
    components: Components | None, engines: int, expected: set[str]
) -> None:
    done: set[str] = set()

    def get(hook: str, name: str) -> SimpleNamespace:
        return SimpleNamespace(preload=lambda *_: done.add(f"{hook} {name}"))

    plugins: Any = SimpleNamespace(get=get)
    backend: Any = None
    config = Config.model_validate({**TREE, "placement": {"rollout_workers": engines}})
    ActorWorker.preload(config, plugins, backend, components=components)
    assert done == expected


def test_an_engine_may_have_nothing_to_import() -> None:
    plugins: Any = SimpleNamespace(get=lambda hook, name: SimpleNamespace(preload=None))
    backend: Any = None
    ActorWorker.preload(Config.model_validate(TREE), plugins, backend)
