"""Differences between two sides, the table of the largest, and the first that is beyond its limit.

Imports no torch: the process of the command prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

__all__ = ["LIMITS", "Difference", "Limits", "conclusion", "first_divergence", "limits_of", "table"]

Kind = Literal["op", "module", "layer", "parameter", "log-probs"]
_ORDER: Sequence[Kind] = ("op", "module", "layer", "parameter", "log-probs")
"""A layer is wrong because of an op or a module in it, and all that follows because of the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest differences of what is not one op."""

    states: float
    """Largest difference of a token's hidden states after a layer, by norm, relative to what the layer adds
    to them; and of the output of a module, by norm."""
    log_probs: float
    """Largest absolute difference of a token's log-prob."""
    gradients: float
    """Largest difference of a parameter's gradient, by norm."""


LIMITS: Mapping[str, Limits] = {
    "float32": Limits(states=1e-3, log_probs=1e-4, gradients=1e-3),
    "bfloat16": Limits(states=0.1, log_probs=0.1, gradients=0.1),
}
"""Limits by dtype. Those of float32 are the ones of ``anygauge check-model``."""


def limits_of(*dtypes: str) -> Limits:
    """Return the limits of the coarsest dtype."""
    return max((LIMITS[dtype] for dtype in dtypes), key=lambda limits: limits.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one call of an op, or one result of the model, is from the other side's."""

    kind: Kind
    name: str
    layer: int = -1
    """Number of the decoder layer; -1 before the first, and the number of layers after the last."""
    place: str = ""
    """Place of this one among those with the name: ``"layer 0, call 3"``."""
    forward: float | None = None
    gradient: float | None = None
    limit: float
    sources: tuple[str, str] | None = None
    """Kernels of both sides."""

    @property
    def error(self) -> float:
        """The larger of both errors."""
        return max(self.forward or 0.0, self.gradient or 0.0)

    @property
    def diverges(self) -> bool:
        """Whether an error is beyond the limit; one that is no number is."""
        return any(not error <= self.limit for error in (self.forward, self.gradient) if error is not None)

    def __str__(self) -> str:
        kinds = {"forward": self.forward, "gradient": self.gradient}
        errors = [f"{kind} {error:.2g}" for kind, error in kinds.items() if error is not None]
        text = f"{self.kind} {self.name}" if self.kind in ("op", "module") else self.name or self.kind
        text += f" ({self.place})" if self.place else ""
        text += f": {', '.join(errors)}, limit {self.limit:.2g}"
        return text + (f"; {' | '.join(self.sources)}" if self.sources else "")


def first_divergence(differences: Sequence[Difference]) -> Difference | None:
    """Return the first difference beyond its limit, in the order in which a pass computes; ``None`` if none.

    Inputs of ops, modules and layers are those of the other side, so that an error in one of them is its own.
    Gradients of parameters accumulate from the last layer to the first: the last one that is wrong counts.
    """
    wrong = [each for each in differences if each.diverges]
    local = [each for each in wrong if each.kind in ("op", "module")]
    if local:
        return min(local, key=lambda each: (each.layer, each.kind != "op"))
    forward = [each for each in wrong if each.forward is not None and not each.forward <= each.limit]
    if forward:
        return min(forward, key=lambda each: (_ORDER.index(each.kind), each.layer))
    return max(wrong, key=lambda each: each.layer, default=None)


def conclusion(differences: Sequence[Difference]) -> str:
    """Return the last line of a comparison: what is wrong first, if anything is."""
    first = first_divergence(differences)
    if first is None:
        return "no difference is beyond its limit"
    text = f"first divergence: {first}"
    has_layers = any(each.kind == "layer" for each in differences)
    if first.kind in ("parameter", "log-probs") and has_layers:
        text += "; every op, module and layer is right by itself: differences add up over the layers"
        text += ", or tokens go to other experts"
    return text


def table(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield the lines of a table: each op and kind of module with its largest errors."""
    yield f"{'':<6}{'':<11}{'':<34}{'calls':>6}  {'forward':<9}{'gradient':<9}limit"
    ordered = sorted(differences, key=lambda each: (_ORDER.index(each.kind), each.name))
    for (kind, name), group in groupby(ordered, key=lambda each: (each.kind, each.name)):
        yield _line(kind, name, list(group))


def _line(kind: str, name: str, group: Sequence[Difference]) -> str:
    status = "FAIL" if any(each.diverges for each in group) else "PASS"
    worst = max(group, key=lambda each: each.error / each.limit)
    forward, gradient = (
        _largest([getattr(each, field) for each in group]) for field in ("forward", "gradient")
    )
    where = "" if worst.sources is None else f"  {' | '.join(dict.fromkeys(worst.sources))}"
    columns = f"{len(group):>6}  {forward:<9}{gradient:<9}{worst.limit:<8.2g}"
    return f"{status:<6}{kind:<11}{name:<34}{columns}{where}".rstrip()


def _largest(errors: Sequence[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return f"{max(known):.2g}" if known else "-"
