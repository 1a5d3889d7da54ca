"""Build the libraries that torch-npu loads from CANN, for simulated NPUs on a host without CANN.

The names come from the installed torch-npu wheel: every symbol that it leaves undefined and that neither
torch nor the C libraries define. ``acl.c`` and ``hccl.c`` implement those that matter; the rest return 0.
Needs a C compiler, ``nm`` and ``readelf``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

__all__ = ["DEVICE", "RECORD", "build", "built", "chips"]

DEVICE, RECORD = "device", "record"
"""Folders of libraries for ``LD_LIBRARY_PATH``: kernels that are missing fail; kernels are written down."""

_HERE = Path(__file__).parent
_SOURCES = [_HERE / name for name in ("acl.c", "hccl.c")]
_KERNELS = _HERE / "opapi.c"
_INPUTS = [*_SOURCES, _KERNELS, _HERE / "simulated.h", Path(__file__)]
_LIBRARY = "libsimulated_cann.so"
_TOOLCHAIN = re.compile(r"^(_ITM_|__gmon_start__|_ZTH|__cxa_|_Py|Py)")
"""Undefined symbols that the interpreter and the compiler's run time provide."""
_KERNEL = re.compile(rb"(?<=\0)(aclnn[A-Z]\w*?)(?:GetWorkspaceSize)?(?=\0)")
"""Names of kernels, which the wheel looks up while it runs."""


def built(cache: Path) -> Path:
    """Return the folder of libraries for the sources and the wheels that are here; build it if it is missing.

    :param cache: Holds one folder for each state of the sources and version of torch-npu.
    """
    parts = [path.read_bytes() for path in _INPUTS]
    parts += [text.encode() for text in (version("torch"), version("torch-npu"), platform.machine())]
    folder = cache / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        try:
            build(unfinished)
            os.replace(unfinished, folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def chips() -> list[str]:
    """Return the names of chips that torch-npu knows: of any other it says much later that it does not."""
    library = (_package("torch_npu") / "lib/libtorch_npu.so").read_bytes()
    return sorted({name.decode() for name in re.findall(rb"(?<=\0)Ascend[39]\d\d[\w-]+(?=\0)", library)})


def build(directory: Path) -> None:
    """Compile the libraries into the folders :data:`DEVICE` and :data:`RECORD` of a directory."""
    package = _package("torch_npu")
    users = [*package.glob("_C*.so"), *(package / "lib").glob("lib*.so")]
    users = [path for path in users if path.name != "libop_plugin_atb.so"]
    implemented = directory / "implemented.so"
    _compile(implemented, _SOURCES)
    missing = _undefined(users) - _defined([*users, *_providers(), implemented])
    rest = directory / "rest.c"
    rest.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(missing)))
    _compile(directory / _LIBRARY, [*_SOURCES, rest])
    kernels = sorted(_kernels(users) - {"aclnnConstantPadNd"})
    (directory / "kernels.inc").write_text("".join(f"KERNEL({name})\n" for name in kernels))
    for folder, recording in ((DEVICE, []), (RECORD, ["-DRECORD", f"-I{directory}"])):
        (directory / folder).mkdir()
        _compile(directory / folder / "libopapi.so", [_KERNELS], *recording)
        for name in _needed(users):
            (directory / folder / name).symlink_to(Path("..") / _LIBRARY)


def _package(name: str) -> Path:
    """Return a package's folder without importing it: torch-npu cannot be imported yet."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed: run `make test-npu-sim` once for an environment")
    return Path(spec.origin).parent


def _providers() -> list[Path]:
    torch = _package("torch")
    return [*(torch / "lib").glob("*.so*"), *torch.parent.glob("torch.libs/*.so*"), *_system_libraries()]


def _system_libraries() -> list[Path]:
    wanted = re.compile(
        r"^\s*(lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so\.\d+|ld-linux\S*) .*=> (\S+)$", re.MULTILINE
    )
    return [Path(match[3]) for match in wanted.finditer(_run("ldconfig", "-p"))]


def _undefined(paths: list[Path]) -> set[str]:
    names = {line.split()[-1] for path in paths for line in _nm(path, "--undefined-only") if " U " in line}
    return {name for name in (name.split("@")[0] for name in names) if not _TOOLCHAIN.match(name)}


def _defined(paths: list[Path]) -> set[str]:
    return {line.split()[-1].split("@")[0] for path in paths for line in _nm(path, "--defined-only")}


def _nm(path: Path, option: str) -> list[str]:
    return _run("nm", "-D", option, str(path)).splitlines()


def _needed(paths: list[Path]) -> set[str]:
    """Return the libraries that the wheel asks for and that are neither torch's, its own nor the system's."""
    names = {
        name
        for path in paths
        for name in re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-d", str(path)))
    }
    present = {path.name for path in [*paths, *_providers()]}
    return {name for name in names - present if not name.startswith("ld-linux")}


def _kernels(paths: list[Path]) -> set[str]:
    return {match[1].decode() for path in paths for match in _KERNEL.finditer(path.read_bytes())}


def _compile(target: Path, sources: list[Path], *options: str) -> None:
    _run("cc", "-O2", "-fPIC", "-shared", "-w", *options, "-o", str(target), *map(str, sources))


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
