"""Errors about groups of servers, and about external engines."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import LoadedConfig
from anygauge.config.rules.group import external_rule, groups_rule
from anygauge.config.validate import validate
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import ConfigError

Load = Callable[..., LoadedConfig]
NEAR, FAR = "http://127.0.0.1:30000", "http://10.0.0.3:30000"


class Engines:
    """One of regular servers alone, one that can be all kinds and attached to."""

    @hookimpl
    def register_rollout_engines(self) -> Iterable[RolloutEngineSpec]:
        kinds = ("regular", "prefill", "decode", "encoder")
        yield RolloutEngineSpec(name="plain", serve=none)
        yield RolloutEngineSpec(name="all", serve=none, attach=none, kinds=kinds, releases_memory=True)


def none(*_: object) -> Any:
    raise AssertionError("nothing is started, and nobody is asked")


@pytest.fixture(autouse=True)
def engines(plugins: Plugins) -> None:
    plugins.register(Engines(), "engines")


def external(*addresses: str, engine: str = "all") -> list[str]:
    return [f"--rollout.engine={engine}", f"--rollout.external={json.dumps(addresses)}"]


def groups(*tables: dict[str, Any], engine: str = "all", workers: int = 2) -> list[str]:
    text = ", ".join(
        "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + "}"
        for table in tables
    )
    return [
        f"--rollout.engine={engine}",
        f"--rollout.groups=[{text}]",
        f"--placement.rollout_workers={workers}",
    ]


def test_nobody_is_asked_for_engines_of_others_before_the_run(load: Load) -> None:
    config = load({}, external(NEAR, FAR)).config
    assert config.has_engines_apart
    assert config.weight_sync.transport == "distributed", "one is on another host"
    assert load({}, external(NEAR)).config.weight_sync.transport == "tensor"
    load({}, [*external(NEAR), "--rollout.schedule=async"])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (external("127.0.0.1:30000"), "write http://HOST:PORT"),
        (external("http://127.0.0.1"), "write http://HOST:PORT"),
        (external(f"{NEAR}?x=1"), "write http://HOST:PORT"),
        (external(NEAR, NEAR), "is listed twice"),
        (external(NEAR, f"{NEAR}/"), "is listed twice"),
        (external(NEAR, engine="plain"), "cannot be attached to"),
        (external(NEAR, engine="transformers"), "cannot be attached to"),
        ([*external(NEAR), "--placement.rollout_workers=1"], "a run with rollout.external starts no servers"),
        ([*external(NEAR), "--weight_sync.transport=delta"], "a run starts with engines of its own alone"),
        ([*external(FAR), "--weight_sync.transport=tensor"], "rollout.external names others"),
        ([*external(NEAR), "--rollout.groups=[{servers = 1}]"], "whose engines the run does not start"),
        ([*external(NEAR), "--debug.mode=rollout_only"], "the engines of rollout.external never get"),
        (groups({"kind": "prefill"}, {"kind": "decode"}, engine="plain"), "are regular"),
        (groups({}, {}, engine="transformers"), "which is not a server"),
        (groups({}, {"model": "judge", "path": "/j"}, workers=3), "2 servers together"),
        (
            groups({}, {"model": "judge", "path": "/j"}),
            "rollout.groups[1].path: found '/j' on the command line; no",
        ),
        (
            [*groups({}, {"kind": "encoder"}), "--placement.colocated=true", "--train.engine=other"],
            "cannot load them again",
        ),
    ],
)
def test_engines_that_a_run_cannot_have(load: Load, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, overrides)
    assert text in str(caught.value)


def test_any_server_may_have_groups_and_other_models(load: Load, tmp_path: Path) -> None:
    loaded = load({}, groups({}, {"model": "judge", "path": str(tmp_path)}, engine="plain"))
    assert [group.model for group in loaded.config.rollout.groups] == ["policy", "judge"]
    load({}, [*groups({"kind": "prefill"}, {"kind": "decode"}), "--rollout.prompts_per_step=1"])


def test_a_replay_of_an_asynchronous_run_needs_no_engines(load: Load) -> None:
    replay = ["--debug.mode=train_only", "--debug.replay_rollouts=dumps"]
    load({}, ["--rollout.engine=all", "--rollout.schedule=async", *replay], check_files=False)


DOCS = Path(__file__).parents[3] / "docs"
EXAMPLES = [
    (page, text)
    for page in ("serving.md", "sglang.md")
    for text in re.findall(r"```toml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]


@pytest.mark.parametrize(("page", "text"), EXAMPLES)
def test_the_examples_of_the_documents_fit(page: str, text: str) -> None:
    needed = {"run": {"name": "t"}, "model": "m", "data": {"train": ["t.jsonl"]}}
    checked = validate({**needed, **tomllib.loads(text)})
    assert not checked.problems
    assert not [*groups_rule(checked.config, ()), *external_rule(checked.config, ())]
    assert page != "serving.md" or checked.config.has_engines_apart
