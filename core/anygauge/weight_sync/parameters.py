"""Expected parameters of a server after an update, by checksum.

A server holds some tensors of a checkpoint as one parameter, one below the other, and tells a checksum of
each of its own. Here the checkpoint's tensors are put together the same way: no code of ours runs in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from anygauge.weight_sync.buckets import dtype_of
from anygauge.weight_sync.checksum import checksum, checksum_of_parts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FUSED", "ExpectedParameters", "KnownParameters", "fused_name", "served_name"]

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of a server, and those of the checkpoint whose rows they hold, in order."""
RENAMED: Mapping[str, str] = {
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    ".attn.qkv.": ".attn.qkv_proj.",
    ".self_attn.out_proj.": ".self_attn.proj.",
}
"""Parts of names in checkpoints of multimodal models, and what a server calls them."""
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Parameters that are another one where a checkpoint has none of their own."""
PADDED = ("embed_tokens.weight", "lm_head.weight", "visual.pos_embed.weight")
COMPUTED = (
    ".rotary_emb.axis_map",
    ".embeddings.position_ids",
    ".positional_embedding.positional_embedding",
)
"""How the names of tables end that a server computes by itself."""
PADDING = 64
"""A server rounds the rows of these up to a multiple, with zeros."""


def fused_name(name: str) -> str | None:
    """Return the fused server parameter that contains a tensor of the checkpoint, or ``None``."""
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{fused}.")
    return None


def served_name(name: str) -> str:
    """Return the server's name of a checkpoint tensor that is not fused."""
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return name


class _Parameter(NamedTuple):
    checksums: frozenset[str]
    """As it was sent, and converted to the dtype of the servers."""
    parts: tuple[str, ...]
    """The checkpoint's tensors in it."""


class KnownParameters(NamedTuple):
    """Checksums of tensors, and the server parameters that consist of them, by name."""

    checksums: dict[str, str]
    parameters: dict[str, _Parameter]


class ExpectedParameters:
    """Checksums of an update's tensors, and of the server parameters that consist of them.

    Tensors that are parts of a parameter are held, on the host, until all parts of it have come.

    :param dtypes: Dtypes of the servers' parameters. A server may keep some in the dtype that they came in.
    """

    def __init__(self, dtypes: Collection[str] = ()) -> None:
        self.checksums: dict[str, str] = {}
        """Checksums of the tensors as they were sent."""
        self._dtypes = [dtype_of(each) for each in dtypes]
        self._parameters: dict[str, _Parameter] = {}
        """Parameters of a server that does not split the model."""
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._unverified: set[str] = set()

    @property
    def unverified(self) -> tuple[str, ...]:
        """Server parameters without an expected checksum."""
        return tuple(sorted(self._unverified))

    @property
    def known(self) -> KnownParameters:
        """Checksums and parameters known so far, for another sender's process."""
        return KnownParameters(self.checksums, self._parameters)

    def include(self, known: KnownParameters) -> None:
        """Include what another sender knows. The parts of one parameter are sent by one rank."""
        self.checksums |= known.checksums
        self._parameters |= known.parameters

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the checksum of a tensor."""
        self.checksums[name] = checksum(tensor)
        parameter = self._parameter([tensor], (name,))
        if name.endswith(PADDED) and tensor.shape[0] % PADDING:
            padded = self._parameter([tensor, _padding(tensor)], (name,))
            parameter = _Parameter(parameter.checksums | padded.checksums, (name,))  # not every server pads
        self._parameters[name] = self._parameters[served_name(name)] = parameter
        fused = fused_name(name)
        if fused is not None:
            self._collect(fused, name, tensor)

    def _collect(self, fused: str, name: str, tensor: Tensor) -> None:
        waiting = self._waiting.setdefault(fused, {})
        waiting[name] = tensor.detach().to("cpu", copy=True)
        names = tuple(_parts(fused))
        if all(each in waiting for each in names):
            held = self._waiting.pop(fused)
            whole = self._parameter([held[each] for each in names], names)
            self._parameters[fused] = self._parameters[served_name(fused)] = whole

    def _parameter(self, rows: Sequence[Tensor], names: tuple[str, ...]) -> _Parameter:
        sums = {checksum_of_parts(rows)}
        if rows[0].is_floating_point():
            others = [dtype for dtype in self._dtypes if dtype != rows[0].dtype]
            sums |= {checksum_of_parts(part.to(dtype) for part in rows) for dtype in others}
        return _Parameter(frozenset(sums), names)

    def differences(self, ranks: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the names of tensors that differ between a server and the update.

        :param ranks: For each of its processes, the checksums that it tells. Of a parameter that they divide
            nothing can be said, and it is noted as unverified; one that a process has whole all must have.
        """
        return list(dict.fromkeys(text for rank in ranks for text in self._different(rank, ranks)))

    def _different(self, told: Mapping[str, str], ranks: Sequence[Mapping[str, str]]) -> Iterator[str]:
        for name, value in told.items():
            if name.endswith(COMPUTED):
                continue
            expected = self._parameters.get(name) or self._parameters.get(TIED.get(name, ""))
            if expected is not None and value in expected.checksums:
                continue
            if expected is None or _is_divided(name, expected, ranks):
                self._unverified.add(name)
            elif len(expected.parts) > 1:
                yield f"{name} ({', '.join(expected.parts)})"
            else:
                yield name


def _is_divided(name: str, expected: _Parameter, ranks: Sequence[Mapping[str, str]]) -> bool:
    """Return whether processes hold parts of a parameter: they differ, and none has the whole."""
    told = {rank.get(name) for rank in ranks}
    return len(told) > 1 and not told & expected.checksums


def _parts(fused: str) -> Iterator[str]:
    for module, parts in FUSED.items():
        if f".{module}." in fused:
            yield from (fused.replace(f".{module}.", f".{part}.") for part in parts)


def _padding(tensor: Tensor) -> Tensor:
    rows = -tensor.shape[0] % PADDING
    return tensor.new_zeros((rows, *tensor.shape[1:]))
