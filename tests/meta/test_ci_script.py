"""``.ci/run`` tests HEAD in a clone that has nothing beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKE = """#!/usr/bin/env bash
echo "$* in $PWD: $(cat file), $(ls .. | tr '\\n' ' ')"
[[ $1 != "$FAILING" ]]
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
"""Without the repository that a git hook, which may run these tests, sets."""
TARGETS = ["test", "test-fsdp", "test-parallel", "test-npu-set", "test-npu-sim", "test-sglang", "docs"]


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """Return a repository with the script and a change that is not committed, next to stand-ins for tools."""
    if not shutil.which("git"):
        pytest.skip("clones with git")
    for folder in ("checkout/.ci", "tools", "tmp"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(root / ".ci" / "run", tmp_path / "checkout" / ".ci")
    for name, text in (("make", MAKE), ("chromium", "#!/bin/sh\n")):
        (tmp_path / "tools" / name).write_text(text)
        (tmp_path / "tools" / name).chmod(0o755)
    checkout = tmp_path / "checkout"
    (checkout / "file").write_text("committed")
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=checkout, env=ENVIRONMENT, check=True)
    (checkout / "file").write_text("changed")
    return checkout


def run(checkout: Path, failing: str = "", **variables: str) -> tuple[int, list[str]]:
    """Return the exit status and what each call of make saw.

    :param variables: Of the environment, beside the usual ones.
    """
    folder = checkout.parent
    path = f"{folder / 'tools'}:{ENVIRONMENT['PATH']}"
    env = {**ENVIRONMENT, "PATH": path, "TMPDIR": str(folder / "tmp"), "FAILING": failing} | variables
    done = subprocess.run([checkout / ".ci" / "run"], env=env, stdout=subprocess.PIPE, text=True, check=False)
    assert list((folder / "tmp").iterdir()) == []
    return done.returncode, done.stdout.splitlines()


def test_everything_runs_in_a_clone_of_head(checkout: Path) -> None:
    status, calls = run(checkout)
    assert status == 0
    assert [call.partition(" in ")[0] for call in calls] == TARGETS
    assert all("tmp" in call and call.endswith("committed, anygauge ") for call in calls)


def test_published_data_sets_are_read_in_addition(checkout: Path) -> None:
    (checkout.parent / "shared" / "data").mkdir(parents=True)
    status, calls = run(checkout)
    assert status == 0
    assert [call.partition(" in ")[0] for call in calls] == [*TARGETS, "test PYTEST_ARGS=-m published_data"]
    assert [call.endswith("committed, anygauge shared ") for call in calls] == [*[False] * len(TARGETS), True]


@pytest.mark.parametrize("target", TARGETS)
def test_a_failing_target_ends_it(checkout: Path, target: str) -> None:
    status, calls = run(checkout, failing=target)
    assert status == 1
    assert len(calls) == TARGETS.index(target) + 1


def test_a_git_hook_keeps_its_index(checkout: Path) -> None:
    """Git tells a hook where its repository is, and so each git command that the hook starts."""
    git = checkout / ".git"
    hook = {"GIT_DIR": str(git), "GIT_WORK_TREE": str(checkout), "GIT_INDEX_FILE": str(git / "index")}
    subprocess.run(["git", "add", "file"], cwd=checkout, env=ENVIRONMENT, check=True)
    staged = (git / "index").read_bytes()
    status, calls = run(checkout, **hook)
    assert status == 0
    assert all(call.endswith("committed, anygauge ") for call in calls)
    assert (git / "index").read_bytes() == staged


def test_a_relative_folder_for_the_clone_is_emptied_too(checkout: Path) -> None:
    status, _ = run(checkout, TMPDIR="../tmp")
    assert status == 0
