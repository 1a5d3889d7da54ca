"""``anygauge doctor`` survives what it examines."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import doctor, installed, main
from anygauge.cli.doctor import read_media
from anygauge.cli.installed import read_installed
from anygauge.plugins import BACKENDS_GROUP
from anygauge_hooks.types import HostCheck


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that the probes import as torch; they are those of the CPU's backend alone."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    entries = [entry for entry in entry_points(group=BACKENDS_GROUP) if entry.name == "cpu"]
    monkeypatch.setattr(doctor, "entry_points", lambda group: entries)
    monkeypatch.setattr(installed, "read_installed", list)  # takes as long as both probes
    (tmp_path / "torch").mkdir()
    return tmp_path / "torch/__init__.py"


def test_a_host_with_torch_passes() -> None:
    command = [sys.executable, "-m", "anygauge", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["backends"]["cpu"]["status"] == "PASS"
    assert {row["status"] for row in report["backends"].values()} <= {"PASS", "FAIL", "NOT INSTALLED"}
    assert report["plugin_errors"] == {}
    assert report["cpus"]["usable"] > 0
    assert report["memory"]["total"] >= report["memory"]["available"] > 0
    assert {row["name"] for row in report["installed"]} >= {"torch", "megatron-core", "ray", "filelock"}
    assert "platform" in report["environment"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libvendor.so is missing')", "`import torch` raised ImportError('libvendor.so"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its probe was killed by SIGSEGV"),
    ],
)
def test_a_torch_that_does_not_import_is_a_row(
    fake_torch: Path, source: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_torch.write_text(source)
    assert main(["doctor"]) == 1
    printed = capfd.readouterr()
    (row,) = [line for line in printed.out.splitlines() if line.startswith("  FAIL          cpu ")]
    assert reason in row
    assert "Traceback" not in printed.err


def test_a_probe_that_ends_without_a_word_is_told_with_its_code() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import os; os._exit(7)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert doctor._answer(child, 60.0, 60.0) == {"failed": "its probe exited with 7: no message"}
    doctor._end(child)


def test_a_probe_that_hangs_is_ended_at_the_deadline() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert doctor._answer(child, 0.05, 5.0) == {"failed": "no answer within 5 s"}
    doctor._end(child)
    assert child.returncode == -9


def test_what_a_probe_prints_does_not_spoil_its_answer(
    fake_torch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_torch.write_text("print('hello from a vendor')")
    main(["doctor", "--json"])
    assert json.loads(capfd.readouterr().out)["backends"]["cpu"]["status"] == "PASS"


def test_an_unknown_backend_is_refused_before_anything_is_probed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", pytest.fail)
    assert main(["doctor", "--backend", "tpu"]) == 1
    assert "Unknown backend 'tpu'; known: cpu, cuda, npu." in capsys.readouterr().err


def report(**changes: Any) -> dict[str, Any]:
    return {
        "anygauge": "1.0",
        "python": "3.11.1",
        "platform": "Linux",
        "cpus": {"present": 64, "usable": 2.5, "reason": "cgroup quota"},
        "memory": {"total": 4 << 30, "available": 3 << 30, "reason": ""},
        "backends": {},
        "plugin_errors": {},
        "environment": {"platform": "again", "driver": "5.1"},
        "installed": [],
        "media": [],
        "checks": {},
        **changes,
    }


def test_the_text_has_reason_and_fix_of_what_fails_only() -> None:
    rows = {
        "cpu": {"name": "cpu", "status": "PASS", "reason": "here", "fix": "none needed"},
        "fast": {"name": "fast", "status": "NOT INSTALLED", "reason": "absent", "fix": "pip install x"},
    }
    lines = doctor._rendered(report(backends=rows)).splitlines()
    assert "CPUs: 2.5 usable of 64 (cgroup quota)" in lines
    assert "Memory: 4.0 GiB, 3.0 GiB available" in lines
    assert "  PASS          cpu     here" in lines
    assert "  NOT INSTALLED fast    absent" in lines
    assert "                        fix: pip install x" in lines
    assert "none needed" not in "\n".join(lines)
    assert "  driver: 5.1" in lines
    assert "again" not in "\n".join(lines)


def test_a_conflict_and_a_plugin_that_fails_are_shown() -> None:
    row = {
        "owner": "a",
        "name": "b",
        "wanted": ">=2",
        "installed": "1",
        "ok": False,
        "fix": "pip install 'b>=2'",
    }
    text = doctor._rendered(report(installed=[row], plugin_errors={"p": "ImportError('x')"}))
    assert "CONFLICT  b 1; a needs b>=2" in text
    assert "fix: pip install 'b>=2'" in text
    assert "p: ImportError('x')" in text


def test_the_installed_set_is_compared_with_what_it_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "anygauge_fake-1.0.dist-info"
    folder.mkdir()
    requires = [
        "pluggy>=1",
        "pydantic>=99",
        "no-such-distribution>=1",
        "no-such-extra>=1; extra == 'more'",
        "rich>=99; extra == 'more'",
        "no-such-python; python_version < '3'",
    ]
    text = "Metadata-Version: 2.1\nName: anygauge-fake\nVersion: 1.0\nProvides-Extra: more\n"
    (folder / "METADATA").write_text(text + "".join(f"Requires-Dist: {line}\n" for line in requires))
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = {row.name: row for row in read_installed() if row.owner == "anygauge-fake"}
    assert {name: row.ok for name, row in rows.items()} == {
        "pluggy": True,
        "pydantic": False,
        "no-such-distribution": False,
        "rich": False,
    }
    assert rows["no-such-distribution"].installed is None
    assert rows["pydantic"].fix == "pip install 'pydantic>=99'"


def test_it_says_what_reads_videos_and_sound_and_what_to_install() -> None:
    rows = {row.found.split()[0]: row for row in read_media()}
    assert rows["pillow"].status == "PASS"
    missing = HostCheck(
        name="mp4 and other video", status="NOT INSTALLED", found="av is not installed", fix="pip install x"
    )
    text = doctor._rendered(report(media=[dataclasses.asdict(missing)]))
    assert "NOT INSTALLED mp4 and other video  av is not installed" in text
    assert "fix: pip install x" in text
