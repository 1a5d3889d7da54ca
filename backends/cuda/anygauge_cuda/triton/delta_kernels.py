"""Kernels of the gated delta rule: through the tokens of a chunk, from chunk to chunk, and both ways back.

As in https://arxiv.org/abs/2412.06464 section 3.3, with states transposed: a chunk of ``C`` tokens gets a
state ``S [D, E]``. Tokens add ``U = T beta (V - before K S)``, their outputs are ``before Q S + M U``, and
the next chunk gets ``left S + K^T (after U)``. ``T`` is the inverse of a unit triangular matrix; ``M`` holds
products of queries with keys. ``before``, ``after`` and ``left`` are decays: from the start of the chunk to a
token, from a token to the end, and from the start to the end.

A program of a chunk has one head and all its columns. One that goes from chunk to chunk has one head and a
part of the columns of its state. On Hopper, Triton 3.4 to 3.7 gives wrong products of tiles transposed in
registers (https://github.com/fla-org/flash-linear-attention/issues/984). So left factors are loaded
transposed, except bfloat16 inputs, which are transposed in shared memory. Where the transpose of a product
is needed, it is computed as a product.

The loops of ``through_mixing`` and ``through_system`` have a barrier: overlapped by Triton 3.6 on an H200,
their iterations gave wrong gradients for some shapes, others in each run, or read outside of memory.
Those of ``mix``, ``mix_back``, ``add_up`` and ``trace_back`` gave the same bits in 20 runs on an H200 and
pass the conformance suite, so they are overlapped.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_up", "invert", "mix", "mix_back", "through_mixing", "through_system", "trace_back"]


@triton.jit
def _tokens(chunks: tl.tensor, C: tl.constexpr):
    """Return the tokens of a chunk, and which of them there are."""
    chunk = chunks + 2 * tl.program_id(0)
    token = tl.load(chunk).to(tl.int64) + tl.arange(0, C)
    return token, token < tl.load(chunk + 1)


@triton.jit
def _rows(
    x: tl.tensor,
    row: tl.tensor,
    step: int,
    here: tl.tensor,
    first: int,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    """Return columns of some rows, 0 where there are none."""
    column = first + tl.arange(0, PART)
    mask = here[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * step + column[None, :], mask=mask, other=0.0)


@triton.jit
def _across(
    x: tl.tensor, row: tl.tensor, step: int, here: tl.tensor, WIDTH: tl.constexpr, PART: tl.constexpr
):
    """Return the first columns of some rows, transposed."""
    column = tl.arange(0, PART)
    mask = (column < WIDTH)[:, None] & here[None, :]
    return tl.load(x + row[None, :] * step + column[:, None], mask=mask, other=0.0)


@triton.jit
def _put(
    x: tl.tensor,
    value: tl.tensor,
    row: tl.tensor,
    step: int,
    here: tl.tensor,
    first: int,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    """Store what ``_rows`` returns."""
    column = first + tl.arange(0, PART)
    mask = here[:, None] & (column < WIDTH)[None, :]
    tl.store(x + row[:, None] * step + column[None, :], value, mask=mask)


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, EXACT: tl.constexpr):
    """Return a product in float32, of the precision of float32 if ``EXACT``, else of that of TF32 at least.

    Factors that are bfloat16 are multiplied as they are, others with them as the sum of two.
    """
    if EXACT:
        result = _exact_product(a.to(tl.float32), b.to(tl.float32), EXACT)
    elif a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        result = tl.dot(a, b)
    elif a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        result = tl.dot(a, high, tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16)))
    elif b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        result = tl.dot(high, b, tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), b))
    else:
        result = tl.dot(a, b, input_precision="tf32")
    return result


@triton.jit
def _exact_product(a: tl.tensor, b: tl.tensor, EXACT: tl.constexpr):
    """Return a product of float32 factors, each as the sum of two that tensor cores take.

    With Triton's own ``tf32x3``, every thread has all rows of ``b`` in its registers, and more than fit.
    """
    a_high = _high(a, EXACT)
    b_high = _high(b, EXACT)
    a_low = (a - a_high.to(tl.float32)).to(a_high.dtype)
    b_low = (b - b_high.to(tl.float32)).to(b_high.dtype)
    result = tl.dot(a_low, b_high, input_precision="tf32")
    result = tl.dot(a_high, b_low, result, input_precision="tf32")
    return tl.dot(a_high, b_high, result, input_precision="tf32")


@triton.jit
def _high(x: tl.tensor, EXACT: tl.constexpr):
    """Return float32 numbers rounded to the 11 bits of TF32 if ``EXACT``, else to bfloat16."""
    if EXACT:
        result = (x.to(tl.int32, bitcast=True) + 4096 & -8192).to(tl.float32, bitcast=True)
    else:
        result = x.to(tl.bfloat16)
    return result


@triton.jit
def _sums(g: tl.tensor):
    """Return the logarithm of the decay from the start up to each token.

    In float64, because their differences would cancel in float32.
    """
    return tl.cumsum(g.to(tl.float64), 0)


@triton.jit
def _decay(sums: tl.tensor, C: tl.constexpr):
    """Return what is left at each token (row) of what each token (column) added, 0 for what comes later."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where(row >= column, tl.exp((sums[:, None] - sums[None, :]).to(tl.float32)), 0.0)


@triton.jit
def _decay_back(sums: tl.tensor, C: tl.constexpr):
    """Return the transpose of ``_decay``."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where(row <= column, tl.exp((sums[None, :] - sums[:, None]).to(tl.float32)), 0.0)


@triton.jit
def _slope(pairs: tl.tensor, reached: tl.tensor, kept: tl.tensor):
    """Return the gradients of log decays, from the gradients of sums over ranges of tokens.

    In float64, because a pair that is on one side of a token adds and subtracts.

    :param pairs: Gradient of the sum from behind a token (column) up to another (row).
    :param reached: Gradient of the sum from the start up to each token.
    :param kept: Gradient of the sum from behind each token up to the end.
    """
    pairs = pairs.to(tl.float64)
    kept = kept.to(tl.float64)
    level = reached.to(tl.float64) + tl.sum(pairs, 1) - tl.sum(pairs, 0) - kept
    return (tl.cumsum(level, 0, reverse=True) + tl.sum(kept, 0)).to(tl.float32)


@triton.jit
def invert(
    k: tl.tensor,
    k_step: int,
    k_head: int,
    g: tl.tensor,
    beta: tl.tensor,
    chunks: tl.tensor,
    inverse: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Store ``T`` and the decays of a chunk.

    The inverse of a triangular matrix with blocks ``A, 0`` and ``B, C`` has ``-C^-1 B A^-1`` in place of
    ``B``: so for blocks of one row, then of two, and so on. No step has powers of the matrix, which can be
    larger than its inverse by many orders.
    """
    head = tl.program_id(1).to(tl.int64)
    token, here = _tokens(chunks, C)
    place = token * HEADS + head
    decays = tl.load(g + place, mask=here, other=0.0)
    sums = _sums(decays)
    strength = tl.load(beta + place, mask=here, other=0.0).to(tl.float32)
    keys = _rows(k + head * k_head, token, k_step, here, 0, DEPTH, ROWS)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    products = _product(keys, tl.trans(keys), EXACT)
    system = tl.where(row > column, strength[:, None] * products * _decay(sums, C), 0.0)
    result = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, system, 0.0)
    for power in tl.static_range(1, 6):  # blocks of 2 to 32 rows
        if (1 << power) < C:
            size = 1 << power
            is_pair = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
            crossed = _exact_product(tl.where(is_pair, system, 0.0), result, EXACT)
            result -= _exact_product(result, crossed, EXACT)
    _put(inverse + head * C, result, token, HEADS * C, here, 0, C, C)
    tl.store(before + place, tl.exp(sums.to(tl.float32)), mask=here)
    whole = tl.sum(decays.to(tl.float64), 0)
    tl.store(after + place, tl.exp((whole - sums).to(tl.float32)), mask=here)


@triton.jit
def add_up(
    k: tl.tensor,
    k_step: int,
    k_head: int,
    v: tl.tensor,
    v_step: int,
    v_head: int,
    beta: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    inverse: tl.tensor,
    chunks: tl.tensor,
    starts: tl.tensor,
    states: tl.tensor,
    added: tl.tensor,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Go through the chunks of a sequence; store the state before each, and ``U``."""
    head, column = tl.program_id(1).to(tl.int64), tl.program_id(2) * PART
    first, last = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    begin = tl.load(chunks + 2 * first).to(tl.int64)
    end = tl.load(chunks + 2 * last - 1).to(tl.int64)
    depth, is_depth = tl.arange(0, ROWS), tl.arange(0, ROWS) < DEPTH
    state = tl.zeros((ROWS, PART), tl.float32)
    for step in range(0, last - first):
        token = begin + step * C + tl.arange(0, C)
        here = token < end
        target = states + ((first + step).to(tl.int64) * HEADS + head) * DEPTH * WIDTH
        _put(target, state, depth, WIDTH, is_depth, column, WIDTH, PART)
        place = token * HEADS + head
        keys = _rows(k + head * k_head, token, k_step, here, 0, DEPTH, ROWS)
        values = _rows(v + head * v_head, token, v_step, here, column, WIDTH, PART).to(tl.float32)
        strength = tl.load(beta + place, mask=here, other=0.0).to(tl.float32)
        known = tl.load(before + place, mask=here, other=0.0)[:, None]
        kept = tl.load(after + place, mask=here, other=0.0)[:, None]
        left = tl.load(before + (tl.minimum(begin + step * C + C, end) - 1) * HEADS + head)
        wanted = strength[:, None] * (values - known * _product(keys, state, EXACT))
        solution = _rows(inverse + head * C, token, HEADS * C, here, 0, C, C)
        fresh = _product(solution, wanted, EXACT)
        _put(added + head * WIDTH, fresh, token, HEADS * WIDTH, here, column, WIDTH, PART)
        keys = _across(k + head * k_head, token, k_step, here, DEPTH, ROWS) if EXACT else tl.trans(keys)
        state = left * state + _product(keys, kept * fresh, EXACT)


@triton.jit
def mix(
    q: tl.tensor,
    q_step: int,
    q_head: int,
    k: tl.tensor,
    k_step: int,
    k_head: int,
    g: tl.tensor,
    before: tl.tensor,
    chunks: tl.tensor,
    states: tl.tensor,
    added: tl.tensor,
    output: tl.tensor,
    scale: float,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Store the outputs of a chunk."""
    head = tl.program_id(1).to(tl.int64)
    token, here = _tokens(chunks, C)
    depth, is_depth = tl.arange(0, ROWS), tl.arange(0, ROWS) < DEPTH
    place = token * HEADS + head
    sums = _sums(tl.load(g + place, mask=here, other=0.0))
    known = scale * tl.load(before + place, mask=here, other=0.0)[:, None]
    queries = _rows(q + head * q_head, token, q_step, here, 0, DEPTH, ROWS)
    keys = _rows(k + head * k_head, token, k_step, here, 0, DEPTH, ROWS)
    mixing = scale * _product(queries, tl.trans(keys), EXACT) * _decay(sums, C)
    states += (tl.program_id(0).to(tl.int64) * HEADS + head) * DEPTH * WIDTH
    for column in range(0, WIDTH, PART):
        state = _rows(states, depth, WIDTH, is_depth, column, WIDTH, PART)
        fresh = _rows(added + head * WIDTH, token, HEADS * WIDTH, here, column, WIDTH, PART)
        result = known * _product(queries, state, EXACT) + _product(mixing, fresh, EXACT)
        _put(output + head * WIDTH, result, token, HEADS * WIDTH, here, column, WIDTH, PART)


@triton.jit
def mix_back(
    q: tl.tensor,
    q_step: int,
    q_head: int,
    k: tl.tensor,
    k_step: int,
    k_head: int,
    grad: tl.tensor,
    grad_step: int,
    grad_head: int,
    g: tl.tensor,
    chunks: tl.tensor,
    local: tl.tensor,
    scale: float,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Store the gradient of ``U`` from the outputs of its own chunk."""
    head = tl.program_id(1).to(tl.int64)
    token, here = _tokens(chunks, C)
    sums = _sums(tl.load(g + token * HEADS + head, mask=here, other=0.0))
    queries = _rows(q + head * q_head, token, q_step, here, 0, DEPTH, ROWS)
    keys = _rows(k + head * k_head, token, k_step, here, 0, DEPTH, ROWS)
    mixing = scale * _product(keys, tl.trans(queries), EXACT) * _decay_back(sums, C)
    for column in range(0, WIDTH, PART):
        slope = _rows(grad + head * grad_head, token, grad_step, here, column, WIDTH, PART)
        result = _product(mixing, slope, EXACT)
        _put(local + head * WIDTH, result, token, HEADS * WIDTH, here, column, WIDTH, PART)


@triton.jit
def trace_back(
    q: tl.tensor,
    q_step: int,
    q_head: int,
    k: tl.tensor,
    k_step: int,
    k_head: int,
    grad: tl.tensor,
    grad_step: int,
    grad_head: int,
    beta: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    inverse: tl.tensor,
    chunks: tl.tensor,
    starts: tl.tensor,
    local: tl.tensor,
    slopes: tl.tensor,
    wanted: tl.tensor,
    scale: float,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Go through the chunks from the last; store the gradients of the state after each, and of ``T^-1 U``."""
    head, column = tl.program_id(1).to(tl.int64), tl.program_id(2) * PART
    first, last = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    begin = tl.load(chunks + 2 * first).to(tl.int64)
    end = tl.load(chunks + 2 * last - 1).to(tl.int64)
    depth, is_depth = tl.arange(0, ROWS), tl.arange(0, ROWS) < DEPTH
    slope = tl.zeros((ROWS, PART), tl.float32)
    for back in range(0, last - first):
        step = last - first - 1 - back
        token = begin + step * C + tl.arange(0, C)
        here = token < end
        target = slopes + ((first + step).to(tl.int64) * HEADS + head) * DEPTH * WIDTH
        _put(target, slope, depth, WIDTH, is_depth, column, WIDTH, PART)
        place = token * HEADS + head
        keys = _rows(k + head * k_head, token, k_step, here, 0, DEPTH, ROWS)
        given = _rows(grad + head * grad_head, token, grad_step, here, column, WIDTH, PART).to(tl.float32)
        strength = tl.load(beta + place, mask=here, other=0.0).to(tl.float32)[:, None]
        known = tl.load(before + place, mask=here, other=0.0)[:, None]
        kept = tl.load(after + place, mask=here, other=0.0)[:, None]
        left = tl.load(before + (tl.minimum(begin + step * C + C, end) - 1) * HEADS + head)
        fresh = _rows(local + head * WIDTH, token, HEADS * WIDTH, here, column, WIDTH, PART).to(tl.float32)
        fresh += kept * _product(keys, slope, EXACT)
        solution = _across(inverse + head * C, token, HEADS * C, here, C, C)
        needed = _product(solution, fresh, EXACT)
        _put(wanted + head * WIDTH, needed, token, HEADS * WIDTH, here, column, WIDTH, PART)
        if EXACT:
            queries = _across(q + head * q_head, token, q_step, here, DEPTH, ROWS)
            keys = _across(k + head * k_head, token, k_step, here, DEPTH, ROWS)
        else:
            queries = tl.trans(_rows(q + head * q_head, token, q_step, here, 0, DEPTH, ROWS))
            keys = tl.trans(keys)
        slope = left * slope + _product(queries, scale * known * given, EXACT)
        slope -= _product(keys, known * strength * needed, EXACT)


@triton.jit
def through_mixing(
    q: tl.tensor,
    q_step: int,
    q_head: int,
    k: tl.tensor,
    k_step: int,
    k_head: int,
    grad: tl.tensor,
    grad_step: int,
    grad_head: int,
    g: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    chunks: tl.tensor,
    states: tl.tensor,
    slopes: tl.tensor,
    added: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dg: tl.tensor,
    scale: float,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Store the gradients of ``q``, ``k`` and ``g`` through the outputs of a chunk and the state after it."""
    head = tl.program_id(1).to(tl.int64)
    token, here = _tokens(chunks, C)
    depth, is_depth = tl.arange(0, ROWS), tl.arange(0, ROWS) < DEPTH
    place = token * HEADS + head
    states += (tl.program_id(0).to(tl.int64) * HEADS + head) * DEPTH * WIDTH
    slopes += (tl.program_id(0).to(tl.int64) * HEADS + head) * DEPTH * WIDTH
    pairs = tl.zeros((C, C), tl.float32)
    read = tl.zeros((C, ROWS), tl.float32)
    written = tl.zeros((ROWS, C), tl.float32)
    carried = tl.zeros((ROWS,), tl.float32)
    for column in range(0, WIDTH, PART):
        given = _rows(grad + head * grad_head, token, grad_step, here, column, WIDTH, PART)
        fresh = _rows(added + head * WIDTH, token, HEADS * WIDTH, here, column, WIDTH, PART)
        state = _rows(states, depth, WIDTH, is_depth, column, WIDTH, PART)
        slope = _rows(slopes, depth, WIDTH, is_depth, column, WIDTH, PART)
        pairs += _product(given, tl.trans(fresh), EXACT)
        read += _product(given, tl.trans(state), EXACT)
        written += _product(slope, tl.trans(fresh), EXACT)
        carried += tl.sum(state.to(tl.float32) * slope.to(tl.float32), 1)
        tl.debug_barrier()  # so that Triton does not overlap iterations
    sums = _sums(tl.load(g + place, mask=here, other=0.0))
    known = tl.load(before + place, mask=here, other=0.0)
    kept = tl.load(after + place, mask=here, other=0.0)
    queries = _rows(q + head * q_head, token, q_step, here, 0, DEPTH, ROWS)
    keys = _rows(k + head * k_head, token, k_step, here, 0, DEPTH, ROWS)
    pairs *= scale * _decay(sums, C)
    read *= scale * known[:, None]
    written *= kept[None, :]
    reached = tl.sum(read * queries.to(tl.float32), 1)
    across = _across(k + head * k_head, token, k_step, here, DEPTH, ROWS)
    lasting = tl.sum(written * across.to(tl.float32), 0)
    left = tl.load(before + (tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) - 1) * HEADS + head)
    reached += tl.where(tl.arange(0, C) == C - 1, left * tl.sum(carried, 0), 0.0)
    scores = _product(queries, tl.trans(keys), EXACT)
    tl.store(dg + place, _slope(pairs * scores, reached, lasting), mask=here)
    read += _product(pairs, keys, EXACT)
    _put(dq + head * DEPTH, read, token, HEADS * DEPTH, here, 0, DEPTH, ROWS)
    across = _across(q + head * q_head, token, q_step, here, DEPTH, ROWS)
    written += _product(across, pairs, EXACT)
    target = dk + head * DEPTH + token[None, :] * HEADS * DEPTH + depth[:, None]
    tl.store(target, written, mask=is_depth[:, None] & here[None, :])


@triton.jit
def through_system(
    k: tl.tensor,
    k_step: int,
    k_head: int,
    v: tl.tensor,
    v_step: int,
    v_head: int,
    g: tl.tensor,
    beta: tl.tensor,
    before: tl.tensor,
    chunks: tl.tensor,
    states: tl.tensor,
    added: tl.tensor,
    wanted: tl.tensor,
    dk_mixing: tl.tensor,
    dg_mixing: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    dg: tl.tensor,
    dbeta: tl.tensor,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Store the gradients of ``k``, ``v``, ``g`` and ``beta``: those through ``U`` are added to the others.

    The gradient of the triangular matrix is minus that of the system's right side times ``U^T``.
    """
    head = tl.program_id(1).to(tl.int64)
    token, here = _tokens(chunks, C)
    depth, is_depth = tl.arange(0, ROWS), tl.arange(0, ROWS) < DEPTH
    place = token * HEADS + head
    states += (tl.program_id(0).to(tl.int64) * HEADS + head) * DEPTH * WIDTH
    strength = tl.load(beta + place, mask=here, other=0.0).to(tl.float32)
    pairs = tl.zeros((C, C), tl.float32)
    pairs_back = tl.zeros((C, C), tl.float32)
    read = tl.zeros((ROWS, C), tl.float32)
    steepness = tl.zeros((C,), tl.float32)
    for column in range(0, WIDTH, PART):
        values = _rows(v + head * v_head, token, v_step, here, column, WIDTH, PART)
        fresh = _rows(added + head * WIDTH, token, HEADS * WIDTH, here, column, WIDTH, PART)
        needed = _rows(wanted + head * WIDTH, token, HEADS * WIDTH, here, column, WIDTH, PART)
        state = _rows(states, depth, WIDTH, is_depth, column, WIDTH, PART)
        pairs -= _product(needed, tl.trans(fresh), EXACT)
        pairs_back -= _product(fresh, tl.trans(needed), EXACT)
        read += _product(state, tl.trans(needed), EXACT)
        wide = needed.to(tl.float32)
        steepness += tl.sum(wide * values.to(tl.float32), 1)
        slope = strength[:, None] * wide
        _put(dv + head * WIDTH, slope, token, HEADS * WIDTH, here, column, WIDTH, PART)
        tl.debug_barrier()  # so that Triton does not overlap iterations
    sums = _sums(tl.load(g + place, mask=here, other=0.0))
    known = tl.load(before + place, mask=here, other=0.0)
    keys = _rows(k + head * k_head, token, k_step, here, 0, DEPTH, ROWS)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    read *= -known[None, :]
    across = _across(k + head * k_head, token, k_step, here, DEPTH, ROWS)
    reached = tl.sum(read * across.to(tl.float32), 0)
    pairs *= tl.where(row > column, _decay(sums, C), 0.0)
    products = pairs * _product(keys, tl.trans(keys), EXACT)
    tl.store(dbeta + place, steepness + tl.sum(products, 1) + reached, mask=here)
    slope = _slope(strength[:, None] * products, strength * reached, tl.zeros((C,), tl.float32))
    slope += tl.load(dg_mixing + place, mask=here, other=0.0)
    tl.store(dg + place, slope, mask=here)
    pairs_back *= tl.where(row < column, _decay_back(sums, C), 0.0)
    both = strength[:, None] * pairs + strength[None, :] * pairs_back
    read = strength[None, :] * read + _product(across, both, EXACT)
    offset = head * DEPTH + token[None, :] * HEADS * DEPTH + depth[:, None]
    mask = is_depth[:, None] & here[None, :]
    tl.store(dk + offset, read + tl.load(dk_mixing + offset, mask=mask, other=0.0), mask=mask)
