"""CUDA graphs: kernels that are recorded once and launched again with one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache

import torch

__all__ = ["capture_graph"]


def capture_graph(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record what a function launches; see :data:`anygauge_hooks.types.CaptureGraph`.

    It runs once unrecorded, on the stream that records: libraries load kernels and take workspaces when they
    are first used, which a recording cannot hold.

    :raises RuntimeError: It waits for the GPU, or does something else that cannot be recorded.
    """
    stream, current = _stream(torch.cuda.current_device()), torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        work()
        with _recording(graph):
            work()
    current.wait_stream(stream)
    return graph


@contextlib.contextmanager
def _recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    # other threads, NCCL's watchdog among them, go on to ask the driver what a recording must not
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # that the recording failed is known
            graph.capture_end()
        raise
    graph.capture_end()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream that records; one per GPU, since each has workspaces of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
