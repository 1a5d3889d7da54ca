"""Reward functions that come with the core."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.rollout.rewards import (
    boxed,
    dapo,
    exact_match,
    f1,
    math,
    multiple_choice,
    overlong_penalty,
    reward_functions,
)
from anygauge_hooks.errors import RewardError


def test_reward_functions_are_named() -> None:
    assert {item.name: (item.fn.__name__, item.inline) for item in reward_functions()} == {
        "dapo": ("dapo", True),
        "exact_match": ("exact_match", True),
        "f1": ("f1", True),
        "math": ("math", False),
        "multiple_choice": ("multiple_choice", True),
        "remote": ("remote", False),
    }


@pytest.mark.parametrize("function", [dapo, exact_match, f1, math, multiple_choice])
def test_a_label_is_needed(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=f"{function.__name__} needs a label"):
        function("4", None)


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


@pytest.mark.parametrize(("label", "kind"), [(["59"], "list"), ({"a": 1}, "dict")])
def test_exact_match_compares_no_containers(label: Any, kind: str) -> None:
    with pytest.raises(RewardError, match=f"The label is a {kind}: ") as error:
        exact_match("59", label)
    assert "data.label_key" in str(error.value)


# -------------------------------------------------------------------------
# boxed
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no box", None),
        (r"\boxed{5}", "5"),
        (r"\boxed{5} and \boxed{6}", "6"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"} { \boxed{5}", "5"),
        (r"\boxed{a \boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{1} \fbox{2} \boxed{3", "2"),
        (r"\\boxed{5}", "5"),
        (r"\\\boxed{5}", "5"),
        (r"\boxed{\text{a } \mathbf{b}}}", r"\text{a } \mathbf{b}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\mybox{5}", None),
        (r"\boxed", None),
    ],
)
def test_boxed(text: str, expected: str | None) -> None:
    assert boxed(text) == expected


@pytest.mark.parametrize("unit", [r"\boxed{", r"\boxed{1} ", "{", "\\", "}"])
def test_boxed_takes_linear_time(unit: str) -> None:
    started = time.process_time()
    boxed(unit * 20_000 + r"\boxed{")
    assert time.process_time() - started < 2


# -------------------------------------------------------------------------
# f1
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("the tower", "Eiffel tower", 2 / 3),
        ("a cat sat on a mat", "the cat", 2 / 5),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("3.5", "35", 0.0),
        ("It costs $3.50.", "3.50", 1 / 2),
        ("-5", "5", 0.0),
        ("\u22125", -5, 1.0),
        (".5", "5", 0.0),
        ("1,000", 1000, 1.0),
        ("\uff11\uff12", 12, 1.0),
        ("caf\u00e9", "cafe\u0301", 1.0),
        ("\u201cParis\u201d \u2014 \u00bfno?", "paris NO", 1.0),
        ("\u5317\u4eac\u5e02", "\u5317\u4eac", 4 / 5),
        ("the", "", 1.0),
        ("42", 42, 1.0),
        ("in Paris", ["London", "Paris", "in the city of Paris"], 2 * 2 / (2 + 4)),
    ],
)
def test_f1(response: str, label: Any, expected: float) -> None:
    assert f1(response, label) == pytest.approx(expected, abs=1e-12)


def test_f1_needs_an_answer() -> None:
    with pytest.raises(RewardError, match="empty list"):
        f1("Paris", [])


@given(st.text(), st.text())
def test_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    assert 0.0 <= f1(one, other) == f1(other, one) <= 1.0
    assert f1(one, one) == 1.0


# -------------------------------------------------------------------------
# multiple_choice
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        "C",
        " c. ",
        "(C)",
        "**C**",
        "C) Paris",
        "C. Paris is the capital.",
        "The answer is C",
        "the correct answer is (C).",
        "Answer: C",
        "**Answer:** C",
        "I first thought the answer is A. No: the answer is C.",
        "A is wrong. So option C.",
        "C is correct",
        "(C) is the right one",
        r"The answer is \boxed{C}",
        r"The answer is A, no: \boxed{\text{(C)}}",
        "The answer is A.</think>So:\nC",
        "B) is out, and so is A.\n\nC",
        "answer: c",
        r"Final answer: $\boxed{C}$",
    ],
)
def test_multiple_choice_finds_the_letter(response: str) -> None:
    assert multiple_choice(response, "C") == 1.0
    assert multiple_choice(response, 2) == 1.0
    assert multiple_choice(response, "B") == 0.0


@pytest.mark.parametrize(
    "response",
    ["", "I do not know.", "The answer is a matter of taste.", "Z", "CAB", "the answer is Cologne"],
)
def test_multiple_choice_finds_no_letter(response: str) -> None:
    assert [multiple_choice(response, letter) for letter in "ABCDEFGHIJ"] == [0.0] * 10


@pytest.mark.parametrize("choices", [["Rome", "Paris"], {"A": "Rome", "b": "Paris"}])
@pytest.mark.parametrize("label", ["B", "b", 1, "1", "paris"])
@pytest.mark.parametrize("response", ["B", "Paris.", r"\boxed{\text{B}}", r"\boxed{Paris}"])
def test_multiple_choice_knows_the_choices(choices: Any, label: Any, response: str) -> None:
    assert multiple_choice(response, label, {"choices": choices}) == 1.0
    assert multiple_choice("A", label, {"choices": choices}) == 0.0


@pytest.mark.parametrize(
    ("label", "metadata", "problem"),
    [
        ("K", {}, "'K' is none of the choices A, B"),
        (2, {"choices": ["x", "y"]}, "2 is none of the choices A, B"),
        ("A", {"choices": "xy"}, "choices of a row are 'xy'"),
        ("A", {"choices": []}, r"choices of a row are \[\]"),
    ],
)
def test_multiple_choice_refuses_a_row(label: Any, metadata: Any, problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        multiple_choice("A", label, metadata)


# -------------------------------------------------------------------------
# dapo
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label", "found"),
    [
        ("Answer: 34", "34", "34"),
        ("Answer: 34", 34, "34"),
        ("Answer: 34", 34.0, "34"),
        ("Answer: 7\nNo.\nanswer : $34$.", "34", "34"),
        ("**Answer:** 34", "34", "34"),
        ("Answer: \\boxed{34}", "34", "34"),
        ("Answer: x = 1,234", "1234", "1234"),
        ("Answer: 34 dollars", "34", "34"),
        ("Answer: 34\\text{ cm}", "34", "34"),
        ("Answer: $90^\\circ$", "90", "90"),
        ("Answer: \\dfrac12", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("Answer: \\sqrt2", "\\sqrt{2}", "\\sqrt{2}"),
        ("Answer: a + b", "a+b", "a+b"),
        ("**Answer**: **34**.", "34", "34"),
        ("__Answer__: `34`", "34", "34"),
        ("### Answer:\n\n34", "34", "34"),
        ("Answer: \\(34\\).", "34", "34"),
        ("Answer: \\[ 34 \\]", "34", "34"),
        ("Answer: $34$ dollars.", "34", "34"),
        ("Answer: $34\\text{ cm}^2$", "34", "34"),
        ("Answer: 34 square units", "34", "34"),
        ("Answer: 90\u00b0", "90", "90"),
        ("Answer: 34\\%", "34%", "34%"),
        ("Answer: \u221234", "-34", "-34"),
        ("Answer: 12\u202f345", "12,345", "12345"),
        ("Answer: $12{,}345.00$", "12345.00", "12345.00"),
        ("Answer: 1/2", "1/2", "1/2"),
        ("Answer: (1,2)", "(1, 2)", "(1,2)"),
        ("Answer: $\\boxed{34}$.</s>", "34", "34"),
    ],
)
def test_dapo_accepts(response: str, label: Any, found: str) -> None:
    assert dapo(response, label) == {"score": 1.0, "acc": True, "pred": found}


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("34", "[INVALID]"),
        ("\\boxed{34}", "[INVALID]"),
        ("Answer: 35", "35"),
        ("Answer: 34.0", "34.0"),
        ("Answer: 68/2", "68/2"),
        ("Answer: 34%", "34%"),
        ("Answer: 3,4", "3,4"),
        ("Answer: 34 or 35", "34or35"),
        ("The answer is 34.", "[INVALID]"),
        ("Answer: 34\nAnswer: 35", "35"),
        ("Answer: 34" + "." * 300, "[INVALID]"),
        ("Answer: ", "[INVALID]"),
    ],
)
def test_dapo_refuses(response: str, found: str) -> None:
    assert dapo(response, "34") == {"score": -1.0, "acc": False, "pred": found}


def test_dapo_with_a_box() -> None:
    assert dapo("So \\boxed{34}.", "34", boxed=True) == {"score": 1.0, "acc": True, "pred": "34"}
    assert dapo("So \\boxed{34.0}.", "34", boxed=True)["acc"] is False
    assert dapo("\\boxed{34}" + "." * 100, "34", boxed=True)["pred"] == "[INVALID]"


# -------------------------------------------------------------------------
# overlong_penalty
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, 0.025), (90, 0.25), (100, 0.5), (120, 0.5)]
)
def test_overlong_penalty(length: int, expected: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=20, penalty=0.5) == expected


def test_no_overlong_penalty_without_a_buffer() -> None:
    assert overlong_penalty(1000, limit=100, buffer=0, penalty=1.0) == 0.0


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
        ("#### 1/2", "0.5"),
        ("#### -3/4", "-0.75"),
        ("#### \\$11", "11"),
        ("\u22125", "-5"),
        ("\\boxed {5}", "5"),
        ("\\fbox{5}", "5"),
        ("First \\boxed{5}. No: it is \\boxed{6}.", "6"),
        ("**5**", "5"),
        ("18.00", "16 - 3 = 13, 13 + 5 = <<13+5=18>>18\n#### 18"),
        ("$\\frac{1}{2}$", "0.5"),
        ("1/2", "\\frac{2}{4}"),
        ("$x^2 + 2x + 1$", "$(x+1)^2$"),
        ("\\boxed{70,000}", "\\boxed{70000}"),
        ("#### 2. Solve\nWe get \\boxed{7}", "7"),
    ],
)
def test_math_accepts(response: str, label: Any) -> None:
    assert math(response, label) == 1.0


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
def test_math_refuses(response: str, label: str) -> None:
    assert math(response, label) == 0.0


def test_math_accepts_every_answer_of_gsm8k(gsm8k: Path) -> None:
    lines = (gsm8k / "test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) >= 60
    for answer in answers:
        final = answer.rpartition("#### ")[2]
        assert re.fullmatch(r"\d{1,3}(,?\d{3})*", final)
        assert math(answer, answer) == 1.0, answer
        assert math(f"The answer is \\boxed{{{final}}}.", answer) == 1.0, answer
        for wrong in (f"{final}1", f"{float(final.replace(',', '')) + 1}"):
            assert math(f"The answer is \\boxed{{{wrong}}}.", answer) == 0.0, answer


BOMBS = {
    "tower": "2^(3^(4^5))",
    "boxed tower": "\\boxed{9^{9^{9^9}}}",
    "factorial": "\\boxed{1000000000!}",
    "binomial": "$\\binom{10^9}{5\\cdot 10^8}$",
    "power of a sum": "$(x+y+z+w)^{400}$",
    "sum": "$\\sum_{i=1}^{10^{9}} i^{i}$",
    "integral": "$\\int_0^1 x^{x^{x}} dx$",
    "matrix": "\\boxed{\\begin{pmatrix}" + "\\\\".join(["&".join(["x^{2}"] * 60)] * 60) + "\\end{pmatrix}}",
    "braces": "\\boxed{" + "{" * 20000 + "}" * 20001,
    "open braces": "{" * 20000,
    "parentheses": "$" + "(" * 20000 + "1" + ")" * 20000 + "$",
    "digits": "9" * 2_000_000,
    "boxed digits": "\\boxed{" + "9" * 2_000_000 + "}",
    "spaces after ####": "####" + " " * 200000,
    "commas after ####": "#### " + "1," * 200000,
    "surrogates": "\\boxed{\udcff\ud800}",
    **{
        f"code {index}": form.format("__import__('os').abort()")
        for index, form in enumerate(("{}", "\\boxed{{{}}}", "$\\text{{{}}}$", "\\boxed{{lambda: {}}}"))
    },
}


DROPPED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python drops what the timer raises in a destructor or a garbage collector's callback; it comes again."""


@DROPPED
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_math_is_bounded_in_time_and_works_again(bomb: str) -> None:
    assert math(bomb, "5", timeout_s=0.1) == 0.0
    assert math("5", "5") == 1.0


@DROPPED
def test_an_answer_without_a_verdict_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert math("2^(3^(4^5))", "5", timeout_s=0.1) == 0.0
    assert caplog.messages == ["math: no verdict in time, counted as wrong: '2^(3^(4^5))'"]


@DROPPED
def test_math_leaves_the_signals_of_the_process_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF)]
    for response in ("2", "2^(3^(4^5))"):
        math(response, "2", timeout_s=0.1)
    assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF)] == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_math_keeps_its_arithmetic_interruptible(tmp_path: Path) -> None:
    """No signal interrupts gmpy2, so the libraries must not take it."""
    (tmp_path / "gmpy2.py").write_text("raise SystemExit('gmpy2 was imported')\n")
    code = "from anygauge.rollout.rewards import math\nassert math('5', '5') == 1.0"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})


def test_math_takes_any_time_limit() -> None:
    assert math("2", "2", timeout_s=1e300) == 1.0


def test_a_label_without_mathematics_is_an_error() -> None:
    with pytest.raises(RewardError, match="holds no mathematical expression"):
        math("5", "  ")
