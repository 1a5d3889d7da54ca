"""The train engine: Megatron-core's model, schedule and optimizer behind the project's protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor, nn

from anygauge.config import Config
from anygauge.device import seed_everything
from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.base import BaseEngine, check_finite
from anygauge.engines.lora.roles import BaseRoles
from anygauge.engines.megatron.checkpoints.checkpoint import Checkpointer
from anygauge.engines.megatron.collective_check import check_collectives
from anygauge.engines.megatron.consistency_check import check_configs_agree
from anygauge.engines.megatron.gradients import begin_gradients, main_gradients
from anygauge.engines.megatron.inputs import MicroBatches, micro_batches
from anygauge.engines.megatron.layers.moe import expert_load, routers
from anygauge.engines.megatron.layers.output import output_logprob
from anygauge.engines.megatron.layers.routing import Routes, RoutingStore
from anygauge.engines.megatron.media.batch import StageReader
from anygauge.engines.megatron.model import Policy, build_policy, initialize_parallel
from anygauge.engines.megatron.optimizer import make_optimizer, make_schedule, optimizer_state, wrap_model
from anygauge.engines.megatron.passes import LogProbPass, TopKPass, TrainPass
from anygauge.engines.megatron.ranks import common_count, from_last_stage, sum_metrics, token_cut, token_slice
from anygauge.engines.megatron.reduction_check import ReductionCheck
from anygauge.engines.megatron.replica_check import ReplicaCheck, check_ranks_agree
from anygauge.engines.megatron.scope import has_pinned_memory, make_scope
from anygauge.engines.megatron.update import Update
from anygauge.engines.memory_offload import DeviceMemory
from anygauge.engines.responses import unpack
from anygauge.engines.roles import ACTOR, RoleWeights
from anygauge_hooks.batch import TopKLogProbs, TrainBatch
from anygauge_hooks.engines import LossFunction, WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.serving import MemoryState

__all__ = ["ForwardOnlyEngine", "MegatronEngine"]

_NUMBERS = TypeAdapter(float | list[float], config=ConfigDict(ser_json_inf_nan="constants"))


class MegatronEngine(BaseEngine):
    """Implements ``anygauge_hooks.engines.TrainEngine``."""

    _checkpoint: Checkpointer

    def __init__(
        self, config: Config, context: WorkerContext, *, build: Callable[..., Policy] = build_policy
    ) -> None:
        super().__init__(config, context)
        with make_scope(context.device):
            check_configs_agree(config, context.plugins)
            seed_everything(context.device, config.run.seed)
            initialize_parallel(config.run.seed, config.run.timeout_s, config.train.parallel)
            self.policy = build(config, context.plugins, context.backend, context.device)
            self._prepare_training()
            self._check_collectives()
        dtype = self.policy.options.transformer.params_dtype
        self._logprob = output_logprob(
            self.policy.kernels,
            dtype,
            self.policy.spec.model_options(self.policy.hf)["vocab_size"],
            fused=config.train.fused_loss,
            path=self.policy.output_owner,
            forbidden=self.policy.forbidden,
        )
        self._biases = [r.expert_bias for r in routers(self.policy.chunks) if r.expert_bias is not None]
        self._biases_before: list[Tensor] = []
        self._roles = self._role_weights()
        self._routes = self._routing_store() if config.train.router_replay else None
        self._packed: MicroBatches | None = None
        """Micro-batches of the last batch, which its passes share."""
        self._memory = DeviceMemory(
            context.device,
            weights=self._model_tensors,
            rest=self._optimizer_tensors,
            temporary=self._gradients,
            pinned=has_pinned_memory(context.device),
        )
        self._check_ranks_agree()
        self._replicas = self._replica_check()

    def _role_weights(self) -> BaseRoles:
        adapters = self.policy.adapters
        owned = {id(parameter) for name, parameter in self.policy.tensors.items() if adapters.owns(name)}
        parameters = self.policy.parameters
        base = [each for each in parameters if id(each) not in owned]
        weights = self._role([*base, *self._biases])
        trained: RoleWeights | None = weights
        if adapters.layers:  # what is trained beside them may be of another stage: all ranks load it, or none
            saved = [each for each in base if each.requires_grad]
            trained = self._role(saved) if adapters.trains_others else None
        return BaseRoles(adapters, self.config.model.path, weights, trained, self.policy.load)

    def _role(self, parameters: Sequence[Tensor]) -> RoleWeights:
        return RoleWeights(parameters, self._synchronize_parameters, self._check_ranks_agree)

    def _prepare_training(self) -> None:
        """Wrap the model for data parallelism, and make what updates and saves it."""
        policy, context = self.policy, self.context
        self.chunks: list[Any] = [*wrap_model(policy.chunks, policy.options)]
        self.optimizer = make_optimizer(self.chunks, policy.options, context.plugins, context.backend)
        self._reductions = ReductionCheck(self.chunks)
        self._weight_update = Update(self.optimizer, policy.options.optimizer.clip_grad, self.device)
        self.schedule = make_schedule(self.optimizer, self.config)
        base = policy.adapters.description(str(self.config.model.path))
        self._checkpoint = Checkpointer(policy, self.optimizer, self.schedule, context, base)
        self._check_saving()

    def _model_tensors(self) -> Iterator[Tensor]:
        for chunk in self.policy.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        return optimizer_state(self.optimizer)

    def _gradients(self) -> Iterator[Tensor]:
        self._weight_update.begin()  # drops those that lie outside of what is found
        return main_gradients(self.chunks)

    def set_memory_state(self, state: MemoryState) -> None:
        """Set the memory state (sleep, wake up); see :class:`anygauge_hooks.engines.SupportsOffload`."""
        with make_scope(self.context.device):
            if self._memory.state != "nothing":
                self._synchronize_parameters()
            self._biases_before = []
            if state != "everything":
                parallel_state.get_global_memory_buffer().buffer.clear()  # scratch of sequence parallelism
            self._memory.set_state(state)

    def _check_saving(self) -> None:
        """Raise now, and not at the first save, if there is something that no checkpoint can hold."""
        if self.config.save.every is not None:
            self._checkpoint.check()

    def _routing_store(self) -> RoutingStore:
        if not self.policy.options.transformer.num_moe_experts:
            raise ConfigError(
                f"train.router_replay is set, and {self.config.model.path} has no experts.",
                hint="Set train.router_replay = false.",
            )
        layers = [router.layer_number - 1 for router in routers(self.policy.chunks)]
        return RoutingStore(layers, parallel_state.get_context_parallel_group())

    def _check_ranks_agree(self, role: str = "") -> None:
        directory = f"{role or 'model'}.path"
        check_ranks_agree(self.policy.tensors, self.policy.all_rules, role, directory)

    def _check_collectives(self) -> None:
        check_collectives(self.device, self.chunks, self.optimizer)

    def _replica_check(self) -> ReplicaCheck:
        options = self.policy.options
        return ReplicaCheck(
            self.policy.tensors,
            self.policy.all_rules,
            stored=self._model_tensors(),
            gradients=self._reduced_gradients(),
            is_sharded=options.ddp.use_distributed_optimizer,
            deterministic=self.config.run.deterministic,
            every=self.config.train.replica_check_every,
        )

    def _reduced_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._weight_update.reduced_gradients(self.chunks)

    def log_probs(self, batch: TrainBatch, *, temperature: float, role: str = "actor") -> Tensor:
        """Return the log-probabilities of all response tokens under a role's weights."""
        step, store = LogProbPass(self._logprob, temperature), self._routes if role == ACTOR else None
        with self._asking(role):
            packed = self._pack(batch)
            if store is None:
                return self._collect(step, packed)
            routes = [Routes(is_replay=False) for _ in packed.plans]
            log_probs = self._collect(step, packed, routes=routes)
            store.clear()
            for plan, captured in zip(packed.plans, routes, strict=True):
                store.keep(plan.sequences, plan.parts, captured)
            return log_probs

    def top_k_log_probs(
        self, batch: TrainBatch, count: int, *, temperature: float, role: str = "actor"
    ) -> TopKLogProbs:
        """Return the top-k tokens in the place of each response token under a role's weights."""
        count = min(count, self._logprob.vocab_size - len(self._logprob.forbidden))
        step = TopKPass(self._logprob, temperature, count)
        with self._asking(role):
            collected = self._collect(step, self._pack(batch), (2 * count + 2,))
        ids, sampled, log_probs = collected.tensor_split((count, count + 1), 1)
        return TopKLogProbs(ids.long(), log_probs, sampled[:, 0])

    @contextmanager
    def _asking(self, role: str) -> Iterator[None]:
        """Let a model say something without learning from it."""
        self._memory.need("everything", "log-probabilities")
        with (
            self._timed("log_probs"),
            make_scope(self.context.device),
            torch.no_grad(),
            self._roles.use(role),
        ):
            if self._is_frozen(role) and self._replicas.is_due(role):
                self._replicas.check_weights(role)
            yield

    def _is_frozen(self, role: str) -> bool:
        """Return whether the weights of a role are not those that this engine trains."""
        return role != ACTOR

    def train_step(
        self, batch: TrainBatch, loss: LossFunction, *, temperature: float, entropy_grad: bool
    ) -> Mapping[str, float]:
        """Take one optimizer step on this rank's mini-batch and return the metrics of the whole step."""
        step = TrainPass(self._logprob, temperature, loss, batch, self.device, entropy_grad=entropy_grad)
        with make_scope(self.context.device):
            packed, store = self._pack(batch), self._routes
            routes = None if store is None else [store.replay(p.sequences, p.parts) for p in packed.plans]
            with self._timed("forward_backward"):
                outputs, norm = self._forward_backward(step, packed, routes)
            metrics = sum_metrics(outputs, self.device)
            with self._timed("optimizer"):
                update = self._update(metrics["loss"], norm)
            return {**metrics, **update, **expert_load(self.policy.chunks, self.policy.options.transformer)}

    def _collect(
        self,
        step: Any,
        batches: MicroBatches,
        shape: Sequence[int] = (),
        routes: Sequence[Routes] | None = None,
    ) -> Tensor:
        """Return a pass's outputs of all response tokens, on every rank.

        :param shape: Shape of the output of each token.
        """
        self._memory.need("everything", "a forward pass")
        self._set_training(False)
        outputs = self._run_schedule(step, batches, routes, forward_only=True)
        return unpack(batches.plans, from_last_stage(outputs, batches.plans, self.device, shape))

    def _forward_backward(
        self, step: Any, batches: MicroBatches, routes: Sequence[Routes] | None = None
    ) -> tuple[list[Any], Tensor]:
        """Return what the step collected, and the norm of the gradients, for which nobody has waited yet."""
        self._memory.need("everything", "an optimizer step")
        self._biases_before = [bias.clone() for bias in self._biases]
        self._set_training(True)
        begin_gradients(self.chunks)
        self._reductions.begin(watches=self._replicas.is_next(ACTOR))
        self._weight_update.begin()
        outputs = self._run_schedule(step, batches, routes, forward_only=False)
        return outputs, self._weight_update.norm()

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            if chunk.training != training:  # there are hundreds of modules, and the device waits
                chunk.train(training)

    def _run_schedule(
        self, step: Any, batches: MicroBatches, routes: Sequence[Routes] | None, *, forward_only: bool
    ) -> list[Any]:
        """Run Megatron's schedule and return what the step collected of each micro-batch.

        Only ranks of the last pipeline stage collect anything.
        """
        iterators = batches.readers(len(self.chunks), routes)
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches.plans),
            seq_length=self.config.train.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs

    def _update(self, loss: float, gradient_norm: Tensor) -> dict[str, float]:
        norm = self._checked(gradient_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            # Megatron has moved these with the gradients, before the loss is known.
            for bias, before in zip(self._biases, self._biases_before, strict=True):
                bias.copy_(before)
        check_finite(self.schedule.num_steps + 1, loss, norm)
        self.schedule.step(1)
        self._weight_update.step(norm)
        if self.schedule.num_steps == 1:  # the optimizer has a state from here on
            self._check_saving()
        return {"grad_norm": norm, "lr": float(self.optimizer.param_groups[0]["lr"])}

    def _checked(self, gradient_norm: Tensor) -> float:
        """Return the norm on the host, for which it waits, and compare replicas then if it is their time."""
        if not self._replicas.is_due(ACTOR):
            return float(gradient_norm)
        self._synchronize_parameters()
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.param_gather_dispatched = False  # the update comes after this gather
        sums = self._reductions.report()
        return self._replicas.check_step(self.schedule.num_steps + 1, gradient_norm, sums)

    def load_role(self, role: str, path: str) -> None:
        """Keep host copies of another role's weights, read from a Hugging Face directory."""
        self._memory.need("everything", f"room for the weights of the {role}")
        with make_scope(self.context.device):
            self._roles.keep(role, Path(path))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names."""
        self._memory.need("weights", "its weights")
        self._synchronize_parameters()
        yield from self.policy.weights()

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained beside a frozen base; see :class:`anygauge_hooks.engines.HasAdapters`."""
        self._memory.need("weights", "its adapters")
        self._synchronize_parameters()
        yield from self.policy.adapter_weights()

    def weights_by_sender(self) -> Mapping[int, Iterator[tuple[str, Tensor]]]:
        """Return the weights by the rank that sends them; see :class:`anygauge_hooks.engines.HasSenders`."""
        self._memory.need("weights", "its weights")
        self._synchronize_parameters()
        return self.policy.weights_by_sender()

    def _exported(self) -> tuple[Iterator[tuple[str, Tensor]], torch.dtype]:
        self._synchronize_parameters()
        weights = self.policy.weights(on_every_rank=False)
        return iter(weights), self.policy.options.transformer.params_dtype

    def _write_adapter(self, target: Path) -> None:
        policy = self.policy
        self._synchronize_parameters()
        policy.adapters.write(target, policy.adapter_weights(), self.config.model.path)

    def load_checkpoint(self, path: str) -> None:
        """Restore a checkpoint of :meth:`save_checkpoint`. A collective."""
        self._memory.need("everything", "the state of a checkpoint")
        self._synchronize_parameters()
        self._checkpoint.load(Path(path))
        if self.policy.options.ddp.use_distributed_optimizer:
            self._gather_parameters()  # some may be rounded otherwise than those of the checkpoint
        self._check_ranks_agree()

    def _synchronize_parameters(self) -> None:
        """Gather what the last optimizer step left on other ranks. A collective."""
        if self.policy.options.ddp.overlap_param_gather:
            self._gather_parameters()

    def _gather_parameters(self) -> None:
        """Give each rank the weights that other ranks update. A collective."""
        with make_scope(self.context.device):
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def data_parallel_sum(self, values: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks, with every bit the same on each. A collective."""
        group = parallel_state.get_data_parallel_group()
        with make_scope(self.context.device):
            terms = all_gather_values(values.tolist(), _NUMBERS, group)
        return torch.tensor(terms, dtype=values.dtype).sum(0)

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the decoder layers of this rank; see :class:`anygauge_hooks.engines.HasDecoderLayers`."""
        owners: list[Any] = [c.get_submodule(self.policy.output_owner) for c in self.policy.chunks]
        return [layer for owner in owners for layer in owner.decoder.layers]

    def _pack(self, batch: TrainBatch) -> MicroBatches:
        """Return the micro-batches of a batch. Those of the last one are kept: its passes share them."""
        if self._packed is None or self._packed.batch is not batch:
            self._packed = micro_batches(
                batch,
                self.config.train.micro_batch_tokens,
                self.policy.rotary,
                self.device,
                token_cut(self.policy.options.transformer),
                partial(common_count, config=self.policy.options.transformer, device=self.device),
                partial(self.policy.spec.flops_per_token, self.policy.hf),
                self._media(),
                packs_prefixes=self.config.train.prefix_packing and self.policy.can_pack_prefixes,
            )
        return self._packed

    def _media(self) -> StageReader | None:
        """Return the reader of media, for a model that has towers."""
        policy = self.policy
        if policy.spec.media is None or not policy.has_towers:
            return None
        return StageReader(
            policy.spec.media,
            policy.hf,
            self.context.media,
            parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            *token_slice(policy.options.transformer),
        )


class ForwardOnlyEngine(MegatronEngine):
    """An engine of a model that is not trained: no gradients, no optimizer, no memory for them.

    It answers :meth:`log_probs`; what trains or saves is not there.
    """

    def _prepare_training(self) -> None:
        for chunk in self.policy.chunks:
            chunk.requires_grad_(False)
        self.chunks = list(self.policy.chunks)

    def _check_collectives(self) -> None:
        check_collectives(self.device)

    def _reduced_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())

    def _is_frozen(self, role: str) -> bool:
        return True

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        return iter(())

    def _gradients(self) -> Iterator[Tensor]:
        return iter(())

    def _synchronize_parameters(self) -> None:
        """Do nothing: no optimizer step has left anything on other ranks."""
