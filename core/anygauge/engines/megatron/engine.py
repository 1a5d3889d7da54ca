"""The train engine: Megatron-core's model, schedule and optimizer behind the project's protocol."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from anygauge.config import Config
from anygauge.device import memory_phase, seed_everything
from anygauge.engines.megatron.agreement import check_ranks_agree
from anygauge.engines.megatron.checkpoint import Checkpointer
from anygauge.engines.megatron.hf import write_directory
from anygauge.engines.megatron.inputs import MicroBatch, micro_batches, per_sample
from anygauge.engines.megatron.model import build_policy, initialize_parallel
from anygauge.engines.megatron.optimizer import make_optimizer, make_schedule, wrap_model
from anygauge.engines.megatron.passes import LogProbPass, StepData, TrainPass
from anygauge.engines.megatron.roles import RoleWeights
from anygauge.engines.megatron.scope import make_scope
from anygauge_hooks.engines import LossFunction, WorkerContext
from anygauge_hooks.errors import NonFiniteError
from anygauge_hooks.rl import TrainSample

__all__ = ["MegatronEngine"]


class MegatronEngine:
    """Implements ``anygauge_hooks.engines.TrainEngine``."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        self.config = config
        self.context = context
        self.device = context.device.torch_device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        with make_scope(context.device):
            seed_everything(context.device, config.run.seed)
            initialize_parallel(config.run.seed, config.run.timeout_s)
            self.policy = build_policy(config, context.plugins, context.backend, context.device)
            self.model = wrap_model(self.policy.model, self.policy.options)
            self.optimizer = make_optimizer(self.model, self.policy.options, context.plugins, context.backend)
            self.schedule = make_schedule(self.optimizer, config)
        dtype = self.policy.options.transformer.params_dtype
        self._logprob = self.policy.kernels.resolve("vocab_parallel_logprob", dtype=dtype)
        self._roles = RoleWeights(list(self.policy.model.parameters()), self._synchronize_parameters)
        self._checkpoint = Checkpointer(self.policy.model, self.optimizer, self.schedule, context)
        self._check_ranks_agree()

    def _check_ranks_agree(self) -> None:
        parameters = dict(self.policy.model.named_parameters())
        check_ranks_agree(parameters, parallel_state.get_data_parallel_group())

    def log_probs(
        self, samples: Sequence[TrainSample], *, temperature: float, role: str = "actor"
    ) -> list[Tensor]:
        """Return the log-probabilities of each sample's response tokens under a role's weights."""
        batches = self._pack(samples)
        step = LogProbPass(self.policy.model, self._logprob, temperature)
        with (
            self._timed("log_probs"),
            make_scope(self.context.device),
            torch.no_grad(),
            self._roles.use(role),
        ):
            self.model.eval()
            outputs = self._run_schedule(step, batches, forward_only=True)
        return per_sample(batches, outputs, len(samples))

    def train_step(
        self,
        samples: Sequence[TrainSample],
        loss: LossFunction,
        *,
        temperature: float,
        weights: Sequence[Sequence[float]],
        old_log_probs: Sequence[Tensor] | Sequence[Sequence[float]],
        reference_log_probs: Sequence[Tensor] | None,
        entropy_grad: bool,
    ) -> Mapping[str, float]:
        """Take one optimizer step on this rank's share and return the metrics of the whole step."""
        data = StepData(samples, weights, old_log_probs, reference_log_probs)
        step = TrainPass(
            self.policy.model, self._logprob, temperature, loss, data, self.device, entropy_grad=entropy_grad
        )
        batches = self._pack(samples)
        with make_scope(self.context.device):
            with self._timed("forward_backward"):
                outputs = self._forward_backward(step, batches)
            metrics = self._sum_over_ranks(outputs)
            with self._timed("optimizer"):
                return {**metrics, **self._update(metrics["loss"])}

    def _forward_backward(self, step: TrainPass, batches: Sequence[MicroBatch]) -> list[Any]:
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._run_schedule(step, batches, forward_only=False)

    def _run_schedule(self, step: Any, batches: Sequence[MicroBatch], *, forward_only: bool) -> list[Any]:
        """Run Megatron's schedule and return what the step collected of each micro-batch."""
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=self.config.train.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs

    def _sum_over_ranks(self, outputs: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        names = sorted(outputs[0])
        assert all(sorted(output) == names for output in outputs), "a loss reports the same metrics each time"
        totals = torch.stack([torch.stack([out[name].float() for name in names]) for out in outputs]).sum(0)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        return dict(zip(names, totals.tolist(), strict=True))

    def _update(self, loss: float) -> dict[str, float]:
        self.optimizer.prepare_grads()
        clip = self.policy.options.optimizer.clip_grad
        norm = float(self.optimizer.clip_grad_norm(clip) if clip > 0 else self.optimizer.get_grad_norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(
                f"Optimizer step {self.schedule.num_steps + 1}: loss {loss}, gradient norm {norm}; "
                "no weight was changed.",
                hint="Lower train.lr, check the rewards, or use train.dtype = 'float32'.",
            )
        self.schedule.step(1)
        self.optimizer.step_with_ready_grads()
        return {"grad_norm": norm, "lr": float(self.optimizer.param_groups[0]["lr"])}

    def load_role(self, role: str, path: str) -> None:
        """Keep host copies of another role's weights, read from a Hugging Face directory."""
        with make_scope(self.context.device):
            self._roles.keep(role, partial(self.policy.load, Path(path)))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names."""
        self._synchronize_parameters()
        yield from self.policy.weights()

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face directory; rank 0 writes."""
        self._synchronize_parameters()
        if self.context.rank == 0:
            dtype = self.policy.options.transformer.params_dtype
            write_directory(Path(path), self.config.model.path, self.policy.weights(), dtype)
        dist.barrier()

    def save_checkpoint(self, path: str) -> None:
        """Copy the training state to the host, and start to write it into a directory."""
        self._checkpoint.save(Path(path))

    def checkpoint_written(self) -> bool:
        """Return whether what :meth:`save_checkpoint` started is on disk."""
        return self._checkpoint.written()

    def load_checkpoint(self, path: str) -> None:
        """Restore what :meth:`save_checkpoint` wrote. A collective."""
        self._synchronize_parameters()
        self._checkpoint.load(Path(path))
        self._check_ranks_agree()

    def _synchronize_parameters(self) -> None:
        """Gather what the last optimizer step left on other ranks. A collective."""
        if self.policy.options.ddp.overlap_param_gather:
            with make_scope(self.context.device):
                self.model.start_param_sync(force_sync=True)

    def timings(self) -> Mapping[str, float]:
        """Return and reset the seconds spent since the last call, by phase."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def _pack(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        return micro_batches(samples, self.config.train.micro_batch_tokens, self.policy.rotary, self.device)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with memory_phase(self.context.device, phase):
                yield
        finally:
            self.context.device.synchronize()
            self._seconds[phase] += time.perf_counter() - start
