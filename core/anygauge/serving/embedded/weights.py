"""Weight loading: from a Hugging Face directory, and from a stream of named tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anygauge.engines.dequantize import open_unquantized
from anygauge_hooks.errors import WeightMappingError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.engines import WeightStream

__all__ = ["CheckpointNames", "copy_weights", "read_weights"]


def read_weights(directory: Path, *, without: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a Hugging Face directory, under their names, on the host.

    Those that FP8 weights have been quantized to are multiplied by their scales.

    :param without: Names that begin so are passed over.
    :raises CheckpointError: There are none, one is torn or missing, the index is malformed, or they are
        quantized in a way that is not supported.
    """
    with open_unquantized(directory) as source:
        for name in sorted(source.names):
            if not name.startswith(without):
                yield name, source(name)


def copy_weights(model: Any, weights: WeightStream) -> None:
    """Copy a complete set of weights into a model, in place, converted to its dtype and device.

    A tensor with several names, such as a tied embedding, may come under any of them; its first name in the
    model wins, as it does in transformers. Names may be those of the checkpoint where the model has others.

    :raises WeightMappingError: A tensor is missing, unknown or of the wrong shape. All are listed; the others
        were copied.
    """
    targets = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name, target in targets.items():
        first_names.setdefault(id(target), name)
    written: set[int] = set()
    unknown, wrong = [], []
    stored: CheckpointNames | None = None
    for name, source in weights:
        target = targets.get(name)
        if target is None:
            stored = stored or CheckpointNames(model, targets)
            target = stored.find(name)
        if target is None:
            if stored is not None and not stored.is_ignored(name):
                unknown.append(name)
            continue
        tensor = source
        if target.shape != source.shape:
            stored = stored or CheckpointNames(model, targets)
            tensor = stored.turned(name, source)
        if target.shape != tensor.shape:
            wrong.append(f"{name} is {list(source.shape)} and not {list(target.shape)}")
        elif first_names.get(id(target), name) == name or id(target) not in written:
            with torch.no_grad():
                target.copy_(tensor)
        # One of the wrong shape is not missing too.
        written.add(id(target))
    missing = [
        name
        for key, first in first_names.items()
        if key not in written
        for name in (stored.missing(first, written) if stored is not None else [first])
    ]
    _check(type(model).__name__, {"missing": missing, "unknown": unknown, "of the wrong shape": wrong})


class CheckpointNames:
    """Mapping from the names of a checkpoint to those of the transformers model.

    Experts are one tensor in memory and one each on disk; some models drop a prefix, or leave tensors out.

    :param targets: Tensors of the model, by its own names.
    """

    def __init__(self, model: Any, targets: Mapping[str, Tensor]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._targets = targets
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._renamings: list[Any] = []
        self._turned: list[tuple[str, tuple[int, int]]] = []
        self._ignored = model._keys_to_ignore_on_load_unexpected or ()
        self._prefix = f"{model.base_model_prefix}."
        for entry in get_model_conversion_mapping(model):
            operations = [type(each).__name__ for each in getattr(entry, "operations", ())]
            if operations in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
                self._add_stacks(entry.target_patterns[0], entry.source_patterns)
            elif operations == ["Transpose"]:
                turn = entry.operations[0]
                self._turned.append((entry.source_patterns[0], (turn.dim0, turn.dim1)))
            elif not operations:
                self._renamings.append(entry)
        self._places = {name: part for parts in self._parts.values() for name, part in parts.items()}
        self._places |= targets

    def _add_stacks(self, stack: str, patterns: Sequence[str]) -> None:
        """Note where each expert's tensors lie in the stacks of all layers."""
        for name, target in self._targets.items():
            if not name.endswith(f".{stack}"):
                continue
            layer = name.removesuffix(stack)
            self._parts[name] = {
                f"{layer}{pattern.replace('*', str(expert))}": part
                for expert, whole in enumerate(target.detach())
                for pattern, part in zip(patterns, whole.chunk(len(patterns)), strict=True)
            }

    def find(self, name: str) -> Tensor | None:
        """Return where a tensor of the checkpoint goes, or ``None`` if the model does not know it."""
        for renaming in self._renamings:  # a pattern may be of names inside a part of the model alone
            name, _ = renaming.rename_source_key(name)
        return self._places.get(name, self._places.get(name.removeprefix(self._prefix)))

    def turned(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the checkpoint as the model has it, where its matrices may lie the other way."""
        dims = next((dims for pattern, dims in self._turned if name.endswith(f".{pattern}")), None)
        return tensor if dims is None or tensor.dim() <= max(dims) else tensor.transpose(*dims)

    def is_ignored(self, name: str) -> bool:
        """Return whether the model leaves a tensor of its checkpoints out."""
        return any(re.search(pattern, name) for pattern in self._ignored)

    def missing(self, name: str, written: Collection[int]) -> list[str]:
        """Return the parts of an incomplete tensor that were not written."""
        parts = self._parts.get(name)
        return [name] if not parts else [each for each, part in parts.items() if id(part) not in written]


def _check(model: str, problems: dict[str, list[str]]) -> None:
    lists = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if lists:
        raise WeightMappingError(
            f"These weights do not fit {model}. {'; '.join(lists)}.",
            hint="A complete set of weights under Hugging Face names is needed; "
            "compare the directory's config.json with the model that the weights are from.",
        )
