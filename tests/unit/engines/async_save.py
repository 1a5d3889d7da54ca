"""Saves with Megatron's asynchronous checkpoints in a device scope. Run by test_scope, in its own process.

Megatron forks the writer, which a process with the threads of a test session had better not do. It spawns
another process, for results, which imports what this module imports outside of functions.
"""

from __future__ import annotations

import sys


def main(directory: str) -> None:
    import torch
    import torch.distributed as dist

    from anygauge.engines.megatron.prepare import prepare_megatron
    from anygauge.engines.megatron.scope import make_scope
    from anygauge.plugins import load_plugins

    plugins = load_plugins(only=["cpu"])
    backend = plugins.get("register_backends", "cpu")
    prepare_megatron(plugins, backend)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    def state(weight: torch.Tensor) -> dict[str, ShardedTensor]:
        return {"weight": ShardedTensor.from_rank_offsets("weight", weight, replica_id=0)}

    device = plugins.make_device(backend, 0)
    calls = AsyncCallsQueue()
    with make_scope(device):
        weight = torch.arange(4.0, device="cuda", requires_grad=True)
        request = dist_checkpointing.save(state(weight.detach()), directory, async_sharded_save=True)
        calls.schedule_async_request(request)
    with make_scope(device):  # the save outlives the scope that started it, and training goes on
        (weight * torch.full((4,), 2.0, device="cuda")).sum().backward()
        weight.data.sub_(weight.grad)
        finished = calls.maybe_finalize_async_calls(blocking=True)
        loaded = dist_checkpointing.load(state(torch.empty(4, device="cuda")), directory)["weight"]
    sys.stdout.write(f"{finished} {weight.tolist()} {loaded.tolist()}\n")
    filesystem_async._results_queue._manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
