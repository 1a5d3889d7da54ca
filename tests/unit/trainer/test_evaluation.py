"""Evaluation with scripted engines: what it reports, and what it does where scoring fails."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.config.schema.run import Profile
from anygauge.data.evaluation import eval_datasets
from anygauge.plugins import Plugins, load_plugins
from anygauge.serving.colocation import ColocationScheduler
from anygauge.trainer import loop as loop_module
from anygauge.trainer.evaluation import evaluate, score_metrics
from anygauge.trainer.inputs import EvalSet
from anygauge.trainer.run import open_scorers
from anygauge_hooks.errors import RewardError
from anygauge_hooks.rl import Group, Prompt, Sample
from anygauge_tests.scoring import sample as make_sample

TEXTS = ["4", "5"]


@pytest.fixture
def plugins() -> Plugins:
    return load_plugins(only=[])


def config_of(**reward: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "x", "steps": 3, "timeout_s": 60},
            "model": {"path": "model"},
            "data": {"train": ["t.jsonl"]},
            "reward": {"function": "exact_match", **reward},
            "rollout": {"max_new_tokens": 4},
            "eval": {"data": ["sums.jsonl"], "interval": 2, "samples_per_prompt": 2},
        }
    )


def sampled(text: str) -> Sample:
    """Return a sample of the greatest length."""
    return make_sample(4, text=text)


def session_with(config: Config, plugins: Plugins, stack: ExitStack, label: str | None) -> Any:
    """Return what an evaluation of one prompt needs of a session; its engines say :data:`TEXTS`."""
    prompt = Prompt(index=0, tokens=(1,), text="2+2=", label=label)
    ((name, settings),) = eval_datasets(config).items()
    eval_set = EvalSet(name, settings, [prompt])
    return SimpleNamespace(
        config=config,
        forbidden=(),
        media=None,
        plugins=plugins,
        info=SimpleNamespace(step=2),
        reports=lambda: [],
        colocation=ColocationScheduler(),
        maker=SimpleNamespace(sample=lambda *_: [Group(prompt=prompt, samples=tuple(map(sampled, TEXTS)))]),
        eval_sets=[eval_set],
        scorers=open_scorers(config, plugins, [eval_set], Path("run"), stack),
        track=lambda metrics, *, step: None,
    )


def evaluated(plugins: Plugins, config: Config, label: str | None, **arguments: Any) -> dict[str, float]:
    with ExitStack() as stack:
        return evaluate(session_with(config, plugins, stack, label), **arguments)


def test_what_is_reported_is_not_shaped(plugins: Plugins) -> None:
    metrics = evaluated(plugins, config_of(overlong_buffer=2, overlong_penalty=3.0), "4")
    assert metrics["eval/sums"] == 0.5
    assert metrics["passrate/sums-pass@1"] == 0.5


def test_the_parts_of_rewards_keep_their_names_from_one_evaluation_to_the_next() -> None:
    eval_set = EvalSet("sums", eval_datasets(config_of())["sums"], [])
    config = config_of(key="right")

    def parts(reward: dict[str, float]) -> dict[str, float]:
        sample = sampled("4")._replace(raw_reward={"right": 1.0, **reward})
        prompt = Prompt(index=0, tokens=(1,), text="")
        metrics = score_metrics(config, eval_set, [Group(prompt=prompt, samples=(sample,))])
        return {name: value for name, value in metrics.items() if "/reward/a" in name}

    assert parts({"a b": 1.0}) == {"eval/sums/reward/a_b": 1.0}
    assert parts({"a_b": 0.5}) == {"eval/sums/reward/a_b_2": 0.5}


def test_a_training_survives_an_evaluation_that_nobody_can_score(
    plugins: Plugins, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = evaluated(plugins, config_of(), None, tolerant=True)
    assert metrics["eval/sums-failed_ratio"] == 1.0
    assert "eval/sums" not in metrics
    assert not any(name.startswith("passrate/") for name in metrics)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().startswith("2 of 2 samples could not be scored:")


def test_an_evaluation_alone_does_not(plugins: Plugins) -> None:
    with pytest.raises(RewardError, match=r"2 of 2 samples could not be scored"):
        evaluated(plugins, config_of(), None)


def test_a_run_has_nothing_to_lose_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is told of a wrong config; every later evaluation is tolerant."""
    asked: list[tuple[int, dict[str, Any]]] = []
    monkeypatch.setattr(
        loop_module, "evaluate", lambda session, **given: asked.append((session.info.step, given))
    )
    monkeypatch.setattr(loop_module, "choose_step", lambda config: lambda loop, step: {})
    monkeypatch.setattr(loop_module, "save", lambda loop, step, *, ends: False)
    loop = scripted_loop(step=0)
    loop_module.run_loop(loop)
    assert asked == [(0, {}), (2, {"tolerant": True}), (3, {"tolerant": True})]


def test_a_resumed_run_warns_of_profiles_that_it_does_not_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = scripted_loop(step=3)
    loop.info.directory = str(tmp_path)
    loop.config = loop.config.model_copy(update={"profile": Profile(steps=(4, 3, 1))})
    loop_module.run_loop(loop)
    assert caplog.messages == ["profile.steps: no profile of step 1, 3: the run resumes after step 3"]
    caplog.clear()
    loop.config = config_of()
    loop_module.run_loop(loop)
    assert caplog.messages == []


def scripted_loop(*, step: int) -> Any:
    """Return what :func:`run_loop` needs, at a step of three."""
    info = SimpleNamespace(step=step, directory="run", total_steps=3)
    session = SimpleNamespace(
        config=config_of(),
        info=info,
        plugins=SimpleNamespace(notify=lambda *_, **__: None),
        state=SimpleNamespace(finish_step=partial(setattr, info, "step"), is_evaluated=True),
        track=lambda metrics, *, step: None,
        add_phases=lambda row, phases: None,
    )
    directory = SimpleNamespace(check=lambda: None)
    return SimpleNamespace(
        config=config_of(),
        info=info,
        session=session,
        directory=directory,
        checkpoints=None,
        save_s=0.0,
        groups=(),
        background=None,
        is_stopping=False,
    )


def test_scoring_waits_no_longer_than_for_a_worker(plugins: Plugins) -> None:
    with ExitStack() as stack:
        scorers = open_scorers(config_of(), plugins, [], Path("run"), stack)
    assert [scorer._deadline_s for scorer in scorers.values()] == [60.0]
