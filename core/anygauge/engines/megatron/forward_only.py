"""The engine of a model that is not trained."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from anygauge.engines.megatron.collective_check import check_collectives
from anygauge.engines.megatron.engine import MegatronEngine

__all__ = ["ForwardOnlyEngine"]


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
