"""Attention as graphs of cuDNN, through its Python frontend.

A build takes a tenth of a second, and no two micro-batches are alike: a ragged graph is built for sizes that
are rounded up, and serves every packing within them. CuDNN is faster with plain batches: sequences of one
length that will come again are one, with a graph of their exact sizes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from anygauge_cuda.packing import Mask, Packing

__all__ = ["as_stored", "backward", "by_token", "forward"]

Q, K, V, OUT, SUMS, GRAD, GRAD_Q, GRAD_K, GRAD_V = range(1, 10)
"""Names of a graph's tensors."""

LENGTHS, KEY_LENGTHS = 20, 21

OFFSETS = 30
"""Added to a tensor's name: that of where its sequences begin, counted in its elements."""

TOKEN_STEP = 2048
"""Numbers of tokens are rounded up to a power of two below this, and to a multiple of it above."""

BATCH_STEP = 512
"""Sequences are a batch if their length is a multiple of this: then somebody chose it, and it comes again. Of
lengths that come by chance one in so many pays for a build, and a context of 32,768 tokens has 64 of them."""

BATCH_SEQUENCES = 8
"""Up to so many there may be any number in a batch, and above it a power of two."""

FEWEST_TOKENS = 64
"""CuDNN has nothing for sequences of one token; more blocks than are needed end at once."""

ROW = 32
"""Numbers of a row of offsets: its start is aligned as cuDNN wants."""

_per_thread = threading.local()


@dataclass(frozen=True, slots=True)
class _Case:
    """Shape and options that a graph is built for."""

    device: int
    dtype: torch.dtype
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    is_batch: bool
    """Whether sizes are exact: a plain batch, or else ragged sequences with lengths and offsets."""
    steps: tuple[tuple[int, int], ...]
    """Strides of queries, keys and values, in elements: from a token to the next, and from a head to the
    next."""
    sequences: int
    longest: int
    longest_key: int
    tokens: int
    key_tokens: int
    scale: float
    mask: Mask
    is_square: bool
    deterministic: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, mask: Mask) -> _Case:
        is_batch = _is_batch(packing)
        count, longest = len(packing.queries), max(packing.queries)
        return cls(
            device=q.device.index,
            dtype=q.dtype,
            heads=q.shape[1],
            key_heads=k.shape[1],
            head_dim=q.shape[2],
            value_dim=v.shape[2],
            is_batch=is_batch,
            steps=tuple((x.stride(0), x.stride(1)) for x in (q, k, v)),
            sequences=count if is_batch else _power_of_two(count),
            longest=longest if is_batch else _rounded(longest),
            longest_key=longest if is_batch else _rounded(max(packing.keys)),
            tokens=_rounded(len(q)),
            key_tokens=_rounded(len(k)),
            scale=scale,
            mask=mask,
            is_square=packing.is_square,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def layouts(self) -> dict[int, tuple[int, int, int, int, bool]]:
        """Return heads, head size, both steps, and whether it is of keys, of each tensor."""
        (q, q_head), (k, k_head), (v, v_head) = self.steps
        rows = {
            Q: (self.heads, self.head_dim, q, q_head, False),
            K: (self.key_heads, self.head_dim, k, k_head, True),
            V: (self.key_heads, self.value_dim, v, v_head, True),
            OUT: (self.heads, self.value_dim, self.heads * self.value_dim, self.value_dim, False),
            SUMS: (self.heads, 1, self.heads, 1, False),
            GRAD_Q: (self.heads, self.head_dim, self.heads * self.head_dim, self.head_dim, False),
            GRAD_K: (self.key_heads, self.head_dim, self.key_heads * self.head_dim, self.head_dim, True),
            GRAD_V: (self.key_heads, self.value_dim, self.key_heads * self.value_dim, self.value_dim, True),
        }
        return {**rows, GRAD: rows[OUT]}


def forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Return the output ``[T, H, E]`` and what :func:`by_token` makes the log-sum-exp of.

    :param q: ``[T, H, D]``, bfloat16 or float16, elements of a head side by side; as the next two.
    """
    case = _Case.of(q, k, v, packing, scale, mask)
    output = q.new_empty(*q.shape[:2], v.shape[2])
    shape = (case.sequences, case.heads, case.longest) if case.is_batch else q.shape[:2]
    sums = q.new_empty(shape, dtype=torch.float32)
    _run(_forward_graph(case), {Q: q, K: k, V: v, OUT: output, SUMS: sums}, case, packing)
    return output, sums


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    packing: Packing,
    scale: float,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    :param grad: ``[T, H, E]``, contiguous.
    """
    case = _Case.of(q, k, v, packing, scale, mask)
    outputs = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    given = {Q: q, K: k, V: v, OUT: output, SUMS: sums, GRAD: grad}
    grads = dict(zip((GRAD_Q, GRAD_K, GRAD_V), outputs, strict=True))
    _run(_backward_graph(case), given | grads, case, packing)
    return outputs[0], outputs[1], outputs[2]


def by_token(sums: Tensor) -> Tensor:
    """Return the log-sum-exp ``[T, H]``, float32, of which a batch has ``[N, H, T / N]``."""
    return sums if sums.ndim == 2 else sums.transpose(1, 2).flatten(0, 1)


def as_stored(by_token: Tensor, sums: Tensor) -> Tensor:
    """Return the log-sum-exp ``[T, H]`` in the form of cuDNN's ``sums``; the inverse of :func:`by_token`."""
    return by_token.view(len(sums), -1, by_token.shape[1]).mT.contiguous() if sums.ndim == 3 else by_token


# -------------------------------------------------------------------------
# Graphs
# -------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _forward_graph(case: _Case) -> tuple[Any, int]:
    graph, tensors, options = _begun(case, (Q, K, V))
    output, sums = graph.sdpa(**_named(tensors, q=Q, k=K, v=V), generate_stats=True, **options)
    _declare(graph, case, OUT, output)
    _declare(graph, case, SUMS, sums)
    return _built(graph)


@lru_cache(maxsize=256)
def _backward_graph(case: _Case) -> tuple[Any, int]:
    graph, tensors, options = _begun(case, (Q, K, V, OUT, GRAD, SUMS))
    if not case.is_batch:
        options |= {"max_total_seq_len_q": case.tokens, "max_total_seq_len_kv": case.key_tokens}
    grads = graph.sdpa_backward(
        **_named(tensors, q=Q, k=K, v=V, o=OUT, dO=GRAD, stats=SUMS),
        use_deterministic_algorithm=case.deterministic,
        **options,
    )
    for name, grad in zip((GRAD_Q, GRAD_K, GRAD_V), grads, strict=True):
        _declare(graph, case, name, grad)
    return _built(graph)


def _begun(case: _Case, names: tuple[int, ...]) -> tuple[Any, dict[int, Any], dict[str, Any]]:
    """Return a graph with its inputs, and the options that forward and backward share."""
    import cudnn

    graph = cudnn.pygraph(
        io_data_type=_io_type(case.dtype),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(case.device),
    )
    tensors = {name: _declare(graph, case, name) for name in names}
    # Of as many queries as keys the first sees the first; elsewhere the last sees the last.
    options = {
        "attn_scale": case.scale,
        "use_causal_mask": case.mask.causal and case.is_square,
        "use_causal_mask_bottom_right": case.mask.causal and not case.is_square,
    }
    if case.mask.window is not None:
        options["sliding_window_length"] = case.mask.window
    if not case.is_batch:
        row = {"dim": (case.sequences, 1, 1, 1), "stride": (1, 1, 1, 1), "data_type": cudnn.data_type.INT32}
        counts = [graph.tensor(**row, uid=uid) for uid in (LENGTHS, KEY_LENGTHS)]
        options |= {"use_padding_mask": True, "seq_len_q": counts[0], "seq_len_kv": counts[1]}
    return graph, tensors, options


def _named(tensors: dict[int, Any], **names: int) -> dict[str, Any]:
    return {parameter: tensors[name] for parameter, name in names.items()}


def _declare(graph: Any, case: _Case, name: int, output: Any = None) -> Any:
    """Make an input of a graph, or say where an output goes."""
    import cudnn

    heads, size, token, head, is_key = case.layouts()[name]
    longest = case.longest_key if is_key else case.longest
    by_head = case.is_batch and name == SUMS
    layout = {
        "dim": (case.sequences, heads, longest, size),
        "stride": (heads * longest, longest, 1, 1) if by_head else (longest * token, head, token, 1),
        "data_type": cudnn.data_type.FLOAT if name == SUMS else _io_type(case.dtype),
    }
    begins = {} if case.is_batch else {"ragged_offset": _offsets_of(graph, case, name)}
    if output is None:
        return graph.tensor(**layout, **begins, uid=name)
    output.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
    output.set_data_type(layout["data_type"])
    if not case.is_batch:
        output.set_ragged_offset(begins["ragged_offset"])
    return output.set_uid(name)


def _offsets_of(graph: Any, case: _Case, name: int) -> Any:
    import cudnn

    return graph.tensor(
        dim=(case.sequences + 1, 1, 1, 1),
        stride=(1, 1, 1, 1),
        data_type=cudnn.data_type.INT64,
        uid=OFFSETS + name,
    )


def _io_type(dtype: torch.dtype) -> Any:
    import cudnn

    return {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]


def _built(graph: Any) -> tuple[Any, int]:
    """Return a graph that can run, and the bytes of memory that it needs to."""
    import cudnn

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, graph.get_workspace_size()


# -------------------------------------------------------------------------
# Runs
# -------------------------------------------------------------------------


def _run(built: tuple[Any, int], tensors: dict[int, Tensor], case: _Case, packing: Packing) -> None:
    graph, size = built
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    if not case.is_batch:
        counts, offsets = _on_device(case, packing)
        pointers[LENGTHS], pointers[KEY_LENGTHS] = (row.data_ptr() for row in counts)
        pointers |= {OFFSETS + name: offsets[name - 1].data_ptr() for name in tensors}
    workspace = torch.empty(size, dtype=torch.uint8, device=tensors[Q].device)
    graph.execute(pointers, workspace.data_ptr(), handle=_handle(case.device))


@lru_cache(maxsize=64)
def _on_device(case: _Case, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return lengths ``[2, N]``, int32, and a row of offsets for each tensor, int64.

    Made once for all layers of a micro-batch, and without waiting for the device.
    """
    counts = [_filled(lengths, case.sequences, 0) for lengths in packing]
    return (
        _moved(counts, torch.int32, case.device),
        _moved(_offsets(case, packing), torch.int64, case.device),
    )


def _offsets(case: _Case, packing: Packing) -> list[list[int]]:
    """Return for each tensor, in the order of their names, the element at which each sequence begins."""
    bounds = [_filled([0, *accumulate(lengths)], case.sequences + 1, sum(lengths)) for lengths in packing]
    layouts = case.layouts()
    return [[bound * layouts[name][2] for bound in bounds[layouts[name][4]]] for name in range(Q, GRAD_V + 1)]


def _moved(rows: list[list[int]], dtype: torch.dtype, device: int) -> Tensor:
    width = -(-len(rows[0]) // ROW) * ROW
    host = torch.tensor([_filled(row, width, 0) for row in rows], dtype=dtype).pin_memory()
    return host.to(torch.device("cuda", device), non_blocking=True)


def _filled(values: Any, size: int, value: int) -> list[int]:
    return [*values, *[value] * (size - len(values))]


def _handle(device: int) -> Any:
    """Return this thread's handle for a device, on the stream that is current."""
    import cudnn

    handles: dict[int, Any] = _per_thread.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


def _is_batch(packing: Packing) -> bool:
    """Return whether all sequences have one length, and a graph of exact sizes will be asked for again."""
    count, length = len(packing.queries), packing.queries[0]
    return (
        packing.is_square
        and length % BATCH_STEP == 0
        and packing.queries.count(length) == count
        and (count <= BATCH_SEQUENCES or count == _power_of_two(count))
    )


def _rounded(tokens: int) -> int:
    if tokens < TOKEN_STEP:
        return max(FEWEST_TOKENS, _power_of_two(tokens))
    return -(-tokens // TOKEN_STEP) * TOKEN_STEP


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
