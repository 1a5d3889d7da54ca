"""The train engine: a model of transformers, sharded by FSDP2, behind the project's protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor, nn

from anygauge.config import Config
from anygauge.config.families import family
from anygauge.config.roles import as_language_model
from anygauge.device import on_device, seed_everything
from anygauge.distributed.all_gather import all_gather_values
from anygauge.distributed.known_results import check_known_results
from anygauge.engines.agreement import check_facts_agree, config_facts
from anygauge.engines.base import BaseEngine, check_finite, torch_dtype
from anygauge.engines.fsdp.batch import MicroBatch, micro_batches
from anygauge.engines.fsdp.checkpoint import Checkpointer
from anygauge.engines.fsdp.mesh import ReplicaCheck, data_mesh, mesh_groups
from anygauge.engines.fsdp.model import Outputs, build_model
from anygauge.engines.fsdp.optimizer import ShardedOptimizer
from anygauge.engines.fsdp.start_check import check_at_start
from anygauge.engines.fsdp.weights import (
    LocalShard,
    base_shards,
    full_weights,
    load_weights,
    local_shards,
)
from anygauge.engines.hf_directory import read_config
from anygauge.engines.lora.roles import BaseRoles
from anygauge.engines.media import MediaReader
from anygauge.engines.memory_offload import DeviceMemory
from anygauge.engines.responses import compared, loss_inputs, unpack
from anygauge.engines.roles import ACTOR, RoleWeights
from anygauge.engines.schedule import decay_steps, learning_rate
from anygauge.kernels.loss_budget import LossBudget
from anygauge.kernels.table import resolve_kernels
from anygauge_hooks.batch import TopKLogProbs, TrainBatch
from anygauge_hooks.engines import LossFunction, WorkerContext
from anygauge_hooks.serving import MemoryState

__all__ = ["ForwardOnlyEngine", "FsdpEngine"]

_NUMBERS = TypeAdapter(float | list[float], config=ConfigDict(ser_json_inf_nan="constants"))

Loss = Callable[[MicroBatch, Any], tuple[Tensor, Mapping[str, Tensor]]]
"""From a micro-batch and what was computed of the model's outputs to a loss and metrics."""


class FsdpEngine(BaseEngine):
    """Implements ``anygauge_hooks.engines.TrainEngine``."""

    _checkpoint: Checkpointer
    is_critic = False
    trains = True

    def __init__(self, config: Config, context: WorkerContext) -> None:
        super().__init__(config, context)
        self.dtype = torch_dtype(config)
        check_facts_agree(partial(config_facts, config))
        mesh = data_mesh(config.train.parallel.replicate, context.device.type, config.run.timeout_s)
        if dist.get_world_size() > 1:  # before a model depends on them
            check_known_results(mesh_groups(mesh), self.device)
        seed_everything(context.device, config.run.seed)
        hf = read_config(config.model.path)
        self.hf = as_language_model(hf) if self.is_critic else hf
        self.spec = family(context.plugins, self.hf, config.train.engine)
        budget = LossBudget(config.train.loss_memory_gib, context.device)
        kernels = resolve_kernels(context.plugins, context.backend, budget)
        self.root = build_model(
            config,
            context,
            kernels,
            self.spec,
            self.hf,
            mesh,
            is_critic=self.is_critic,
            trains=self.trains,
        )
        media = None if self.root.towers is None else self.spec.media
        self._media = None if media is None else MediaReader(media, self.hf, context.media)
        check_at_start(self.root, kernels, self.dtype, self.device)
        # FSDP has now laid out its memory, which stays: what follows holds views of it.
        self.shards = local_shards(self.root)
        if self.trains:
            learning = [shard for shard in self.shards if shard.tensor.requires_grad]
            self.optimizer = ShardedOptimizer(learning, config.train, context, self.root.masters)
            self._replicas = ReplicaCheck(mesh, learning, config.train.replica_check_every)
            adapters = self.root.adapters
            kept = learning if adapters.layers else self.shards
            base = adapters.description(str(config.model.path))
            self._checkpoint = Checkpointer(kept, self.optimizer, context, base)
        base_weights = base_shards(self.root)
        trained = [shard for shard in base_weights if shard.tensor.requires_grad]
        self._roles = BaseRoles(
            self.root.adapters,
            config.model.path,
            _role_weights(base_weights),
            _role_weights(trained) if trained else None,
            partial(load_weights, self.root),
            self.root.weights_changed,
        )
        self._planned: tuple[TrainBatch, Sequence[MicroBatch]] | None = None
        """Micro-batches of the last batch, which its passes share."""
        self._memory = DeviceMemory(
            context.device,
            weights=self._model_tensors,
            rest=self._optimizer_tensors,
            temporary=self._copies_of_weights,
        )

    def _model_tensors(self) -> Iterator[Tensor]:
        yield from (tensor for shard in self.shards for tensor in shard.stored)
        yield from self.root.buffers()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        return self.optimizer.state() if self.trains else iter(())

    def _copies_of_weights(self) -> Iterator[Tensor]:
        return iter(()) if self.root.masters is None else self.root.masters.copies()

    def set_memory_state(self, state: MemoryState) -> None:
        """Set the memory state (sleep, wake up); see :class:`anygauge_hooks.engines.SupportsOffload`."""
        if self.trains:
            self.optimizer.begin()  # drops the gradients
        self._memory.set_state(state)
        if state == "everything":
            self.root.weights_changed()

    # -------------------------------------------------------------------------
    # Passes
    # -------------------------------------------------------------------------

    def log_probs(self, batch: TrainBatch, *, temperature: float, role: str = ACTOR) -> Tensor:
        """Return the log-probabilities of all response tokens under a role's weights."""

        def compute(outputs: Outputs, plan: MicroBatch) -> Tensor:
            return outputs.log_probs(plan.targets, temperature, entropy_grad=False)[0]

        with self._asking("log_probs", role):
            return self._collect(batch, compute)

    def top_k_log_probs(
        self, batch: TrainBatch, count: int, *, temperature: float, role: str = ACTOR
    ) -> TopKLogProbs:
        """Return the top-k tokens in the place of each response token under a role's weights."""
        count = min(count, self.spec.model_options(self.hf)["vocab_size"] - len(self.root.forbidden))

        def compute(outputs: Outputs, plan: MicroBatch) -> Tensor:
            ids, log_probs = outputs.top_k(count, plan.targets, temperature)
            # ids below 2 ** 24 are whole numbers in float32 too
            return torch.cat((ids.to(log_probs), compared(log_probs, plan.targets[:, None], ids)), 1)

        with self._asking("log_probs", role):
            ids, sampled, log_probs = self._collect(batch, compute).tensor_split((count, count + 1), 1)
        return TopKLogProbs(ids.long(), log_probs, sampled[:, 0])

    @contextmanager
    def _asking(self, phase: str, role: str = ACTOR) -> Iterator[None]:
        """Let a model say something without learning from it."""
        self._memory.need("everything", "a forward pass")
        with self._timed(phase), torch.no_grad(), self._roles.use(role):
            yield

    def _collect(self, batch: TrainBatch, compute: Callable[[Outputs, MicroBatch], Tensor]) -> Tensor:
        """Return what is computed for all response tokens, on the host."""
        plans = self._plan(batch)
        results = [self._run(self._load(plan), compute) for plan in plans]
        self.root.free_gathered()
        return unpack(plans, results)

    def _load(self, plan: MicroBatch) -> MicroBatch:
        return plan.to(self.device, self._media)

    def _run(self, plan: MicroBatch, compute: Callable[[Outputs, MicroBatch], Any]) -> Any:
        return self.root(plan.inputs, plan.rows, lambda outputs: compute(outputs, plan))

    def _plan(self, batch: TrainBatch) -> Sequence[MicroBatch]:
        """Return the micro-batches of a batch. Those of the last one are kept: its passes share them."""
        if self._planned is None or self._planned[0] is not batch:
            flops = partial(self.spec.flops_per_token, self.hf)
            tokens = self.config.train.micro_batch_tokens
            options: Any = {"is_packed": self.root.is_packed, "reader": self._media}
            plans = micro_batches(batch, tokens, flops, self._common, **options)
            self._planned = batch, plans
        return self._planned[1]

    def _common(self, count: int) -> int:
        """Return how many micro-batches every rank has: FSDP's ranks meet in every layer of each."""
        most = torch.tensor([count], device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most.item())

    # -------------------------------------------------------------------------
    # Training
    # -------------------------------------------------------------------------

    def train_step(
        self, batch: TrainBatch, loss: LossFunction, *, temperature: float, entropy_grad: bool
    ) -> Mapping[str, float]:
        """Take one optimizer step on this rank's mini-batch and return the metrics of the whole step."""
        teacher = batch.teacher_top_k

        def compute(outputs: Outputs, plan: MicroBatch) -> tuple[Tensor, Tensor]:
            if teacher is None:
                return outputs.log_probs(plan.targets, temperature, entropy_grad=entropy_grad)
            sampled = plan.targets[:, None]
            ids = on_device(teacher.ids.index_select(0, plan.responses), self.device)
            log_probs, entropy = outputs.log_probs(
                torch.cat((sampled, ids), 1), temperature, entropy_grad=entropy_grad, rest=True
            )
            return compared(log_probs, sampled, ids), entropy

        def policy_loss(plan: MicroBatch, computed: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
            log_probs, entropy = computed
            top_k = None
            if teacher is not None:
                log_probs, top_k = log_probs[:, 0], log_probs[:, 1:]
            return loss(loss_inputs(batch, plan, log_probs, entropy, top_k, self.device))

        return self._train(batch, compute, policy_loss, "forward_backward")

    def _train(
        self, batch: TrainBatch, compute: Callable[[Outputs, MicroBatch], Any], loss: Loss, phase: str
    ) -> Mapping[str, float]:
        self._memory.need("everything", "an optimizer step")
        with self._timed(phase):
            self.optimizer.begin()
            reported = []
            plans = self._plan(batch)
            for number, plan in enumerate(map(self._load, plans), 1):
                self.root.begin_micro_batch(is_last=number == len(plans))
                value, metrics = loss(plan, self._run(plan, compute))
                value.backward()
                self.root.take_gradients()
                reported.append({**metrics, "loss": value.detach()})
            norm = self.optimizer.norm()
            metrics_of_step = self._sum_metrics(reported)
        with self._timed("optimizer"):
            return {**metrics_of_step, **self._update(metrics_of_step["loss"], float(norm))}

    def _sum_metrics(self, reported: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Return the sums over micro-batches and ranks, on every rank. A collective."""
        names = sorted(reported[0])
        values = [torch.stack([each[name].float() for name in names]) for each in reported]
        totals = torch.stack(values).sum(0)
        dist.all_reduce(totals)
        return dict(zip(names, totals.tolist(), strict=True))

    def _update(self, loss: float, norm: float) -> dict[str, float]:
        step = self._checkpoint.step + 1
        check_finite(step, loss, norm)
        self._replicas.check(step)
        lr = learning_rate(self.config.train, step, decay_steps(self.config))
        self.optimizer.step(norm, lr)
        self._checkpoint.step = step
        return {"grad_norm": norm, "lr": lr}

    # -------------------------------------------------------------------------
    # Weights and checkpoints
    # -------------------------------------------------------------------------

    def load_role(self, role: str, path: str) -> None:
        """Keep host copies of another role's weights, read from a Hugging Face directory."""
        self._memory.need("everything", f"room for the weights of the {role}")
        self._roles.keep(role, Path(path))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names."""
        self._memory.need("weights", "its weights")
        yield from full_weights(self.root, self.root.names, self.dtype)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained beside a frozen base; see :class:`anygauge_hooks.engines.HasAdapters`."""
        self._memory.need("weights", "its adapters")
        yield from self.root.adapters.weights(self.shards)

    def _exported(self) -> tuple[Iterator[tuple[str, Tensor]], torch.dtype]:
        return full_weights(self.root, self.root.names, self.dtype), self.dtype

    def _write_adapter(self, target: Path) -> None:
        self.root.adapters.write(target, self.shards, self.config.model.path)

    def load_checkpoint(self, path: str) -> None:
        """Restore a checkpoint of :meth:`save_checkpoint`. A collective."""
        self._memory.need("everything", "the state of a checkpoint")
        self._checkpoint.load(Path(path))
        self.root.weights_changed()

    # -------------------------------------------------------------------------
    # Others
    # -------------------------------------------------------------------------

    def data_parallel_sum(self, values: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks, with every bit the same on each. A collective."""
        return torch.tensor(all_gather_values(values.tolist(), _NUMBERS), dtype=values.dtype).sum(0)

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the decoder layers of this rank; see :class:`anygauge_hooks.engines.HasDecoderLayers`."""
        return self.root.layers


class ForwardOnlyEngine(FsdpEngine):
    """An engine of a model that is not trained: no gradients, no optimizer, no memory for them.

    It answers :meth:`log_probs`; what trains or saves is not there.
    """

    trains = False


def _role_weights(shards: Sequence[LocalShard]) -> RoleWeights:
    # Each rank's shards are its own, and were checked when they were read.
    tensors = [tensor for shard in shards for tensor in shard.stored]
    return RoleWeights(tensors, lambda: None, lambda role: None)
