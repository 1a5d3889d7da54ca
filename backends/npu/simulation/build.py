"""Build the libraries that torch-npu loads from CANN, for a simulated NPU on a host without CANN.

The names come from the installed torch-npu wheel: every symbol that it leaves undefined and that neither
torch nor the C libraries define. ``acl.c`` and ``hccl.c`` implement those that matter; the rest return 0.
Needs a C compiler, ``nm`` and ``readelf``.

    python build.py DIRECTORY
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["build"]

_SOURCES = [Path(__file__).with_name(name) for name in ("acl.c", "hccl.c")]
_LIBRARY = "libsimulated_cann.so"
_TOOLCHAIN = re.compile(r"^(_ITM_|__gmon_start__|_ZTH|__cxa_|_Py|Py)")
"""Undefined symbols that the interpreter and the compiler's run time provide."""


def build(directory: Path) -> Path:
    """Compile the libraries into a directory for ``LD_LIBRARY_PATH``.

    :param directory: Made if it is missing.
    :returns: The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    package = _package("torch_npu")
    users = [*package.glob("_C*.so"), *(package / "lib").glob("lib*.so")]
    users = [path for path in users if path.name != "libop_plugin_atb.so"]
    implemented = directory / "implemented.so"
    _compile(implemented, _SOURCES)
    missing = _undefined(users) - _defined([*users, *_providers(), implemented])
    rest = directory / "rest.c"
    rest.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(missing)))
    _compile(directory / _LIBRARY, [*_SOURCES, rest])
    for name in _needed(users):
        link = directory / name
        link.unlink(missing_ok=True)
        link.symlink_to(_LIBRARY)
    return directory


def _package(name: str) -> Path:
    """Return a package's folder without importing it: torch-npu cannot be imported yet."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.origin is not None
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


def _compile(target: Path, sources: list[Path]) -> None:
    _run("cc", "-O1", "-fPIC", "-shared", "-w", "-o", str(target), *map(str, sources))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    build(Path(sys.argv[1]))
