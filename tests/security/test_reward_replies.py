"""Rewards that write to the connection of their process: the driver unpickles nothing and goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.rollout.rewards import messages, pool
from anygauge.rollout.rewards.messages import Ready, Results, decode_reply, encode_reply
from anygauge_hooks.errors import RewardError
from anygauge_tests.scoring import errors, group, rewards, scorer

MODULE = """
import mmap, os, pickle, stat, struct, time
from pathlib import Path

def descriptors(kind):
    for entry in os.listdir("/proc/self/fd"):
        try:
            if kind(os.stat(int(entry)).st_mode):
                yield int(entry)
        except OSError:
            pass

def write(data):
    for descriptor in descriptors(stat.S_ISSOCK):
        try:
            os.write(descriptor, data)
        except OSError:
            pass

class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)

def marks():
    for line in open("/proc/self/maps"):
        if "mark" in line and "rw-s" in line:
            return int(line.split("-")[0], 16)

def attack(response, label):
    if response == "pickle":
        data = pickle.dumps(Touch(Path(label)))
        write(struct.pack("!i", len(data)) + data)
        write(data + b"\\n")
        time.sleep(60)  # the next sample may be under way before the driver has read this
    elif response == "half a line":
        write(b'{"outcomes": [')
        time.sleep(60)
    elif response == "shrink":
        for entry in os.listdir("/proc/self/fd"):
            if "mark" in os.readlink(f"/proc/self/fd/{entry}"):
                os.ftruncate(int(entry), 0)
    elif response == "mark":
        import ctypes
        ctypes.c_int64.from_address(marks()).value = 10**12
        time.sleep(60)
    elif response != "4":
        write(response.encode() + b"\\n")
        time.sleep(60)
    return 1.0

def honest(response):
    strange = {"text": "\\ud800 \\x00 \\n", "deep": {"list": [1, None, True, {"a": 2.5}]}, 7: "key"}
    return {"score": 0.1, "nan": float("nan"), "inf": float("inf"), "huge": 10**25, **strange}
"""
LINES = {
    "no JSON": "junk",
    "other JSON": "[1, 2]",
    "too many levels": "[" * 100_000,
    "an item that is not there": '{"outcomes": [[99, [[1.0, null]]]], "spent": false}',
    "a negative item": '{"outcomes": [[-1, [[1.0, null]]]], "spent": false}',
    "too many outcomes": '{"outcomes": [[0, [[1.0, null], [1.0, null]]]], "spent": false}',
    "no outcomes": '{"outcomes": [[0, []]], "spent": false}',
    "an error that is no text": '{"outcomes": [[0, [[null, 5]]]], "spent": false}',
    "many digits": '{"outcomes": [[0, [[' + "9" * 5000 + ', null]]]], "spent": false}',
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "attacking.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "attacking"
    sys.modules.pop("attacking", None)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process that sleeps after its reply be killed at once."""
    monkeypatch.setattr(pool, "EXIT_S", 0.0)


def score(function: str, *texts: str, label: Any = "4") -> Any:
    table = {"function": function, "timeout_s": 1.0, "max_failed_ratio": 1.0, "num_workers": 1}
    with scorer(table) as made:
        return made.score([group(*texts, label=label)])


def test_a_pickle_is_not_loaded(module: str, tmp_path: Path) -> None:
    scored = score(f"{module}:attack", "pickle", "4", label=str(tmp_path / "ran"))
    assert rewards(scored) == [None, 1.0]
    assert not (tmp_path / "ran").exists()


def test_a_line_that_is_no_result_fails_its_sample_alone(module: str) -> None:
    scored = score(f"{module}:attack", "4", *LINES.values(), "4")
    assert rewards(scored) == [1.0, *[None] * len(LINES), 1.0]
    assert all("wrote to the connection of its process" in str(error) for error in errors(scored)[1:-1])


def test_a_value_that_is_no_reward_is_one_that_failed(module: str) -> None:
    scored = score(f"{module}:attack", '{"outcomes": [[0, [["text", null]]]], "spent": false}')
    assert errors(scored)[0] == f"{module}:attack returned 'text', which is not a number"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("half a line", "did not return in 1 s"),
        ("mark", "did not return in 1 s"),
        ("shrink", "raised PermissionError"),
    ],
)
def test_what_a_reward_does_to_what_it_shares_holds_nobody_up(
    module: str, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.setattr(pool, "SILENCE_GRACE_S", 0.2)
    scored = score(f"{module}:attack", text, "4")
    assert rewards(scored) == [None, 1.0]
    assert why in str(errors(scored)[0])


def test_a_message_without_an_end_is_not_kept(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anygauge.rollout.rewards.child.LONGEST_REPLY", 2**16)
    scored = score(f"{module}:attack", "a" * 2**17, "4")
    assert rewards(scored) == [None, 1.0]
    assert "more than 65536 bytes" in str(errors(scored)[0])


def test_a_module_that_writes_when_it_is_imported_is_an_error(module: str, tmp_path: Path) -> None:
    # The driver imports the module too, to check the function: its own sockets are those of other tests.
    (tmp_path / "attacking.py").write_text(
        f"{MODULE}\nif os.getpid() != {os.getpid()}:\n    write(b'x\\n')\n"
    )
    with pytest.raises(RewardError, match="cannot start: it wrote to the connection of its process"):
        score(f"{module}:attack", "4")


def test_honest_results_arrive_as_they_were(module: str) -> None:
    (scored,) = score(f"{module}:honest", "4")
    assert scored.samples[0].raw_reward == {
        "score": 0.1,
        "nan": "nan",
        "inf": "inf",
        "huge": 10**25,
        "text": "\ud800 \x00 \n",
        "deep": {"list": [1, None, True, {"a": 2.5}]},
        "7": "key",
    }


@pytest.mark.parametrize(
    "reply",
    [
        Ready(),
        Ready("KeyError: '\udcff\n'"),
        Results([(0, [(0.1, None), (None, "why\n")]), (3, [({"score": 1e300}, None)])], spent=True),
    ],
)
def test_replies_are_lines(reply: Ready | Results) -> None:
    line = encode_reply(reply)
    assert line.count(b"\n") == 1
    assert decode_reply(line) == reply
    assert len(line) < messages.LONGEST_REPLY
