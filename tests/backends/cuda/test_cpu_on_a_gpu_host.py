"""A CPU worker on a host with a GPU sees none: ``python -m pytest -m gpu_host tests/backends/cuda``."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anygauge.plugins import find_backend, load_plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.testing.tiny import tiny_qwen3
from anygauge_tests.batches import plan_samples, sample_of
from anygauge_tests.engine_config import engine_config

HAS_GPU = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()

pytestmark = [
    pytest.mark.gpu_host,
    pytest.mark.skipif(not HAS_GPU, reason="needs a host with a GPU: no nvidia-smi and no /dev/nvidia0"),
    pytest.mark.skipif(
        torch.version.cuda is None, reason="needs a torch built for CUDA: this one sees no GPU"
    ),
]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # workers search where their driver does
    config = engine_config(
        tiny_qwen3(tmp_path / "model", vocab_size=64),
        run={"name": "gpu-host", "timeout_s": 100},
        train={"lr": 1e-3, "recompute": "full"},
        rollout={"temperature": 1.0},
        placement={"launcher": "local", "train_workers": 1},
    )
    plugins = load_plugins()
    backend = find_backend(plugins, plugins.named("register_backends"), "cpu")
    with launch_workers(
        config,
        backend,
        plugins,
        worker_class="gpu_host_worker:GpuHostWorker",
        role="actor",
        run_directory=tmp_path / "run",
    ) as workers:
        yield workers


def test_a_worker_on_the_host_sees_no_gpu_and_trains(group: WorkerGroup) -> None:
    assert torch.cuda.device_count() > 0, (
        "the driver sees no GPU either, so nothing is hidden from the worker"
    )
    hidden = {"count": 0, "available": False, "initialized": False, "devices": {"cpu"}}
    assert group.call("describe") == [hidden]
    sample = sample_of(range(20, 36), 8, log_prob=-4.0)
    (batch,) = plan_samples([sample], 1, 1, "token_mean")
    ((metrics,),) = group.call("train", batch=batch)
    assert math.isfinite(metrics["loss"])
    assert metrics["grad_norm"] > 0
    assert group.call("describe") == [hidden]
