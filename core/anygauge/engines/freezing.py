"""Weights that ``train.freeze`` freezes by regular expression, and the check that others are trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from pydantic import TypeAdapter
from torch import nn

from anygauge.distributed.all_gather import all_gather_values
from anygauge.wording import listed
from anygauge_hooks.errors import ConfigError

__all__ = ["check_learns", "frozen_tensors"]

_LEARNS = TypeAdapter(bool)


def frozen_tensors(
    expressions: Collection[str], names: Mapping[str, Sequence[str]], *, may_lack: bool = False
) -> list[str]:
    """Return the tensors of a model that expressions freeze.

    :param expressions: Each matches whole names of a checkpoint's tensors.
    :param names: Tensors of the whole model, each with the names of the checkpoint's tensors that it is made
        of.
    :param may_lack: Whether expressions may match nothing, as on a critic, which has no output layer.
    :raises ConfigError: One matches nothing, or a part of a tensor.
    """
    for expression in expressions:
        if not may_lack and not any(re.fullmatch(expression, each) for own in names.values() for each in own):
            ends = sorted({".".join(each.split(".")[-2:]) for own in names.values() for each in own})
            raise ConfigError(
                f"train.freeze: {expression!r} matches no weight of the checkpoint.",
                hint="Write vision, audio, language, or an expression of whole names, which end in: "
                f"{', '.join(ends)}.",
            )
    return [tensor for tensor, own in names.items() if _is_frozen(expressions, own)]


def check_learns(freeze: Sequence[str], parameters: Iterable[nn.Parameter]) -> None:
    """Check that a rank trains a parameter. A collective of all ranks.

    :param freeze: ``train.freeze``.
    :param parameters: Those of this rank, after they were frozen; a pipeline stage may train none.
    :raises ConfigError: No rank trains one.
    """
    mine = any(parameter.requires_grad for parameter in parameters)
    learns: list[bool] = all_gather_values(mine, _LEARNS)
    if not any(learns):
        raise ConfigError(
            f"train.freeze = {list(freeze)} leaves nothing to train.",
            hint="Leave a part out of it, or write expressions that match fewer weights. The towers of a "
            "model are trained only in a run that has their media (model.modalities).",
        )


def _is_frozen(expressions: Collection[str], names: Sequence[str]) -> bool:
    """Return whether all of a tensor's names match.

    :raises ConfigError: Only some do.
    """
    inside = [name for name in names if any(re.fullmatch(each, name) for each in expressions)]
    if inside and len(inside) < len(names):
        others = [name for name in names if name not in inside]
        raise ConfigError(
            f"train.freeze: {listed(inside)} is one tensor with {listed(others)} here.",
            hint="Freeze all of them or none, or choose the other train engine, whose tensors differ.",
        )
    return bool(inside)
