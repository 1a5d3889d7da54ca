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
    pool = torch.cuda.graph_pool_handle()
    # other threads, NCCL's watchdog among them, go on to ask the driver what a recording must not
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        _give_up(graph, pool)
        raise
    graph.capture_end()


def _give_up(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """End a recording that failed; why is known."""
    try:
        graph.capture_end()
    except RuntimeError:
        # torch raises before its allocator has left the recording, during which it takes nothing back of what
        # several streams have used
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream that records; one per GPU, since each has workspaces of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
