"""Where workers go: bundles, slots, ranks, devices, threads."""

from __future__ import annotations

import os

import pytest

from anygauge.config import Config
from anygauge.runtime.placement import (
    DETECTED_BY_RAY,
    Seat,
    actor_options,
    check_capacity,
    placement_error,
    rank_order,
    shared_seats,
)
from anygauge.runtime.worker import Worker, WorkerSetup, host_cores, local_accelerator_id, set_threads
from anygauge_cpu.plugin import CPU
from anygauge_cuda.plugin import CUDA
from anygauge_hooks.errors import PlacementError
from anygauge_hooks.types import Availability, BackendSpec
from anygauge_npu.plugin import NPU


def make_backend(device_type: str, env: str | None = None) -> BackendSpec:
    return BackendSpec(
        name="made_up",
        device_type=device_type,
        dist_backend="gloo",
        probe=lambda: Availability(ok=True),
        scheduler_resource="CHIP",
        local_device=lambda ids, environ: 0,
        visible_devices_env=env,
    )


def test_workers_reserve_devices_and_no_cores() -> None:
    assert actor_options({CUDA.scheduler_resource: 2}) == {"num_cpus": 0, "num_gpus": 2, "resources": {}}
    slots = {CPU.scheduler_resource: 2}
    assert actor_options(slots) == {"num_cpus": 0, "num_gpus": 0, "resources": slots}


def test_devices_that_ray_counts_itself_are_declared_to_no_cluster() -> None:
    from ray._private.accelerators import get_all_accelerator_resource_names

    assert get_all_accelerator_resource_names() <= DETECTED_BY_RAY
    assert {CUDA.scheduler_resource, NPU.scheduler_resource} <= DETECTED_BY_RAY
    assert CPU.scheduler_resource not in DETECTED_BY_RAY


def test_neighboring_ranks_share_a_node() -> None:
    assert rank_order({0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]


def test_a_cluster_that_is_large_enough_passes() -> None:
    check_capacity({"GPU": 1.0}, 3, {"a": {"GPU": 2.0}, "b": {"GPU": 1.0}})


def test_a_cluster_that_is_too_small_is_refused_at_once() -> None:
    with pytest.raises(PlacementError, match="too small"):
        check_capacity({"GPU": 2.0}, 2, {"a": {"GPU": 3.0}, "b": {"GPU": 1.0}})


def test_the_error_shows_what_was_requested_and_what_each_node_has() -> None:
    error = placement_error({"slot": 1.0}, 3, {"b": {}, "a": {"slot": 2.0, "CPU": 8.0}}, "No room")
    assert str(error).splitlines()[:3] == [
        "No room: requested 3 x {slot: 1}, available:",
        "  node a: slot: 2",
        "  node b: slot: 0",
    ]
    assert "--resources" in str(error)


def test_local_workers_take_the_device_at_their_rank() -> None:
    assert local_accelerator_id(make_backend("chip"), 1, {}) == "1"
    assert local_accelerator_id(make_backend("chip", "CHIPS"), 1, {"CHIPS": "4, 6"}) == "6"


def test_a_rank_without_a_visible_device_is_an_error() -> None:
    with pytest.raises(PlacementError, match="CHIPS='4' shows 1"):
        local_accelerator_id(make_backend("chip", "CHIPS"), 1, {"CHIPS": "4"})


@pytest.mark.parametrize(
    ("requested", "workers", "threads"), [(3, 8, 3), (0, 1, host_cores()), (0, 10**6, 1)]
)
def test_cores_are_divided_among_the_workers_of_a_host(
    requested: int, workers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    set_threads(requested, workers)
    assert chosen == [threads]
    set_threads(requested, workers, computes=False)
    assert chosen == [threads], "torch is not asked"
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


def test_who_shares_devices_sits_with_those_that_have_them() -> None:
    workers = [("a", ("GPU-1",)), ("a", ("GPU-2",)), ("b", ("0",)), ("b", ("1",))]
    assert shared_seats(workers, 2, 2) == [Seat("a", ("GPU-1", "GPU-2")), Seat("b", ("0", "1"))]
    assert shared_seats(workers, 3, 1) == [Seat("a", ("GPU-1",)), Seat("a", ("GPU-2",)), Seat("b", ("0",))]
    assert shared_seats([("a", ())], 1, 1) == [Seat("a", ())], "a host without devices to name"
    with pytest.raises(PlacementError, match=r"3 devices .* on several nodes: a, b"):
        shared_seats(workers, 1, 3)


def test_a_worker_that_shares_devices_is_given_these() -> None:
    seen = WorkerSetup(
        config=Config.model_validate(
            {"run": {"name": "x"}, "model": {"path": "."}, "data": {"train": []}, "reward": {"function": "f"}}
        ),
        backend="chip",
        worker_class="x:Y",
        role="rollout",
        rank=1,
        world_size=2,
        log="",
        timeout_s=1.0,
        accelerators=("5", "7"),
    )
    assert Worker(seen).accelerator_ids() == ("5", "7")
