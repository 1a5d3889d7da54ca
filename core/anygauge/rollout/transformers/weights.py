"""Weights in: from the files of a Hugging Face directory, and from a stream of named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from anygauge.hub.weight_files import weight_files
from anygauge_hooks.errors import CheckpointError, WeightMappingError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.engines import WeightStream

__all__ = ["copy_weights", "read_weights"]


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a Hugging Face directory, under their names, on the host.

    :raises CheckpointError: There are none, one is torn or missing, or the index is malformed.
    """
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    yield key, file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {error}.", hint="Download or copy the file again."
            ) from error


def copy_weights(model: Any, weights: WeightStream) -> None:
    """Copy a complete set of weights into a model, in place, converted to its dtype and device.

    A tensor with several names, such as a tied embedding, may come under any of them; its first name in the
    model wins, as it does in transformers.

    :raises WeightMappingError: A tensor is missing, unknown or of the wrong shape. All are listed; the others
        were copied.
    """
    targets = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name, target in targets.items():
        first_names.setdefault(id(target), name)
    written: set[int] = set()
    unknown, wrong = [], []
    for name, source in weights:
        target = targets.get(name)
        if target is None:
            unknown.append(name)
            continue
        if target.shape != source.shape:
            wrong.append(f"{name} is {list(source.shape)} and not {list(target.shape)}")
        elif first_names[id(target)] == name or id(target) not in written:
            with torch.no_grad():
                target.copy_(source)
        # One of the wrong shape is not missing too.
        written.add(id(target))
    missing = [name for key, name in first_names.items() if key not in written]
    _check(type(model).__name__, {"missing": missing, "unknown": unknown, "of the wrong shape": wrong})


def _check(model: str, problems: dict[str, list[str]]) -> None:
    found = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if found:
        raise WeightMappingError(
            f"These weights do not fit {model}. {'; '.join(found)}.",
            hint="A complete set of weights under Hugging Face names is needed; "
            "compare the directory's config.json with the model that the weights are from.",
        )
