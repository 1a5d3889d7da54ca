"""Attacks by the program of an agent, which may run whatever the policy writes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from anygauge.distributed.guard import Tail
from anygauge.rollout.gateway.command import run_command
from anygauge.rollout.gateway.guarded_command import KEPT_BYTES
from anygauge_hooks.errors import RolloutError
from anygauge_tests.processes import wait_until_ended
from anygauge_tests.scripted_gateway import chat_tokenizer, serve_script

ROW = {"prompt": "the weather?", "label": None, "metadata": {}, "index": 0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def reward_of(tokenizer: Any, command: Sequence[str], **options: Any) -> Any:
    async with serve_script(tokenizer, []) as served:
        return await run_command(command, served.gateway, served.session, ROW, **options)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_it_gets_the_row_the_gateway_and_no_key_of_the_driver(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "SEARCH_API_KEY", "MALLORY"):
        monkeypatch.setenv(name, "secret")
    code = "import json, os, sys; print(json.dumps(dict(row=json.load(sys.stdin), env=dict(os.environ))))"
    told = asyncio.run(reward_of(tokenizer, python(code), pass_env=["SEARCH_API_KEY", "NOT_SET"]))
    assert told["row"] == ROW
    environment = told["env"]
    assert environment.pop("SEARCH_API_KEY") == "secret"
    assert "secret" not in environment.values()
    assert (environment["PATH"], environment["HOME"]) == (os.environ["PATH"], os.environ["HOME"])
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"]
    assert environment["OPENAI_BASE_URL"].endswith("/v1")


DETACHED = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]
kwargs = {"stdout": subprocess.PIPE}
children = [subprocess.Popen(sleep, start_new_session=apart, **kwargs) for apart in (True, False)]
for child in children:
    child.stdout.readline()
print(*(child.pid for child in children), file=open(sys.argv[1], "w"), flush=True)
if sys.argv[2] == "hangs":
    time.sleep(1000)
if sys.argv[2] == "ends its group":
    os.kill(0, 9)
print(1)
"""


@pytest.mark.parametrize("how", ["returns", "hangs", "ends its group"])
def test_nothing_is_left_of_what_it_started(tokenizer: Any, tmp_path: Path, how: str) -> None:
    pids = tmp_path / "pids"

    async def main() -> None:
        running = asyncio.ensure_future(reward_of(tokenizer, [*python(DETACHED), str(pids), how]))
        if how == "returns":
            assert await running == 1
            return
        if how == "hangs":
            while not (pids.exists() and pids.read_text().endswith("\n")):
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return
        with pytest.raises(RolloutError, match=f"status {-signal.SIGKILL}"):
            await running

    asyncio.run(main())
    assert not any(map(psutil.pid_exists, map(int, pids.read_text().split())))


DRIVER = """
import os, socket, sys, tempfile
from anygauge.rollout.gateway.command import _start
files = [tempfile.TemporaryFile() for _ in range(3)]
ours, theirs = socket.socketpair()
process = _start(sys.argv[1:], {**os.environ}, theirs, files)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


def test_it_ends_with_the_driver(tmp_path: Path) -> None:
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    command = [*python(DRIVER), *python(DETACHED), str(fifo), "hangs"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as driver:
        processes = [psutil.Process(int(pid)) for pid in fifo.read_text().split()]
        driver.communicate(b"\n")
    assert driver.returncode == -signal.SIGKILL
    assert wait_until_ended(processes, 60) == []


FLOOD = """
import sys
for stream in (sys.stderr, sys.stdout):
    for number in range(int(sys.argv[1])):
        stream.write(f"{number} " + "x" * 999 + "\\n")
print(sys.argv[2])
sys.exit(int(sys.argv[3]))
"""


def test_its_output_is_read_to_the_end_and_its_last_line_is_the_reward(tokenizer: Any) -> None:
    count = str(4 * KEPT_BYTES // 1000)
    assert asyncio.run(reward_of(tokenizer, [*python(FLOOD), count, "0.5", "0"])) == 0.5
    with pytest.raises(RolloutError, match=r"status 3: x+\n\d+ x+\n") as caught:
        asyncio.run(reward_of(tokenizer, [*python(FLOOD), count, "0.5", "3"]))
    assert len(str(caught.value)) < 3000


def test_what_is_kept_of_an_output_is_bounded(tmp_path: Path) -> None:
    """1.5 GB in pieces of a pipe, at a thousandth."""
    output = tmp_path / "output"
    with output.open("wb") as file:  # takes all of it, unlike a pipe
        tail, peak = Tail(file.fileno(), 1000), 0
        for number in range(1500):
            tail.take(f"{number} ".encode() + b"x" * 995 + b"\n")
            peak = max(peak, len(tail._kept))
        tail.take(b"0.5\n")
        tail.end()
    assert output.read_bytes() == b"\n[output was left out here]\n0.5\n"
    assert peak <= 2000


@pytest.mark.parametrize("sizes", [(10,), (1001,), (600, 600), (600, 2000)])
def test_a_tail_is_whole_lines(sizes: Sequence[int]) -> None:
    source, sink = os.pipe()
    tail, lines = Tail(sink, 1000), [b"y" * (size - 1) + b"\n" for size in sizes]
    for line in lines:
        tail.take(line)
    tail.end()
    os.close(sink)
    with os.fdopen(source, "rb") as file:
        kept = file.read()
    whole = b"".join(lines)
    assert kept == (
        whole if len(whole) <= 1000 else b"\n[output was left out here]\n" + lines[-1] * (sizes[-1] <= 1000)
    )


@pytest.mark.parametrize(
    "line", ["[" * 5000, "9" * 5000, "true", '"1"', "[1]", "NaN", "1 2", '{"a":' * 1000 + "1" + "}" * 1000]
)
def test_a_last_line_that_is_no_reward_is_none(tokenizer: Any, tmp_path: Path, line: str) -> None:
    (tmp_path / "said").write_text(line)
    assert asyncio.run(reward_of(tokenizer, ["cat", str(tmp_path / "said")])) is None


def test_a_program_that_cannot_run_is_named(tokenizer: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("no program\n")
    broken.chmod(0o755)
    with pytest.raises(RolloutError, match=f"status 127: {broken}: Exec format error"):
        asyncio.run(reward_of(tokenizer, [str(broken)]))
    with pytest.raises(RolloutError, match="'absent' cannot be started"):
        asyncio.run(reward_of(tokenizer, ["absent"]))


def test_a_large_row_is_read_by_a_program_that_does_not_begin_with_it(tokenizer: Any) -> None:
    code = "import sys; print('x' * 200_000); print(len(sys.stdin.read()))"
    row = {**ROW, "prompt": "p" * 300_000}

    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            length = await run_command(python(code), served.gateway, served.session, row)
            assert length == len(json.dumps(row))

    asyncio.run(main())
