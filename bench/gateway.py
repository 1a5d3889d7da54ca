"""Other agents' waits and the driver's memory while one agent sends a very long prompt."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

from anygauge.distributed.garbage import freeze_living_objects
from anygauge_hooks.rl import SamplingParams
from anygauge_tests.scripted_gateway import Served, chat_tokenizer, serve_script

MIB = 2**20
CONTEXT = 30_000
SIZES = {
    "nothing": 0,
    "60 MiB, beyond max_body_bytes": 60 * MIB,
    "7.9 MiB, beyond the context": int(7.9 * MIB),
    "0.45 MiB, as long as is rendered": 15 * CONTEXT,
}
longest_ms = [0.0]
"""CPU time of the longest step of the event loop, in which no agent is served."""


async def main() -> None:
    """Print a row for each size of prompt."""
    asyncio.events.Handle._run = timed(asyncio.events.Handle._run)  # type: ignore[method-assign]
    heads = f"{'status':>7} {'asked':>6} {'median ms':>10} {'95 % ms':>8} {'max ms':>7} {'step ms':>8}"
    print(f"{'one agent sends':34} {heads} {'MB more':>8}")
    with TemporaryDirectory() as folder:
        tokenizer = chat_tokenizer(Path(folder))
    for name, size in SIZES.items():
        params = SamplingParams(max_new_tokens=64)
        async with serve_script(
            tokenizer, lambda _: "four", params=params, max_context_tokens=CONTEXT
        ) as served:
            # As the driver does before its first step, and outside the loop's thread as there.
            await asyncio.to_thread(freeze_living_objects)
            print(f"{name:34} {await measure(served, size)}", flush=True)


async def measure(served: Served, size: int) -> str:
    """Return what an agent that asks all the time sees, while others send a prompt of some size."""
    longest_ms[0] = 0.0
    driver, before = psutil.Process(), psutil.Process().memory_info().rss
    peak = asyncio.create_task(watch(driver))
    senders = [client(served, "send", size)] if size else []
    asker = client(served, "ask", 0)
    waits = json.loads((await asyncio.to_thread(asker.communicate))[0])
    statuses = set()
    for sender in senders:
        sender.terminate()
        statuses |= set((await asyncio.to_thread(sender.communicate))[0].split())
    peak.cancel()
    grown = (max(await peak, driver.memory_info().rss) - before) / 1e6
    worst_20th = sorted(waits)[-1 - len(waits) // 20]
    status = b",".join(sorted(statuses)).decode() or "-"
    times = f"{statistics.median(waits):10.1f} {worst_20th:8.1f} {max(waits):7.1f} {longest_ms[0]:8.1f}"
    return f"{status:>7} {len(waits):6} {times} {grown:8.0f}"


def timed(run: Callable[[asyncio.Handle], None]) -> Callable[[asyncio.Handle], None]:
    """Return a step of the event loop that notes its CPU time, which other processes do not change."""

    def step(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        longest_ms[0] = max(longest_ms[0], 1000 * (time.thread_time() - began))

    return step


async def watch(driver: psutil.Process) -> int:
    """Return the most memory until it is cancelled."""
    most = 0
    try:
        while True:
            most = max(most, driver.memory_info().rss)
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return most


def client(served: Served, what: str, size: int) -> subprocess.Popen[bytes]:
    """Start an agent as a process of its own."""
    url, key = served.gateway.openai_url(served.session), served.gateway.key(served.session)
    return subprocess.Popen([sys.executable, __file__, what, url, key, str(size)], stdout=subprocess.PIPE)


def send(url: str, key: str, size: int) -> None:
    """Send a long prompt again and again, and print each status."""
    body = json.dumps(question("the weather in Paris " * (size // 21))).encode()
    while True:
        with httpx.Client(headers={"x-api-key": key}, verify=False, timeout=600) as agent:
            try:
                print(agent.post(f"{url}/chat/completions", content=body).status_code, flush=True)
            except httpx.TransportError:  # refused before all of it was sent
                print("closed", flush=True)


def ask(url: str, key: str, _: int) -> None:
    """Ask for ten seconds, and print how many milliseconds each answer took."""
    waits = []
    with httpx.Client(headers={"x-api-key": key}, verify=False, timeout=600) as agent:
        ends = time.perf_counter() + 10
        while (began := time.perf_counter()) < ends:
            agent.post(f"{url}/chat/completions", json=question("the weather?")).raise_for_status()
            waits.append(1000 * (time.perf_counter() - began))
            time.sleep(0.02)
    print(json.dumps(waits))


def question(text: str) -> dict[str, object]:
    """Return a request."""
    return {"model": "policy", "messages": [{"role": "user", "content": text}]}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        asyncio.run(main())
    else:
        {"send": send, "ask": ask}[sys.argv[1]](*sys.argv[2:4], int(sys.argv[4]))
