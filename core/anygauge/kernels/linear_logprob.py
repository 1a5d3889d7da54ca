"""Fused output layer, log-probability and entropy, one tile of the logits at a time.

Forward keeps the logarithm of each token's normalizer, and the logits of as many tiles as a memory budget
holds. Backward goes from the last tile to the first, frees logits that were kept and computes the others
again. Results and gradients have the same bits whatever the budget is.

A tile is some tokens by some rows of the weight. The more tokens it has, the fewer times the gradient of the
weight is read and written, and the more rows, the fewer times that of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.kernels.main_grad import add_product, handed_back
from anygauge_hooks.tiles import KeepsLogits, Kept, Slopes, Sums, Tile, TileMath

__all__ = ["linear_logprob", "linear_topk"]

HOST_TILE = (512, 4096)
"""Tokens and vocabulary rows of a tile on the host: two float32 buffers, 8 MiB each."""

DEVICE_TILE = (8192, 16896)
"""The same on an accelerator, where a larger product is a faster one: a buffer or two of 528 MiB. This many
rows, and quarters of it, are whole rounds of 128 x 128 for 132 processors, and nearly so for others."""

HOST_SHARE, DEVICE_SHARE = 16, 8
"""The memory of a tile is at most this part of that of all logits, to stay small beside theirs ..."""

SMALLEST_HOST_TILE = 1 << 20
"""... unless it has this many, whose memory is not worth saving."""

SMALLEST_DEVICE_TILE = 1 << 24
"""The same on an accelerator, where few tokens cost the time that it takes to start kernels."""

ALIGNMENT = 256
"""Rows of a tile come in these steps: a product whose rows lie across boundaries takes twice as long."""

PITCH = 32
"""Rows of a tile in which passes work in place lie in memory at multiples of this, for wide loads."""

LEAST_EXPONENT = -1e4
"""Its exponential is 0."""

NOTHING = -1e30
"""A logit of no probability, of which a finite number of differences and products are finite."""

RAREST = -80.0
"""Less than the logarithm of a probability whose inverse has a float32, or that a gradient is worth."""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    group: Any | None,
    *,
    entropy_grad: bool,
    vocab_size: int | None = None,
    rest: bool = False,
    math: TileMath | None = None,
    budget: Callable[[], int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropy of ``softmax(hidden @ weight.T / temperature)``.

    See :class:`anygauge_hooks.kernels.LinearLogprob`.

    :param weight: Where it has a ``main_grad``, the gradient is added to that.
    :param math: The passes over a tile; by default torch makes them.
    :param budget: Returns the bytes in which logits may wait for backward; by default there are none. It is
        asked by calls that record a gradient, and serves passes that are ``KeepsLogits``.
    """
    columns = targets if targets.dim() == 2 else targets.unsqueeze(1)
    result: tuple[Tensor, Tensor] = _LinearLogprob.apply(  # type: ignore[no-untyped-call]  # torch leaves it so
        math or _EAGER,
        hidden,
        weight,
        columns.contiguous(),
        temperature,
        group,
        entropy_grad,
        vocab_size,
        rest,
        budget if torch.is_grad_enabled() else None,  # which forward cannot ask: it is off in there
    )
    return (result[0] if targets.dim() == 2 else result[0].squeeze(1)), result[1]


@torch.no_grad()
def linear_topk(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    group: Any | None,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the top-k tokens of ``softmax(hidden @ weight.T)``, for distillation.

    The other parameters are those of :func:`linear_logprob`, which knows their log-probabilities.

    :param count: Tokens per row, at most the size of the vocabulary.
    :returns: Their ids ``[T, count]``, int64, most probable first.
    """
    best = torch.full((len(hidden), count), -torch.inf, dtype=_wide(hidden.dtype), device=hidden.device)
    ids = torch.zeros_like(best, dtype=torch.int64)
    tiles = _Tiles(hidden, _VocabShard.of(weight, group, vocab_size), ids, 1.0)
    for block in tiles.blocks:
        for number in block:
            tile = tiles.fill(number)
            values, column = tile.logits.topk(min(count, tile.logits.shape[1]), dim=1)
            known = (best[tile.tokens], values), (ids[tile.tokens], column + tile.first)
            best[tile.tokens], ids[tile.tokens] = _merge(*known, count)
    return ids if group is None else _merge(_gather(best, group), _gather(ids, group), count)[1]


def _merge(values: Any, ids: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of several candidate lists, and their ids."""
    best, where = torch.cat(tuple(values), dim=1).topk(count, dim=1)
    return best, torch.cat(tuple(ids), dim=1).gather(1, where)


def _gather(x: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


# -------------------------------------------------------------------------
# Tiles
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _VocabShard:
    """This rank's share of the vocabulary, without padding."""

    weight: Tensor
    start: int
    """Global id of the first row."""

    @classmethod
    def of(cls, weight: Tensor, group: Any | None, vocab_size: int | None) -> _VocabShard:
        width = weight.shape[0]
        start = 0 if group is None else width * dist.get_rank(group)
        kept = width if vocab_size is None else min(width, max(0, vocab_size - start))
        return cls(weight[:kept], start)


@dataclass(slots=True)
class _Memory:
    """Memory of tiles: what forward leaves for backward."""

    buffers: Tensor | None = None
    """``[1, size]``, or ``[2, size]`` with spare memory."""
    filled: int | None = None
    """Number of the tile whose logits are in the buffer."""
    peaks: Tensor | None = None
    """``[T, b]``: of all tiles that are side by side."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Those that are kept, by number of their tile."""


class _Tiles:
    """The tiles of ``hidden @ weight.T``, one after the other in the same memory, but for what is kept.

    :param targets: ``[T, N]``, int64, contiguous.
    :param scale: One over the temperature.
    :param math: The passes over a tile; ``None`` for one that works in place.
    :param memory: Memory of an earlier pass over the same tiles.
    """

    def __init__(
        self,
        hidden: Tensor,
        part: _VocabShard,
        targets: Tensor,
        scale: float,
        math: TileMath | None = None,
        memory: _Memory | None = None,
    ) -> None:
        self.hidden, self.part, self.targets, self.scale = hidden, part, targets, scale
        self._in_place = math is None or math.in_place
        shape = len(hidden), len(part.weight)
        height, width = _tile_shape(*shape, hidden.device, in_place=self._in_place)
        self._step = PITCH if self._in_place else 1
        self.tokens, self._rows = _cut(shape[0], height), _cut(shape[1], width)
        self._size = height * _up(width, self._step)
        self._peaks = math.peaks(width) if isinstance(math, KeepsLogits) else 0
        self.memory = _Memory() if memory is None else memory
        if self._peaks and self.memory.peaks is None:
            columns = self._peaks * len(self._rows)
            self.memory.peaks = hidden.new_empty(shape[0], columns, dtype=_wide(hidden.dtype))

    @property
    def blocks(self) -> list[range]:
        """The numbers of all tiles, those of the same tokens together."""
        width = len(self._rows)
        return [range(block * width, (block + 1) * width) for block in range(len(self.tokens))]

    def fill(self, number: int) -> Tile:
        """Compute the logits of a tile."""
        tile = self._tile(number, self.memory.logits.get(number))
        add_product(tile.logits, self.hidden[tile.tokens], self.part.weight[tile.rows].t(), beta=0)
        self.memory.filled = number
        return tile

    def take(self, number: int) -> Tile:
        """Return a tile for the last time: as it was kept, or with its logits."""
        kept = self.memory.logits.pop(number, None)
        if kept is None and self.memory.filled != number:
            tile = self.fill(number)
        else:
            tile = self._tile(number, kept, has_logits=kept is None or not self._in_place)
        self.memory.filled = None
        return tile

    def keep(self, budget: int) -> None:
        """Allocate memory in which the logits of the last tiles are kept, up to so many bytes."""
        dtype = _kept_dtype(self.hidden.dtype)
        for block in reversed(self.blocks if self._peaks else []):
            for number in reversed(block):
                height, width = self._shape(number)
                pitch = _up(width, self._step)
                budget -= height * pitch * dtype.itemsize
                if budget < 0:
                    return
                self.memory.logits[number] = self.hidden.new_empty(height, pitch, dtype=dtype)[:, :width]

    def release(self) -> None:
        """Free the buffers, unless a backward pass can begin with the logits that are there."""
        filled = self.memory.filled
        if not self._in_place or filled is None or filled in self.memory.logits:
            self.memory.buffers = self.memory.filled = None

    def _parts(self, number: int) -> tuple[slice, slice]:
        block, column = divmod(number, len(self._rows))
        return self.tokens[block], self._rows[column]

    def _shape(self, number: int) -> tuple[int, int]:
        tokens, rows = self._parts(number)
        return tokens.stop - tokens.start, rows.stop - rows.start

    def _tile(self, number: int, kept: Tensor | None, *, has_logits: bool = True) -> Tile:
        tokens, rows = self._parts(number)
        height, width = self._shape(number)
        pitch = _up(width, self._step)
        if has_logits:
            logits, *spare = (x[: height * pitch].view(-1, pitch)[:, :width] for x in self._buffers())
        else:
            logits, spare = self.hidden.new_empty(height, 0, dtype=_wide(self.hidden.dtype)), []
        return Tile(
            tokens,
            rows,
            self.part.start + rows.start,
            self.targets[tokens],
            logits,
            spare[0] if spare else None,
            self.hidden.dtype,
            self.scale,
            self._kept(number, kept),
        )

    def _kept(self, number: int, logits: Tensor | None) -> Kept | None:
        if self.memory.peaks is None:
            return None
        tokens, _ = self._parts(number)
        first = number % len(self._rows) * self._peaks
        if logits is None:
            logits = self.hidden.new_empty(self._shape(number)[0], 0, dtype=_kept_dtype(self.hidden.dtype))
        return Kept(self.memory.peaks[tokens, first : first + self._peaks], logits)

    def _buffers(self) -> Tensor:
        if self.memory.buffers is None:
            count, dtype = 1 if self._in_place else 2, _wide(self.hidden.dtype)
            self.memory.buffers = self.hidden.new_empty(count, self._size, dtype=dtype)
        return self.memory.buffers


def _tile_shape(tokens: int, rows: int, device: torch.device, *, in_place: bool) -> tuple[int, int]:
    """Return how many tokens and rows a tile has; of the one more where there is less of the other."""
    host, buffers = device.type == "cpu", 1 if in_place else 2
    height, width = HOST_TILE if host else DEVICE_TILE
    smallest = SMALLEST_HOST_TILE if host else SMALLEST_DEVICE_TILE
    share = tokens * rows // ((HOST_SHARE if host else DEVICE_SHARE) * buffers)
    size = min(height * width, max(smallest, share))
    height = max(height, size // max(1, rows))
    height = max(1, -(-tokens // max(1, round(tokens / height))))  # no part is much smaller than the others
    width, step = size // height, ALIGNMENT if host or size // height < width // 4 else width // 4
    return height, max(1, min(rows, width - width % step if width > step else width))


def _cut(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for that."""
    return torch.promote_types(dtype, torch.float32)


def _kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of kept logits; derivatives of 16 bits would not show a wider one."""
    return torch.float16 if dtype.itemsize == 2 else _wide(dtype)


# -------------------------------------------------------------------------
# Forward
# -------------------------------------------------------------------------


class _Eager:
    """Tile math with plain torch operators. A row of a tile has one peak."""

    in_place = False

    def peaks(self, width: int) -> int:
        return 1

    def summarize(self, tile: Tile, sums: Sums) -> None:
        column, present = _columns(tile)
        sums.chosen.add_(tile.logits.gather(1, column).masked_fill_(~present, 0))
        peak = tile.logits.amax(1)
        joint = torch.maximum(sums.peak, peak)
        _move(sums, joint, tile.scale)
        if tile.kept is not None:
            self._keep(tile, tile.kept, peak)
        shifted = self._shift(tile, peak)
        weights = torch.exp(shifted, out=tile.spare)
        total, mean = weights.sum(1), shifted.mul_(weights).sum(1)
        shift = (peak - joint) * tile.scale
        weight = shift.exp()
        sums.total.add_(weight * total)
        sums.mean.add_(weight * (mean + shift * total))

    def derive(self, tile: Tile, slopes: Slopes) -> Tensor:
        log_softmax = self._log_softmax(tile, slopes.base)
        assert tile.spare is not None
        softmax = torch.exp(log_softmax, out=tile.spare)
        total = slopes.total[:, None]
        if slopes.slope is None:
            factor = torch.mul(softmax, -total, out=_narrowed(tile.logits, tile.dtype))
        else:
            factor = log_softmax.add_(slopes.entropy[:, None]).mul_(-slopes.slope[:, None])
            factor = factor.sub_(total).mul_(softmax)
            if factor.dtype != tile.dtype:
                factor = _narrowed(tile.spare, tile.dtype).copy_(factor)
        _put(factor, *_columns(tile), slopes.chosen)
        return factor

    def _keep(self, tile: Tile, kept: Kept, peak: Tensor) -> None:
        kept.peaks.copy_(peak[:, None])
        if not kept.logits.shape[1]:
            return
        if kept.logits.dtype == tile.logits.dtype:
            kept.logits.copy_(tile.logits)
        else:
            kept.logits.copy_(torch.sub(tile.logits, peak[:, None], out=tile.spare).mul_(tile.scale))

    def _log_softmax(self, tile: Tile, base: Tensor) -> Tensor:
        kept = tile.kept
        is_kept = kept is not None and kept.logits.shape[1] > 0
        if kept is not None and is_kept:
            tile.logits.copy_(kept.logits)
        if kept is None or kept.logits.dtype == tile.logits.dtype:
            return self._shift(tile, base)
        if not is_kept:
            tile.logits.copy_(self._shift(tile, kept.peaks[:, 0]).to(kept.logits.dtype))
        # bounded, because float16 ends at -65504, and 0 times infinity is no number
        differences = tile.logits.clamp_(min=LEAST_EXPONENT)
        return differences.add_((kept.peaks - base[:, None]) * tile.scale)

    def _shift(self, tile: Tile, base: Tensor) -> Tensor:
        shifted = tile.logits.sub_(base[:, None])
        return shifted if tile.scale == 1 else shifted.mul_(tile.scale)


_EAGER = _Eager()


def _columns(tile: Tile) -> tuple[Tensor, Tensor]:
    """Return the column of each target in a tile, and whether it is there at all."""
    column, count = tile.targets - tile.first, tile.logits.shape[1]
    return column.clamp(0, count - 1), (column >= 0) & (column < count)


def _put(out: Tensor, column: Tensor, present: Tensor, values: Tensor) -> None:
    """Put the values that are present at their columns, where equal columns have equal values."""
    first = present.byte().argmax(1, keepdim=True)
    # what is not here does again what another one does, or else nothing
    column = torch.where(present, column, column.gather(1, first))
    values = torch.where(present, values, values.gather(1, first)).to(out.dtype)
    out.scatter_(1, column, torch.where(present.any(1, keepdim=True), values, out.gather(1, column)))


def _narrowed(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the shape of another one, and of this dtype, at the start of its memory."""
    return memory.view(-1).view(dtype)[: memory.numel()].view(memory.shape)


def _move(sums: Sums, peak: Tensor, scale: float) -> None:
    """Express sums in terms of a new peak."""
    # bounded, because the first peak is no logit, and 0 times infinity is no number
    shift = ((sums.peak - peak) * scale).clamp_(min=LEAST_EXPONENT)
    factor = shift.exp()
    sums.mean.copy_(factor * (sums.mean + shift * sums.total))
    sums.total.mul_(factor)
    sums.peak.copy_(peak)


@dataclass(slots=True)
class _Statistics:
    """Running statistics of each token's distribution. Differences are taken before they are scaled."""

    scale: float
    """One over the temperature."""
    peak: Tensor
    total: Tensor
    mean: Tensor
    chosen: Tensor

    @classmethod
    def start(cls, hidden: Tensor, targets: int, scale: float) -> _Statistics:
        """Return the statistics before the first tile."""
        dtype = _wide(hidden.dtype)
        total, mean = torch.zeros(2, len(hidden), dtype=dtype, device=hidden.device)
        peak = torch.full_like(total, NOTHING)
        return cls(scale, peak, total, mean, total.new_zeros(len(hidden), targets))

    def sums(self, tokens: slice) -> Sums:
        """Return the statistics of some tokens, to accumulate into."""
        return Sums(self.peak[tokens], self.total[tokens], self.mean[tokens], self.chosen[tokens])

    def combine(self, group: Any | None) -> None:
        """Sum over the ranks, in two collectives."""
        if group is None:
            return
        peak = self.peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        _move(self.sums(slice(None)), peak, self.scale)
        sums = torch.cat((self.total[:, None], self.mean[:, None], self.chosen), dim=1)
        dist.all_reduce(sums, group=group)
        self.total, self.mean, self.chosen = sums[:, 0], sums[:, 1], sums[:, 2:]

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of some logits of each token, ``[T, N]``."""
        return (logits - self.peak[:, None]) * self.scale - self.total.log()[:, None]

    def log_fraction(self, all_: _Statistics) -> Tensor:
        """Return the log-probability ``[T]`` of these tokens among all."""
        shift = (self.peak - all_.peak) * self.scale
        return (shift + self.total.log() - all_.total.log()).clamp(min=LEAST_EXPONENT)

    def entropy(self) -> Tensor:
        """Return ``[T]``."""
        return self.total.log() - self.mean / self.total

    def base(self) -> Tensor:
        """Return the logit ``[T]`` whose probability is 1."""
        return self.peak + self.total.log() / self.scale


class _LinearLogprob(torch.autograd.Function):
    """Forward in one pass over the tiles, backward in another."""

    @staticmethod
    def forward(
        ctx: Any,
        math: TileMath,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        group: Any | None,
        entropy_grad: bool,
        vocab_size: int | None,
        rest: bool,
        budget: Callable[[], int] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities ``[T, N]``, or ``[T, N + 1]`` with the rest, and entropies ``[T]``."""
        statistics = _Statistics.start(hidden, targets.shape[1], 1 / temperature)
        others = _Statistics.start(hidden, 0, 1 / temperature) if rest else None
        part = _VocabShard.of(weight, group, vocab_size)
        tiles = _Tiles(hidden, part, targets, 1 / temperature, math)
        if budget is not None and any(ctx.needs_input_grad):
            tiles.keep(budget())
        for block in tiles.blocks:
            for number in block:
                tile = tiles.fill(number)
                without = _without_targets(tile) if rest else None
                math.summarize(tile, statistics.sums(tile.tokens))
                if others is not None and without is not None:
                    math.summarize(without, others.sums(tile.tokens))
        statistics.combine(group)
        logprobs, entropy = statistics.logprobs(statistics.chosen), statistics.entropy()
        if others is not None:
            others.combine(group)
            logprobs = torch.cat((logprobs, others.log_fraction(statistics)[:, None]), 1)
        ctx.save_for_backward(hidden, weight, targets, statistics.base(), entropy, logprobs)
        ctx.math, ctx.entropy_grad = math, entropy_grad
        tiles.release()
        ctx.memory = tiles.memory
        ctx.scale, ctx.group, ctx.vocab_size = statistics.scale, group, vocab_size
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``hidden`` and ``weight``."""
        hidden, weight, *_ = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        grad_weight = _weight_gradient(weight) if ctx.needs_input_grad[2] else None
        _backward(ctx, grads, grad_hidden, grad_weight)
        return (
            None,
            _sum_over(grad_hidden, ctx.group),
            None if grad_weight is None else _for_autograd(weight, grad_weight),
            *[None] * 7,
        )


# -------------------------------------------------------------------------
# Backward
# -------------------------------------------------------------------------


def _slopes(ctx: Any, grads: tuple[Tensor, ...]) -> Slopes:
    """Return the derivatives of the loss by the logits, with ``l = log softmax``.

    ``d logprob = onehot - exp(l)`` and ``d entropy = -exp(l) (l + entropy)``. That of the rest, whose
    probability is ``r``, is ``exp(l) / r - exp(l)``, without the first for a target.
    """
    targets, base, entropy, logprobs = ctx.saved_tensors[2:]
    count = targets.shape[1]
    slope = grads[1] * ctx.scale if ctx.entropy_grad else None
    grad = grads[0].contiguous() * ctx.scale
    total, from_rest = grad[:, :count].sum(1), None
    if grad.shape[1] > count:
        log_rest = logprobs[:, count]
        of_rest = grad[:, count].masked_fill(log_rest <= LEAST_EXPONENT, 0)  # there is none
        total, from_rest = total + of_rest, of_rest * (-log_rest.clamp(min=RAREST)).exp()
    level = total[:, None]
    if slope is not None:
        level = level + slope[:, None] * (logprobs[:, :count] + entropy[:, None])
    chosen = _by_target(grad[:, :count], targets) - logprobs[:, :count].exp() * level
    return Slopes(base, entropy, total if from_rest is None else total - from_rest, slope, chosen)


def _of(slopes: Slopes, tokens: slice) -> Slopes:
    slope = None if slopes.slope is None else slopes.slope[tokens]
    base, entropy, total = (x[tokens] for x in (slopes.base, slopes.entropy, slopes.total))
    return Slopes(base, entropy, total, slope, slopes.chosen[tokens])


def _by_target(grad: Tensor, targets: Tensor) -> Tensor:
    """Return for each target the sum of the gradients of all that are the same token, ``[T, N]``."""
    if targets.shape[1] == 1:
        return grad
    total = torch.zeros_like(grad)
    for index in range(targets.shape[1]):
        total += (targets == targets[:, index, None]) * grad[:, index, None]
    return total


def _without_targets(tile: Tile) -> Tile:
    """Return a copy of a tile in which the targets have no probability."""
    logits, kept = tile.logits.clone(), tile.kept
    _put(logits, *_columns(tile), torch.full_like(tile.targets, NOTHING, dtype=logits.dtype))
    if kept is not None:  # the tile's own stays
        kept = Kept(torch.empty_like(kept.peaks), kept.logits[:, :0])
    return replace(tile, logits=logits, targets=tile.targets[:, :0], kept=kept)


def _backward(ctx: Any, grads: tuple[Tensor, ...], grad_hidden: Tensor, grad_weight: Tensor | None) -> None:
    """Write the gradient of the hidden states, and add to that of the weight."""
    hidden, weight, targets = ctx.saved_tensors[:3]
    part = _VocabShard.of(weight, ctx.group, ctx.vocab_size)
    tiles = _Tiles(hidden, part, targets, ctx.scale, ctx.math, ctx.memory)
    slopes = _slopes(ctx, grads)
    for tokens, block in zip(reversed(tiles.tokens), reversed(tiles.blocks), strict=True):
        total = _accumulator(grad_hidden[tokens])
        for index, number in enumerate(reversed(block)):
            tile = tiles.take(number)
            factor = ctx.math.derive(tile, _of(slopes, tokens))
            add_product(total, factor, part.weight[tile.rows], beta=int(index > 0))
            if grad_weight is not None:
                add_product(grad_weight[tile.rows], factor.t(), hidden[tokens])
        if block and total.dtype != grad_hidden.dtype:
            grad_hidden[tokens] = total
    tiles.release()


def _accumulator(grad: Tensor) -> Tensor:
    """Return where the gradient of some tokens is added up: in place, where that is not to round it."""
    wide = _wide(grad.dtype)
    return grad if grad.dtype == wide else torch.empty_like(grad, dtype=wide)


def _weight_gradient(weight: Tensor) -> Tensor:
    """Return what the gradient is added to: Megatron's own buffer where there is one."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    return weight.new_zeros(weight.shape, dtype=_wide(weight.dtype)) if main is None else main


def _for_autograd(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return autograd's gradient for the weight."""
    return gradient.to(weight.dtype) if getattr(weight, "main_grad", None) is None else handed_back(weight)


def _sum_over(x: Tensor, group: Any | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
