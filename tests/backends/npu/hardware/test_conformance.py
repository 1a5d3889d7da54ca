"""The conformance suite on a real NPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Run = Callable[..., str]

pytestmark = [pytest.mark.npu_hw, pytest.mark.timeout(1800)]


def test_the_suite_passes(run: Run) -> None:
    run("-m", "pytest", "-q", "--pyargs", "anygauge.testing.conformance", "--backend", "npu")
