"""Embedding whose backward pass adds the gradient of its rows to Megatron's main gradient.

Autograd has a gradient of the whole weight, which is zeros but for the rows of the tokens, and Megatron's
hook adds all of it. Megatron imports happen here at module level: import this file only after
``prepare_megatron``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor, nn

from anygauge.engines.megatron.layers.modules import is_megatrons
from anygauge.kernels.main_grad import add_rows, handed_back

__all__ = ["Embedding", "embedding", "replace_embeddings"]


class Embedding(VocabParallelEmbedding):
    """Megatron's embedding, of which each tensor-parallel rank has some rows, with another look-up."""

    def forward(self, input_: Tensor) -> Tensor:
        """Return the rows of tokens, summed over ranks of which one has each.

        :param input_: ``[B, T]``, int64.
        :returns: ``[B, T, H]``, or this rank's tokens ``[T / tp, B, H]`` where they are scattered here.
        """
        if self.tp_group.size() == 1:
            rows = embedding(input_, self.weight)
        else:
            elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            ids = (input_ - self.vocab_start_index).masked_fill_(elsewhere, 0)
            rows = embedding(ids, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.reduce_scatter_embeddings:
            by_token = rows.transpose(0, 1).contiguous()
            embedded: Tensor = reduce_scatter_to_sequence_parallel_region(by_token, group=self.tp_group)
        else:
            embedded = reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)
        return embedded


def replace_embeddings(model: nn.Module) -> None:
    """Replace Megatron's embeddings in a model, unless a provider has its own; weights stay."""
    if not is_megatrons(VocabParallelEmbedding, "forward"):
        return
    for module in model.modules():
        if type(module) is VocabParallelEmbedding:
            module.__class__ = Embedding


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return ``weight[ids]``.

    :param ids: ``[...]``, int64.
    :param weight: ``[V, H]``. Where it has a ``main_grad``, the gradient is added to that.
    :returns: ``[..., H]``.
    """
    if not hasattr(weight, "main_grad"):
        return F.embedding(ids, weight)
    embedded: Tensor = _Embedding.apply(ids, weight)
    return embedded


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the rows."""
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Add the gradient to that of the weight."""
        ids, weight = ctx.saved_tensors
        add_rows(weight, ids.flatten(), grads[0].flatten(0, -2))
        return None, handed_back(weight)
