"""How processes that score end, with all that they started, and their logs."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from anygauge.config.schema import Reward
from anygauge.distributed import guard
from anygauge.rollout.rewards import Scorer, child
from anygauge.rollout.scoring import ScoringQueue
from anygauge_tests.processes import wait_until_ended
from anygauge_tests.scoring import group, plugins_with, rewards, scorer


def test_output_and_stacks_are_in_the_log(user_module: str, tmp_path: Path) -> None:
    table = Reward(
        function=f"{user_module}:misbehave", timeout_s=1.0, max_failed_ratio=1.0, memory_gib=8, num_workers=2
    )
    log = tmp_path / "logs" / "scorer.log"
    with Scorer(table, plugins_with(), max_new_tokens=8, log=log) as made:
        scored = made.score([group("hoard", "odd", "regex")])
    written = "".join(path.read_text() for path in sorted(log.parent.glob("scorer-[01].log")))
    assert "4096\n" in written
    assert "Traceback" in written
    assert "in misbehave" in written[written.index("most recent call first") :]
    assert re.search(
        r"did not return in 1 s; its stack is in scorer-\d.log$", str(scored[0].samples[2].error)
    )


@pytest.mark.usefixtures("cold_workers")  # a stack ends where the interpreter began
@pytest.mark.parametrize("kind", ["one", "stop"])
def test_the_stacks_in_the_log_are_whole(user_module: str, tmp_path: Path, kind: str) -> None:
    table = {"function": f"{user_module}:dig_twice", "timeout_s": 0.5}
    with scorer(table, log=tmp_path / "scorer.log") as made:
        (scored,) = made.score([group(kind)])
    assert str(scored.samples[0].error).endswith("its stack is in scorer-0.log")
    stacks = (tmp_path / "scorer-0.log").read_text().split("most recent call first")[1:]
    assert sorted(stack.count("in dig\n") for stack in stacks) == [0, 41, 41]  # the first is what receives
    assert stacks[-1].rstrip().endswith("in _run_module_as_main")


def test_a_queue_that_is_closed_waits_for_no_call(
    user_module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after Ctrl-C, while a reward hangs that may take ten minutes for each sample."""
    began = tmp_path / "began"

    async def main() -> None:
        queue = ScoringQueue(partial(made.score, tolerant=True), made.cancel)
        scoring = asyncio.create_task(queue.score(group(str(began), str(began))))
        while not began.exists():
            await asyncio.sleep(0.01)
        await queue.close()
        assert [sample.reward for sample in (await scoring).samples] == [None, None]

    with scorer({"function": f"{user_module}:forever", "timeout_s": 600}) as made:
        asyncio.run(asyncio.wait_for(main(), 100))
    assert caplog.messages == [], "nothing failed that anybody waits for"


def test_stacks_that_are_written_slowly_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line every 100 ms of a clock that only the waiting moves."""
    now, log = 0.0, tmp_path / "scorer.log"
    log.write_text("most recent call first, of before\n")
    lines = ["Thread (most recent call first):\n", *(f"line {number}\n" for number in range(9))]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if lines and int(now / 0.1) > 10 - len(lines):
            log.write_text(log.read_text() + lines.pop(0))

    hung = child.Child.__new__(child.Child)
    hung.log, hung._process = log, SimpleNamespace(exited=lambda: False, signal=lambda number: None)  # type: ignore[assignment]
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert hung.write_stacks()
    assert lines == []
    assert 1.0 < now < child.STACKS_S
    now = 0.0
    assert not hung.write_stacks()
    assert now >= child.STACKS_S


def test_a_stack_that_is_not_there_is_not_promised(
    user_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "STACKS_S", 0.3)
    table = {"function": f"{user_module}:dig", "timeout_s": 0.5}
    with scorer(table, log=tmp_path / "scorer.log") as made:
        (scored,) = made.score([group("deaf")])
        assert scored.samples[0].error == f"{user_module}:dig did not return in 0.5 s"
    assert "most recent call first" not in (tmp_path / "scorer-0.log").read_text()


DRIVER = """
import os, signal, sys, threading
from anygauge.config.schema import Reward
from anygauge.plugins import load_plugins
from anygauge.rollout.rewards import Scorer
from anygauge_tests.scoring import group

folder, module, fifo, where = sys.argv[1:]
sys.path.append(folder)
scorer = Scorer(Reward(function=module + ":forever"), load_plugins(only=[]), max_new_tokens=1, log=None)

def die():
    with open(fifo) as file:
        print(file.read(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def score():
    scorer.score([group(fifo)])

first, second = (score, die) if where == "main" else (die, score)
threading.Thread(target=second).start()
first()
"""


@pytest.mark.parametrize("where", ["main", "another"])
def test_a_process_ends_with_its_driver(user_module: str, tmp_path: Path, where: str) -> None:
    """Also in the middle of a call that never returns, and with what a call has started."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    module = sys.modules.get(user_module) or importlib.import_module(user_module)
    folder = str(Path(str(module.__file__)).parent)
    # The processes inherit standard error, so that reading it to the end waits for them all.
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, folder, user_module, str(fifo), where],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert driver.returncode == -signal.SIGKILL
    assert driver.stderr == b""
    assert len(driver.stdout.split()) == 2


def test_the_process_that_grades_ends_with_the_scorer() -> None:
    with scorer({"function": "math"}) as made:
        assert rewards(made.score([group("4", r"\boxed{8/2}", "5")])) == [1.0, 1.0, 0.0]
        process = made._pool._processes[0]
        assert process is not None
        guard = psutil.Process(process._process.pid)
        children = guard.children(recursive=True)
        assert len(children) == 1  # mathematics is graded where everything is scored
    assert wait_until_ended(children, 20) == []


@pytest.mark.parametrize("how", ["return", "exit", "hang"])
def test_nothing_is_left_of_what_a_call_detached(user_module: str, tmp_path: Path, how: str) -> None:
    pids = tmp_path / "pids"
    with scorer({"function": f"{user_module}:detach", "timeout_s": 4.0}) as made:
        made.score([group(f"{how} {pids}")])
    (apart, orphan) = map(int, pids.read_text().split())
    assert not psutil.pid_exists(apart)
    assert not psutil.pid_exists(orphan)


def test_the_log_keeps_the_first_and_the_last_output(user_module: str, tmp_path: Path) -> None:
    texts = [str(number) for number in range(40)]
    with scorer({"function": f"{user_module}:talk"}, log=tmp_path / "scorer.log") as made:
        assert rewards(made.score([group(*texts)])) == [1.0] * 40
    lines = (tmp_path / "scorer-0.log").read_bytes().split(b"\n")
    assert sum(len(line) + 1 for line in lines) < guard.LARGEST_LOG + (1 << 17)
    assert [line.split()[0] for line in lines if line.endswith(b"x" * 1_000_000)][:4] == [
        b"0",
        b"1",
        b"2",
        b"3",
    ]
    assert [line.split()[0] for line in lines[-5:-1]] == [b"36", b"37", b"38", b"39"]
    assert b"[output was left out here]" in lines
