"""Checks of a model at the start: whether it keeps packed sequences apart, and what its output layer is.

Two short sequences run alone, by transformers' own eager attention. A model whose results differ when they
are packed (no varlen path, recurrent state) gets one sequence a row, and one whose logits are no product of
hidden states and a weight (soft caps, biases) computes its logits itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.engines.fsdp.attention import ATTENTION, packing_arguments
from anygauge.engines.fsdp.batch import model_inputs
from anygauge.engines.fsdp.model import Outputs, ShardedModel
from anygauge.engines.fsdp.towers import Tower
from anygauge.kernels.table import KernelTable
from anygauge_hooks.errors import ConfigError

__all__ = ["check_at_start"]

LENGTHS = (13, 9)
"""Tokens of the sequences."""


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """Largest relative errors of a token's hidden states. Attention to another sequence changes far more."""

    alone: float
    """Between attention functions, over one sequence."""
    together: float
    """Between a sequence alone and beside another one."""
    share: float
    """Share of the tokens of a sequence that must be within: rounding sends some to other experts."""


TOLERANCE: Mapping[torch.dtype, _Tolerance] = {
    torch.float32: _Tolerance(1e-4, 1e-4, 1.0),
    torch.bfloat16: _Tolerance(0.1, 0.03, 0.5),
}
PADDED = ("sdpa", "eager")
"""Attention functions of transformers for one sequence a row, the faster one first."""

_log = logging.getLogger(__name__)


@torch.no_grad()
def check_at_start(
    root: ShardedModel, kernels: KernelTable, dtype: torch.dtype, device: torch.device
) -> None:
    """Set how the model is run: its layers, attention, ``is_packed`` and ``logit_scale``. A collective.

    :raises ConfigError: Its results differ in every way that there is, or a model with towers computes its
        logits otherwise than from hidden states.
    """
    check = _Check(root, kernels, dtype, device)
    reason = check.choose_packing()
    name = type(root.model).__name__
    for tower in root.towers or ():
        if (own := check.choose_tower_attention(tower)) and dist.get_rank() == 0:
            _log.warning("%s: %s", name, own)
    if reason and dist.get_rank() == 0:
        _log.warning("%s: sequences are padded, one a row, and not packed: %s", name, reason)
    if not hasattr(root, "score"):
        root.logit_scale = check.logit_scale()
        if root.logit_scale is None and root.towers is not None:
            raise ConfigError(
                f"The logits of {name} are no product of hidden states and a weight.",
                hint="train.engine = 'fsdp' trains such a model on text alone: leave out model.modalities "
                "and data.multimodal_keys.",
            )
        if root.logit_scale is None and dist.get_rank() == 0:
            _log.warning(
                "%s: its logits are no product of hidden states and a weight, so the model computes them "
                "itself, for all tokens of a micro-batch at once",
                name,
            )


class _Check:
    def __init__(
        self, root: ShardedModel, kernels: KernelTable, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.root = root
        self.kernels = kernels
        self.dtype = dtype
        self.tolerance = TOLERANCE[dtype]
        self.device = device
        size = root.model.config.get_text_config().vocab_size
        tokens = (torch.arange(sum(LENGTHS)) * 7919 + 3) % size
        self.sequences = tokens.split(list(LENGTHS))

    def choose_packing(self) -> str:
        """Choose an attention function, and return why it is not the packed one."""
        model, decoder = self.root.model, self.root.decoder
        _use_attention(model, "eager")
        expected = self.alone(is_packed=False)
        self.bind_layers(expected)
        _use_attention(decoder, ATTENTION)
        reason = self.difference(expected, is_packed=True)
        if not reason:
            return ""
        self.root.is_packed = False
        for name in PADDED:
            if name == "sdpa" and not model._supports_sdpa:
                continue
            _use_attention(decoder, name)
            if not self.difference(expected, is_packed=False):
                return reason
        raise ConfigError(
            f"{type(model).__name__} computes other results for a sequence beside others, packed or padded, "
            "than for the sequence alone.",
            hint="No train engine of transformers' models can train it.",
        )

    def bind_layers(self, expected: Sequence[Tensor]) -> None:
        """Let layers take the kernels of the table, unless the model as a whole then computes otherwise."""
        with_towers = [*expected, *self.tower_features()]
        restore = self.root.table_layers.bind(self.kernels, self.dtype)
        bound = [*self.alone(is_packed=False), *self.tower_features()]
        if (off := self.error(bound, with_towers)) > self.tolerance.alone:
            restore()
            if dist.get_rank() == 0:
                text = "%s: no layer takes a kernel of the backend: results differ by %.1f%%"
                _log.warning(text, type(self.root.model).__name__, 100 * off)

    def tower_features(self) -> list[Tensor]:
        """Return the features of each tower for some contents, ``[N, H]``, float32."""
        return [self.features_of(tower) for tower in self.root.towers or ()]

    def features_of(self, tower: Tower) -> Tensor:
        """Return the features of a tower for contents that are packed, ``[N, H]``, float32."""
        inputs = tower.smallest(self.device, count=3)

        def features(_: Outputs) -> Tensor:
            main, levels = tower.features(inputs)
            return torch.cat((main, *levels)).float()

        result: Tensor = self.root({}, torch.empty(0), features)
        return result

    def choose_tower_attention(self, tower: Tower) -> str:
        """Choose a tower's attention function, and return why it is not that of the table."""
        expected = self.features_of(tower)
        reason = ""
        for name in (ATTENTION, *PADDED):
            _use_attention(tower.module, name)
            try:
                off = self.error([self.features_of(tower)], [expected])
            except (NotImplementedError, TypeError, ValueError) as error:
                reason = reason or f"the tower {tower.spec.name!r} has its own attention: {error}"
                continue
            if off <= self.tolerance.alone:
                break
            reason = (
                reason or f"the tower {tower.spec.name!r} has its own attention: features differ by {off:.1%}"
            )
        return reason

    def difference(self, expected: Sequence[Tensor], *, is_packed: bool) -> str:
        """Return why the sequences alone or together are not what is expected; empty if they are."""
        try:
            alone = self.alone(is_packed=is_packed)
            together = self.hidden(self.sequences, is_packed=is_packed).split(list(LENGTHS))
        except (NotImplementedError, TypeError, ValueError) as error:
            return str(error)
        if (off := self.error(alone, expected)) > self.tolerance.alone:
            return f"a sequence differs by {off:.1%} from that of eager attention"
        if (off := self.error(together, alone)) > self.tolerance.together:
            return f"a sequence beside another one differs by {off:.1%}"
        return ""

    def error(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        """Return the relative error that the wanted share of each sequence's tokens is within."""
        errors = [(a - b).norm(dim=1) / b.norm(dim=1) for a, b in zip(one, other, strict=True)]
        return max(float(each.nan_to_num(torch.inf).quantile(self.tolerance.share)) for each in errors)

    def alone(self, *, is_packed: bool) -> list[Tensor]:
        """Return the hidden states of each sequence by itself."""
        return [self.hidden([each], is_packed=is_packed) for each in self.sequences]

    def hidden(self, sequences: Sequence[Tensor], *, is_packed: bool) -> Tensor:
        """Return the hidden states of all tokens, ``[T, H]``, float32."""
        result: Tensor = self.run(sequences, Outputs.hidden, is_packed=is_packed)
        return result.float()

    def run(self, sequences: Sequence[Tensor], compute: Any, *, is_packed: bool) -> Any:
        """Run the model over sequences, and compute something for each of their tokens."""
        inputs = model_inputs(sequences, is_packed=is_packed)
        inputs = {n: v.to(self.device) if isinstance(v, Tensor) else v for n, v in inputs.items()}
        if is_packed:
            inputs |= packing_arguments(inputs.pop("boundaries"), inputs.pop("lengths"))
        longest, first = max(map(len, sequences)), 0
        rows = []
        for each in sequences:
            rows.append(torch.arange(first, first + len(each), device=self.device))
            first += len(each) if is_packed else longest
        return self.root(inputs, torch.cat(rows), compute)

    def logit_scale(self) -> float | None:
        """Return what the product of hidden states and the output layer's weight is scaled by.

        :returns: ``None`` if that is not all that the model does.
        """
        # A bias of zeros changes no logit now, and must get its gradient.
        if getattr(self.root.model.get_output_embeddings(), "bias", None) is not None:
            return None

        def compared(outputs: Outputs) -> tuple[Tensor, Tensor]:
            weight = outputs.root.model.get_output_embeddings().weight
            return outputs.logits().float(), (outputs.hidden() @ weight.t()).float()

        logits, product = self.run(self.sequences, compared, is_packed=self.root.is_packed)
        tolerance = self.tolerance.together
        scale = float((logits * product).sum() / product.square().sum())
        scale = 1.0 if abs(scale - 1) <= 1e-3 else scale
        off = float((product * scale - logits).norm() / logits.norm())
        return scale if scale > 0 and off <= tolerance else None


def _use_attention(model: Any, name: str) -> None:
    """Let the modules of this model take an attention function by its name, which their config has.

    Transformers' own setter looks on a hub for a name with "flash" in it.
    """
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name
