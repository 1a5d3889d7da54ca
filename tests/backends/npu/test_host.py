"""``anygauge doctor`` on Ascend hosts, on directory trees made up here. Simulated."""

from __future__ import annotations

import argparse
import dataclasses
import doctest
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.cli import doctor, main
from anygauge.cli.installed import _direct, _version
from anygauge.cli.probe import _checks
from anygauge_hooks import host as shared
from anygauge_hooks.errors import UnknownBackendError
from anygauge_hooks.types import HostCheck
from anygauge_npu import host, mindspeed, releases
from anygauge_npu.host import Host
from anygauge_npu.plugin import NPU

HOME = "usr/local/Ascend/cann-9.1.0"
SET = {"ASCEND_TOOLKIT_HOME": f"/{HOME}", "ASCEND_HOME_PATH": f"/{HOME}"}
COMPLETE: Mapping[str, str] = {
    **{f"dev/davinci{number}": "" for number in (0, 1, 2, 10)},
    **{f"dev/{name}": "" for name in host.DEVICE_FILES},
    "etc/ascend_install.info": "UserName=HwHiAiUser\nDriver_Install_Path_Param=/usr/local/Ascend\n",
    "usr/local/Ascend/driver/version.info": "Version=25.5.1\nascendhal_version=7.35.19\n",
    "usr/local/Ascend/firmware/version.info": "Version=7.8.0.5.216\n",
    "usr/local/bin/npu-smi": "",
    f"{HOME}/aarch64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=9.1.0\n",
    f"{HOME}/compiler/version.info": "Version=9.1.0.0.1\nversion_dir=9.1.0\n",
    f"{HOME}/aarch64-linux/lib64/libfmk_parser.so": "",
    "usr/local/Ascend/nnal/atb/set_env.sh": "",
    "etc/hccn.conf": "".join(f"address_{n}=192.0.2.{n}\nnetmask_{n}=255.255.255.0\n" for n in range(4)),
}
INSTALLED = {
    "torch": "2.10.0",
    "torch-npu": "2.10.0.post6",
    "megatron-core": "0.16.1",
    "mindspeed": "0.16.0",
    **dict.fromkeys(mindspeed.REQUIREMENTS, "1.0"),
    "sglang": "0.5.23",
    "sgl-kernel-npu": "2026.9.0",
    "triton-ascend": "3.2.2",
}

COMMIT = "e4772499f7eb9fa9a68919dd1eaddef00e915b2d"
INSTALL = releases.INSTALL

Look = Callable[..., dict[str, HostCheck]]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    def look(
        without: str = "\0",
        files: Mapping[str, str] = COMPLETE,
        installed: Mapping[str, str | None] = INSTALLED,
        environ: Mapping[str, str] = SET,
        **options: Any,
    ) -> dict[str, HostCheck]:
        for name, text in files.items():
            if without not in name:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
        monkeypatch.setattr(shared, "distribution", lambda name: found(name, installed))
        given = {"machine": "aarch64", "libc": ("glibc", "2.35"), **options}
        return {check.name: check for check in host.host_checks(Host(tmp_path, environ, **given))}

    return look


def found(name: str, installed: Mapping[str, str | None]) -> Any:
    if installed.get(name) is None:
        raise PackageNotFoundError(name)
    requires = ["torch==2.14.1"] if name == "sglang" and installed.get("wheel") else []
    if name == "torch-npu" and installed.get("suffix"):
        requires = ["torch==2.10.0+cpu"]
    return SimpleNamespace(name=name, version=installed[name], requires=requires, read_text=lambda file: None)


# -------------------------------------------------------------------------
# A host that has everything, and one that has nothing
# -------------------------------------------------------------------------


def test_a_complete_host_passes(look: Look) -> None:
    found = look()
    assert {check.status for check in found.values()} == {"PASS"}
    assert found["NPUs"].found == "4: /dev/davinci0 to /dev/davinci10"
    assert found["driver"].found == "25.5.1"
    assert found["CANN"].found == f"9.1.0 in /{HOME}"
    assert found["HCCN"].found == "4 addresses in /etc/hccn.conf"
    assert len(found) == 17 + ("shared memory" in found)


def test_an_empty_host_is_told_what_to_install_and_nothing_fails(look: Look) -> None:
    found = look(files={}, installed={"torch": "2.10.0"}, environ={})
    assert {name for name, check in found.items() if check.status == "PASS"} == {
        "architecture",
        "libc",
        "torch",
    }
    others = [check for check in found.values() if check.status != "PASS"]
    assert {check.status for check in others} == {"NOT INSTALLED"}
    assert all(check.fix for check in others)


# -------------------------------------------------------------------------
# One thing wrong at a time
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "reason", "fix", "change"),
    [
        ("architecture", "FAIL", "riscv64", "aarch64 and x86_64", {"machine": "riscv64"}),
        ("libc", "FAIL", "glibc 2.17", "glibc 2.28 or newer", {"libc": ("glibc", "2.17")}),
        ("libc", "FAIL", "unknown ", "glibc 2.28 or newer", {"libc": ("", "")}),
        ("NPUs", "FAIL", "no /dev/devmm_svm", "--device=/dev/devmm_svm", {"without": "devmm_svm"}),
        ("driver", "NOT INSTALLED", "no /usr/local/Ascend/driver", "mount", {"without": "driver/version"}),
        ("firmware", "NOT INSTALLED", "no /usr/local", "mount", {"without": "firmware/version"}),
        ("npu-smi", "NOT INSTALLED", "not found", "comes with the driver", {"without": "npu-smi"}),
        ("CANN", "FAIL", "9.1.0 in /usr/local/Ascend/cann-9.1.0, but", "source /usr", {"environ": {}}),
        ("NNAL", "NOT INSTALLED", "no /usr/local/Ascend/nnal", "nnal package", {"without": "nnal"}),
        ("HCCN", "NOT INSTALLED", "no /etc/hccn.conf", "hccn_tool", {"without": "hccn.conf"}),
        (
            "HCCN",
            "FAIL",
            "1 addresses for 4 NPUs",
            "hccn_tool -i N",
            {"files": {**COMPLETE, "etc/hccn.conf": "address_0=192.0.2.1\n"}},
        ),
    ],
)
def test_a_host_lacks_something(
    look: Look, name: str, status: str, reason: str, fix: str, change: Mapping[str, Any]
) -> None:
    found = look(**change)[name]
    assert found.status == status
    assert reason in found.found
    assert fix in (found.fix or "")


@pytest.mark.parametrize(
    ("name", "status", "reason", "fix", "change"),
    [
        ("torch", "NOT INSTALLED", "not installed", INSTALL, {"torch": None}),
        ("torch-npu", "NOT INSTALLED", "not installed", INSTALL, {"torch-npu": None}),
        ("torch-npu", "FAIL", "2.10.0.post6 does not fit torch 2.13.0", INSTALL, {"torch": "2.13.0"}),
        ("torch-npu", "UNKNOWN", "2.10.0.post6 asks for torch 2.10.0+cpu", INSTALL, {"suffix": "yes"}),
        (
            *("torch-npu", "FAIL", "2.10.0.post6 does not fit torch 2.10.1", INSTALL),
            {"suffix": "yes", "torch": "2.10.1+cpu"},
        ),
        ("torch-npu", "PASS", "2.10.0.post6", "", {"suffix": "yes", "torch": "2.10.0+cpu"}),
        ("torch-npu", "FAIL", "2.9.0 is too old", INSTALL, {"torch": "2.9.0", "torch-npu": "2.9.0"}),
        ("MindSpeed", "NOT INSTALLED", "optional", "core_r0.16.0", {"mindspeed": None}),
        ("MindSpeed", "FAIL", "is a placeholder", "pip uninstall mindspeed", {"mindspeed": "0.0.1.dev1"}),
        ("MindSpeed", "FAIL", "does not fit megatron-core 0.16.1", "0.16.0", {"mindspeed": "0.17.0"}),
        ("MindSpeed", "FAIL", "0.16.0 without scipy, six", "docs/npu.md", {"scipy": None, "six": None}),
        ("MindSpeed", "FAIL", "0.16.0 without triton-ascend", "releases page", {"triton-ascend": None}),
        ("SGLang", "NOT INSTALLED", "optional", "pyproject_npu.toml", {"sglang": None}),
        ("SGLang", "FAIL", "is the wheel that wants torch==2.14.1", "from source", {"wheel": "yes"}),
        ("sgl-kernel-npu", "NOT INSTALLED", "optional", "releases page", {"sgl-kernel-npu": None}),
        ("triton-ascend", "NOT INSTALLED", "optional", "releases page", {"triton-ascend": None}),
        ("triton-ascend", "FAIL", "3.2.2 beside triton", "uninstall", {"triton": "3.5.0"}),
    ],
)
def test_a_package_is_missing_or_does_not_fit(
    look: Look, name: str, status: str, reason: str, fix: str, change: Mapping[str, str | None]
) -> None:
    found = look(installed={**INSTALLED, **change})[name]
    assert found.status == status
    assert reason in found.found
    assert fix in (found.fix or "")


@pytest.mark.parametrize(
    ("cann", "npu", "status", "text"),
    [
        ("9.1.0", "2.10.0.post6", "PASS", "9.1.0 is the CANN of torch-npu 2.10.0.post6"),
        ("9.1.1", "2.10.0.post6", "PASS", ""),
        ("9.1.0", "2.10.0.post4", "PASS", ""),
        ("9.0.0", "2.10.0", "PASS", ""),
        ("9.0.1", "2.10.0.post2", "PASS", ""),
        ("9.2.0", "2.10.0.post7", "PASS", ""),
        (
            "9.1.0",
            "2.10.0",
            "UNKNOWN",
            "CANN 9.0.0; its release notes call 9.1.0 compatible",
        ),
        ("8.5.0", "2.10.0.post6", "UNKNOWN", "is released with CANN 9.1;"),
        ("9.1.1", "2.10.0.post4", "UNKNOWN", ""),
        ("9.0.0", "2.10.0.post4", "FAIL", "install CANN 9.1.0"),  # TorchNPU 26.1.0 breaks beside it
        ("8.5.0", "2.10.0.post4+gitabc", "FAIL", "install CANN 9.1.0"),
        ("8.3.RC1", "2.10.0.post6", "FAIL", "install CANN 9.1 "),
        (
            "9.1.0",
            "2.10.0.post9",
            "UNKNOWN",
            "no table of releases has torch-npu 2.10.0.post9 with CANN 9.1.0",
        ),
        (
            "9.3.0",
            "2.10.0.post6",
            "UNKNOWN",
            "no table of releases has torch-npu 2.10.0.post6 with CANN 9.3.0",
        ),
    ],
)
def test_a_cann_is_held_against_the_whole_version_of_torch_npu(
    look: Look, cann: str, npu: str, status: str, text: str
) -> None:
    files = {f"{HOME}/compiler/version.info": f"version_dir={cann}\n"}
    row = look(files=files, installed={"torch": "2.10.0", "torch-npu": npu})["CANN of torch-npu"]
    assert row.status == status
    assert text in f"{row.found}; {row.fix} "


def test_a_torch_npu_that_is_replaced_is_not_held_against_cann(look: Look) -> None:
    """One fix per problem: the torch-npu that the fix installs may need another CANN."""
    for npu in ("2.9.0.post6", "2.13.0"):
        rows = look(installed={"torch": "2.10.0", "torch-npu": npu})
        assert [row.fix for row in rows.values() if row.status == "FAIL"] == [INSTALL]
        assert "CANN of torch-npu" not in rows


def test_torch_npu_without_cann_says_that_it_breaks_torch(look: Look) -> None:
    found = look(without="cann-", environ={})["torch-npu"]
    assert found.status == "FAIL"
    assert "breaks `import torch`" in found.found
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in (found.fix or "")


def test_mindspeed_needs_a_library_of_cann(look: Look) -> None:
    found = look(without="libfmk_parser")["MindSpeed"]
    assert found.status == "UNKNOWN"
    assert f"no libfmk_parser.so below /{HOME}" in found.found
    assert "whole toolkit" in (found.fix or "")


def test_a_device_that_may_not_be_opened_is_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("davinci1"))
    found = look()["NPUs"]
    assert (found.status, found.found) == ("FAIL", "/dev/davinci1 may not be opened by this user")
    assert "HwHiAiUser" in (found.fix or "")


def test_limits_of_a_container_are_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(f_frsize=4096, f_blocks=16384)
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    monkeypatch.setattr(shared.resource, "getrlimit", lambda which: (1024, 1024))
    found = look(files={**COMPLETE, "dev/shm/x": ""})
    assert (found["shared memory"].status, found["shared memory"].found) == ("FAIL", "/dev/shm has 64 MiB")
    assert "--shm-size" in (found["shared memory"].fix or "")
    assert (found["open files"].status, found["open files"].found) == ("FAIL", "at most 1024")


# -------------------------------------------------------------------------
# Versions
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({f"{HOME}/aarch64-linux/ascend_toolkit_install.info": "version=8.3.RC1\n"}, "8.3.RC1"),
        ({f"{HOME}/compiler/version.info": "Version=7.3.0.1.231\nversion_dir=8.5.0\n"}, "8.5.0"),
        ({f"{HOME}/runtime/version.info": 'Version="9.0.0"\n'}, "9.0.0"),
        ({f"{HOME}/set_env.sh": ""}, "9.1.0"),  # nothing but the name of the directory
    ],
)
def test_the_version_of_cann_is_read_from_its_files(look: Look, files: dict[str, str], version: str) -> None:
    assert look(files=files)["CANN"].found == f"{version} in /{HOME}"


def test_a_toolkit_without_any_version_is_broken(look: Look) -> None:
    found = look(files={"opt/cann/set_env.sh": ""}, environ={"ASCEND_HOME_PATH": "/opt/cann"})["CANN"]
    assert (found.status, found.found) == ("FAIL", "/opt/cann has no version file")


def test_a_driver_elsewhere_is_found_where_its_installer_wrote(look: Look) -> None:
    files = {
        "etc/ascend_install.info": "Driver_Install_Path_Param=/opt/Ascend\n",
        "opt/Ascend/driver/version.info": "Version=25.0.rc1\n",
    }
    assert look(files=files)["driver"].found == "25.0.rc1"


def test_the_log_of_a_run_has_the_versions(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.facts(Host(tmp_path, {})) == {}
    look()
    monkeypatch.setenv(host.ROOT, str(tmp_path))
    monkeypatch.setenv("ASCEND_HOME_PATH", f"/{HOME}")
    from anygauge_npu.plugin import report_environment

    assert report_environment() == {
        "Ascend driver": "25.5.1",
        "Ascend firmware": "7.8.0.5.216",
        "CANN": "9.1.0",
    }


@pytest.mark.parametrize(
    ("origin", "git", "expected"),
    [
        ({"vcs_info": {"commit_id": COMMIT, "requested_revision": "main"}}, {}, "(main at e4772499f7eb)"),
        (
            {"dir_info": {"editable": True}},
            {"HEAD": "ref: refs/heads/main\n", "refs/heads/main": f"{COMMIT}\n"},
            "(main at e4772499f7eb)",
        ),
        ({"dir_info": {}}, {"HEAD": f"{COMMIT}\n"}, "at e4772499f7eb"),
        ({"dir_info": {}}, {"HEAD": "ref: refs/heads/packed\n"}, "packed at unknown"),
        ({"dir_info": {}}, {}, "checkout"),
    ],
)
def test_the_branch_and_commit_of_an_installed_checkout(
    tmp_path: Path, origin: dict[str, Any], git: dict[str, str], expected: str
) -> None:
    checkout = tmp_path / "checkout"
    for name, text in git.items():
        (checkout / ".git" / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / ".git" / name).write_text(text)
    info = tmp_path / "mindspeed-0.16.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mindspeed\nVersion: 0.16.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{checkout}", **origin}))
    assert expected in host._source(Distribution.at(info))


def test_the_examples_of_the_table_are_true() -> None:
    assert doctest.testmod(releases).failed == 0


# -------------------------------------------------------------------------
# In anygauge doctor
# -------------------------------------------------------------------------


def run_doctor(root: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "anygauge", "doctor", *arguments],
        env={**os.environ, host.ROOT: str(root), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.usefixtures("forked_probes")
def test_doctor_shows_the_host_of_a_backend_that_was_asked_for(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    look()
    for name, value in {host.ROOT: str(tmp_path), **SET}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--backend", "npu"]) == 1  # its probe fails here: torch-npu is not installed
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert "Host of npu" in lines
    assert f"PASS CANN 9.1.0 in /{HOME}" in lines
    assert "CANN: 9.1.0" in lines


def rendered(checks: list[HostCheck], status: str, asked: str | None = None) -> str:
    host_and_set = {
        "anygauge": "1.0",
        "python": "3.11.1",
        "platform": "Linux",
        "cpus": {"present": 1, "usable": 1, "reason": ""},
        "memory": {"total": 1, "available": 1, "reason": ""},
        "plugin_errors": {},
        "environment": {},
        "media": [],
        "installed": [],
    }
    backends = {"npu": {"name": "npu", "status": status, "reason": "", "fix": None}}
    return doctor._rendered(
        {**host_and_set, "backends": backends, "checks": {"npu": list(map(dataclasses.asdict, checks))}},
        asked,
    )


def test_doctor_alone_shows_a_host_on_which_something_is_there() -> None:
    absent = HostCheck(name="driver", status="NOT INSTALLED", found="no driver")
    wrong = HostCheck(name="NPUs", status="FAIL", found="no /dev/davinci_manager")
    assert "Host of npu" not in rendered([absent], "FAIL")
    assert "no driver" in rendered([absent], "FAIL", "npu")
    assert "no driver" in rendered([absent], "PASS")
    assert "no /dev/davinci_manager" in rendered([absent, wrong], "FAIL")
    assert "Host of npu" not in rendered([absent, wrong], "FAIL", "cpu")


def test_doctor_works_where_torch_npu_breaks_torch(tmp_path: Path) -> None:
    """As it is without CANN: the extension of torch raises while torch is imported."""
    packages = tmp_path / "packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch/__init__.py").write_text(
        "raise RuntimeError('Failed to load the backend extension: torch_npu.')\n"
    )
    for name, version in {"torch": "2.10.0", "torch_npu": "2.10.0.post6"}.items():
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    done = run_doctor(tmp_path, "--backend", "npu", PYTHONPATH=path)
    assert "Traceback" not in done.stderr
    assert "torch-npu" in done.stdout
    assert "2.10.0.post6 without CANN: it breaks `import torch`" in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout


PINNED = [("2.10.0", "2.10.0.post4", True), ("2.10.0", "2.10.0.post6", True)]
"""Versions that ``requirements/npu.txt`` installs, by architecture and Python."""


@pytest.mark.parametrize(("torch", "npu", "is_met"), [*PINNED, ("2.9.0", "2.9.0", False)])
def test_the_extra_of_the_package_holds_nothing_against_the_pinned_pair(
    torch: str, npu: str, is_met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doctor compares what an extra asks for with what is installed, whoever installed it."""
    source = Path(__file__).parents[3] / "backends/npu/pyproject.toml"
    extra = tomllib.loads(source.read_text())["project"]["optional-dependencies"]["vendor"]
    requires = [f"Requires-Dist: {each}; extra == 'vendor'\n" for each in extra]
    assert extra == [f"torch{releases.PAIR[0]}", f"torch-npu{releases.PAIR[1]}"]
    versions = {"torch": f"{torch}+cpu", "torch_npu": npu, "anygauge_npu": "0.1.0"}
    for name, version in versions.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        own = f"Provides-Extra: vendor\n{''.join(requires)}" if name == "anygauge_npu" else ""
        (info / "METADATA").write_text(text + own)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {row.name: row.ok for row in _direct("anygauge-npu", _version, optional=True)} == {
        "torch": is_met,
        "torch-npu": is_met,
    }


def test_an_unknown_backend_is_named() -> None:
    arguments = argparse.Namespace(backend="npuu", timeout=1.0, json=False)
    with pytest.raises(UnknownBackendError, match=r"Unknown backend 'npuu'; known: .*npu"):
        doctor.run(arguments)


def test_a_check_that_raises_is_a_row() -> None:
    def broken() -> list[HostCheck]:
        raise ZeroDivisionError("in a driver")

    (row,) = _checks(SimpleNamespace(host_checks=broken))  # type: ignore[arg-type]
    assert (row["status"], row["found"]) == ("FAIL", "ZeroDivisionError('in a driver')")
    assert _checks(SimpleNamespace(host_checks=None)) == []  # type: ignore[arg-type]
    assert NPU.host_checks is host.host_checks


def test_a_backend_that_was_asked_for_passes_only_if_none_of_its_checks_fails() -> None:
    row = {"status": "PASS"}
    for status, expected in (("PASS", True), ("NOT INSTALLED", True), ("FAIL", False)):
        found = {"backends": {"npu": row}, "checks": {"npu": [{"status": status}]}}
        assert doctor._passes(found, "npu") is expected
