"""Failed graph captures and what they leave behind. Captures on a GPU are in the conformance suite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge_cuda import graphs


@pytest.mark.parametrize("is_valid", [True, False])
def test_the_allocator_leaves_a_recording_that_failed(
    monkeypatch: pytest.MonkeyPatch, is_valid: bool
) -> None:
    """Torch's own end of a recording has it leave, but raises before that where the recording is invalid."""
    calls: list[Any] = []

    def capture_end() -> None:
        calls.append("end")
        if not is_valid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def begin(**options: Any) -> None:
        calls.append(options)

    graph: Any = SimpleNamespace(capture_begin=begin, capture_end=capture_end)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: calls.append(args), raising=False)

    def work() -> None:
        with graphs._recording(graph):
            raise ZeroDivisionError("what went wrong")

    with pytest.raises(ZeroDivisionError, match="what went wrong"):
        work()
    begun = {"pool": (0, 7), "capture_error_mode": "thread_local"}
    assert calls == [begun, "end"] + ([] if is_valid else [(3, (0, 7))])
