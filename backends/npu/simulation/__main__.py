"""Run a command on simulated NPUs: ``python backends/npu/simulation --devices 2 -- COMMAND...``."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # the package by its name, and no module of it by a bare one

from simulation.build import DEVICE, RECORD, built, chips  # noqa: E402

MOST_DEVICES = 64
CACHE = "SIMULATED_NPU_CACHE"
ROOT = "ANYGAUGE_NPU_ROOT"
"""The directory that an NPU's and CANN's files are looked for in, as in the backend's own checks; ``/``."""
CANN = ("usr/local/Ascend/ascend-toolkit", "usr/local/Ascend/cann*")
SOC = "Ascend910B3"
SCRATCH = "simulated-npu-"
"""Prefix of scratch directories."""
LOCK = "lock"
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: anygauge-npu-simulation\nVersion: 0.1.0\n",
    "entry_points.txt": "[anygauge.plugins]\nnpu_simulation = simulation.plugin\n",
}
"""Package metadata through which only the processes of a run find the plugin."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not 0 <= options.devices <= MOST_DEVICES:
        _parser().error(f"--devices {options.devices}: 0 to {MOST_DEVICES} can be simulated")
    if not command:
        _parser().error("no command: python backends/npu/simulation -- COMMAND...")
    if shutil.which(command[0]) is None:
        _parser().error(f"{command[0]}: no such program")
    refusal = _refusal()
    if refusal is not None:
        sys.stderr.write(f"The simulation does not start here: {refusal}.\n")
        return 2
    try:
        if options.soc != SOC and options.soc not in (known := chips()):
            _parser().error(f"--soc {options.soc}: torch-npu knows {', '.join(known)}")
        libraries = built(options.cache)
    except (ImportError, OSError, RuntimeError) as error:
        sys.stderr.write(
            f"The simulation cannot be built: {error}. It needs torch, torch-npu, cc, nm and readelf.\n"
        )
        return 2
    _remove_unfinished()
    with _scratch() as scratch:
        environ = _environment(options, libraries, scratch)
        sys.stderr.write(f"{_banner(options)}\n")
        sys.stderr.flush()
        return _run(command, {**os.environ, **environ})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python backends/npu/simulation",
        description="Run a command on SIMULATED Ascend NPUs: plumbing and contracts, no numerics, no speed.",
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many (1)")
    parser.add_argument("--soc", default=SOC, metavar="NAME", help="what they say they are (%(default)s)")
    parser.add_argument(
        "--memory-mib", type=int, default=8192, metavar="N", help="memory of each (%(default)s)"
    )
    parser.add_argument(
        "--timeout", type=int, default=60, metavar="SECONDS", help="deadline of a collective (%(default)s)"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="compute NOTHING, and write every kernel's name and tensors here",
    )
    parser.add_argument(
        "--cache", type=Path, default=_cache(), metavar="DIR", help="built libraries (%(default)s)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    return parser


def _cache() -> Path:
    given = os.environ.get(CACHE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "anygauge" / "npu-simulation"


def _refusal() -> str | None:
    """Return why nothing is simulated on this host, where it could be taken for the real thing."""
    root = os.environ.get(ROOT, "/")
    for device in glob.iglob("dev/davinci[0-9]*", root_dir=root):
        return f"it has an NPU (/{device})"
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if os.environ.get(name):
            return f"CANN is set up ({name}={os.environ[name]})"
    for place in (place for pattern in CANN for place in glob.iglob(pattern, root_dir=root)):
        return f"CANN is installed (/{place})"
    return None


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Make a directory that lasts as long as the block, with a lock that this process holds."""
    path = Path(tempfile.mkdtemp(prefix=SCRATCH))
    try:
        with (path / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_unfinished() -> None:
    """Remove what launchers left behind that were killed: nobody holds its lock."""
    for lock in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _environment(options: argparse.Namespace, libraries: Path, scratch: Path) -> Mapping[str, str]:
    plugin = scratch / "plugin"
    metadata = plugin / "anygauge_npu_simulation-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    for name, text in METADATA.items():
        (metadata / name).write_text(text)
    path = [] if options.record else [str(plugin)]
    path += [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    folder = libraries / (RECORD if options.record else DEVICE)
    environ = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": os.pathsep.join(path),
        "SIMULATED_NPU_DEVICES": str(options.devices),
        "SIMULATED_NPU_SOC": options.soc,
        "SIMULATED_NPU_MEMORY_MIB": str(options.memory_mib),
        "SIMULATED_NPU_SCRATCH": str(scratch),
        "SIMULATED_NPU_TIMEOUT_S": str(options.timeout),
        "TASK_QUEUE_ENABLE": "0",  # operators run when they are called: the host reads finished results
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",  # an operator without a kernel is an error
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }
    if options.record:
        options.record.unlink(missing_ok=True)
        environ["SIMULATED_NPU_RECORD"] = str(options.record.resolve())
    return environ


def _banner(options: argparse.Namespace) -> str:
    what = "kernels are recorded and compute NOTHING" if options.record else "kernels run on the host"
    return f"SIMULATED: {options.devices} x {options.soc}, no hardware, no CANN; {what}."


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run until the command ends; hand on what would end this process, so that the scratch is removed."""
    child = subprocess.Popen(command, env=environ)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: child.send_signal(received))
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command as well
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
