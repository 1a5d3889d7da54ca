"""Which interface and which addresses the workers of a run use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from anygauge.config.schema import Config
from anygauge.plugins import find_backend, load_plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import WorkerGroup
from anygauge_hooks.errors import PlacementError
from anygauge_tests.processes import has_ipv6


def launch(directory: Path, num_workers: int, **cluster: Any) -> WorkerGroup:
    config = Config.model_validate(
        {
            "run": {"name": "addresses", "timeout_s": 60},
            "model": str(directory),
            "data": {"train": []},
            "reward": {"function": "exact_match"},
            "placement": {"launcher": "local", "train_workers": num_workers, "start_timeout_s": 120},
            "cluster": cluster,
        }
    )
    plugins = load_plugins(only=["cpu"])
    return launch_workers(
        config,
        find_backend(plugins, plugins.named("register_backends"), "cpu"),
        plugins,
        worker_class="anygauge_tests.workers:ProbeWorker",
        role="actor",
        run_directory=directory,
    )


def addresses(group: WorkerGroup) -> set[str]:
    """Return every address that the workers listen on or are connected through."""
    found = [psutil.Process(worker.pid).net_connections("inet") for worker in group.workers]
    return {connection.laddr.ip for each in found for connection in each}


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback")
def test_ipv6_on_one_interface_is_all_that_is_used_where_it_is_asked_for(tmp_path: Path) -> None:
    with launch(tmp_path, 2, interface="lo", ip_version="6") as group:
        assert group.call("sum_ranks") == [3.0, 3.0]
        assert addresses(group) == {"::1"}
        assert group.call("describe")[0]["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_an_interface_that_is_not_there_is_an_error_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"no address on interface 'nowhere'; it has .*lo: 127\.0\.0\.1"):
        launch(tmp_path, 1, interface="nowhere")
