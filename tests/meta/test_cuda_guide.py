"""The commands of docs/cuda.md: what needs no GPU is run, what does is listed here with the reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from anygauge.cli import main
from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge_cuda import env
from anygauge_tests.code_blocks import blocks, commands

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs/cuda.md"
PAGE = PATH.read_text(encoding="utf-8")
COMMANDS = commands(PATH)
GPU, INSTALLS = "needs a GPU", "installs packages"
NOT_RUN = {
    "nvidia-smi": GPU,
    "ls -l /dev/nvidia*": GPU,
    "docker run": GPU,
    "source docker/versions.env": "of the lines that install",
    "source .venv": "of the environment that the line before makes",
    "python3 -m venv": INSTALLS,
    "pip install": INSTALLS,
    "python bench/resolve_extras.py": "asks the package index; run by hand",
    "pytest --pyargs anygauge.testing.conformance --backend cuda": GPU,
    "python -m pytest -m cuda": GPU,
    "python examples/arithmetic/make_inputs.py": "run by the tests of the tutorials",
    "anygauge train examples/arithmetic_grpo.toml --backend cuda": GPU,
    "anygauge train examples/qwen3_0p6b_one_gpu.toml --backend cuda": GPU,
    "anygauge train examples/qwen3_8b_grpo.toml --backend cuda": GPU,
}
"""Beginnings of commands; one with ``--dry-run`` is run all the same."""


def runnable() -> Iterator[str]:
    for command in COMMANDS:
        if "--dry-run" in command or not command.startswith(tuple(NOT_RUN)):
            yield command


OURS = [command for command in runnable() if command.startswith("anygauge ")]


def test_every_command_is_run_or_has_a_reason() -> None:
    assert {begin for begin in NOT_RUN if not any(line.startswith(begin) for line in COMMANDS)} == set()
    others = {command.split()[0] for command in runnable() if command not in OURS}
    assert others == {"docker/build.sh"}
    assert len(OURS) == 7


@pytest.mark.parametrize("command", [each for each in OURS if not each.startswith("anygauge doctor")])
def test_a_command_that_needs_no_gpu_does_what_it_says(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(shlex.split(command)[1:]) == 0
    assert "cuda" in "".join(capsys.readouterr())


@pytest.mark.usefixtures("forked_probes")
def test_doctor_lists_what_the_page_says(capfd: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--backend", "cuda", "--json"])
    found = {check["name"] for check in json.loads(capfd.readouterr().out)["checks"]["cuda"]}
    assert {"GPUs", "driver", "torch", "NVML", "triton", "transformer-engine", "SGLang"} <= found


@pytest.mark.parametrize("command", [each for each in runnable() if each.startswith("docker/build.sh")])
def test_an_image_is_built_as_the_page_says(command: str) -> None:
    environ = {**os.environ, "DOCKER": "echo"}
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("buildx build --file docker/Dockerfile.cuda")


def test_the_config_of_the_page_loads(tmp_path: Path) -> None:
    (block,) = blocks(PATH, "toml")
    head = 'model = "m"\nreward = { function = "math" }\n[run]\nname = "r"\n[data]\ntrain = []\n'
    path = tmp_path / "run.toml"
    path.write_text(head + block)
    loaded = load_config(path, backend="cuda", plugins=load_plugins(), check_files=False)
    assert loaded.config.rollout.sglang["mem_fraction_static"] == 0.7
    assert loaded.config.placement.colocated


def test_every_variable_of_the_backend_is_in_the_table() -> None:
    rows = "\n".join(re.findall(r"^\| `.*$", PAGE, re.M))
    for name, value in {**env.WORKER, **dict([env.ALLOCATOR])}.items():
        assert f"`{name}`" in rows
        assert f"`{value}`" in rows
    for prefix in env.FORWARDED:
        assert f"`{prefix}*`" in PAGE
