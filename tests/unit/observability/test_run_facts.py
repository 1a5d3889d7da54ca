"""Facts that reproduce a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anygauge.observability import run_facts as module
from anygauge.observability.run_facts import run_facts
from anygauge.version import __version__


def test_the_command_line_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["/x/anygauge/__main__.py", "train", "a b.toml", "--judge.key", "s3cret"]
    )
    facts = run_facts(["s3cret"])
    assert facts["command"] == "anygauge train 'a b.toml' --judge.key ***"
    assert facts["directory"] == str(tmp_path)
    assert "torch 2" in facts["packages"]
    monkeypatch.setattr(sys, "argv", ["/bin/anygauge", "demo"])
    assert run_facts()["command"] == "anygauge demo"


def test_a_clone_has_a_commit_and_a_wheel_within_another_clone_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ("git", "-C", str(tmp_path), *identity, *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    monkeypatch.setattr(module, "CLONE", tmp_path)
    assert run_facts()["anygauge"] == f"{__version__} (commit {commit})"
    (tmp_path / "untracked").write_text("1")
    assert run_facts()["anygauge"] == f"{__version__} (commit {commit})"
    (tmp_path / "file").write_text("2")
    assert run_facts()["anygauge"] == f"{__version__} (commit {commit}, changed)"
    (inner := tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(module, "CLONE", inner)
    assert run_facts()["anygauge"] == __version__


def test_a_deleted_directory_and_an_unreadable_commit_cost_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    facts = run_facts()
    assert "directory" not in facts
    assert facts["command"]
    (git := tmp_path / "git").write_bytes(b"#!/bin/sh\nprintf '\\351\\n'\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    assert run_facts()["directory"] == f"{tmp_path} (commit \N{REPLACEMENT CHARACTER}, changed)"
