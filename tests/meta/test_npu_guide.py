"""The commands of docs/npu.md: what needs no Ascend is run, what does is listed here with the reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from anygauge.cli import main
from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge_tests.code_blocks import blocks, commands

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs/npu.md"
PAGE = PATH.read_text(encoding="utf-8")
COMMANDS = commands(PATH)
ASCEND, DOWNLOADS, INSTALLS = "needs an Ascend", "downloads", "installs packages"
NOT_RUN = {
    "npu-smi info": ASCEND,
    "ls /dev/davinci*": ASCEND,
    "hccn_tool": ASCEND,
    "docker run": ASCEND,
    "source /usr/local/Ascend": ASCEND,
    "python3 -m venv": INSTALLS,
    "source .venv/bin/activate": "of the environment that the line before makes",
    "pip install": INSTALLS,
    "git clone": DOWNLOADS,
    "git -C MindSpeed checkout": "of the clone that the line before makes",
    "python bench/resolve_extras.py": "asks the package index; run by hand",
    "pytest --pyargs anygauge.testing.conformance --backend npu": ASCEND,
    "python -m pytest -m npu_hw": ASCEND,
    "python examples/arithmetic/make_inputs.py": "run by the tests of the tutorials",
    "anygauge train examples/arithmetic_grpo.toml --backend npu": ASCEND,
    "anygauge train examples/qwen3_8b_grpo.toml --backend npu": ASCEND,
    "anygauge train examples/qwen3_8b_ppo.toml --backend npu": ASCEND,
    "hf download": DOWNLOADS,
    "modelscope download": DOWNLOADS,
}
"""Beginnings of commands; one with ``--dry-run`` is run all the same."""


def reason(command: str) -> str | None:
    if "--dry-run" in command:
        return None
    return next((why for begin, why in NOT_RUN.items() if command.startswith(begin)), None)


RUN = sorted({command for command in COMMANDS if reason(command) is None})


def run(command: str) -> subprocess.CompletedProcess[str]:
    """Run a line as it is written, with programs of this environment, and a docker that only echoes."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "DOCKER": "echo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_page_has_commands_of_both_kinds() -> None:
    assert len(RUN) > 8
    assert {begin for begin in NOT_RUN if not any(line.startswith(begin) for line in COMMANDS)} == set()


@pytest.mark.parametrize("command", [line for line in RUN if not line.startswith("anygauge ")])
def test_a_program_that_needs_no_ascend_does_what_it_says(command: str) -> None:
    done = run(command)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        # the same with --json says more
        pytest.param(line, marks=[pytest.mark.soak] if line == "anygauge doctor --backend npu" else [])
        for line in RUN
        if line.startswith("anygauge ")
    ],
)
@pytest.mark.usefixtures("forked_probes")
def test_a_command_that_needs_no_ascend_does_what_it_says(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported what each of them would import anew."""
    monkeypatch.chdir(ROOT)
    status = main(shlex.split(command)[1:])
    printed, errors = capfd.readouterr()
    if command.startswith("anygauge doctor"):
        assert "Traceback" not in errors
        assert status == 1  # there is no Ascend
        if "--json" in command:
            assert {"driver", "CANN", "torch-npu", "HCCN"} <= {
                check["name"] for check in json.loads(printed)["checks"]["npu"]
            }
    else:
        assert status == 0, errors


def test_the_config_of_the_page_loads(tmp_path: Path) -> None:
    (block,) = blocks(PATH, "toml")
    path = tmp_path / "run.toml"
    path.write_text((ROOT / "examples/qwen3_8b_grpo.toml").read_text() + "\n" + block)
    loaded = load_config(path, backend="npu", plugins=load_plugins(), check_files=False)
    assert loaded.config.train.provider == "mindspeed"
    assert loaded.config.train.provider_options["arguments"] == {"optimization_level": 1}


# -------------------------------------------------------------------------
# Where the programs of the page come from
# -------------------------------------------------------------------------

HOST = {"docker", "git", "hccn_tool", "ls", "npu-smi", "python3", "source"}
"""Commands of a host with the driver, and of the shell."""
IMAGE = {"git", "pip", "python", "python3", "source"}
"""Commands of CANN's image, and of the shell. Unchecked."""
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLUGINS = {"pytest": {"pytest-timeout"}}
"""Packages without which a program refuses this project's settings."""


def scripts(requirement: str) -> Iterator[str]:
    """Yield the programs that a requirement brings, and the names of the distributions that do."""
    name, extra = re.fullmatch(r"([\w.-]+)(?:\[(\w+)\])?.*", requirement).groups()  # type: ignore[union-attr]
    if name in (".", "anygauge"):
        wanted = DECLARED["optional-dependencies"][extra] if extra else DECLARED["dependencies"]
        yield from ("anygauge", *(script for each in wanted for script in scripts(each)))
        return
    yield name
    try:
        entries = distribution(name).entry_points
    except PackageNotFoundError:  # of a vendor: it brings nothing that the page calls
        return
    yield from (entry.name for entry in entries if entry.group == "console_scripts")


def installed_by(command: str) -> Iterator[str]:
    if command == "source .venv/bin/activate":
        yield from ("python", "pip")
    for words in re.findall(r"\bpip install ([^&]*)", command):
        named = (word.strip("'\"") for word in re.sub(r"--index-url \S+|-e \S+", "", words).split())
        yield from (
            script for word in named if not word.startswith(("-", "./", "/", "$")) for script in scripts(word)
        )


def called_by(command: str) -> Iterator[str]:
    for part in command.split(" && "):
        program, *arguments = part.split()
        if not (ROOT / program).is_file():
            yield program
        module = arguments[1] if arguments[:1] == ["-m"] else None
        called = {program, module} & {*PLUGINS}
        yield from (needed for name in called for needed in (name, *PLUGINS[name]))


def missing(commands: list[str], there: set[str]) -> list[tuple[str, str]]:
    """Return the programs that no command before has installed, each with the line that calls it."""
    found = []
    for command in commands:
        found += [(command, program) for program in called_by(command) if program not in there]
        there = there | {*installed_by(command)}
    return found


def test_every_program_is_installed_by_an_earlier_line() -> None:
    assert missing(COMMANDS, HOST) == []


def test_the_image_has_every_program_that_is_called_in_it() -> None:
    text = (ROOT / "docker/Dockerfile.npu").read_text(encoding="utf-8").replace("\\\n", " ")
    there = {script for line in text.splitlines() for script in installed_by(line)}
    inside = COMMANDS[COMMANDS.index("anygauge doctor --backend npu") :]
    assert missing(inside, IMAGE | there) == []


@pytest.mark.parametrize("line", ["pip install pytest pytest-timeout", "source .venv/bin/activate"])
def test_a_line_that_is_left_out_is_missed(line: str) -> None:
    assert missing([command for command in COMMANDS if command != line], HOST)


def test_the_page_says_what_was_never_run() -> None:
    assert "**No line of this page has run on Ascend hardware.**" in PAGE
    assert "*simulated*" in PAGE
    assert "None of them has ever passed" in PAGE


def test_the_table_of_hardware_tests_is_complete() -> None:
    named = set(re.findall(r"^\| `(test_\w+\.py)` \|", PAGE, re.M))
    assert named == {path.name for path in (ROOT / "tests/backends/npu/hardware").glob("test_*.py")}
