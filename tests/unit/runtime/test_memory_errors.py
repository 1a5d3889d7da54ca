"""Out of memory: what counts as it, what the error tells, and what it advises."""

from __future__ import annotations

import pickle
import re
import resource
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anygauge
from anygauge import device as device_module
from anygauge.config import Config
from anygauge.device import is_out_of_memory, memory_phase, peak_memory_by_phase
from anygauge.runtime.memory_advice import ADVICE, PHASES, advise, advise_death, memory_advice
from anygauge.runtime.rpc import Died, MethodCall, Raised, WorkerId, decode, encode, error_of
from anygauge.runtime.worker import Worker, WorkerSetup
from anygauge_cpu.device import CpuDevice
from anygauge_hooks.errors import OutOfMemoryError
from anygauge_hooks.resources import read_oom_kills

HOST = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599627370496 bytes."


@pytest.fixture(autouse=True)
def no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_peaks", {})


def config(**tables: Mapping[str, Any]) -> Config:
    needed = {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"train": ["t"]}}
    return Config.model_validate({**needed, **tables})


def raised(error: BaseException, phase: str = "generate") -> BaseException:
    expected = OutOfMemoryError if is_out_of_memory(error) else type(error)
    with pytest.raises(expected) as caught, memory_phase(CpuDevice(), phase):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 20.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError(HOST), True),
        (RuntimeError("ABACUS out of memory. Tried to allocate 2 beads"), True),
        (OSError(12, "Cannot allocate memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    assert isinstance(raised(error), OutOfMemoryError) is expected


def test_an_allocation_that_really_fails_is_explained() -> None:
    with memory_phase(CpuDevice(), "load"):
        held = torch.ones(1 << 20)
    with pytest.raises(OutOfMemoryError) as caught, memory_phase(CpuDevice(), "forward_backward"):
        torch.empty(1 << 50)
    error = caught.value
    assert held.sum() == 1 << 20
    assert error.phase == "forward_backward"
    assert "you tried to allocate 4503599627370496 bytes" in str(error)
    assert "Peak of each phase so far in GiB: load " in str(error)
    assert ", forward_backward " in str(error)
    assert "Memory of cpu in GiB: " in str(error)
    assert isinstance(error.__cause__, RuntimeError)


LIMITED = """
import resource, torch
from anygauge.device import memory_phase
from anygauge_cpu.device import CpuDevice
torch.ones(1)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, resource.RLIM_INFINITY))
with memory_phase(CpuDevice(), "generate"):
    kept = [torch.ones(2**24) for _ in range(64)]
"""


def test_a_process_that_runs_into_its_limit_says_so(tmp_path: Path, start_script: Callable[..., Any]) -> None:
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    process, output = start_script(script)
    assert process.wait(60) == 1
    assert "OutOfMemoryError: Out of memory in phase generate:" in output.read_text()
    assert "you tried to allocate 67108864 bytes" in output.read_text()


def test_the_error_of_an_inner_phase_is_kept() -> None:
    outer, inner = memory_phase(CpuDevice(), "generate"), memory_phase(CpuDevice(), "log_probs")
    with pytest.raises(OutOfMemoryError) as caught, outer, inner:
        raise MemoryError
    assert caught.value.phase == "log_probs"


def test_peaks_are_kept_by_phase() -> None:
    device = CpuDevice()
    with memory_phase(device, "generate"):
        torch.ones(1 << 25)  # 128 MiB
    with memory_phase(device, "optimizer"):
        pass
    with memory_phase(device, "generate"):
        pass
    peaks = peak_memory_by_phase()
    assert list(peaks) == ["generate", "optimizer"]
    assert peaks["generate"] >= 1 << 27
    assert peaks["generate"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + (1 << 28)


def test_a_device_that_knows_no_peak() -> None:
    class Silent(CpuDevice):
        def peak_memory(self, *, reset: bool = False) -> int | None:
            return None

        def memory(self) -> Mapping[str, int]:
            return {}

    told = r"in GiB: unknown\.(.|\n)*in GiB: unknown\."
    with pytest.raises(OutOfMemoryError, match=told), memory_phase(Silent(), "load"):
        raise MemoryError


# -------------------------------------------------------------------------
# Advice
# -------------------------------------------------------------------------


def test_the_hint_has_the_keys_with_their_values() -> None:
    error = raised(MemoryError(), "forward_backward")
    advise(error, config(train={"micro_batch_tokens": 4096, "recompute": "full"}))
    copy = pickle.loads(pickle.dumps(error))
    assert copy.hint == "To need less: lower train.micro_batch_tokens (now 4096)."
    assert copy.phase == "forward_backward"
    assert str(copy).endswith("[AG605]")


def test_a_hint_that_is_there_stays() -> None:
    error = OutOfMemoryError("full", hint="buy more", phase="load")
    advise(error, config())
    assert error.hint == "buy more"


@pytest.mark.parametrize("phase", ADVICE)
def test_every_phase_has_advice_that_the_schema_knows(phase: str) -> None:
    assert memory_advice(config(), [phase]).startswith("To need less: ")


def test_every_phase_that_is_timed_has_advice() -> None:
    sources = [path.read_text() for path in Path(anygauge.__file__).parent.glob("engines/*/*.py")]
    timed = {name for source in sources for name in re.findall(r"\b_timed\(\"(\w+)\"", source)}
    assert {"log_probs", "train_values"} <= timed <= ADVICE.keys()


def test_every_call_has_phases_with_advice() -> None:
    assert {phase for phases in PHASES.values() for phase in phases} <= ADVICE.keys()


def test_nothing_is_advised_where_nothing_is_known() -> None:
    assert memory_advice(config(), ["breakfast"]) == ""


@pytest.mark.parametrize(
    ("how", "oom_kills", "expected"),
    [
        ("was killed by SIGKILL", 0, "Unless it was killed on purpose, its host probably ran out of memory."),
        ("was killed by SIGKILL", 2, "The kernel's out-of-memory killer has ended 2 process(es) here"),
        ("died (Ray: Task was killed due to the node running low on memory)", 0, "Unless it was"),
        ("exited with code 7", 1, None),
        ("was killed by SIGSEGV", 0, None),
    ],
)
def test_a_death_that_memory_may_have_brought(how: str, oom_kills: int, expected: str | None) -> None:
    advice = advise_death(Died(how=how), "train", config(), oom_kills)
    if expected is None:
        assert advice is None
        return
    assert advice is not None
    assert advice.startswith(expected)
    assert "lower train.micro_batch_tokens (now 16384)" in advice
    assert "raise placement.train_workers (now 1)" in advice


def test_a_worker_sends_the_advice_with_the_error() -> None:
    setup = WorkerSetup(
        config=config(),
        backend="cpu",
        worker_class="",
        role="actor",
        rank=0,
        world_size=1,
        log="",
        timeout_s=1,
    )
    worker = Worker(setup)

    def train() -> None:
        with memory_phase(CpuDevice(), "optimizer"):
            torch.empty(1 << 50)

    worker._object = SimpleNamespace(train=train)
    reply = decode(worker.handle(encode(MethodCall(method="train", kwargs={}))))
    assert isinstance(reply, Raised)
    assert reply.code == "AG605"
    error = decode(reply.pickled or b"")
    assert str(error).startswith("Out of memory in phase optimizer: ")
    assert "raise placement.train_workers (now 1)" in error.hint


def test_the_advice_comes_before_the_consequences() -> None:
    who = {0: WorkerId(role="actor", rank=0)}
    death = Died(how=f"was killed by {signal.SIGKILL.name}")
    error = error_of({0: death}, who, lambda death: advise_death(death, "generate", config(), 1))
    assert "lower rollout.max_batch_tokens (now 262144)" in str(error.hint)


@pytest.mark.parametrize("name", ["memory.events", "memory/memory.oom_control"])
def test_the_kernels_count_is_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert read_oom_kills(tmp_path) == 3
    assert read_oom_kills(tmp_path / "none") == 0
