"""Checks of an Ascend host, read from files: nothing here is imported.

``ANYGAUGE_NPU_ROOT`` is the directory that the files are looked for in, ``/`` by default.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path

from anygauge_hooks.host import (
    Checks,
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
from anygauge_hooks.host import Host as AnyHost
from anygauge_hooks.types import HostCheck
from anygauge_npu.mindspeed import INSTALL as INSTALL_MINDSPEED
from anygauge_npu.mindspeed import requirements_missing
from anygauge_npu.releases import (
    CANN_OF_TORCH_NPU,
    INSTALL,
    MEGATRON_OF_MINDSPEED,
    fit,
    mismatch,
    number,
    other_build,
)
from anygauge_npu.rollout import INSTALLS

__all__ = ["ROOT", "Host", "facts", "host_checks"]

ROOT = "ANYGAUGE_NPU_ROOT"
OLDEST_LIBC = (2, 28)
"""Oldest libc that the wheels of torch-npu run on: manylinux_2_28."""
DEVICE_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")
"""Beside one davinciN for each NPU."""
CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
"""Set by CANN's set_env.sh."""
CANN_PLACES = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann", "usr/local/Ascend/cann-*")
CANN_FILES = (
    "{machine}-linux/ascend_toolkit_install.info",
    "ascend_toolkit_install.info",
    "compiler/version.info",
    "runtime/version.info",
    "opp/version.info",
)
CANN_LIBRARIES = ("lib64", "*/lib64")
TORCHAIR_LIBRARY = "libfmk_parser.so"
"""A library that torch-npu's torchair is linked against, and torch-npu itself not."""
_GUIDE = "docs/npu.md"
_RELEASE = re.compile(r"\d+\.\d+(\.(RC|alpha|beta)?\d+)*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Host(AnyHost):
    """Where to look."""

    libc: tuple[str, str] = field(default_factory=platform.libc_ver)

    def named(self, variable: str) -> Path | None:
        """Return the directory that a variable names, inside the root."""
        text = self.environ.get(variable)
        return self.root / text.lstrip("/") if text else None


def here() -> Host:
    """Return this host, or the tree that a test has made up."""
    return Host(root=Path(os.environ.get(ROOT, "/")))


def host_checks(host: Host | None = None) -> Sequence[HostCheck]:
    """Return everything, from the machine up to what serves."""
    host = host or here()
    return [
        *_machine(host),
        *_devices(host),
        *_driver(host),
        *_cann(host),
        *_torch(host),
        *_mindspeed(host),
        *_serving(),
        *_network(host),
        *(limits(host.root) if _device_names(host) else ()),
    ]


def facts(host: Host | None = None) -> dict[str, str]:
    """Return the installed versions for a run's log."""
    host = host or here()
    versions = {
        "Ascend driver": _version(_ascend(host) / "driver/version.info"),
        "Ascend firmware": _version(_ascend(host) / "firmware/version.info"),
        "CANN": _cann_version(host)[1],
    }
    return {name: version for name, version in versions.items() if version}


# -------------------------------------------------------------------------
# The machine
# -------------------------------------------------------------------------


def _machine(host: Host) -> Checks:
    yield architecture(host.machine, "torch-npu")
    name, version = host.libc
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) >= OLDEST_LIBC:
        yield passed("libc", f"{name} {version}")
    else:
        wanted = ".".join(map(str, OLDEST_LIBC))
        yield failed("libc", f"{name or 'unknown'} {version}", f"use a Linux with glibc {wanted} or newer")


def _devices(host: Host) -> Checks:
    devices = _device_names(host)
    if not devices:
        fix = f"install the driver; in a container pass --device=/dev/davinci0 and so on ({_GUIDE})"
        yield absent("NPUs", "no /dev/davinci0", fix)
        return
    missing = [name for name in DEVICE_FILES if not (host.root / "dev" / name).exists()]
    locked = [name for name in devices if not os.access(host.root / "dev" / name, os.R_OK | os.W_OK)]
    if missing:
        fix = " ".join(f"--device=/dev/{name}" for name in missing)
        yield failed("NPUs", f"no /dev/{missing[0]}", f"give the container {fix}, or reload the driver")
    elif locked:
        fix = "add the user to the group that owns the device: usermod -aG HwHiAiUser $USER, and log in again"
        yield failed("NPUs", f"/dev/{locked[0]} may not be opened by this user", fix)
    else:
        yield passed("NPUs", f"{len(devices)}: /dev/{devices[0]} to /dev/{devices[-1]}")


def _device_names(host: Host) -> list[str]:
    return host.device_files("davinci")


def _driver(host: Host) -> Checks:
    for name in ("driver", "firmware"):
        version = _version(_ascend(host) / name / "version.info")
        if version:
            yield passed(name, version)
        else:
            place = f"/usr/local/Ascend/{name}"
            fix = f"install the {name} of the product's HDK on the host; in a container mount {place}:ro"
            yield absent(name, f"no {place}/version.info", fix)
    tools = [host.root / folder / "npu-smi" for folder in ("usr/local/bin", "usr/local/sbin", "usr/bin")]
    if any(tool.exists() for tool in tools):
        yield passed("npu-smi", "there")
    else:
        fix = "it comes with the driver; in a container mount /usr/local/bin/npu-smi and /usr/local/dcmi"
        yield absent("npu-smi", "not found", fix)


def _ascend(host: Host) -> Path:
    """Return where the driver is installed, as its installer wrote it down."""
    place = _values(host.root / "etc/ascend_install.info").get("driver_install_path_param")
    return host.root / (place or "usr/local/Ascend").lstrip("/")


# -------------------------------------------------------------------------
# CANN and torch
# -------------------------------------------------------------------------


def _cann(host: Host) -> Checks:
    home, version = _cann_version(host)
    if home is None:
        fix = f"install CANN, or use an image that has it ({_GUIDE}), and source its set_env.sh"
        yield absent("CANN", "not found", fix)
        return
    shown = f"/{home.relative_to(host.root)}"
    if version is None:
        fix = "install the toolkit again; its version is in compiler/version.info"
        yield failed("CANN", f"{shown} has no version file", fix)
    elif not any(host.environ.get(name) for name in CANN_HOMES):
        fix = f"source {shown}/set_env.sh, or the one beside it, in the shell that starts the run"
        yield failed("CANN", f"{version} in {shown}, but its environment is not set", fix)
    else:
        yield passed("CANN", f"{version} in {shown}")
    atb = host.root / "usr/local/Ascend/nnal/atb/set_env.sh"
    if atb.exists():
        yield passed("NNAL", "there")
    else:
        yield absent(
            "NNAL", "no /usr/local/Ascend/nnal", "install CANN's nnal package: SGLang's kernels use it"
        )


def _cann_version(host: Host) -> tuple[Path | None, str | None]:
    """Return the toolkit's directory and its version, where each is known."""
    named = [home for name in CANN_HOMES if (home := host.named(name)) is not None]
    usual = [path for place in CANN_PLACES for path in sorted(host.root.glob(place))]
    for home in [*named, *usual]:
        if home.is_dir():
            files = [home / each.format(machine=host.machine) for each in CANN_FILES]
            versions = [version for file in files if (version := _version(file))]
            own_name = _RELEASE.search(home.resolve().name)
            return home, versions[0] if versions else own_name[0] if own_name else None
    return None, None


def _torch(host: Host) -> Checks:
    torch, npu = installed("torch"), installed("torch-npu")
    if torch is None:
        yield absent("torch", "not installed", INSTALL)
    else:
        yield passed("torch", torch.version)
    if npu is None:
        yield absent("torch-npu", "not installed", INSTALL)
        return
    if torch is not None and (reason := mismatch(npu, torch)):
        yield failed("torch-npu", reason, INSTALL)
        return  # another torch-npu may need another CANN
    if _cann_version(host)[0] is None:
        fix = "install CANN; until then `import torch` needs TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall it"
        yield failed("torch-npu", f"{npu.version} without CANN: it breaks `import torch`", fix)
    elif torch is not None and (build := other_build(npu, torch)):
        found = f"{npu.version} asks for torch {build}; with another build of it nobody has tried an NPU"
        yield unknown("torch-npu", found, INSTALL)
    else:
        yield passed("torch-npu", npu.version)
    yield from _cann_of(host, npu.version)


def _cann_of(host: Host, version: str) -> Checks:
    cann = _cann_version(host)[1]
    if cann is None:
        return
    name, own = "CANN of torch-npu", CANN_OF_TORCH_NPU.get(version.partition("+")[0])
    match fit(cann, version):
        case "paired":
            yield passed(name, f"{cann} is the CANN of torch-npu {version}")
        case "compatible":
            pair = f"torch-npu {version} is released with CANN {own}"
            yield unknown(name, f"{pair}; its release notes call {cann} compatible")
        case "refused":
            text = f"{cann} does not serve torch-npu {version}"
            yield failed(name, text, f"install CANN {own} ({_GUIDE})")
        case "unknown":
            yield unknown(name, f"no table of releases has torch-npu {version} with CANN {cann}")


# -------------------------------------------------------------------------
# What a run may use
# -------------------------------------------------------------------------


def _mindspeed(host: Host) -> Checks:
    package = installed("mindspeed")
    if package is None:
        yield absent("MindSpeed", "not installed; optional", INSTALL_MINDSPEED)
        return
    wanted, megatron = MEGATRON_OF_MINDSPEED.get(number(package.version)), installed("megatron-core")
    source = _source(package)
    if package.version.startswith("0.0."):
        yield failed(
            "MindSpeed",
            f"{package.version} is a placeholder",
            f"pip uninstall mindspeed; {INSTALL_MINDSPEED}",
        )
    elif megatron is not None and wanted != number(megatron.version):
        text = f"{package.version}{source} does not fit megatron-core {megatron.version}"
        yield failed("MindSpeed", text, INSTALL_MINDSPEED)
    else:
        yield _what_mindspeed_needs(host, f"{package.version}{source}")


def _what_mindspeed_needs(host: Host, version: str) -> HostCheck:
    """Check what an import of MindSpeed loads: distributions, and a library of CANN behind torchair."""
    missing, home = requirements_missing(), _cann_version(host)[0]
    if missing:
        fix = f'install them ({_GUIDE}, "MindSpeed"); triton-ascend is a wheel of its releases page'
        return failed("MindSpeed", f"{version} without {', '.join(missing)}", fix)
    if home is not None and not any(
        any(home.glob(f"{place}/{TORCHAIR_LIBRARY}")) for place in CANN_LIBRARIES
    ):
        text = f"{version}; no {TORCHAIR_LIBRARY} below /{home.relative_to(host.root)}, which torchair loads"
        return unknown("MindSpeed", text, "install the whole toolkit of CANN, not its runtime alone")
    return passed("MindSpeed", version)


def _serving() -> Checks:
    yield from _sglang()
    kernels = "a wheel of its releases page, for this torch, CANN, Python and product"
    yield from _simple("sgl-kernel-npu", f"SGLang's kernels: {kernels}")
    triton = installed("triton-ascend")
    if triton is not None and installed("triton") is not None:
        fix = "pip uninstall -y triton triton-ascend, then install triton-ascend again: both are `triton`"
        yield failed("triton-ascend", f"{triton.version} beside triton", fix)
    else:
        yield from _simple("triton-ascend", "a wheel of its releases page; docker/versions.env has the pin")


def _simple(name: str, fix: str) -> Checks:
    package = installed(name)
    yield passed(name, package.version) if package else absent(name, "not installed; optional", fix)


def _sglang() -> Checks:
    package, torch = installed("sglang"), installed("torch")
    fix = f"install it {INSTALLS['sglang']}"
    if package is None:
        yield absent("SGLang", "not installed; optional", fix)
    elif torch is not None and (wanted := refused(package, torch)):
        yield failed("SGLang", f"{package.version} is the wheel that wants torch{wanted}", fix)
    else:
        yield passed("SGLang", f"{package.version}{_source(package)}")


# -------------------------------------------------------------------------
# The network and limits
# -------------------------------------------------------------------------


def _network(host: Host) -> Checks:
    file = host.root / "etc/hccn.conf"
    devices = _device_names(host)
    if not file.is_file():
        fix = "for several hosts: hccn_tool -i N -ip -s address ADDRESS netmask MASK; a container: mount it"
        yield absent("HCCN", "no /etc/hccn.conf; one host does without", fix)
        return
    addresses = [value for key, value in _values(file).items() if re.fullmatch(r"address_\d+", key)]
    if len(addresses) < max(1, len(devices)):
        text = f"/etc/hccn.conf has {len(addresses)} addresses for {len(devices)} NPUs"
        yield failed("HCCN", text, "hccn_tool -i N -ip -s address ADDRESS netmask MASK, for each NPU")
    else:
        yield passed("HCCN", f"{len(addresses)} addresses in /etc/hccn.conf")


# -------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------


def _values(file: Path) -> dict[str, str]:
    """Return the ``key=value`` lines of a file, by key in lower case; nothing if it cannot be read."""
    pairs = (line.partition("=") for line in text_of(file).splitlines() if "=" in line)
    return {key.strip().lower(): value.strip().strip('"') for key, _, value in pairs}


def _version(file: Path) -> str | None:
    """Return the release that a version file names: of the package, or of the directory that it is in."""
    values = _values(file)
    for key in ("version_dir", "version"):
        match = _RELEASE.search(values.get(key, ""))
        if match:
            return match[0]
    return None


def _source(package: Distribution) -> str:
    """Return the branch and commit that a distribution was installed from, as far as pip or git tell."""
    text = package.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    git = origin.get("vcs_info", {})
    if git:
        return f" ({git.get('requested_revision', 'no branch')} at {git['commit_id'][:12]})"
    folder = Path(origin.get("url", "").removeprefix("file://"))
    return _checkout(folder) if origin.get("dir_info") is not None else ""


def _checkout(folder: Path) -> str:
    head = text_of(folder / ".git/HEAD").strip()
    if not head:
        return f" ({folder})"
    reference = head.removeprefix("ref: ")
    if reference == head:
        return f" ({folder} at {head[:12]})"
    commit = text_of(folder / ".git" / reference).strip()[:12] or "unknown"
    return f" ({reference.removeprefix('refs/heads/')} at {commit})"
