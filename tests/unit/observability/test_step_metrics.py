"""Metrics by data set, at a step that drew from one of two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anygauge.config import Config
from anygauge.config.roles import Components
from anygauge.observability.distributions import DISTRIBUTIONS_FILE, value_counts
from anygauge.observability.reward_parts import PartNames
from anygauge.trainer import loop as module
from anygauge.trainer.loop_state import Loop
from anygauge.trainer.state import TRAINING
from anygauge_hooks.errors import DataError
from anygauge_hooks.rl import Group, Prompt
from anygauge_hooks.types import NamedFunction
from anygauge_tests.scoring import sample as make_sample

PROMPT = Prompt(
    index=0, tokens=(1,), text="1+1=", dataset="sums", response=(2, 3), loss_mask=(1, 1), label="2"
)
SAMPLE = make_sample(text="2", reward=1.0, raw_reward=1.0)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loop:
    """Return a loop without workers, whose next prompt is of one data set of two."""
    config = Config.model_validate(
        {
            "run": {"name": "demo"},
            "model": {"path": "m"},
            "data": {"train": ["chats.jsonl", "sums.jsonl"]},
            "reward": {"function": "exact_match"},
        }
    )
    monkeypatch.setattr(module, "start_training", lambda *_: None)
    monkeypatch.setattr(module, "finish_training", lambda *_: {"train/loss": 0.5})
    monkeypatch.setattr(module, "read_ahead", lambda *_: None)
    monkeypatch.setattr(module, "measure", lambda *_, **__: {})
    batch = SimpleNamespace(group_rewards=[[1.0, 0.0], [None]])
    monkeypatch.setattr(module, "rollout_batch", lambda *_: batch)
    groups = [Group(prompt=PROMPT, samples=(SAMPLE,))]
    rollouts = SimpleNamespace(collect=lambda step: (groups, 0.0), metrics=dict)
    centered = NamedFunction(name="centered", fn=lambda rewards_G: rewards_G - rewards_G.mean(), kind="group")
    plugins = SimpleNamespace(notify=lambda *_, **__: None, find=lambda *_: centered)
    components, state = (
        Components(trains=True, generates=True),
        SimpleNamespace(version=2, part_names={TRAINING: PartNames()}),
    )
    session = SimpleNamespace(plugins=plugins, components=components, state=state, media=None)
    source = SimpleNamespace(next=lambda count: (PROMPT,))
    fields: dict[str, Any] = {
        "config": config,
        "session": session,
        "source": source,
        "first_step": 1,
        "next_prompts": (),
    }
    fields["info"] = SimpleNamespace(directory=str(tmp_path), total_steps=100)
    fields |= {"flops": (lambda length: 1.0, None, ()), "rollouts": rollouts}
    return cast(Loop, SimpleNamespace(**fields))


def test_a_step_of_conversations(loop: Loop) -> None:
    metrics = module.train_on_conversations(loop, 1)
    assert metrics["train/loss"] == 0.5
    assert (metrics["train/tokens"], metrics["train/sums/tokens"]) == (2, 2)


def test_conversations_that_cannot_be_read_end_the_step_that_needs_them(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are read while the step before is trained, which is complete and saved."""
    monkeypatch.undo()

    def fail(count: int) -> Sequence[Prompt]:
        raise DataError("row 3 is gone")

    fields = cast(Any, loop)
    fields.rollouts, fields.source = None, SimpleNamespace(next=fail, state_dict=dict)
    fields.directory = SimpleNamespace(path=tmp_path, check=lambda: None)
    fields.checkpoints = None
    module.read_ahead(loop, 1)
    with pytest.raises(DataError, match="row 3 is gone"):
        module.train_on_conversations(loop, 2)


def test_a_step_of_rollouts(loop: Loop) -> None:
    metrics = module.train_on_rollouts(loop, 1)
    assert metrics["rollout/sums/raw_reward"] == 1.0
    assert metrics["rollout/lag/max"] == 2


def test_the_parts_of_rewards_keep_their_names_from_step_to_step(loop: Loop) -> None:
    reward = loop.config.reward.model_copy(update={"key": "right"})
    cast(Any, loop).config = loop.config.model_copy(update={"reward": reward})
    for key, name in (("a b", "reward/a_b"), ("a_b", "reward/a_b_2")):
        sample = SAMPLE._replace(raw_reward={"right": 1.0, key: 0.5})
        cast(Any, loop).rollouts.collect = lambda step, s=sample: ([Group(prompt=PROMPT, samples=(s,))], 0.0)
        metrics = module.train_on_rollouts(loop, 1)
        assert {each for each in metrics if each.startswith("reward/")} == {"reward/right", name}


def test_a_step_of_rollouts_records_its_distributions(loop: Loop, tmp_path: Path) -> None:
    for step in (1, 3):  # the samples of step 3 of 100 are recorded too, unlike those of 1001 of 2000
        module.train_on_rollouts(loop, step)
    cast(Any, loop).info.total_steps = 2000
    module.train_on_rollouts(loop, 1001)
    lines = [json.loads(line) for line in (tmp_path / DISTRIBUTIONS_FILE).read_text().splitlines()]
    counts = {"reward": [[1.0, 1]], "prompt_reward": [[1.0, 1]], "length": [[1.0, 1]]}
    advantage = [[-0.5, 1], [0.0, 1], [0.5, 1]]
    assert lines == [{"step": step, **counts, "advantage": advantage} for step in (1, 3)]


def test_many_values_are_counted_in_intervals() -> None:
    counts = value_counts([number / 10 for number in range(641)])
    assert len(counts) == 64
    assert counts[0] == (0.5, 10, 1.0)
    assert counts[-1] == (63.5, 11, 1.0)  # the greatest value ends the last interval
    assert value_counts([1 / 3, 1 / 3 + 1e-9]) == [(0.333333, 2)]  # rounding makes no value of its own


@pytest.mark.parametrize(("max_lag", "trains"), [(None, True), (2, True), (1, False)])
def test_a_step_trains_on_no_token_that_is_too_old(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, max_lag: int | None, trains: bool
) -> None:
    started: list[int] = []
    monkeypatch.setattr(module, "start_training", lambda loop, step, samples: started.append(step))
    algorithm = loop.config.algorithm.model_copy(update={"mask_stale": max_lag})
    cast(Any, loop).config = loop.config.model_copy(update={"algorithm": algorithm})
    metrics = module.train_on_rollouts(loop, 1)
    assert started == ([1] if trains else [])
    assert metrics["rollout/lag/mean"] == 2.0


def test_a_replay_has_no_lag(loop: Loop) -> None:
    debug = loop.config.debug.model_copy(update={"replay_rollouts": Path("dumps")})
    cast(Any, loop).config = loop.config.model_copy(update={"debug": debug})
    assert not [name for name in module.train_on_rollouts(loop, 1) if "lag" in name]
