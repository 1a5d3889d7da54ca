"""The warning of a host with too few processors for its workers."""

from __future__ import annotations

import pytest

from anygauge.runtime import launch
from anygauge_hooks.resources import Cpus


@pytest.mark.parametrize(("num_workers", "warned"), [(64, True), (5, True), (4, False), (1, False)])
def test_workers_that_share_processors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_workers: int, warned: bool
) -> None:
    monkeypatch.setattr(launch, "read_cpus", lambda: Cpus(64, 2.0, "cgroup quota"))
    launch._warn_of_few_cores(num_workers)
    assert (f"{num_workers} workers share 2 processors" in caplog.text) == warned
