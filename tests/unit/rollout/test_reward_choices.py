"""The ways in which models say which choice is right."""

from __future__ import annotations

import string
import time
from collections.abc import Mapping

import pytest

from anygauge.rollout.rewards.choice import chosen_letter, multiple_choice

FOUR = dict.fromkeys("ABCD", "")
TEN = dict.fromkeys(string.ascii_uppercase[:10], "")
CITIES = {"A": "Rome", "B": "New York", "C": "Paris", "D": "None of the above"}

STATED = [
    # The conclusion first, the other choices afterwards.
    ("The answer is C. Option A is incorrect because it ignores friction.", "C"),
    ("The correct answer is (B). Choice A ignores the fee, and option D doubles it.", "B"),
    ("Option A: 3. Option B: 4. Option C: 5. So it is A.", "A"),
    ("Answer: D\n\nExplanation: option B would need a catalyst, and option C is too slow.", "D"),
    ("The answer is B. Options A and C are both too small.", "B"),
    ("C) Paris. Option A is a city in Italy.", "C"),
    ("C\n\nOption A is wrong because Rome is in Italy.", "C"),
    ("**C) Paris**\n\n- **A) Rome** lies in Italy.\n- **B) New York** lies in America.", "C"),
    ("B because A and C are out.", "B"),
    ("B - the only even one.", "B"),
    # Another choice first, the conclusion last.
    ("A) is tempting but wrong. Therefore, B.", "B"),
    ("At first the answer is A. On reflection the answer is D.", "D"),
    ("I would say A is correct... no wait, C is correct.", "C"),
    ("A: too small. B: too large. C: just right, so the answer must be C.", "C"),
    ("(A) fails. (B) fails. (C) fails. That leaves (D).", "D"),
    ("A) 3\nB) 4\nC) 5\nD) 6\n3 + 2 = 5, hence C.", "C"),
    ("Both A and B look fine, but the best answer is B.", "B"),
    ("If the answer is A then the sum is odd, which it is not. Thus B.", "B"),
    ("The answer cannot be A. It must be D.", "D"),
    ("I don't think A is correct. I choose C.", "C"),
    ("The answer is not A. The answer is C, not A.", "C"),
    ("We can eliminate A and B. Between C and D, I would go with D.", "D"),
    # Verbs and fillers.
    ("The answer must be D.", "D"),
    ("The answer would be B", "B"),
    ("The correct choice is therefore A.", "A"),
    ("the right option is: (d)", "D"),
    ("The answer to question 12 is B.", "B"),
    ("The answer, then, is C.", "C"),
    ("The answer is most likely B", "B"),
    ("The answer is option C.", "C"),
    ("The answer is the letter B.", "B"),
    ("The answer is I think C", "C"),
    ("I think the answer is C, because the tax is due in May", "C"),
    ("I'd pick B.", "B"),
    ("I will go with option D because it fits the data.", "D"),
    ("My choice: B", "B"),
    ("The best answer choice is (A).", "A"),
    ("Option C is the correct answer.", "C"),
    ("(B) must be the right one.", "B"),
    ("B. New York is the correct answer.", "B"),
    ("D (all of them) is correct", "D"),
    ("Only B is the most likely answer", "B"),
    ("So option C.", "C"),
    ("Looking at the graph, option B fits best.", "B"),
    ("It could be D.", "D"),
    # Layout and markup.
    ("Final answer: C", "C"),
    ("Final Answer C", "C"),
    ("**Answer:** B", "B"),
    ("**Answer**: B", "B"),
    ("__Answer__: `B`", "B"),
    ("### Final Answer\n\n(C)", "C"),
    ("Answer:\n\nC) Paris", "C"),
    ("Answer -> D", "D"),
    ("The answer is **C**.", "C"),
    ("The answer is *(C)* Paris.", "C"),
    ('The answer is "B".', "B"),
    ("Answer: [D]", "D"),
    ("<think>B or C?</think><answer>C</answer>", "C"),
    ("<answer> (B) </answer>", "B"),
    ("The answer is <b>A</b>.", "A"),
    ("Q: Which city?\nA: C", "C"),
    ("answer: c", "C"),
    ("The answer is (c) since it is even.", "C"),
    ("the answer is b) 42", "B"),
    ("The answer is \u201cD\u201d.", "D"),
    ("\u7b54\u6848\u662fC\u3002\u9009\u9879A\u662f\u9519\u8bef\u7684\u3002", "C"),
    ("\u6545\u9009\uff22\u3002", "B"),
    ("\u7b54\u6848\uff1a\uff08D\uff09", "D"),
    # LaTeX.
    (r"\boxed{C) Paris}", "C"),
    (r"\boxed{C. Paris}", "C"),
    (r"\boxed{\text{(C) Paris}}", "C"),
    (r"\boxed{\text{C: }\frac{1}{2}}", "C"),
    (r"\boxed{\textbf{(B)}\ 12}", "B"),
    (r"\boxed{\text{Option B}}", "B"),
    (r"$\boxed{ \mathrm{D} }$", "D"),
    (r"\fbox{A}", "A"),
    (r"So x = \boxed{12}, and the answer is (B).", "B"),
    (r"The answer is $\boxed{12}$, which is option B.", "B"),
    (r"The sum is \boxed{5}. So the answer is B.", "B"),
    (r"We solve for \boxed{x}. The answer is B.", "B"),
    ("Answer: [[B]]", "B"),
    ("C?", "C"),
    ("Probably C", "C"),
    ("Therefore option b is correct.", "B"),
    ("After A, B and D are out, the only option left is C.", "C"),
    ("C is the only option that fits.", "C"),
    ("My guess is B.", "B"),
    ("I'd say D", "D"),
    ("x = 5, which matches B.", "B"),
    ("The answer is D. All of A, B and C are true.", "D"),
    ("The correct answer is C, not B, because B is correct only in winter.", "C"),
    ("Let A = 3 and B = 4. So A is smaller. Answer: D", "D"),
    (r"Answer: $\textbf{(C)}$", "C"),
    (r"The answer is $\mathbf{B}$.", "B"),
    (r"The answer is \(\text{D}\).", "D"),
    (r"Therefore, $\text{(A)}$ is the correct choice.", "A"),
]

UNSTATED = [
    "",
    "I do not know.",
    "I think so.",
    "Answer: A and B",
    "Answer: A, C",
    "Answer: (A) or (B)",
    "Final answer: A/B",
    "The answer is both B and C.",
    "The answer is either A or D.",
    "The answer is B. No: the answer is A and B.",
    "The answer is neither A nor B.",
    "Answer: none of these",
    "Answer: ABD",
    r"\boxed{A, C}",
    r"\boxed{A \text{ and } C}",
    r"\boxed{ACD}",
    r"The answer is A. \boxed{Z}",
    r"\boxed{12\text{ C}}",
    r"\boxed{C = 12}",
    "The answer is a matter of taste.",
    "The answer is A dog that barks.",
    "The answer is I think unclear.",
    "The answer is A = 5.",
    "The answer is B-cells.",
    "The answer is C's mother.",
    "The answer is J. K. Rowling.",
    "The answer is not B.",
    "The answer is Z.",
    "A is incorrect.",
    "A is not correct.",
    "I doubt that B is correct.",
    "Neither A nor B is correct.",
    "So B is out.",
    "Angle C is right.",
    "Option B is wrong.",
    "Options A and B remain",
    "Which option is it?",
    "A) Rome\nB) New York\nC) Paris\nD) none",
    "A) is tempting.",
    "CAB",
]


@pytest.mark.parametrize(("response", "letter"), STATED)
def test_what_is_stated(response: str, letter: str) -> None:
    assert chosen_letter(response, FOUR) == letter
    assert chosen_letter(response, TEN) == letter


@pytest.mark.parametrize("response", UNSTATED)
def test_what_is_not_stated(response: str) -> None:
    assert chosen_letter(response, FOUR) is None
    assert chosen_letter(response, TEN) is None


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is Paris.", "C"),
        ("The answer is **New York**. It is in America.", "B"),
        ("Answer: rome", "A"),
        ("Answer: None of the above", "D"),
        (r"\boxed{\text{New York}}", "B"),
        ("The answer is Rome. No, the answer is Paris.", "C"),
        ("The answer is Oslo.", None),
        ("The answer is A) Rome", "A"),
    ],
)
def test_choices_are_known_by_their_texts(response: str, letter: str | None) -> None:
    assert chosen_letter(response, CITIES) == letter


@pytest.mark.parametrize("choices", [FOUR, CITIES])
def test_only_the_ends_of_a_long_response_count(choices: Mapping[str, str]) -> None:
    filler = "The data says more. " * 1000
    assert chosen_letter(f"C) Paris\n{filler}", choices) == "C"
    assert chosen_letter(f"{filler}So the answer is B.", choices) == "B"
    assert chosen_letter(f"{filler}the answer is B.{filler}", choices) is None


@pytest.mark.parametrize(
    "unit",
    ["answer ", "answer is ", "A, ", "A is ", "so ", "( ", "$", "answer of ", " ", "\n", "the most ", "\\"],
)
def test_an_answer_is_found_in_little_time(unit: str) -> None:
    response = unit * (2000 // len(unit))
    started = time.process_time()
    for _ in range(10):
        multiple_choice(response, "A")
    assert time.process_time() - started < 2
