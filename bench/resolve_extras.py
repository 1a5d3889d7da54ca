"""Check that every extra, and the sets of the images, resolve on every Python, and print a dated table.

Builds the three wheels, then lets pip resolve them without installing or downloading what the index describes
by metadata alone. Needs the network and a ``pip`` newer than 24. Run by hand, from the root of the project:

    .venv/bin/python bench/resolve_extras.py
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12")
PLATFORMS = {"x86-64": "x86_64", "aarch64": "aarch64"}
IMAGES = ("docker/Dockerfile.npu", "docker/Dockerfile.cuda")
"""Each stands for what that installs from the index, with its pins; SGLang's set for Ascend is elsewhere."""
SHOWN = ("torch", "torch-npu", "sglang", "megatron-core", "transformers", "ray")


@dataclass(frozen=True, slots=True)
class Resolution:
    """Packages that pip resolved for one extra, Python version and platform."""

    extra: str
    python: str
    platform: str
    packages: dict[str, str]
    """Version by name; empty if the resolution failed."""
    error: str

    def row(self) -> str:
        """Return the table row."""
        versions = ", ".join(f"{name} {self.packages[name]}" for name in SHOWN if name in self.packages)
        result = f"{len(self.packages)} packages: {versions}" if self.packages else f"FAILED: {self.error}"
        return f"| {self.extra or '(none)'} | {self.python} | {self.platform} | {result} |"


def build_wheels(folder: str) -> None:
    """Build the distributions of this repository into ``folder``; their names are on no index yet."""
    for source in (".", "backends/cuda", "backends/npu"):
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def resolve(extra: str, python: str, platform: str, *, wheels: str) -> Resolution:
    """Resolve one extra as pip would install it into an empty environment.

    :param extra: Its name, empty for none, or one of :data:`IMAGES`.
    """
    name = f"anygauge[{extra}]" if extra else "anygauge"
    names = image_sets()[extra] if extra in IMAGES else [name]
    command = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-input"),
        *("--disable-pip-version-check", "--only-binary=:all:", "--python-version", python),
        *(option for glibc in range(17, 36) for option in ("--platform", f"manylinux_2_{glibc}_{platform}")),
        *("--platform", f"manylinux2014_{platform}", "--find-links", wheels, *names),
        *(
            "--target",
            f"{wheels}/nothing",
        ),  # pip takes a platform only with one; a dry run writes nothing there
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^Would install (.*)$", done.stdout, re.MULTILINE)
    pairs = (item.rpartition("-") for item in found[1].split()) if found else ()
    packages = {name.lower().replace("_", "-"): version for name, _, version in pairs}
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return Resolution(extra, python, platform, packages, errors[-1] if errors else f"exit {done.returncode}")


def extras() -> list[str]:
    """Return the extras that the project declares, after the bare install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return ["", *project["optional-dependencies"]]


def versions() -> dict[str, str]:
    """Return the pins of the images."""
    lines = (ROOT / "docker/versions.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def image_sets() -> dict[str, list[str]]:
    """Return the requirements of each image."""
    pins = versions()
    npu = {"torch": "TORCH", "torchvision": "TORCHVISION", "torch-npu": "TORCH_NPU", "numpy": "NUMPY"}
    cuda = {
        **{name: f"CUDA_{name.upper()}" for name in ("torch", "torchvision", "torchaudio", "sglang")},
        "torch_memory_saver": "TORCH_MEMORY_SAVER",
        "liger-kernel": "LIGER_KERNEL",
        "nvidia-ml-py": "NVIDIA_ML_PY",
        "nvidia-cudnn-frontend": "CUDNN_FRONTEND",
    }
    of_npu, of_cuda = ([f"{name}=={pins[key]}" for name, key in each.items()] for each in (npu, cuda))
    return {
        "docker/Dockerfile.npu": [*of_npu, f"pyarrow<{pins['PYARROW_BELOW']}", "anygauge", "anygauge-npu"],
        "docker/Dockerfile.cuda": [*of_cuda, "anygauge", "anygauge-cuda[vendor]"],
    }


def main() -> int:
    """Print the table; the exit status is 1 if anything does not resolve."""
    parser = argparse.ArgumentParser(description="Check that every extra resolves.")
    parser.add_argument("--jobs", type=int, default=2, help="resolutions at a time")
    parser.add_argument("--platform", choices=sorted(PLATFORMS), action="append", help="default: all")
    parser.add_argument("--image", action="store_true", help="the sets of the images alone")
    args = parser.parse_args()
    platforms = [PLATFORMS[name] for name in args.platform or PLATFORMS]
    cases = [(e, p, a) for a in platforms for e in extras() for p in PYTHONS]
    cases += [(image, versions()["PYTHON"], a) for a in platforms for image in IMAGES]
    if args.image:
        cases = [case for case in cases if case[0] in IMAGES]
    with tempfile.TemporaryDirectory() as wheels, ThreadPoolExecutor(args.jobs) as pool:
        build_wheels(wheels)
        rows = list(pool.map(lambda case: resolve(*case, wheels=wheels), cases))
    print(f"Resolved on {dt.datetime.now(dt.UTC):%Y-%m-%d}:\n")
    print("| extra | Python | platform | result |\n|---|---|---|---|")
    print("\n".join(row.row() for row in rows))
    return int(not all(row.packages for row in rows))


if __name__ == "__main__":
    sys.exit(main())
