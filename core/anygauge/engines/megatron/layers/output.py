"""Output layer that passes the hidden states of response tokens to the fused loss.

Megatron names the class of that layer in the model, so it is replaced in the model that was built. Megatron
imports happen here at module level: import this file only after ``prepare_megatron``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from anygauge.engines.forbidden import logprob_without, top_k_without
from anygauge.kernels.linear_logprob import linear_topk
from anygauge.kernels.reference import through_logits
from anygauge.kernels.table import KernelTable
from anygauge_hooks.kernels import LinearLogprob

__all__ = [
    "HiddenOutput",
    "OutputLogprob",
    "ResponseOutput",
    "output_logprob",
    "output_owner",
    "output_weight",
    "replace_output_layer",
    "response_output",
]


# -------------------------------------------------------------------------
# Modules
# -------------------------------------------------------------------------


class ResponseOutput(nn.Module):
    """Base of modules that replace an output layer.

    :param layer: Layer to replace: Megatron's own, or another of these.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.sequence_parallel: bool = layer.sequence_parallel
        self.tp_group: Any = layer.tp_group
        self.rows: Tensor | None = None
        """Which tokens of this context-parallel rank are wanted; ``None`` for all."""

    @contextmanager
    def selected(self, rows: Tensor) -> Iterator[None]:
        """Want these tokens alone.

        :param rows: ``[R]``, int64.
        """
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def wanted(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of the wanted tokens, the same on every tensor-parallel rank.

        Every rank must give them the same gradient.

        :param hidden: ``[T, 1, H]``, or this rank's part of it under sequence parallelism.
        :returns: ``[R, 1, H]``.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden if self.rows is None else hidden.index_select(0, self.rows)


class HiddenOutput(ResponseOutput):
    """Hands on the hidden states of the wanted tokens; without a choice of tokens it gives logits.

    :param layer: Layer that Megatron built. Its weight becomes this module's, under the same name.
    """

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__(layer)
        self.register_parameter("weight", layer.weight)
        self._layer = (layer,)  # in a tuple, or the weight would be there twice

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return hidden states ``[R, 1, H]``, or logits ``[T, 1, V / tp]``, and no bias.

        :param hidden: ``[T, 1, H]``, or this rank's part of it under sequence parallelism.
        :param weight: Weight of the embedding, where it is shared.
        """
        if self.rows is not None:
            return self.wanted(hidden), None
        given = self.weight if weight is None else weight
        logits: Tensor = self._layer[0](hidden, given, runtime_gather_output)[0]
        return logits, None

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sharded state of Megatron's layer."""
        return self._layer[0].sharded_state_dict(*args, **kwargs)


# -------------------------------------------------------------------------
# Models
# -------------------------------------------------------------------------


def replace_output_layer(model: nn.Module, make: Callable[[Any], ResponseOutput], path: str = "") -> None:
    """Put ``make(layer)`` in the place of a model's output layer, on the pipeline stage that has one.

    :param path: ``MegatronModel.output_owner``.
    """
    owner: Any = output_owner(model, path)
    if not owner.post_process:
        return
    _mark_tied_gradient(owner)
    owner.output_layer = make(owner.output_layer)


def output_owner(model: Any, path: str = "") -> Any:
    """Return the module that has the output layer, or would have it on the last pipeline stage.

    :param model: May be wrapped for data parallelism.
    :param path: ``MegatronModel.output_owner``.
    """
    if path:
        while not hasattr(model, path.partition(".")[0]):
            model = model.module
        return model.get_submodule(path)
    return get_attr_wrapped_model(model, "post_process", return_model_obj=True)


def response_output(wrapped: Any, rows: Tensor, inputs: Any, path: str = "") -> Tensor:
    """Run a stage of the model; of the last one return the output ``[R, ...]`` of the given tokens.

    :param wrapped: The model, wrapped for data parallelism.
    :param rows: ``[R]``, int64.
    :param inputs: Keyword arguments of the model.
    :param path: ``MegatronModel.output_owner``.
    """
    owner = output_owner(wrapped, path)
    if not owner.post_process:
        passed_on: Tensor = wrapped(**inputs)
        return passed_on
    with owner.output_layer.selected(rows):
        output: Tensor = wrapped(**inputs)
    return output[0]


def output_weight(owner: Any) -> Tensor:
    """Return the weight of the last stage's output layer: the embedding's, where they are tied."""
    tied: bool = owner.share_embeddings_and_output_weights
    weight: Tensor = owner.shared_embedding_or_output_weight() if tied else owner.output_layer.weight
    return weight


def _mark_tied_gradient(owner: Any) -> None:
    """Tell Megatron's hook that a weight's gradient comes from an embedding and from an output layer.

    It would drop what autograd has of one, since the other adds to the main gradient itself. Megatron sets
    the mark without pipeline stages only.
    """
    embedding = getattr(owner, "embedding", None)
    if embedding is not None and owner.share_embeddings_and_output_weights:
        embedding.word_embeddings.weight.zero_out_wgrad = True


# -------------------------------------------------------------------------
# Log-probabilities
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutputLogprob:
    """The op that computes log-probabilities from hidden states, and its other inputs."""

    fn: LinearLogprob
    group: Any | None
    """Tensor-parallel, or ``None`` for one rank."""
    vocab_size: int
    """Without padding."""
    path: str = ""
    """``MegatronModel.output_owner``."""
    forbidden: tuple[int, ...] = ()
    """Tokens that are never sampled: log-probabilities are those among the others."""

    def __call__(
        self,
        wrapped: Any,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropy_grad: bool,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the shape of ``targets`` and entropies ``[R]``, float32.

        :param wrapped: The last stage's model.
        :param hidden: ``[R, H]``.
        :param targets: ``[R]`` or ``[R, N]``, int64.
        :param options: Further ones of the op.
        """
        weight = output_weight(output_owner(wrapped, self.path))
        call: Any = partial(self.fn, hidden, weight, vocab_size=self.vocab_size, **options)
        return logprob_without(
            call, targets, temperature, self.group, self.forbidden, entropy_grad=entropy_grad
        )

    def top_k_ids(self, wrapped: Any, hidden: Tensor, count: int) -> Tensor:
        """Return the ids ``[R, count]`` of the top-k tokens.

        :param wrapped: The last stage's model.
        :param hidden: ``[R, H]``.
        """
        weight = output_weight(output_owner(wrapped, self.path))
        more = count + len(self.forbidden)
        ids = linear_topk(hidden, weight, more, self.group, vocab_size=self.vocab_size)
        return top_k_without(ids, count, self.forbidden)


def output_logprob(
    kernels: KernelTable,
    dtype: torch.dtype,
    vocab_size: int,
    *,
    fused: bool,
    path: str = "",
    forbidden: Sequence[int] = (),
) -> OutputLogprob:
    """Return the op for the parallel layout of this process.

    :param fused: Or logits of a whole micro-batch at a time.
    :param forbidden: Tokens that are never sampled.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    fn: LinearLogprob = (
        kernels.resolve("linear_logprob", dtype=dtype)
        if fused
        else partial(through_logits, kernels.resolve("vocab_parallel_logprob", dtype=dtype))
    )
    divided = group if dist.get_world_size(group) > 1 else None
    return OutputLogprob(fn, divided, vocab_size, path, tuple(forbidden))
