"""The simulation itself: devices, memory, random numbers, collectives, and that it never passes for more."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

pytestmark = pytest.mark.npu_sim

Run = Callable[..., CompletedProcess[str]]
PROGRAMS = Path(__file__).parent / "programs"
LAUNCHER = Path(__file__).parents[3] / "backends/npu/simulation"
needs_the_wheel = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is None, reason="needs torch-npu: run `make test-npu-sim`"
)
TWO = ("--devices", "2", "--memory-mib", "256")

COUNT = """
import ctypes
count = ctypes.c_uint32()
ctypes.CDLL("libascendcl.so").aclrtGetDeviceCount(ctypes.byref(count))
print(count.value)
"""
WITH_LIBRARIES_OF = """
import os, sys
os.environ |= {"LD_LIBRARY_PATH": sys.argv[1], "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
os.execv(sys.executable, [sys.executable, "-c", "from simulation.simulated import install; install()"])
"""
SUM = "all_reduce of 1024 float32 (reduction sum, root 0)"
DISAGREEMENTS = {
    "sizes": (f"rank 0 calls {SUM}, rank 1 calls all_reduce of 2048", "rank 1 calls all_reduce of 2048"),
    "types": (
        f"rank 0 calls {SUM}, rank 1 calls all_reduce of 1024 int32",
        "rank 1 calls all_reduce of 1024",
    ),
    "operations": (f"rank 0 calls {SUM}, rank 1 calls broadcast", "rank 1 calls broadcast of 1024"),
    "reductions": (
        f"rank 0 calls {SUM}, rank 1 calls all_reduce of 1024 float32 (reduction max, root 0)",
        "rank 1 calls all_reduce of 1024 float32 (reduction max, root 0), rank 0 calls all_reduce",
    ),
    "roots": (
        "rank 0 calls broadcast of 1024 float32 (reduction sum, root 0), rank 1 calls broadcast",
        "rank 1 calls broadcast of 1024 float32 (reduction sum, root 1)",
    ),
    "parts": (
        "all_to_all_v: rank 0 takes 512 elements from rank 1, which gives 1000",
        "all_to_all_v: rank 1 takes 512 elements from rank 1, which gives 24",
    ),
}


def passes(done: CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def suite(*arguments: str) -> list[str]:
    """Return the command of a pytest run that takes nothing from this project's own settings."""
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", *arguments]


@pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"])
def test_devices(simulated: Run, allocator: str) -> None:
    cases = suite(str(PROGRAMS / "device_cases.py"))
    chosen = [] if "False" in allocator else ["-k", "memory or training"]
    passes(simulated(*cases, *chosen, options=TWO, PYTORCH_NPU_ALLOC_CONF=allocator))


@pytest.mark.timeout(600)
def test_conformance(simulated: Run) -> None:
    cases = suite("--pyargs", "anygauge.testing.conformance", "--backend", "npu")
    done = simulated(*cases, options=("--devices", "4"), limit_s=550)
    passes(done)
    assert "devices, and" not in done.stdout, "some processes had no device"


def test_conformance_of_the_second_device(simulated: Run) -> None:
    parts = ("test_device", "test_scope_map", "test_collectives")
    files = [f"anygauge.testing.conformance.{name}" for name in parts]
    done = simulated(
        *suite("--pyargs", *files, "--backend", "npu"), options=TWO, ASCEND_RT_VISIBLE_DEVICES="1"
    )
    passes(done)
    assert "NOT CHECKED: 2 processes of npu need 2 devices, and 1 can be seen" in done.stdout


@pytest.mark.parametrize(
    ("visible", "count"), [("1,0", 2), ("1", 1), ("0,7,1", 1), ("0,x,1", 1), ("", 0), (" ", 0)]
)
def test_visible_devices_end_at_the_first_bad_one(simulated: Run, visible: str, count: int) -> None:
    done = simulated("-c", COUNT, options=TWO, ASCEND_RT_VISIBLE_DEVICES=visible)
    assert done.stdout.split() == [str(count)], done.stderr


@pytest.fixture(scope="module")
def ranks(simulated: Run) -> list[dict[str, Any]]:
    """Return what each of two ranks reports of its collectives."""
    done = simulated(str(PROGRAMS / "two_ranks.py"), str(PROGRAMS / "collectives.py"), options=TWO)
    passes(done)
    lines = [line.partition("REPORT ")[2] for line in done.stdout.splitlines() if "REPORT " in line]
    return [report for _, report in sorted(json.loads(line) for line in lines)]


def test_collectives_give_the_bits_of_gloo(ranks: list[dict[str, Any]]) -> None:
    first, second = (report["compared"] for report in ranks)
    assert first["differ"] == second["differ"] == []
    assert len(first["equal"]) > 60
    assert first["equal"] == second["equal"]


def test_what_is_not_a_number_stays_whichever_rank_has_it(ranks: list[dict[str, Any]]) -> None:
    assert [report["not numbers"] for report in ranks] == [[], []]


def test_a_group_finds_nothing_of_an_earlier_one_of_its_name(ranks: list[dict[str, Any]]) -> None:
    assert [report["again"] for report in ranks] == [[2.0, 20.0]] * 2


def test_options_of_a_group_reach_hccl(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(ranks):
        expected = {"pid": None, "rank": rank, "size": 2, "title": "weights", "buffer_mib": 123}
        assert report["asked"][-1] == expected


def test_ranks_that_cannot_go_on_get_an_error(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(each["errors"] for each in ranks):
        assert "Unsupported data type at::kDouble" in report["float64"]
        assert "all_reduce of bfloat16: HCCL has no such reduction on Atlas A2" in report["product"]
        for name, messages in DISAGREEMENTS.items():
            assert f"SIMULATED NPU: {messages[rank]}" in report[name]
        assert report["none"] == "no error"  # they agree again
    assert "SIMULATED NPU: rank 0 of 2 waited 2 s for all_reduce of rank 1" in ranks[0]["errors"]["absent"]


def test_processes_share_memory_of_a_device(simulated: Run) -> None:
    done = simulated("-W", "ignore", str(PROGRAMS / "shared_memory.py"), options=TWO)
    passes(done)
    assert done.stdout.splitlines()[-2:] == ["[2.0, 3.0, 4.0, 5.0] npu:0", "[20.0, 30.0, 40.0, 50.0]"]


def test_record_writes_kernels_down_and_computes_nothing(simulated: Run, tmp_path: Path) -> None:
    file = tmp_path / "kernels.jsonl"
    code = (
        "import torch, torch_npu; x = torch.empty(4, 64, dtype=torch.bfloat16, device='npu');"
        "torch_npu.npu_rms_norm(x, x[0]); print(torch.zeros(2, device='npu:1').device)"
    )
    done = simulated("-c", code, options=("--devices", "2", "--record", str(file)))
    passes(done)
    assert done.stdout.splitlines()[-1] == "npu:1"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (norm,) = [line for line in lines if line["kernel"] == "aclnnRmsNorm"]
    assert norm["tensors"][:2] == [
        {"dtype": "bfloat16", "shape": [4, 64]},
        {"dtype": "bfloat16", "shape": [64]},
    ]
    assert (
        "SIMULATED: 2 x Ascend910B3, no hardware, no CANN; kernels are recorded and compute NOTHING."
        in done.stderr
    )


def test_the_kernels_of_a_real_npu_are_left_alone(simulated: Run, tmp_path: Path) -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    other = Path(torch.origin).parent / "lib" / "libc10.so"  # a library without the simulation's mark
    (tmp_path / "libascendcl.so").symlink_to(other)
    done = simulated("-c", WITH_LIBRARIES_OF, str(tmp_path))
    assert "The simulation replaces no kernel of a real NPU" in done.stderr


def test_a_host_with_cann_is_refused(simulated: Run) -> None:
    done = simulated("-c", "print('ran')", ASCEND_HOME_PATH="/usr/local/Ascend")
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not start here: CANN is set up (ASCEND_HOME_PATH=/usr/local/Ascend)" in done.stderr


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("usr/local/Ascend/cann-9.1.0/set_env.sh", "CANN is installed (/usr/local/Ascend/cann-9.1.0)"),
        (
            "usr/local/Ascend/ascend-toolkit/set_env.sh",
            "CANN is installed (/usr/local/Ascend/ascend-toolkit)",
        ),
        ("dev/davinci3", "it has an NPU (/dev/davinci3)"),
    ],
)
def test_a_host_with_files_of_the_real_thing_is_refused(
    simulated: Run, tmp_path: Path, file: str, said: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    done = simulated("-c", "print('ran')", ANYGAUGE_NPU_ROOT=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"does not start here: {said}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--", "no-such-program"), "error: no-such-program: no such program"),
        pytest.param(
            ("--soc", "Foo", "--", "true"),
            "error: --soc Foo: torch-npu knows Ascend310B1, ",
            marks=needs_the_wheel,
        ),
    ],
)
def test_what_cannot_be_started_is_one_line(on_host: Run, arguments: tuple[str, ...], said: str) -> None:
    done = on_host(str(LAUNCHER), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@needs_the_wheel
def test_another_chip_that_torch_npu_knows_is_taken(on_host: Run) -> None:
    done = on_host(str(LAUNCHER), "--soc", "Ascend910_9391", "--", "true")
    assert done.returncode == 0, done.stderr
    assert "SIMULATED: 1 x Ascend910_9391" in done.stderr


def test_a_program_may_start_the_runtime_before_it_sets_a_device(simulated: Run) -> None:
    """torch-npu 2.10 looks the chip up when a device is set: MindSpeed has started the runtime by then."""
    code = "import torch, torch_npu as npu; npu.npu.current_device(); npu.npu.set_device(0)"
    done = simulated("-c", f"{code}; print(npu.npu.get_device_name(0))")
    assert done.stdout.endswith("\nAscend910B3 (simulated)\n"), done.stderr


def test_what_it_is_built_with_is_named(simulated: Run, tmp_path: Path) -> None:
    done = simulated("-c", "print('ran')", PATH="", SIMULATED_NPU_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be built: [Errno 2] No such file or directory: 'cc'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_simulated_without_the_launcher(on_host: Run) -> None:
    code = "from anygauge.plugins import load_plugins; print(load_plugins().installed)"
    done = on_host("-c", code)
    assert "npu_simulation" not in done.stdout
    assert "'npu'" in done.stdout


def test_the_scratch_goes_with_the_run(simulated: Run, tmp_path: Path) -> None:
    show = "import os; print(os.environ['SIMULATED_NPU_SCRATCH'])"
    scratch = Path(simulated("-c", show, TMPDIR=str(tmp_path)).stdout.strip())
    assert scratch.parent == tmp_path
    assert not scratch.exists()
    wait = f"{show}; os.sys.stdout.flush(); os.sys.stdin.read()"
    with started(wait, tmp_path) as launcher:
        scratch = Path(line(launcher))
        assert scratch.exists()
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait() == 128 + signal.SIGTERM
    assert not scratch.exists()
    with started(wait, tmp_path) as launcher:
        scratch = Path(line(launcher))
        passes(simulated("-c", "pass", TMPDIR=str(tmp_path)))
        assert scratch.exists()  # another run leaves it alone
        launcher.kill()  # nobody can clean up now
        launcher.wait()
    assert scratch.exists()
    passes(simulated("-c", "pass", TMPDIR=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def started(code: str, tmp_path: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, str(root / "backends" / "npu" / "simulation"), "--", sys.executable, "-c", code],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
