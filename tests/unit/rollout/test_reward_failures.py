"""Failures of a scoring process."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from anygauge.rollout.rewards import pool
from anygauge_hooks.errors import RewardError
from anygauge_tests.scoring import errors, group, rewards, scorer

GOOD = ["fine"] * 3


def fates(function: str, kinds: Sequence[str], **table: Any) -> dict[str, str]:
    """Score misbehaving samples among good ones; return how each failed, by kind."""
    texts = [*GOOD, *(each for kind in kinds for each in (kind, *GOOD))]
    with scorer({"function": function, "timeout_s": 1.0, **table}) as made:
        (scored,) = made.score([group(*texts)])
        assert all(sample.reward == 1.0 for sample in scored.samples if sample.text not in kinds)
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3
    found = {sample.text: sample.error or "" for sample in scored.samples if sample.text in kinds}
    return {kind: error.removeprefix(f"{function} ") for kind, error in found.items()}


def test_only_the_sample_that_misbehaves_fails(user_module: str, caplog: pytest.LogCaptureFixture) -> None:
    kinds = ["loop", "exit", "segfault", "leave", "interrupt", "odd", "none", "regex", "memory", "hoard"]
    found = fates(f"{user_module}:misbehave", kinds, num_workers=2, memory_gib=0.5)
    assert found["loop"] == found["regex"] == "did not return in 1 s"
    assert found["exit"] == "did not return: its process exited with code 3"
    assert found["segfault"] == "did not return: its process was killed by SIGSEGV"
    assert found["leave"].startswith(f"raised SystemExit(4) at {user_module}.py:")
    assert found["interrupt"].startswith(f"raised KeyboardInterrupt() at {user_module}.py:")
    assert found["odd"].startswith("raised <Odd instance at")
    assert found["none"] == "returned None, which is not a number"
    assert found["memory"].startswith(f"raised MemoryError() at {user_module}.py:")
    # Python 3.12 has no frame of its own for a comprehension.
    assert re.search(
        r"in (<listcomp>|misbehave), `case .*`: it has 0\.5 GiB \(reward\.memory_gib\)$", found["hoard"]
    )
    hung = (
        f"{user_module}:misbehave for t.jsonl:7 did not return in 1 s (1 such call so far); reward.timeout_s "
    )
    assert sum(message.startswith(hung) for message in caplog.messages) == 1


@pytest.mark.parametrize("open_files", [0, 300])
def test_a_call_that_takes_the_ways_out_of_its_process_away(user_module: str, open_files: int) -> None:
    """Also where the driver has so many files open that its children get high descriptors."""
    with ExitStack() as stack:
        for _ in range(open_files):
            stack.enter_context(open(os.devnull))
        found = fates(f"{user_module}:misbehave", ["close", "close and raise", "parent"])
    closed = "did not return: its process ended, since its connection to the driver was closed in it"
    assert found["close"] == found["close and raise"] == closed
    assert found["parent"] == "did not return: its process was killed by SIGKILL"


def test_only_the_async_calls_that_misbehave_fail(user_module: str) -> None:
    found = fates(f"{user_module}:misbehave_later", ["wait", "raise", "exit", "memory"], memory_gib=0.5)
    assert found["wait"] == "did not return in 1 s"
    assert found["raise"].startswith(f"raised KeyError('raise') at {user_module}.py:")
    assert found["exit"].startswith(f"raised SystemExit(5) at {user_module}.py:")
    assert found["memory"].endswith("it has 0.5 GiB (reward.memory_gib)")


def test_only_the_async_call_that_blocks_the_others_fails(user_module: str) -> None:
    assert fates(f"{user_module}:misbehave_later", ["block"]) == {"block": "did not return in 1 s"}


def test_a_crash_outside_of_every_call_is_found_by_calling_one_at_a_time(user_module: str) -> None:
    found = fates(f"{user_module}:misbehave_later", ["child"])
    assert found == {"child": "did not return: its process exited with code 6"}


def test_async_calls_overlap(user_module: str) -> None:
    """Each of the calls waits for all of them."""
    with scorer({"function": f"{user_module}:gather", "concurrency": 16}) as made:
        assert rewards(made.score([group(*["16"] * 16)])) == [1.0] * 16


def test_async_calls_are_bounded(user_module: str) -> None:
    """Each call returns how many have been under way at once so far."""
    with scorer({"function": f"{user_module}:overlap", "concurrency": 2}) as made:
        assert max(rewards(made.score([group(*"12345678")]))) == 2


def test_a_call_is_made_once(user_module: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with scorer({"function": f"{user_module}:remember", "num_workers": 2}) as made:
        made.score([group(*[str(seen)] * 50)])
    assert seen.read_text() == "x" * 50


def test_a_silent_process_is_given_up(user_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SILENCE_GRACE_S", 0.2)
    with scorer({"function": f"{user_module}:where", "timeout_s": 0.6}) as made:
        os.kill(made.score([group("4")])[0].samples[0].raw_reward["pid"], signal.SIGSTOP)
        scored = made.score([group("4", "4")])
    assert rewards(scored) == [1.0, 1.0]


def test_a_module_that_fails_in_the_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = "rewards_of_one_process"
    (tmp_path / f"{name}.py").write_text(
        f"import os\nassert os.getpid() == {os.getpid()}, 'driver only'\ndef f(response): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: sys.modules.pop(name, None) and None)
    with (
        scorer({"function": f"{name}:f"}) as made,
        pytest.raises(RewardError, match=r"cannot start: UnknownNameError.*driver only"),
    ):
        made.score([group("4")])
    with scorer({"function": f"{name}:f"}) as made:
        (error,) = errors(made.score([group("4")], tolerant=True))
    assert re.search(r"cannot start: UnknownNameError.*driver only", str(error))


def test_too_many_failures_end_the_scoring(user_module: str) -> None:
    table = {"function": f"{user_module}:misbehave", "max_failed_ratio": 0.1}
    with scorer(table) as made:
        with pytest.raises(
            RewardError, match=r"^2 of 16 samples (?s:.*)exited with code 3\n  and 14 were not tried"
        ):
            made.score([group(*["exit"] * 16)])
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3


def test_a_sample_that_is_left_has_no_reason_of_its_own(user_module: str) -> None:
    parts = {name: {"function": f"{user_module}:{name}"} for name in ("misbehave", "short")}
    with (
        scorer({"parts": parts, "max_failed_ratio": 0.0}) as made,
        pytest.raises(RewardError) as error,
    ):
        made.score([group(*["exit"] * 8, "fine")])
    first, reason, left = error.value.args[0].splitlines()
    assert first == "1 of 9 samples could not be scored:"
    assert reason.startswith(
        f"  1 (t.jsonl:7): misbehave: {user_module}:misbehave did not return: its process"
    )
    assert left == "  and 8 were not tried"


def test_what_is_scored_before_the_deadline_counts(user_module: str) -> None:
    with scorer({"function": f"{user_module}:misbehave_later"}) as made:
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3
        made._deadline_s = 1.0
        scored = made.score([group("fine", "wait")])
        made._deadline_s = 300.0
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3
    late = f"{user_module}:misbehave_later did not return in the 1 s for all samples (run.timeout_s)"
    assert errors(scored) == [None, late]


def test_a_deadline_is_for_all_samples(
    user_module: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has much longer, and a warning names one meanwhile."""
    monkeypatch.setattr(pool, "SLOW_S", 0.1)
    with scorer({"function": f"{user_module}:misbehave", "num_workers": 2}) as made:
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3
        made._deadline_s = 0.4
        found = errors(made.score([group(*["loop"] * 9)]))
    late = f"{user_module}:misbehave did not return in the 0.4 s for all samples (run.timeout_s)"
    assert found == [late] * 9
    assert caplog.messages[0].startswith(f"{user_module}:misbehave for t.jsonl:7 has not returned for 0 s;")
