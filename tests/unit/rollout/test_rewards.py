"""Reward functions, how they are found, and what happens when one misbehaves."""

from __future__ import annotations

import json
import math as pymath
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pluggy
import pytest

from anygauge.plugins import Plugins
from anygauge.rollout import math_grader, rewards
from anygauge.rollout.math_grader import Grader
from anygauge.rollout.rewards import exact_match, math, resolve_reward, score
from anygauge_hooks import PROJECT, hookimpl, specs
from anygauge_hooks.errors import RewardError, UnknownNameError
from anygauge_hooks.rl import Prompt, Sample
from anygauge_hooks.types import NamedFunction

ROOT = Path(__file__).parents[3]
GSM8K = ROOT.parent / "shared/data/gsm8k"
ENDLESS = "2^(3^(4^5))"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    grader = Grader()
    yield grader
    grader.close()


def prompt(index: int = 0, label: Any = "4", **metadata: Any) -> Prompt:
    return Prompt(index=index, tokens=(1,), text="2+2=", label=label, source="t.jsonl:7", metadata=metadata)


def sample(text: str, prompt_index: int = 0) -> Sample:
    return Sample(
        prompt_index=prompt_index,
        prompt_tokens=(1,),
        response_tokens=(2,),
        log_probs=(-0.5,),
        loss_mask=(1,),
        weight_versions=(0,),
        text=text,
        finish_reason="stop",
        seed=0,
    )


def plugins_with(*functions: NamedFunction) -> Plugins:
    """Return plugins of which one registers reward functions."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    plugins = Plugins(manager)
    plugins.register(
        SimpleNamespace(register_reward_functions=hookimpl(lambda: list(functions))), "rewards under test"
    )
    return plugins


# -------------------------------------------------------------------------
# exact_match
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("59", "59", 1.0),
        (" 59\n", "59", 1.0),
        ("59", 59, 1.0),
        ("5 9", "59", 0.0),
        ("", "59", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact_match(response: str, label: Any, expected: float) -> None:
    assert exact_match(response, label, {}) == expected


def test_exact_match_without_strip() -> None:
    assert exact_match(" 59", "59", {}, strip=False) == 0.0
    assert exact_match(" 59", " 59", {}, strip=False) == 1.0


@pytest.mark.parametrize("function", [exact_match, math])
def test_a_label_is_needed(function: Callable[..., float]) -> None:
    with pytest.raises(RewardError, match="needs a label"):
        function("4", None, {})


@pytest.mark.parametrize(("label", "kind"), [(["59"], "list"), ({"a": 1}, "dict")])
def test_exact_match_compares_no_containers(label: Any, kind: str) -> None:
    with pytest.raises(RewardError) as error:
        score([sample("59")], [prompt(label=label)], exact_match)
    assert "exact_match on prompt 0 (t.jsonl:7), response '59'" in str(error.value)
    assert f"The label is a {kind}: {label!r}" in str(error.value)
    assert "data.label_key" in str(error.value)


# -------------------------------------------------------------------------
# math
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("18", "18"),
        ("18", 18),
        ("The answer is 18.", "18"),
        ("So it is \\boxed{18}, not 17.", "18"),
        ("5 and 6 make 11.\n#### 11", "11"),
        ("#### 11\n\nQuestion: what is 3 + 4?", "11"),
        ("#### $70,000", "70000"),
        ("#### -3", "-3"),
        ("#### 2.50", "5/2"),
        ("18.00", "16 - 3 = 13, 13 + 5 = <<13+5=18>>18\n#### 18"),
        ("$\\frac{1}{2}$", "0.5"),
        ("1/2", "\\frac{2}{4}"),
        ("$x^2 + 2x + 1$", "$(x+1)^2$"),
        ("\\boxed{70,000}", "\\boxed{70000}"),
        ("#### 2. Solve\nWe get \\boxed{7}", "7"),
    ],
)
def test_math_accepts(grader: Grader, response: str, label: Any) -> None:
    assert grader.equivalent(response, str(label), 5.0)


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("17", "18"),
        ("", "18"),
        ("I do not know.", "18"),
        ("18 at first, but then 17", "18"),
        ("#### 17\nnot 18", "18"),
        ("\\boxed{17} 18", "18"),
        ("18 \x00\ud7ff \\boxed{", "19"),
    ],
)
def test_math_refuses(grader: Grader, response: str, label: str) -> None:
    assert not grader.equivalent(response, label, 5.0)


def test_math_accepts_every_answer_of_gsm8k(grader: Grader) -> None:
    lines = (GSM8K / "test.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) == 300
    for answer in answers:
        final = answer.rpartition("#### ")[2]
        assert grader.equivalent(answer, answer, 5.0), answer
        assert grader.equivalent(f"The answer is \\boxed{{{final}}}.", answer, 5.0), answer
        assert not grader.equivalent(f"The answer is \\boxed{{{final}1}}.", answer, 5.0), answer


def test_math_is_bounded_in_time_and_works_again(grader: Grader, caplog: pytest.LogCaptureFixture) -> None:
    started = time.monotonic()
    assert not grader.equivalent(ENDLESS, "5", 0.2)
    assert time.monotonic() - started < 30
    assert caplog.messages == [f"math: no verdict in time, counted as wrong: {ENDLESS!r}"]
    assert grader.equivalent("5", "5", 5.0)


def test_math_works_off_the_main_thread() -> None:
    verdicts: dict[str, float] = {}
    threads = [
        threading.Thread(target=lambda label=label: verdicts.update({label: math("2", label, {})}))
        for label in ("1", "2", "3")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert verdicts == {"1": 0.0, "2": 1.0, "3": 0.0}


def test_math_leaves_the_alarm_of_the_process_alone() -> None:
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_PROF)
    math("2", "2", {})
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_PROF)) == before


def test_a_label_without_mathematics_is_an_error(grader: Grader) -> None:
    with pytest.raises(RewardError, match="holds no mathematical expression"):
        grader.equivalent("5", "  ", 5.0)
    assert grader.equivalent("5", "5", 5.0)


def test_a_grader_that_was_killed_is_replaced() -> None:
    grader = Grader()
    assert grader.equivalent("5", "5", 5.0)
    assert grader._process is not None
    first = grader._process.pid
    os.kill(first, signal.SIGKILL)
    grader._process.wait()
    assert grader.equivalent("5", "5", 5.0)
    assert grader._process.pid != first
    grader.close()


def test_a_grader_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    monkeypatch.setattr(math_grader, "_start", start)
    with pytest.raises(RewardError, match="exit code 3"):
        Grader().equivalent("5", "5", 5.0)


def test_a_grader_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    monkeypatch.setattr(math_grader, "_start", start)
    monkeypatch.setattr(math_grader, "_START_S", 0.1)
    grader = Grader()
    assert not grader.equivalent("5", "5", 0.01)
    assert grader._process is None


def test_the_grader_ends_with_its_parent() -> None:
    code = (
        "import os, signal\n"
        "from anygauge.rollout import rewards\n"
        "assert rewards.math('5', '5', {}) == 1.0\n"
        "print(rewards._grader(os.getpid())._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The grader inherits standard error, so that reading it to the end waits for the grader.
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert parent.returncode == -signal.SIGKILL
    assert parent.stderr == b""
    assert int(parent.stdout) > 0


# -------------------------------------------------------------------------
# resolve_reward
# -------------------------------------------------------------------------


def test_reward_functions_are_named() -> None:
    assert {item.name: item.fn for item in rewards.reward_functions()} == {
        "exact_match": exact_match,
        "math": math,
    }


def test_a_registered_name() -> None:
    assert resolve_reward("exact_match", plugins_with(*rewards.reward_functions())) is exact_match


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match=r"'exact'.*available: exact_match, math"):
        resolve_reward("exact", plugins_with(*rewards.reward_functions()))


MODULE = """
import json, sys
from functools import partial

def full(response, label, metadata, *, bonus=0.0): return float(response == label) + bonus
def short(response): return float(len(response))
def open_(**arguments): return float(len(arguments))
def no_response(label): return 0.0
def positional(response, /, label): return 0.0
def needs_more(response, weight): return 0.0
def odd(prompt, answer): return 0.0
def raises(response): return inner(response)
def inner(response): return {}[response]
def deep(response): return json.loads(response)
def leaves(response): sys.exit(3)
async def slow(response): return 0.0
class Scale:
    def __call__(self, response, label): return 2.0
    def method(self, response): return 3.0
instance = Scale()
bound = partial(full, bonus=1.0)
number = 3
builtin = max
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write an importable module of a user and return its name."""
    name = "user_rewards_under_test"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("full", 1.0),
        ("short", 1.0),
        ("open_", 3.0),
        ("instance", 2.0),
        ("instance.method", 3.0),
        ("bound", 2.0),
    ],
)
def test_a_dotted_path(user_module: str, function: str, expected: float) -> None:
    reward = resolve_reward(f"{user_module}:{function}", plugins_with())
    assert score([sample("4")], [prompt()], reward) == [expected]


def test_options_reach_the_function(user_module: str) -> None:
    reward = resolve_reward(f"{user_module}:full", plugins_with(), {"bonus": 0.5})
    assert score([sample("4")], [prompt()], reward, {"bonus": 0.5}) == [1.5]


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [
        ("no_response", {}, "does not take 'response'"),
        (
            "positional",
            {},
            "takes 'response' by position only. It is given response, label, metadata, by name.",
        ),
        ("needs_more", {}, "needs 'weight'. It is given response, label, metadata, by name."),
        ("odd", {"weight": 1}, "needs 'prompt', 'answer'; does not take 'response', 'weight'."),
        (
            "full",
            {"bonsu": 1},
            "does not take 'bonsu'. It is given response, label, metadata, bonsu, by name.",
        ),
        ("full", {"label": 1}, "is given 'label' by the run and by reward.options"),
        ("builtin", {}, "has no signature that Python can read"),
        ("slow", {}, "is a coroutine function"),
        ("number", {}, "is int, not a function"),
    ],
)
def test_a_function_that_cannot_be_called(
    user_module: str, function: str, options: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(RewardError) as error:
        resolve_reward(f"{user_module}:{function}", plugins_with(), options)
    assert problem in str(error.value)
    assert function in str(error.value)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_module_anywhere:reward", "ModuleNotFoundError"),
        ("user_rewards_under_test:missing", "has no 'missing'"),
        ("user_rewards_under_test:full.inner", "has no 'full.inner'"),
        ("user_rewards_under_test_broken:reward", "RuntimeError('no licence')"),
        (":reward", "ValueError"),
    ],
)
def test_a_path_that_leads_nowhere(user_module: str, path: str, problem: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        resolve_reward(path, plugins_with())
    assert problem in str(error.value)
    assert path in str(error.value)


# -------------------------------------------------------------------------
# score
# -------------------------------------------------------------------------


def test_score_finds_each_prompt() -> None:
    prompts = [prompt(3, "a"), prompt(8, "b")]
    samples = [sample("a", 3), sample("a", 8), sample("b", 8), sample("b", 3)]
    assert score(samples, prompts, exact_match) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1.0), np.int64(1)])
def test_numbers_of_any_kind(value: Any) -> None:
    (reward,) = score([sample("4")], [prompt()], lambda response: value)
    assert type(reward) is float
    assert reward == 1.0


@pytest.mark.parametrize("value", [None, "1", pymath.nan, pymath.inf, [1.0], 1j])
def test_what_is_no_finite_number(value: Any) -> None:
    def reward(response: str) -> float:
        return cast(float, value)

    with pytest.raises(RewardError) as error:
        score([sample("4 " * 100)], [prompt()], reward)
    text = str(error.value)
    assert f"returned {value!r}." in text
    assert "reward on prompt 0 (t.jsonl:7), response '4 4 4" in text
    assert len(text) < 400


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**400, "int beyond any float"),
        (-(10**5000), "int beyond any float"),
        (2e30, "2e+30"),
        (-1e300, "-1e+300"),
        (Fraction(10**400, 3), "Fraction beyond any float"),
    ],
    ids=["integer", "long", "float32", "float64", "fraction"],
)
def test_what_float32_cannot_hold(value: Any, shown: str) -> None:
    with pytest.raises(RewardError) as error:
        score([sample("4")], [prompt()], lambda response: cast(float, value))
    assert f"returned {shown}, too large for float32 (the limit is 1e+30)." in str(error.value)


def test_the_largest_reward() -> None:
    assert score([sample("4")], [prompt()], lambda response: -1e30) == [-1e30]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises", "raised KeyError('4') at user_rewards_under_test.py:13 in inner."),
        ("deep", "raised JSONDecodeError('Expecting value: line 1 column 1 (char 0)') at user_rewards_under"),
        ("leaves", "raised SystemExit(3) at user_rewards_under_test.py:15 in leaves."),
    ],
)
def test_an_error_says_where(user_module: str, function: str, problem: str) -> None:
    reward = resolve_reward(f"{user_module}:{function}", plugins_with())
    with pytest.raises(RewardError) as error:
        score([sample("4" if function == "raises" else "")], [prompt()], reward)
    assert problem in str(error.value)
    assert "ANYGAUGE_DEBUG=1" in str(error.value)


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt(), SystemExit(128 + signal.SIGTERM), SystemExit(signal.SIGTERM)]
)
def test_a_signal_is_no_error_of_the_function(stop: BaseException) -> None:
    def reward(response: str) -> float:
        raise stop

    with pytest.raises(type(stop)) as error:
        score([sample("4")], [prompt()], reward)
    assert error.value is stop


def test_what_a_function_raises_is_kept() -> None:
    def reward(response: str, metadata: Mapping[str, Any]) -> float:
        return float(metadata["missing"])

    with pytest.raises(RewardError, match=r"reward on prompt 0 .* raised KeyError\('missing'\)") as error:
        score([sample("4")], [prompt(level=3)], reward)
    assert isinstance(error.value.__cause__, KeyError)
