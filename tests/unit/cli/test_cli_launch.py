"""``anygauge launch``: the lines that it prints, and what it becomes."""

from __future__ import annotations

import json
import shlex
import socket
import stat
import sys
from pathlib import Path

import pytest

from anygauge.cli import main
from anygauge.cli.launch import _port
from anygauge.runtime.ray_commands import free_port, head_command, join_address, worker_command
from anygauge_cpu.plugin import CPU
from anygauge_hooks.errors import PlacementError

CONFIG = """
[run]
name = "t"
[model]
path = "model"
[data]
train = ["train.jsonl"]
[reward]
function = "exact_match"
[placement]
train_workers = 3
rollout_workers = 2
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG)
    return "c.toml"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """Return the printed commands, comments left out."""
    assert main(["launch", "--backend=cpu", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def test_two_nodes_share_the_workers_of_the_config(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    token, export, head, worker, train, stop = printed(capsys, config, "--nodes=2", "--head=10.0.0.1:7000")
    assert "auth_token" in " ".join(token)
    assert export == ["export", "RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0"]
    resources = '--resources={"anygauge_cpu": 3}'
    address = ["--node-ip-address=10.0.0.1", "--port=7000"]
    assert head == [
        "ray",
        "start",
        "--head",
        *address,
        "--include-dashboard=false",
        "--num-cpus=1",
        resources,
    ]
    assert worker == ["ray", "start", "--address=10.0.0.1:7000", "--num-cpus=1", resources]
    assert train == ["anygauge", "train", "c.toml", "--cluster.address", "auto"]
    assert stop == ["ray", "stop"]


def test_one_node_listens_on_the_loopback_interface(capsys: pytest.CaptureFixture[str]) -> None:
    _, export, head, train, _ = printed(capsys, "--devices=4")
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in export
    assert "--node-ip-address=127.0.0.1" in head
    assert '--resources={"anygauge_cpu": 4}' in head
    assert train[2] == "CONFIG.toml"


def test_a_recipe_of_one_host_is_told_to_use_ray(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(config).write_text(f'{CONFIG}\nlauncher = "local"\n')
    *_, train, _ = printed(capsys, config, "--nodes=2", "--head=10.0.0.1:7000")
    assert train[3:] == ["--placement.launcher", "ray", "--cluster.address", "auto"]


def test_overrides_count_and_are_passed_on(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    *_, head, train, _ = printed(capsys, config, "--placement.rollout_workers", "0", "--cluster.interface=lo")
    assert '--resources={"anygauge_cpu": 3}' in head
    assert train[3:6] == ["--placement.rollout_workers", "0", "--cluster.interface=lo"]


def test_a_cluster_that_is_too_small_for_the_run_is_refused(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", config, "--backend=cpu", "--nodes=2", "--devices=2"]) == 1
    assert "The run has 5 workers; 2 nodes with 2 devices each have room for 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--run=worker"], ["--run=worker", "--head=host"], ["--nodes=0"], ["--train.lr=1"]],
)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--backend=cpu", *arguments])


@pytest.mark.parametrize(
    ("head", "port"),
    [("h:1", 1), ("[fd00::2]:6379", 6379), ("fd00::2", None), ("[fd00::2]", None), ("h", None), ("", None)],
)
def test_the_port_of_an_address(head: str, port: int | None) -> None:
    assert _port(head) == port


@pytest.mark.parametrize("head", ["h:0", "h:99999", "h:port", "h:", "[fd00::2]:x"])
def test_a_head_whose_port_is_none(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--backend=cpu", f"--head={head}"])
    assert f"--head: the port of {head!r} must be a number from 1 to 65535" in capsys.readouterr().err


def test_no_port_is_free_on_another_host() -> None:
    with pytest.raises(PlacementError, match=r"192\.0\.2\.1, which is no address of this host") as caught:
        free_port("192.0.2.1")  # of documentation alone
    assert "Name the port too" in str(caught.value)


def test_addresses_of_both_families_are_joined() -> None:
    assert join_address("10.0.0.1", 1) == "10.0.0.1:1"
    assert join_address("fd00::2", 1) == "[fd00::2]:1"
    assert 0 < free_port("127.0.0.1") < 65536


def test_commands_leave_to_ray_what_is_not_given() -> None:
    assert head_command(CPU, 2)[:4] == ["ray", "start", "--head", "--include-dashboard=false"]
    assert worker_command(CPU, 2, head="h:1", host="10.0.0.2")[3] == "--node-ip-address=10.0.0.2"
    assert json.loads(head_command(CPU, 2)[-1].partition("=")[2]) == {"anygauge_cpu": 2}


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the process would become, in an environment without a token."""
    command: list[str] = []
    monkeypatch.setattr("os.execv", lambda path, arguments: command.extend(arguments))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return command


def test_the_head_makes_a_token_that_only_its_user_reads(tmp_path: Path, become: list[str]) -> None:
    assert main(["launch", "--backend=cpu", "--devices=2", "--run=head"]) == 0
    token = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert become[:5] == [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    assert become[-1] == "--block"


def test_a_worker_without_a_token_is_told_where_it_belongs(
    become: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["launch", "--backend=cpu", "--nodes=2", "--run=worker", "--head=10.0.0.1:7000"]
    assert main(arguments) == 1
    assert "This node has no token for the cluster" in capsys.readouterr().err
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert main(arguments) == 0
    assert "--address=10.0.0.1:7000" in become


def test_a_node_names_its_address_on_the_interface(
    config: str, become: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    arguments = ["launch", config, "--backend=cpu", "--nodes=2", "--run=worker", "--head=10.0.0.1:7000"]
    assert main([*arguments, "--cluster.interface=lo", '--cluster.ip_version="4"']) == 0
    assert "--node-ip-address=127.0.0.1" in become


def test_devices_that_a_run_does_not_use(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--backend=cpu", config, "--nodes=4", "--devices=8"]) == 0
    assert "# NOTE: the run uses 5 of these 32 devices" in capsys.readouterr().out
    assert main(["launch", "--backend=cpu", config, "--nodes=1", "--devices=5"]) == 0
    assert "NOTE" not in capsys.readouterr().out


def test_a_head_on_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        head = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["launch", "--backend=cpu", "--run=head", f"--head={head}"]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on port {head.partition(':')[2]} of 127.0.0.1" in error
    assert "`ray stop`" in error


def test_a_config_names_a_module_of_the_current_directory(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "launch_rewards.py").write_text("def one(response): return 1.0")
    assert main(["launch", "--backend=cpu", config, "--reward.function=launch_rewards:one"]) == 0
