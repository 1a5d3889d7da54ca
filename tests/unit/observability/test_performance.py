"""Times that divide a step, speeds and memory, from what workers report."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.observability.memory import driver_memory, memory_metrics, worker_memory
from anygauge.observability.metrics import StepWork, performance_metrics
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Group, Prompt
from anygauge_tests.batches import TrainSample, make_batch
from anygauge_tests.scoring import sample

WORK = StepWork(tokens=1000, response_tokens=600, longest_response=60, forward_flops=2e12)


def report(**seconds: float) -> dict[str, Any]:
    return {"seconds": seconds}


def times(metrics: dict[str, float]) -> dict[str, float]:
    """Return the parts of a step."""
    parts = {name.removeprefix("perf/"): value for name, value in metrics.items() if name.endswith("_time")}
    del parts["step_time"]
    return parts


def test_the_times_are_those_of_the_busiest_worker_and_divide_the_step() -> None:
    busy = report(generate=3.0, log_probs=0.5, forward_backward=1.0, optimizer=0.5, weight_sync=0.25)
    idle = report(generate=2.0, log_probs=0.25, forward_backward=1.0, optimizer=0.25, weight_sync=2.0)
    metrics = performance_metrics(WORK, [idle, busy], wall_s=6.0, driver_seconds={"reward": 0.5})
    assert times(metrics) == {
        "rollout_time": 3.0,
        "log_probs_time": 0.5,
        "train_time": 1.5,
        "update_weights_time": 0.25,
        "reward_time": 0.5,
        "overhead_time": 0.25,
    }
    assert sum(times(metrics).values()) == metrics["perf/step_time"] == 6.0


def test_workers_that_only_generate_are_waited_for_too() -> None:
    trains = report(log_probs=0.5, forward_backward=1.0, weight_sync=0.5)
    generates = [report(generate=2.0, weight_sync=0.25), report(generate=1.0)]
    metrics = performance_metrics(WORK, [trains, *generates], wall_s=5.0)
    assert times(metrics) == {
        "rollout_time": 2.0,
        "log_probs_time": 0.5,
        "train_time": 1.0,
        "update_weights_time": 0.5,
        "overhead_time": 1.0,
    }


def test_speeds() -> None:
    seconds = report(generate=2.0, log_probs=0.5, forward_backward=1.5, optimizer=0.5)
    reports = [{**seconds, "passes": {"log_probs": 2}}] * 2
    metrics = performance_metrics(WORK, reports, wall_s=5.0)
    assert metrics["perf/tokens_per_s"] == 200.0
    assert metrics["perf/tokens_per_device_per_s"] == 100.0
    assert metrics["perf/rollout_tokens_per_s"] == 300.0
    assert metrics["perf/longest_sample_tokens_per_s"] == 30.0
    assert metrics["perf/tflops"] == 3 * 2 / 2 / 2.0
    assert metrics["perf/log_probs_tflops"] == 2 * 2 / 2 / 0.5
    assert metrics["perf/wait_time_ratio"] == pytest.approx(0.5)


def test_a_run_that_does_not_train_has_no_training_figures() -> None:
    metrics = performance_metrics(WORK, [report(generate=2.0)], wall_s=3.0)
    assert times(metrics) == {"rollout_time": 2.0, "overhead_time": 1.0}
    assert not [name for name in metrics if "flops" in name or "wait" in name or "memory" in name]


def test_a_run_that_does_not_generate_has_no_generation_figures() -> None:
    metrics = performance_metrics(WORK, [report(forward_backward=1.0)], wall_s=3.0)
    assert "perf/tflops" in metrics
    assert not [name for name in metrics if "rollout" in name or "longest" in name or "log_probs" in name]


def test_a_model_that_does_not_say_has_no_flops() -> None:
    work = StepWork.of_lengths([3, 4], [1, 2], None)
    assert work == StepWork(tokens=7, response_tokens=3, longest_response=2, forward_flops=None)
    assert "perf/tflops" not in performance_metrics(work, [report(forward_backward=1.0)], wall_s=3.0)


@pytest.mark.parametrize(
    ("frozen", "passes"),
    [
        ([], (3, 3, 3)),
        (["vision"], (3, 1, 3)),
        (["audio"], (3, 3, 1)),
        (["vision", "audio"], (3, 1, 1)),
        (["language"], (2, 3, 3)),
    ],
)
def test_frozen_parts_are_not_counted_as_trained(frozen: list[str], passes: tuple[int, int, int]) -> None:
    """A tower has no backward pass then, and a decoder no gradients of weights."""
    shown = [Media(kind, kind, ((0, 1),), (1, 1, 1)) for kind in ("image", "video", "audio")]
    sample = TrainSample([1] * 4, 1, [1], [0.0], [0.0], media=(*shown, shown[0]))
    costs = {"image": 1e12, "video": 4e12, "audio": 16e12}
    work = StepWork.of_batches(
        [make_batch([sample])], lambda length: 25e12, lambda media: costs[media.kind], frozen
    )
    assert work.forward_flops == 121e12
    metrics = performance_metrics(work, [report(forward_backward=1.0)], wall_s=1.0)
    assert metrics["perf/tflops"] == sum(a * b for a, b in zip(passes, (100, 5, 16), strict=True))


def test_a_phase_of_a_strangers_engine_is_shown_under_its_name() -> None:
    assert performance_metrics(WORK, [report(prefill=1.0)], wall_s=2.0)["perf/prefill_time"] == 1.0


def test_operations_grow_with_the_length_of_each_sequence() -> None:
    asked: list[int] = []

    def flops_per_token(length: int) -> float:
        asked.append(length)
        return 10.0 + length

    prompt = Prompt(index=0, tokens=(1, 2), text="a")
    samples = tuple(sample(length, prompt_tokens=(1, 2)) for length in (1, 3, 1))
    work = StepWork.of_groups([Group(prompt=prompt, samples=samples)], flops_per_token)
    assert work == StepWork(
        tokens=11, response_tokens=5, longest_response=3, forward_flops=2 * 3 * 13 + 5 * 15
    )
    assert sorted(asked) == [3, 5], "once for each length"
    given = [
        TrainSample(
            tokens=(1,) * total,
            response_length=own,
            loss_mask=(1,) * own,
            rollout_log_probs=(0.0,) * own,
            advantages=(0.0,) * own,
        )
        for total, own in ((3, 1), (5, 3), (3, 1))
    ]
    assert StepWork.of_batches([make_batch(given[:1]), make_batch(given[1:])], flops_per_token) == work


def test_memory_is_that_of_the_largest_worker() -> None:
    gib = float(1 << 30)
    reports = [{"rss": 2 * gib, "device": 8 * gib}, {"rss": 3 * gib, "device": 7 * gib}]
    assert memory_metrics(reports) == {"perf/worker_rss_gib": 3.0, "perf/device_memory_gib": 8.0}
    assert memory_metrics([{"rss": gib}, {}]) == {"perf/worker_rss_gib": 1.0}
    with_seconds = [{"seconds": {"generate": 1.0}, "memory": reports[0]}]
    assert performance_metrics(WORK, with_seconds, wall_s=2.0)["perf/device_memory_gib"] == 8.0


def test_meters_of_all_devices_become_one_metric_each() -> None:
    reports = [
        {"utilization": 0.5, "power": 600.0, "temperature": 60.0, "clock": 1980.0, "thermal_slowed": 0.0},
        {"utilization": 1.0, "power": 700.0, "temperature": 70.0, "clock": 1500.0, "power_capped": 0.5},
        {},
    ]
    assert memory_metrics(reports) == {
        "perf/device_utilization": 0.75,
        "perf/device_utilization_min": 0.5,
        "perf/device_power_w": 650.0,
        "perf/device_temperature_c": 70.0,
        "perf/device_clock_mhz": 1500.0,
        "perf/device_power_capped": 0.5,
        "perf/device_thermal_slowed": 0.0,
    }


def test_a_worker_reports_its_memory() -> None:
    from anygauge.device import memory_phase
    from anygauge_cpu.device import CpuDevice

    device = CpuDevice()
    before = worker_memory(device)["rss"]
    with memory_phase(device, "test"):
        held = bytearray(b"x") * (64 << 20)
        del held
    peak = worker_memory(device)["device"]
    assert peak > before + (48 << 20)
    assert 0 < worker_memory(device)["device"] < peak, "what is allocated now: no phase has ended since"


def test_the_driver_reports_the_host() -> None:
    memory = driver_memory()
    assert memory.keys() == {"perf/host_memory_gib", "perf/host_memory_ratio", "perf/driver_rss_gib"}
    assert 0 < memory["perf/driver_rss_gib"] < memory["perf/host_memory_gib"] * 2
    assert 0 < memory["perf/host_memory_ratio"] < 1
