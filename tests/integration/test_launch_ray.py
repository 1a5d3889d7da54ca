"""The Ray launcher's own properties: placement, addresses, signal handlers."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import psutil
import pytest
import ray

from anygauge.runtime.launch_ray import _attach
from anygauge.runtime.ray_media import RayStore, ray_name
from anygauge.runtime.worker_group import WorkerGroup
from anygauge_hooks.errors import PlacementError
from anygauge_hooks.media import Content

Launch = Callable[..., WorkerGroup]
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def group(launch: Launch, ray_cluster: str) -> Iterator[WorkerGroup]:
    """Three workers on a cluster with two cores."""
    del ray_cluster
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with launch("ray", 3) as group:
        assert [signal.getsignal(number) for number in SIGNALS] == handlers
        yield group


def test_more_workers_than_cores_start(group: WorkerGroup) -> None:
    assert group.call("sum_ranks") == [6.0, 6.0, 6.0]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_workers_of_the_tests_are_forked(group: WorkerGroup) -> None:
    assert {psutil.Process(worker.pid).ppid() for worker in group.workers} == {os.getpid()}


def test_the_cluster_that_was_joined_is_named(group: WorkerGroup, ray_cluster: str) -> None:
    assert group.cluster.startswith(f"Ray cluster at {ray_cluster} with 1 node (CPU: 2, ")
    assert "anygauge_cpu: 8" in group.cluster
    assert "memory" not in group.cluster
    assert "node:" not in group.cluster


@pytest.mark.usefixtures("group")
def test_actors_are_listed_under_their_role_and_rank() -> None:
    names = sorted(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
    assert [name.rpartition("-")[0] for name in names] == [f"launch-actor-{rank}" for rank in range(3)]


def test_workers_on_the_devices_of_others_go_to_their_node_and_reserve_nothing(
    group: WorkerGroup, launch: Launch
) -> None:
    seats = group.seats(2, 1)
    assert {seat.node for seat in seats} == {ray.get_runtime_context().get_node_id()}
    reserved = ray.util.placement_group_table().keys()
    with launch("ray", 2, seats=seats) as beside:
        assert beside.call("sum_ranks") == [3.0, 3.0]
        assert beside.seats(2, 1) == seats
        assert ray.util.placement_group_table().keys() == reserved


@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_find_no_room_are_an_error_with_numbers(launch: Launch) -> None:
    started = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        launch("ray", 100, start_timeout_s=0.5)
    assert time.monotonic() - started < 60, "it waited for the default"
    assert "No room for the workers of role actor on the Ray cluster at " in str(caught.value)
    assert "within 0.5 s: requested" in str(caught.value)
    assert "requested 100 x {anygauge_cpu: 1}, available:\n  node " in str(caught.value)
    groups = ray.util.placement_group_table().values()
    assert [group["state"] for group in groups if len(group["bundles"]) == 100] == ["REMOVED"]


@pytest.mark.parametrize("given", ["address", "auto"])
def test_an_address_where_nobody_listens_is_an_error(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    asked = address if given == "address" else given
    with pytest.raises(PlacementError, match=f"cluster.address = '{asked}'") as caught:
        _attach(asked, "ray start --head")
    assert "Start one: `ray start --head`" in str(caught.value)


@pytest.mark.usefixtures("ray_cluster")
def test_contents_of_media_are_in_the_object_store_for_whoever_knows_the_runs_directory() -> None:
    own, other = (RayStore(ray_name("runs/a/media"), owns=owns) for owns in (True, False))
    content = Content("video", np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3), 0.5)
    with closing(own):
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda key: own.put(key, content), "abcd"))
        own.put("a", content._replace(seconds=9.0))
        own.drop("bcd")
        found = other.get("a")
        assert (found.kind, found.seconds, other.bytes()) == ("video", 0.5, 96)
        assert np.array_equal(found.data, content.data)
        assert not found.data.flags.writeable
        own.drop(["a", "none"])
        assert (other.has("a"), other.bytes()) == (False, 0)
        with pytest.raises(KeyError):
            other.get("a")
