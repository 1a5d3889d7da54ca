"""An evaluation beside training: one at a time, recorded at its own step, and what it says of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from anygauge.config import Config
from anygauge.data.evaluation import eval_datasets
from anygauge.rollout.context import RolloutContext
from anygauge.rollout.functions import UserFunction, UserFunctions, single_turn
from anygauge.rollout.text import TextTools
from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.generation_client import GenerationClient
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.trainer.background_evaluation import BackgroundEvaluation
from anygauge.trainer.generation import SampleMaker
from anygauge.trainer.inputs import EvalSet
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Group, Prompt
from anygauge_hooks.rollout import GenerateRequest
from anygauge_hooks.types import RunInfo
from anygauge_tests.scripted_engine import ScriptedEngine

PROMPTS = [Prompt(index=index, tokens=(1, index + 1), text=str(index), label="x") for index in range(40)]


class Scorer:
    """Rewards length."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def score(self, groups: Sequence[Group], *, tolerant: bool) -> list[Group]:
        assert tolerant
        self.calls.append(len(groups))
        return [
            replace(
                group,
                samples=tuple(
                    each._replace(reward=1.0, raw_reward=float(len(each.response_tokens)))
                    for each in group.samples
                ),
            )
            for group in groups
        ]


class Opened:
    """A session on a scripted engine."""

    def __init__(self, loop: EventLoop, text: TextTools) -> None:
        self.engine = ScriptedEngine(self.say, lambda request: 1)
        self.failure: Exception | None = None
        self.scorer, self.rows = Scorer(), list[tuple[int, Mapping[str, float]]]()
        self.loop = loop
        config = Config.model_validate(
            {
                "run": {"name": "x", "steps": 9},
                "model": {"path": "model"},
                "data": {"train": ["t.jsonl"]},
                "rollout": {"max_new_tokens": 4},
                "eval": {"data": ["sums.jsonl"], "interval": 2},
            }
        )
        ((name, settings),) = eval_datasets(config).items()
        functions = UserFunctions(UserFunction("single_turn", single_turn))
        context = RolloutContext(config=config.rollout, generator=self.engine, functions=functions, text=text)
        client = GenerationClient(
            self.engine, loop, lambda work, what: loop.run(work, timeout_s=20, what=what)
        )
        self.session = SimpleNamespace(
            config=config,
            media=None,
            forbidden=(),
            maker=SampleMaker(client, context),
            info=RunInfo(
                name="x", directory=".", backend="cpu", total_steps=9, config=SimpleNamespace(), step=2
            ),
            eval_sets=[EvalSet(name, settings, PROMPTS)],
            scorers={name: self.scorer},
            plugins=SimpleNamespace(notify=lambda name, run, metrics: None),
            track=lambda metrics, *, step: self.rows.append((step, metrics)),
        )
        self.background = BackgroundEvaluation(self.session, rollouts=24)  # type: ignore[arg-type]

    def say(self, request: GenerateRequest) -> list[int]:
        if self.failure is not None:
            raise self.failure
        return [2, 3]

    def go_on_to(self, step: int) -> None:
        self.session.info = replace(self.session.info, step=step)

    def until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(20):
                while not condition():
                    await asyncio.sleep(0.001)

        self.loop.run(wait())

    def release(self) -> None:
        async def one() -> None:
            self.engine.release()

        self.loop.run(one())


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    text = TextTools(tiny_tokenizer(tmp_path, alphabet="abcdefgh"), SimpleNamespace())  # type: ignore[arg-type]
    with EventLoop() as loop:
        yield Opened(loop, text)


def test_it_is_recorded_when_it_is_done_at_the_step_that_it_is_of(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    opened.background.start()
    opened.until(lambda: len(opened.engine.waiting) == 6)
    opened.go_on_to(4)
    opened.background.collect()
    assert opened.rows == []
    opened.background.start()
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning == "no evaluation after step 4: that after step 2 is still under way"
    opened.engine.version = 7
    while len(opened.engine.requests) < len(PROMPTS) or opened.engine.waiting:
        opened.release()
    opened.background.finish()
    ((step, metrics),) = opened.rows
    assert step == 2
    assert metrics["eval/sums"] == 2.0
    assert metrics["eval/sums-samples"] == len(PROMPTS)
    assert metrics["eval/sums/versions"] == 1, "an engine of one version at a time says one for an answer"
    assert opened.scorer.calls == [32, 8], "training may score in between"
    opened.background.collect()
    assert len(opened.rows) == 1


def test_it_says_how_many_versions_made_it(opened: Opened) -> None:
    opened.engine._holds = lambda request: None
    answered = 0

    def say(request: GenerateRequest) -> list[int]:
        nonlocal answered
        answered += 1
        opened.engine.version = int(answered > 20)
        return [2, 3]

    opened.engine._say = say
    opened.background.start()
    opened.background.finish()
    assert opened.rows[0][1]["eval/sums/versions"] == 2


def test_an_engine_that_fails_ends_the_run_when_it_is_looked_at(opened: Opened) -> None:
    opened.failure = RolloutError("the engines are gone")
    opened.background.start()
    with pytest.raises(RolloutError, match="the engines are gone"):
        opened.background.finish()
