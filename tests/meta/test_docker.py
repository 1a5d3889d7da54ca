"""The Dockerfiles parse, name each version once, and agree with the project. Nothing here builds an image."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from anygauge.serving.sglang.versions import LISTED
from anygauge_npu import mindspeed, releases

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile.*") if path.suffix != ".dockerignore")
SCRIPTS = sorted(DOCKER.glob("*.sh"))
HOSTS = {"quay.io", "docker.io", "download.pytorch.org", "github.com", "gitcode.com"}
"""Public hosts that the images are made from. A mirror is an argument of whoever builds them."""
INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR"),
}
SECRET = re.compile(r"(?i)(password|passwd|secret|token|api_?key|credential)")


def versions() -> dict[str, str]:
    lines = (DOCKER / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))  # type: ignore[misc]


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each instruction and its argument, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        yield name, rest.strip()


def arguments(path: Path) -> list[str]:
    return [rest for name, rest in instructions(path) if name == "ARG"]


# -------------------------------------------------------------------------
# Versions
# -------------------------------------------------------------------------


def test_each_version_is_written_once_as_a_plain_assignment() -> None:
    lines = [line for line in (DOCKER / "versions.env").read_text().splitlines() if line]
    plain = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Z_]+=[A-Za-z0-9._:/-]+", line) for line in plain)
    assert len(versions()) == len(plain)


VERSIONS_OF_THE_GUIDE = re.compile(r"^### Versions\n.*?(?=^### )", re.M | re.S)
"""A table of releases that fit together, with those of the image among them."""


def test_every_argument_has_its_value_there_and_every_value_a_user() -> None:
    used = {name for path in DOCKERFILES for name in arguments(path)}
    assert used == set(versions())


@pytest.mark.parametrize(
    "path", [*DOCKERFILES, *SCRIPTS, ROOT / "docs/npu.md", ROOT / "docs/cuda.md"], ids=lambda path: path.name
)
def test_no_version_is_written_a_second_time(path: Path) -> None:
    numbers = [value for value in versions().values() if re.search(r"\d\.\d|[0-9a-f]{12}", value)]
    text = VERSIONS_OF_THE_GUIDE.sub("", path.read_text())
    again = [value for value in numbers if re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.]*\w)", text)]
    assert again == []


def test_they_agree_with_each_other_and_with_the_project() -> None:
    found = versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=\[]", text)[0]: text for text in project["dependencies"]}
    assert found["PYTHON"] in SpecifierSet(project["requires-python"])
    assert found["TORCH"] in SpecifierSet(wanted["torch"].removeprefix("torch"))
    assert found["NUMPY"] in SpecifierSet(wanted["numpy"].removeprefix("numpy"))
    assert releases.number(found["TORCH_NPU"]) == releases.number(found["TORCH"])
    assert releases.fit(found["CANN"], found["TORCH_NPU"]) == "paired"
    assert found["TORCH"] in SpecifierSet(releases.PAIR[0])
    assert found["TORCH_NPU"] in SpecifierSet(releases.PAIR[1])
    assert found["TORCH_INDEX"] == releases.CPU_INDEX
    guide = VERSIONS_OF_THE_GUIDE.search((ROOT / "docs/npu.md").read_text())
    assert guide
    assert f"torch, torch-npu | {found['TORCH']} and {found['TORCH_NPU']} " in guide[0]
    megatron = wanted["megatron-core"].removeprefix("megatron-core==")
    branch = found["MINDSPEED_BRANCH"].removeprefix("core_r")
    assert releases.MEGATRON_OF_MINDSPEED[releases.number(branch)] == releases.number(megatron)
    assert found["SGLANG"].removeprefix("v") in LISTED


@pytest.mark.parametrize(
    ("kind", "ours"),
    [("npu", ["anygauge", "anygauge-npu"]), ("cuda", ["anygauge", "anygauge-cuda[vendor]"])],
)
def test_what_is_resolved_by_hand_is_what_the_image_installs(kind: str, ours: list[str]) -> None:
    found = runpy.run_path(str(ROOT / "bench/resolve_extras.py"))["image_sets"]()
    constraints = next(
        rest
        for _, rest in instructions(DOCKER / f"Dockerfile.{kind}")
        if "constraints.txt" in rest and "printf" in rest
    )
    named = re.findall(r'"([\w-]+[=<]+)\$\{(\w+)\}"', constraints)
    assert found[f"docker/Dockerfile.{kind}"] == [*(f"{name}{versions()[key]}" for name, key in named), *ours]


def test_the_image_of_cuda_agrees_with_the_project() -> None:
    found = versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    vendor = tomllib.loads((ROOT / "backends/cuda/pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *vendor["optional-dependencies"]["vendor"]]
    wanted = {Requirement(text).name: Requirement(text).specifier for text in texts}
    pinned = {
        "torch": "CUDA_TORCH",
        "nvidia-ml-py": "NVIDIA_ML_PY",
        "nvidia-cudnn-frontend": "CUDNN_FRONTEND",
        "liger-kernel": "LIGER_KERNEL",
    }
    assert all(wanted[name].contains(found[key]) for name, key in pinned.items())
    assert found["CUDA_SGLANG"] in LISTED
    major, minor, *_ = found["CUDA"].split(".")
    assert found["CUDA_TORCH_INDEX"].endswith(f"/cu{major}{minor}"), "kernels made at run time fit torch's"
    assert found["CUDA_TORCHAUDIO"] == found["CUDA_TORCH"]


def test_mindspeed_is_the_one_that_the_provider_was_written_for() -> None:
    found = versions()
    data = ROOT / "tests/backends/npu/data/mindspeed_core_r0_16_0.json"
    published: Mapping[str, str] = json.loads(data.read_text())
    assert (found["MINDSPEED_BRANCH"], found["MINDSPEED_COMMIT"]) == (
        published["branch"],
        published["commit"],
    )
    assert found["MINDSPEED_BRANCH"] in mindspeed.INSTALL
    assert found["MINDSPEED_COMMIT"] in (mindspeed.__doc__ or "")


# -------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_starts_from_an_image_with_a_tag_and_declares_what_it_uses(path: Path) -> None:
    found = list(instructions(path))
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert next(name for name, _ in found if name != "ARG") == "FROM"
    (image,) = (rest for name, rest in found if name == "FROM")
    assert re.fullmatch(r"[\w${}./-]+:[\w${}.-]*\$\{[A-Z]+\}[\w${}.-]*", image), "a tag made of versions"
    assert "latest" not in image
    declared: set[str] = set()
    for name, rest in found:
        if name == "ARG":
            declared.add(rest)
        if name == "FROM":
            assert set(re.findall(r"\$\{([A-Z_]+)", rest)) <= declared
            declared.clear()
        if name == "RUN":
            assert set(re.findall(r"\$\{([A-Z_]+)", rest)) <= declared, rest


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_its_commands_are_bash_that_stops_at_an_error(path: Path) -> None:
    found = list(instructions(path))
    shell = next(index for index, (name, _) in enumerate(found) if name == "SHELL")
    assert json.loads(found[shell][1]) == ["/bin/bash", "-euo", "pipefail", "-c"]
    commands = [(index, rest) for index, (name, rest) in enumerate(found) if name == "RUN"]
    for index, command in commands:
        assert index > shell
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "sudo" not in command
        assert ";" not in command, "&& stops where ; does not"
        if "apt-get install" in command:
            assert "--no-install-recommends" in command
            assert "rm -rf /var/lib/apt/lists/*" in command
        for install in re.findall(r"pip install[^&]*", command):
            assert install.split()[0] == "pip"
        assert not re.search(r"(?<!-m )\bpip install", command), "python3 -m pip"
    assert {json.loads(rest)[0] for name, rest in found if name in ("CMD", "ENTRYPOINT")}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_it_copies_is_there_and_in_the_context(path: Path) -> None:
    listed = {
        line.removeprefix("!")
        for line in path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {name for kind, rest in instructions(path) if kind == "COPY" for name in rest.split()[:-1]}
    assert copied == listed
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize(
    "path", [*DOCKERFILES, *SCRIPTS, DOCKER / "versions.env"], ids=lambda path: path.name
)
def test_it_has_no_secret_and_names_public_hosts_alone(path: Path) -> None:
    text = path.read_text()
    assert not SECRET.search(text)
    hosts = set(re.findall(r"https?://([\w.-]+)", text)) | set(re.findall(r"=([\w-]+\.io)/", text))
    assert hosts <= HOSTS


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_executable_bash(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(path)], check=True)


# -------------------------------------------------------------------------
# Scripts
# -------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_building_hands_over_the_versions_that_a_file_takes(path: Path) -> None:
    kind = path.suffix[1:]
    command = [str(DOCKER / "build.sh"), kind, "--build-arg", "PRODUCT=a3"]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "DOCKER": "echo"}, capture_output=True, text=True, check=True
    )
    words = done.stdout.split()
    given = [words[index + 1] for index, word in enumerate(words) if word == "--build-arg"]
    expected = [f"{name}={value}" for name, value in versions().items() if name in arguments(path)]
    assert given == [*expected, "PRODUCT=a3"]
    assert words[:4] == ["buildx", "build", "--file", f"docker/{path.name}"]
    assert words[-1] == "."


def test_building_something_else_says_what_there_is() -> None:
    command = [str(DOCKER / "build.sh"), "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "There is no docker/Dockerfile.tpu.\n")


def test_the_entry_runs_its_command_where_there_is_no_cann() -> None:
    command = [str(DOCKER / "npu_entry.sh"), "printenv", "LD_LIBRARY_PATH"]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("/usr/local/Ascend/driver/lib64:")
