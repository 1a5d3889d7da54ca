"""One rank of the processes that the tests here share: takes a case, runs it, sends back what came out.

Run as a script with the file descriptor of a pipe. Every case makes its process groups anew, over as many of
the ranks as it wants.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from anygauge.config import Config
from anygauge.data.batch import mini_batches
from anygauge.distributed.layout import layout_of
from anygauge.distributed.lifetime import die_with
from anygauge.distributed.process_groups import destroy_process_group, init_process_group
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.kernels.table import reference_kernel
from anygauge.plugins import Plugins, load_plugins
from anygauge.runtime.diagnostics import enable_stacks
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl
from anygauge_hooks.types import BackendSpec, Device
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config
from anygauge_tests.optimizers import Joining, Rounding, Taking, taking

COLLECTIVE_TIMEOUT_S = 60.0
Action = Callable[[Config, WorkerContext, dict[str, Any]], Any]
Place = tuple[BackendSpec, Device]


def make_config(case: dict[str, Any]) -> Config:
    train = {"lr": 1e-2, "adam_eps": 1e-2, "micro_batch_tokens": 40, **case.get("train", {})}
    train["parallel"] = case.get("parallel", {})
    return engine_config(
        case.get("model", "none"),
        run={"name": "parallel", "steps": 4, "timeout_s": COLLECTIVE_TIMEOUT_S},
        rollout={"temperature": 0.8},
        debug={"mode": "train_only"},
        algorithm={
            "entropy_coef": 0.01,
            "loss_aggregation": "sample_mean",
            **case.get("algorithm", {}),
        },
        **{name: case.get(name, {}) for name in ("critic", "teacher")},
        train=train,
        placement={"launcher": "local", "train_workers": case["world"], "threads_per_worker": 1},
    )


def make_samples(vocab: int, count: int, longest: int, group: int = 1) -> list[TrainSample]:
    """Return samples of many lengths; some lengths are divisible by no number of ranks.

    :param group: Samples in succession that have the same prompt.
    """
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(count):
        length = 3 + int(torch.randint(longest - 2, (), generator=generator))
        response = 1 + int(torch.randint(length - 1, (), generator=generator))
        tokens = torch.randint(0, vocab, (length,), generator=generator).tolist()
        if index % group:
            first = samples[-1]
            tokens[:-response] = first.tokens[: -first.response_length]
        samples.append(
            TrainSample(
                tokens=tokens,
                response_length=response,
                loss_mask=[int(place % 5 != 3) for place in range(response)],
                rollout_log_probs=[-2.5] * response,
                advantages=[float(index % 3 - 1) or 0.5] * response,
            )
        )
    return samples


# -------------------------------------------------------------------------
# Actions
# -------------------------------------------------------------------------


def train(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs before, the metrics of some steps, log-probs after, and the weights on every rank.

    And how the model is divided in fact, lest a mode that reaches no engine be tested as another.
    """
    actor = ActorWorker(config, context)
    layout = layout_of(config)
    counts = case.get("samples", 9), case.get("longest", 24), case.get("group", 1)
    samples = make_samples(case["vocab"], *counts)
    shares = batches.plan_samples(
        samples,
        case.get("steps", 3),
        layout.data,
        config.algorithm.loss_aggregation,
        packs_prefixes=config.train.prefix_packing,
    )
    mine = shares[layout.dp_rank(context.rank)]
    before = batches.split(mine, actor.trainer.log_probs(mine, temperature=0.8))
    metrics = actor.train(mine)
    after = batches.split(mine, actor.trainer.log_probs(mine, temperature=0.8))
    weights = {name: tensor.clone() for name, tensor in actor.trainer.weights()}
    tokens = [tuple(sample.tokens) for sample in batches.unpack_samples(mine)]
    return {
        "metrics": metrics,
        "before": dict(zip(tokens, before, strict=True)),
        "after": dict(zip(tokens, after, strict=True)),
        "weights": weights,
        "division": division(actor.trainer),
        "packed_tokens": sum(plan.inputs["input_ids"].numel() for plan in actor.trainer._packed.plans),
        "whereabouts": whereabouts(actor.trainer),
    }


def whereabouts(engine: Any) -> dict[str, Any]:
    """Return where this rank has its tensors, and over what its groups communicate."""
    from megatron.core import parallel_state as state

    buffers = [buffer for chunk in engine.chunks for buffer in chunk.buffers]
    held = [
        *engine.policy.tensors.values(),
        *(
            tensor
            for buffer in buffers
            for tensor in (buffer.grad_data, buffer.param_data)
            if tensor is not None
        ),
        *(tensor for group in engine.optimizer.param_groups for tensor in group["params"]),
    ]
    groups = (state.get_data_parallel_group(), state.get_tensor_model_parallel_group(), None)
    return {
        "devices": {str(tensor.device) for tensor in held},
        "backends": {dist.get_backend(group) for group in groups},
    }


def division(engine: Any) -> dict[str, Any]:
    """Return what this rank has of a model, and the settings with which Megatron runs it."""
    from megatron.core import parallel_state as state

    transformer, ddp = engine.policy.options.transformer, engine.policy.options.ddp
    remade = any(getattr(module, "remade", False) for chunk in engine.chunks for module in chunk.modules())
    return {
        "chunks": len(engine.chunks),
        "shapes": {name: tuple(tensor.shape) for name, tensor in engine.policy.tensors.items()},
        "groups": {
            "tensor": state.get_tensor_model_parallel_world_size(),
            "pipeline": state.get_pipeline_model_parallel_world_size(),
            "context": state.get_context_parallel_world_size(),
            "data": state.get_data_parallel_world_size(),
            "expert": state.get_expert_model_parallel_world_size(),
        },
        "sequence": transformer.sequence_parallel,
        "recompute": transformer.recompute_granularity or ("elementwise" if remade else None),
        "overlap": [
            ddp.overlap_grad_reduce and transformer.grad_sync_func is not None,
            ddp.overlap_param_gather and transformer.param_sync_func is not None,
        ],
    }


def disagree(config: Config, context: WorkerContext, case: dict[str, Any]) -> None:
    """Change the least bit of one element of one tensor on one rank, and let the ranks compare."""
    actor = ActorWorker(config, context)
    engine: Any = actor.trainer
    if context.rank == case["rank"]:
        with torch.no_grad():
            engine.policy.tensors[case["tensor"]].view(torch.int32).view(-1)[0] ^= 1
    engine._check_ranks_agree()


def hang(config: Config, context: WorkerContext, case: dict[str, Any]) -> None:
    """Wait on the last rank for what never comes."""
    if context.rank == context.world_size - 1:
        threading.Event().wait()


def fault(config: Config, context: WorkerContext, case: dict[str, Any]) -> None:
    """End the last rank as the system ends one that touches memory which is not its own."""
    if context.rank == context.world_size - 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGSEGV)


def take_turns(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of some steps, and the weights, where memory is given up between the steps."""
    actor = ActorWorker(config, context)
    layout = layout_of(config)
    samples = make_samples(case["vocab"], 9, 24)
    shares = batches.plan_samples(samples, 3, layout.data, config.algorithm.loss_aggregation)
    metrics: list[Any] = []
    for part in mini_batches(shares[layout.dp_rank(context.rank)]):
        metrics += actor.train(part)
        for what in case["turns"]:
            actor.set_memory_state(what)
    return {"metrics": metrics, "weights": {name: tensor.clone() for name, tensor in actor.trainer.weights()}}


ACTIONS: dict[str, Action] = {
    action.__name__: action for action in (train, disagree, hang, fault, take_turns)
}


# -------------------------------------------------------------------------
# The process
# -------------------------------------------------------------------------


class References:
    """A plugin whose kernels are the core's references, for digits that are the same on every backend."""

    @hookimpl
    def register_kernels(self) -> list[KernelImpl]:
        return [replace(reference_kernel(op), priority=1000) for op in KERNEL_OPS]


class TakingOptimizer:
    """A plugin whose optimizer takes gradients and copies with its step."""

    def __init__(self, kind: type[Taking]) -> None:
        self._kind = kind

    @hookimpl
    def make_optimizer(
        self, param_groups: Any, lr: float, betas: Any, eps: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return taking(param_groups, kind=self._kind, **settings)


OWN_PLUGINS: dict[str, Callable[[], Any]] = {
    "references": References,
    "takes": partial(TakingOptimizer, Taking),
    "rounds": partial(TakingOptimizer, Rounding),
    "joins": partial(TakingOptimizer, Joining),
}
"""Plugins by the key of the case that asks for them."""


def run_case(case: dict[str, Any], rank: int, store: Any, plugins: Plugins, on: Place) -> Any:
    from megatron.core import parallel_state

    backend, device = on
    own = [name for name in OWN_PLUGINS if case.get(name)]
    for name in own:
        plugins.register(OWN_PLUGINS[name](), name)
    init_process_group(
        plugins,
        backend,
        dist.PrefixStore(str(case["number"]), store),
        rank=rank,
        world_size=case["world"],
        timeout_s=COLLECTIVE_TIMEOUT_S,
        single_host=True,
        reloadable=bool(case.get("turns")) and "pipeline" not in case.get("parallel", {}),
    )
    try:
        context = WorkerContext(
            rank=rank,
            world_size=case["world"],
            backend=backend,
            device=device,
            plugins=plugins,
        )
        return find_action(case["action"])(make_config(case), context, case)
    finally:
        parallel_state.destroy_model_parallel()
        destroy_process_group()
        for name in own:
            plugins.manager.unregister(name=name)


def on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def find_action(name: str) -> Action:
    """Return an action of this file, or ``"/path/file.py:function"``."""
    if name in ACTIONS:
        return ACTIONS[name]
    path, _, function = name.partition(":")
    namespace: dict[str, Any] = {"__name__": Path(path).stem, "__file__": path}
    exec(compile(Path(path).read_text(), path, "exec"), namespace)
    action: Action = namespace[function]
    return action


def main(descriptor: int, rank: int, size: int, store_path: str, parent: int, name: str) -> None:
    die_with(parent)
    enable_stacks()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    plugins = load_plugins()
    backend = plugins.get("register_backends", name)
    plugins.prepare_worker(backend, "actor", "before_vendor_import")
    device = plugins.make_device(backend, backend.local_device([str(rank)], os.environ))
    prepare_megatron(plugins, backend)
    import anygauge.engines.megatron.engine  # noqa: F401  # now, not within the deadline of a case

    store = dist.FileStore(store_path, size)
    with Connection(descriptor) as pipe, contextlib.suppress(EOFError):
        pipe.send_bytes(pickle.dumps("ready"))
        while True:
            case = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(outcome(case, rank, store, plugins, (backend, device))))


def outcome(case: dict[str, Any], rank: int, store: Any, plugins: Plugins, on: Place) -> tuple[str, Any]:
    """Return what a case returned, its tensors on the host, or how it failed."""
    try:
        return "value", tree_map(on_host, run_case(case, rank, store, plugins, on))
    except AnygaugeError as error:
        return "error", f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - the boundary of the process: the test shows it
        return "crash", traceback.format_exc()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]), sys.argv[6])
