"""Runs whose samples come from rollout control, on the embedded engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.trainer.generation import EVAL_STREAM
from anygauge.trainer.plan import sample_seeds
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import NO_VERSION, Group
from anygauge_hooks.types import NamedFunction, RunInfo
from anygauge_tests.recipe import tiny_recipe

MODULE = "own_rollouts_of_a_test"
SOURCE = """
seen = []

async def ask_twice(rollout, prompt, seed, *, hint):
    draft = rollout.draft()
    await draft.generate(max_new_tokens=2)
    draft.observe(rollout.encode(hint))
    compact = rollout.draft(prompt.tokens + rollout.encode(hint))
    await compact.generate(max_new_tokens=3)
    await draft.generate()
    return [compact.sample(), draft.sample()] if seed % 2 else draft.sample()

def note(sample, prompt):
    seen.append(sample.seed)

async def broken(rollout, prompt, seed):
    return {}[prompt.text]
"""


class Recorder:
    """Keeps the groups of a run, ends it if asked to, and scores by digits."""

    def __init__(self, fails_at: int | None) -> None:
        self.groups: list[Group] = []
        self.rows: list[dict[str, float]] = []
        self._fails_at = fails_at

    @hookimpl
    def after_rollout(self, groups: Sequence[Group]) -> None:
        self.groups += groups

    @hookimpl
    def before_train_step(self, run: RunInfo) -> None:
        if run.step + 1 == self._fails_at:  # after a step, the run would save it
            raise KeyError("the end of the first part")

    @hookimpl
    def after_train_step(self, run: RunInfo, metrics: dict[str, float]) -> None:
        self.rows.append(metrics)

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        return [NamedFunction(name="digits", fn=self.digits, inline=True)]

    def digits(self, response: str) -> float:
        return float(sum(character.isdigit() for character in response[:3]))


@pytest.fixture
def recipe(tmp_path: Path, forked_actors: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tiny_recipe(
        tmp_path,
        run__steps=3,
        run__report=False,
        run__progress=False,
        reward__function="digits",
        rollout__max_new_tokens=12,
        algorithm__loss_aggregation="sample_mean",
        save__every=2,
        save__hf_at_end=False,
    )
    sys.modules.pop(MODULE, None)


def run(recipe: Path, fails_at: int | None = None, **keys: Any) -> Recorder:
    plugins, recorder = load_plugins(), Recorder(fails_at)
    plugins.register(recorder, "recorder")
    overrides = [(name.replace("__", "."), value) for name, value in keys.items()]
    train(load_config(recipe, overrides, backend="cpu", plugins=plugins), plugins)
    return recorder


def test_turns_filters_and_samples_that_share_a_rollout(recipe: Path) -> None:
    recorder = run(
        recipe,
        rollout__function=f"{MODULE}:ask_twice",
        rollout__function_options={"hint": "+1="},
        rollout__filters=["zero_variance"],
        rollout__after_sample=[f"{MODULE}:note"],
        eval__data=[recipe.parent / "data.jsonl"],
        eval__interval=3,
    )
    assert len(recorder.groups) == 3 * 4
    for group in recorder.groups:
        assert len({sample.reward for sample in group.samples}) > 1
        rollouts: dict[int, list[float | None]] = {}
        for sample in group.samples:
            length = len(sample.response_tokens)
            assert length == len(sample.log_probs) == len(sample.loss_mask) == len(sample.weight_versions)
            rollouts.setdefault(sample.seed, []).append(sample.reward)
            observed = [place for place, mask in enumerate(sample.loss_mask) if not mask]
            assert all(sample.weight_versions[place] == NO_VERSION for place in observed)
            assert all(sample.log_probs[place] == 0 for place in observed)
            assert bool(observed) is (sample.prompt_tokens == group.prompt.tokens)
        assert len(rollouts) == 4
        assert all(len(set(rewards)) == 1 for rewards in rollouts.values())
        assert [len(rewards) for seed, rewards in sorted(rollouts.items())] == [
            1 + seed % 2 for seed in sorted(rollouts)
        ]
    for row in recorder.rows:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert row["multi_turn/rounds/max"] == 2
        assert row["rollout/lag/max"] == 0
    seen = sys.modules[MODULE].seen
    assert len(seen) >= sum(len(group.samples) for group in recorder.groups)
    assert sum(seed in evaluation_seeds() for seed in seen) >= 2 * 12, "an evaluation runs the function too"


def evaluation_seeds() -> set[int]:
    """Return the seeds of the evaluation of twelve prompts."""
    return {seed for own in sample_seeds(0, EVAL_STREAM, 0, 12, 1) for seed in own}


def test_control_that_asks_for_nothing_more_gives_the_samples_of_a_plain_run(recipe: Path) -> None:
    plain = run(recipe, run__name="plain")
    controlled = run(recipe, run__name="controlled", rollout__after_sample=[f"{MODULE}:note"])
    assert controlled.groups == plain.groups
    losses = [[row["train/loss"] for row in each.rows] for each in (plain, controlled)]
    assert losses[0] == losses[1]


def test_a_resumed_run_goes_on_with_what_was_kept(recipe: Path, tmp_path: Path) -> None:
    keys = {"run__steps": 4, "rollout__over_sampling": 3, "rollout__partial_rollout": True}
    whole = run(recipe, run__name="whole", **keys)
    with pytest.raises(KeyError):
        run(recipe, fails_at=4, run__name="parts", **keys)
    *_, checkpoint = sorted((tmp_path / "parts" / "checkpoints").iterdir())
    assert checkpoint.name == "step-00000003"
    states = [json.loads(path.read_text()) for path in checkpoint.rglob("*.json") if "rank" not in path.name]
    (kept,) = (found for state in states if (found := rollout_of(state)) is not None)
    assert len(kept["done"]) == 3
    resumed = run(recipe, run__name="parts", run__resume=True, **keys)
    assert resumed.groups == whole.groups[3 * 4 :]
    assert [row["train/loss"] for row in resumed.rows] == [row["train/loss"] for row in whole.rows[3:]]


def rollout_of(state: Any) -> Any:
    """Return what a checkpoint keeps of rollout control, wherever it is."""
    if not isinstance(state, dict):
        return None
    if "done" in state and "drawn" in state:
        return state
    return next((found for each in state.values() if (found := rollout_of(each)) is not None), None)


def test_a_function_that_raises_ends_the_run_with_its_place(recipe: Path) -> None:
    with pytest.raises(
        RolloutError, match=rf"data\.jsonl:\d+.*\n?.*{MODULE}:broken raised KeyError"
    ) as error:
        run(recipe, rollout__function=f"{MODULE}:broken")
    assert f"at {MODULE}.py:17 in broken" in str(error.value)
