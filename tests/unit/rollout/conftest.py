"""A module of reward functions as a user may write them, good and bad."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

MODULE = """
import asyncio, ctypes, json, os, re, signal, subprocess, sys, threading, time
from functools import partial

def full(response, label, metadata, *, bonus=0.0): return float(response == label) + bonus
def short(response): return float(len(response))
def open_(**arguments): return float(len(arguments))
def no_response(label): return 0.0
def positional(response, /, label): return 0.0
def needs_more(response, weight): return 0.0
def odd(question, answer): return 0.0
def raises(response): return inner(response)
def inner(response): return {}[response]
def deep(response): return json.loads(response)
async def slow(response): return 2.0
class Scale:
    def __call__(self, response, label): return 2.0
    def method(self, response): return 3.0
class Later:
    async def __call__(self, response): return 4.0
instance = Scale()
later = Later()
bound = partial(full, bonus=1.0)
bound_later = partial(slow)
number = 3
builtin = max

def where(response): return {"score": 1.0, "pid": os.getpid(), "path": sys.path[-1]}
def mixed(response): return {"score": 2, "note": response, "also": {1, 2}} if response == "dict" else 0.5
def keyed(response): return {"a": 1, "b": float("nan")} if response != "none" else {"b": 2}
def ranks(response, label, metadata, prompt):
    assert len(response) == len(label) == len(metadata) == len(prompt)
    if response[0] == "raise": raise ValueError("no group")
    if response[0] == "short": return [1.0]
    if response[0] == "nan": return [float("nan"), 1.0]
    return [float(sorted(response).index(each)) for each in response]
async def ranks_later(response): return [0.0] * len(response)

CATASTROPHE = "a" * 40 + "b"
EVERY_DESCRIPTOR = os.sysconf("SC_OPEN_MAX")
def misbehave(response):
    match response:
        case "loop":
            while True: pass
        case "regex": re.match(r"(a+)+$", CATASTROPHE)
        case "exit": os._exit(3)
        case "leave": sys.exit(4)
        case "interrupt": raise KeyboardInterrupt
        case "segfault": ctypes.string_at(0)
        case "memory": bytearray(1 << 40)
        case "hoard": print(len([bytes(1 << 20) for _ in range(4096)]))
        case "odd": raise Odd
        case "none": return None
        case "parent":
            os.kill(os.getppid(), 9)
            while True: pass
        case "close": os.closerange(0, EVERY_DESCRIPTOR)
        case "close and raise":
            os.closerange(0, EVERY_DESCRIPTOR)
            raise ValueError(response)
    return 1.0
class Odd(Exception):
    def __repr__(self): raise RuntimeError

arrived, everybody = 0, None
async def gather(response):
    global arrived, everybody
    if everybody is None: everybody = asyncio.Event()
    arrived += 1
    if arrived == int(response): everybody.set()
    await everybody.wait()
    return 1.0
waiting = most = 0
async def overlap(response):
    global waiting, most
    waiting += 1
    most = max(most, waiting)
    await asyncio.sleep(0.01)
    waiting -= 1
    return float(most)
async def misbehave_later(response):
    if response == "wait": await asyncio.Event().wait()
    if response == "block": re.match(r"(a+)+$", CATASTROPHE)
    if response == "child": await asyncio.create_task(child())
    if response == "memory": bytearray(1 << 40)
    if response == "raise": raise KeyError(response)
    if response == "exit": sys.exit(5)
    await asyncio.sleep(0)
    return 1.0
async def child(): os._exit(6)
def remember(response):
    with open(response, "a") as file: file.write("x")
    return 1.0
def detach(response):
    how, path = response.split()
    apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    orphan = subprocess.check_output("sleep 1000 >&2 & echo $!", shell=True, start_new_session=True)
    with open(path, "a") as file: print(apart.pid, int(orphan), file=file)
    if how == "exit": os._exit(3)
    while how == "hang": pass
    return 1.0
def forever(response):
    detach("return " + response)
    while True: pass
dug = threading.Event()
def dig(response, depth=40):
    if depth: return dig(response, depth - 1)
    if response == "two": dug.set()
    if response == "deaf": signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if response == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    while response != "return": pass
def dig_twice(response):
    threading.Thread(target=dig, args=("two",), daemon=True).start()
    dug.wait()
    dig(response)
def talk(response):
    print(response, "x" * 1_000_000)
    return 1.0
"""


@pytest.fixture(scope="module")
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Write an importable module of a user and return its name."""
    name, folder = "user_rewards_under_test", tmp_path_factory.mktemp("user")
    (folder / f"{name}.py").write_text(MODULE)
    (folder / f"{name}_broken.py").write_text("raise RuntimeError('no license')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield name
    sys.modules.pop(name, None)
