"""Checks of an NVIDIA host, read from files: nothing here is imported.

``ANYGAUGE_CUDA_ROOT`` is the directory that the files are looked for in, ``/`` by default.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path

from anygauge_cuda.env import CONNECTIONS, CUMEM, VISIBLE_DEVICES, WORKER
from anygauge_cuda.probe import locked_files
from anygauge_cuda.releases import DRIVER_OF_CUDA, INSTALL, numbers, suffices
from anygauge_cuda.rollout import MEMORY_SAVER
from anygauge_cuda.transformer_engine import INSTALL as TRANSFORMER_ENGINE
from anygauge_hooks.host import (
    Checks,
    Host,
    absent,
    architecture,
    failed,
    installed,
    limits,
    passed,
    refused,
    text_of,
    unknown,
)
from anygauge_hooks.types import HostCheck

__all__ = ["ROOT", "Host", "facts", "host_checks"]

ROOT = "ANYGAUGE_CUDA_ROOT"
DRIVER = "proc/driver/nvidia"
LIBRARIES = (
    "usr/lib/*-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",
    "lib64",
)
PROGRAMS = ("usr/bin", "usr/local/bin", "usr/local/nvidia/bin", "usr/lib/wsl/lib", "bin")
LOCKED_MEMORY = 1 << 30
"""Bytes that a process must be able to lock for InfiniBand; a shell often gives 64 KiB or 8 MiB."""
_GUIDE = "docs/cuda.md"
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")
_OPTIONAL: Mapping[str, tuple[Sequence[str], str]] = {
    "NVML": (("nvidia-ml-py",), "pip install nvidia-ml-py: meters of the GPUs among the metrics, near cores"),
    "triton": (("triton",), "it comes with torch for CUDA: install torch again"),
    "liger-kernel": (("liger-kernel",), "pip install liger-kernel: more kernels to choose from"),
    "flash-attn": (
        ("flash-attn", "flash-attn-4", "flash-attn-3"),
        "pip install flash-attn --no-build-isolation",
    ),
    "transformer-engine": (
        ("transformer-engine",),
        f"{TRANSFORMER_ENGINE}: a provider of modules ({_GUIDE})",
    ),
    "torch_memory_saver": (
        (MEMORY_SAVER, MEMORY_SAVER.replace("_", "-")),
        f"pip install {MEMORY_SAVER}: servers that share their GPUs with trainers need it",
    ),
}


def here() -> Host:
    """Return this host, or the tree that a test has made up."""
    return Host(root=Path(os.environ.get(ROOT, "/")))


def host_checks(host: Host | None = None) -> Sequence[HostCheck]:
    """Return everything, from the machine up to what serves."""
    host = host or here()
    return [
        architecture(host.machine, "torch for CUDA"),
        *_gpus(host),
        *_driver(host),
        *_torch(host),
        *_packages(),
        *_serving(host),
        *_fabric(host),
        *(limits(host.root) if _device_files(host) else ()),
        *_variables(host),
    ]


def facts(host: Host | None = None) -> dict[str, str]:
    """Return the installed versions for a run's log."""
    driver, nccl = _driver_release(host or here()), _nccl()
    versions = {"NVIDIA driver": driver, "NCCL": nccl.version if nccl else None}
    return {name: version for name, version in versions.items() if version}


# -------------------------------------------------------------------------
# The machine
# -------------------------------------------------------------------------


def _gpus(host: Host) -> Checks:
    files = _device_files(host)
    if not files:
        fix = f"install the driver; a container is started with --gpus all ({_GUIDE})"
        if _driver_release(host):
            yield failed("GPUs", "the driver is loaded, and there is no /dev/nvidia0", fix)
        else:
            yield absent("GPUs", "no /dev/nvidia0", fix)
    elif locked := locked_files(host.root):
        fix = f"ls -l {locked[0]} shows whose it is: join that group, or chmod 0666 it on the host"
        yield failed("GPUs", f"{locked[0]} may not be opened by this user", fix)
    else:
        models = ", ".join(f"{count} x {name}" for name, count in _models(host).items())
        yield passed("GPUs", models or f"{len(files)}: /dev/{files[0]} to /dev/{files[-1]}")


def _device_files(host: Host) -> list[str]:
    return host.device_files("nvidia")


def _models(host: Host) -> dict[str, int]:
    """Return how many GPUs of each model the driver has; a container is told of those of the whole host."""
    counts: dict[str, int] = {}
    for file in (host.root / DRIVER).glob("gpus/*/information"):
        match = re.search(r"^Model:\s*(.+?)\s*$", text_of(file), re.MULTILINE)
        if match:
            counts[match[1]] = counts.get(match[1], 0) + 1
    return counts


# -------------------------------------------------------------------------
# Driver and torch
# -------------------------------------------------------------------------


def _driver_release(host: Host) -> str | None:
    """Return the release of the kernel module that is loaded."""
    match = _RELEASE.search(text_of(host.root / DRIVER / "version").partition("\n")[0])
    return match[0] if match else None


def _driver(host: Host) -> Checks:
    release = _driver_release(host)
    if release is None:
        yield absent("driver", "no /proc/driver/nvidia/version", "install the NVIDIA driver on the host")
        return
    kind = (
        "open kernel module" if "Open Kernel" in text_of(host.root / DRIVER / "version") else "kernel module"
    )
    yield passed("driver", f"{release} ({kind})")
    library = _driver_library(host)
    if library is None:
        fix = "a container's runtime mounts it: --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield failed("libcuda", "no libcuda.so.1 beside a loaded driver", fix)
    elif _RELEASE.search(library) and not library.endswith(release):
        fix = "reboot the host after an update of the driver; restart the container"
        yield failed("libcuda", f"{library} beside the kernel module of {release}", fix)
    else:
        yield passed("libcuda", library)
    if any((host.root / place / "nvidia-smi").exists() for place in PROGRAMS):
        yield passed("nvidia-smi", "there")
    else:
        fix = "it comes with the driver; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield absent("nvidia-smi", "not found", fix)


def _driver_library(host: Host) -> str | None:
    """Return the file name that ``libcuda.so.1`` leads to."""
    for place in LIBRARIES:
        for link in sorted(host.root.glob(f"{place}/libcuda.so.1")):
            return link.resolve().name
    return None


def _torch(host: Host) -> Checks:
    torch = installed("torch")
    if torch is None:
        yield absent("torch", "not installed", INSTALL)
        return
    cuda = _cuda_of(torch)
    if cuda is None:
        wrong = failed if _driver_release(host) else absent
        yield wrong("torch", f"{torch.version} is built without CUDA", INSTALL)
        return
    yield passed("torch", f"{torch.version} for CUDA {cuda}")
    yield from _driver_of_torch(_driver_release(host), cuda)
    nccl = _nccl()
    if nccl is None:
        yield absent("NCCL", "no wheel of it; torch may carry its own", INSTALL)
    else:
        yield passed("NCCL", nccl.version)


def _driver_of_torch(driver: str | None, cuda: str) -> Checks:
    if driver is None:
        return
    name = "driver of torch"
    match suffices(driver, cuda):
        case True:
            yield passed(name, f"{driver} runs CUDA {cuda}")
        case False:
            major = numbers(cuda)[0]
            older = max(
                (each for each, oldest in DRIVER_OF_CUDA.items() if numbers(driver) >= numbers(oldest)),
                default=0,
            )
            other = f", or install a torch for CUDA {older}" if older else ""
            fix = f"update the driver to {DRIVER_OF_CUDA[major]} or newer{other}"
            yield failed(name, f"{driver} does not run CUDA {cuda}", fix)
        case _:
            yield unknown(name, f"CUDA {cuda} is in no table of ours; the driver is {driver}")


def _cuda_of(torch: Distribution) -> str | None:
    """Return the CUDA that torch was built for, from the file that says so."""
    match = re.search(
        r"^cuda\b[^=]*= *'([\d.]+)'", text_of(Path(str(torch.locate_file("torch/version.py")))), re.M
    )
    return match[1] if match else None


def _nccl() -> Distribution | None:
    distributions = (installed(f"nvidia-nccl-cu{major}") for major in sorted(DRIVER_OF_CUDA, reverse=True))
    return next((each for each in distributions if each is not None), None)


# -------------------------------------------------------------------------
# What a run may use
# -------------------------------------------------------------------------


def _packages() -> Checks:
    for name, (distributions, fix) in _OPTIONAL.items():
        package = next(filter(None, map(installed, distributions)), None)
        if package is None:
            yield absent(name, "not installed; optional", fix)
        else:
            other = "" if package.name == name or len(distributions) == 1 else f" ({package.name})"
            yield passed(name, f"{package.version}{other}")


def _serving(host: Host) -> Checks:
    sglang, torch = installed("sglang"), installed("torch")
    if sglang is None:
        yield absent(
            "SGLang", "not installed; optional", "pip install sglang (docs/sglang.md says which release)"
        )
        return
    if not _driver_release(host):  # what a host without a GPU needs is in docs/sglang.md
        yield passed("SGLang", sglang.version)
        return
    wanted = torch and refused(sglang, torch)
    if torch and wanted:
        fix = "install the SGLang of this torch: docs/sglang.md has the table"
        yield failed("SGLang", f"{sglang.version} wants torch{wanted}, and {torch.version} is installed", fix)
    else:
        yield passed("SGLang", sglang.version)
    kernels = installed("sglang-kernel") or installed("sgl-kernel")
    if kernels is None:
        yield failed(
            "sglang-kernel",
            "not installed beside SGLang, which does not start without",
            "pip install sglang-kernel",
        )
    else:
        yield passed("sglang-kernel", kernels.version)


# -------------------------------------------------------------------------
# The network and limits
# -------------------------------------------------------------------------


def _fabric(host: Host) -> Checks:
    if not _device_files(host):
        return
    ports = sorted((host.root / "sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        yield absent(
            "InfiniBand", "none; several hosts then meet over TCP", "a container: --device=/dev/infiniband"
        )
        return
    active = [each for each in ports if "ACTIVE" in text_of(each / "state")]
    names = ", ".join(sorted({each.parent.parent.name for each in active}))
    if not active:
        yield failed(
            "InfiniBand", f"none of {len(ports)} ports is active", "ibstat shows why; NCCL_IB_DISABLE=1"
        )
    elif not (host.root / "dev/infiniband").is_dir():
        fix = "give the container --device=/dev/infiniband and --cap-add=IPC_LOCK"
        yield failed("InfiniBand", f"{names} without /dev/infiniband", fix)
    else:
        yield passed("InfiniBand", f"active: {names}")
    yield from _direct_memory(host)
    yield from _locked_memory()


def _direct_memory(host: Host) -> Checks:
    """Tell how a network card reaches a GPU's memory: by a module, or by the kernel's own way."""
    name = "GPUDirect RDMA"
    if (host.root / "sys/module/nvidia_peermem").exists():
        yield passed(name, "nvidia_peermem is loaded")
    elif "Open Kernel" in text_of(host.root / DRIVER / "version"):
        yield unknown(name, "no nvidia_peermem; open kernel modules can do it by dma-buf, from Linux 5.12")
    else:
        yield absent(name, "nvidia_peermem is not loaded", "on the host: modprobe nvidia-peermem")


def _locked_memory() -> Checks:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= soft < LOCKED_MEMORY:
        fix = "ulimit -l unlimited; a container: --ulimit memlock=-1"
        yield failed("locked memory", f"at most {soft >> 10} KiB, which InfiniBand exceeds", fix)
    else:
        yield passed("locked memory", "unlimited" if soft < 0 else f"at most {soft >> 30} GiB")


def _variables(host: Host) -> Checks:
    """Show what the shell has set that counts more than the backend's own settings."""
    names = [name for name in (VISIBLE_DEVICES, CONNECTIONS, *WORKER) if name in host.environ]
    if names:
        yield passed("environment", " ".join(f"{name}={host.environ[name]}" for name in names))
    if host.environ.get(CUMEM, WORKER[CUMEM]) != WORKER[CUMEM]:
        fix = f"unset {CUMEM}, unless SGLang runs with enable_symm_mem too"
        yield unknown(CUMEM, "SGLang's default is 0: unlike ends hang at the first broadcast", fix)
