"""The kernels of the CUDA backend at the sizes of real models, beside every other source that is installed.

Run it as ``python bench/kernels.py --backend cuda``. Every source runs on the same few sets of inputs in
turns, captured in one graph, so that caches are cold and the host does not count. A source that makes the
host wait is marked with ``*``: it cannot be captured, and its time has the waiting in it. The whole table
takes a minute or two the first time, most of it compiling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_kernels import permute, rms_norm, rotary, swiglu

from anygauge.kernels.table import KernelTable, reference_kernel, resolve_kernels
from anygauge.plugins import find_backend, load_plugins
from anygauge_hooks.kernels import KernelOp

OTHERS = ("liger_kernel", "transformer_engine", "flash_attn", "apex", "quack", "fla", "causal_conv1d")
"""Libraries with kernels of these operations."""

SETS = 3
REPLAYS = 8
TOKENS = 8192
EPS = 1e-6
WAITING = "*"
PRODUCTS = ("grouped_matmul", "varlen_attention")
"""Operations whose rate is one of products."""


@dataclass
class Case:
    """One operation at one size."""

    op: KernelOp
    size: str
    inputs: Callable[[], tuple[Any, ...]]
    work: float
    """Bytes that forward and backward read and write at least; operations for a matrix product."""
    others: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    waits: Sequence[str] = ()
    """The sources that make the host wait."""
    has_reference: bool = True
    """Whether the reference is taken too; that of attention writes all scores."""


def show(only: Sequence[str]) -> None:
    """Print the table, the sources that are absent, and what the kernel table costs."""
    plugins = load_plugins(only=("cpu", "cuda"))
    backend = find_backend(plugins, plugins.named("register_backends"), "cuda")
    table = resolve_kernels(plugins, backend)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, {TOKENS} tokens; us")
    print(f"absent: {', '.join(name for name in OTHERS if find_spec(name) is None) or 'none'}")
    print("| op | size | source | forward | forward and backward | rate | of the fastest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in cases():
        if not only or case.op in only:
            for row in rows(case, table):
                print("| " + " | ".join(row) + " |", flush=True)
    if not only or "rms_norm" in only:
        show_overhead(table)


def rows(case: Case, table: KernelTable) -> Iterator[Sequence[str]]:
    """Yield what each source takes, ours first."""
    torch.manual_seed(0)
    sets = [case.inputs() for _ in range(SETS)]
    chosen = table.candidates(case.op, dtype="bfloat16", **case.facts)
    sources = {kernel.source: kernel.fn for kernel in chosen} | dict(case.others)
    if case.has_reference:
        sources["reference"] = reference_kernel(case.op).fn
    times = {}
    for name, fn in sources.items():
        is_captured = name not in case.waits
        times[name] = [
            gpu_time(lambda one, do=do, fn=fn: do(fn, one, case.options), sets, is_captured)
            for do in (forward, both_ways)
        ]
    fastest = min(both for _, both in times.values())
    for name, (one, both) in times.items():
        mark = WAITING if name in case.waits else ""
        is_product = case.op in PRODUCTS
        rate = case.work / both / (1e6 if is_product else 1e3)
        unit = "TFLOP/s" if is_product else "GB/s"
        yield (
            *(case.op, case.size, name + mark, f"{one:.0f}", f"{both:.0f}"),
            *(f"{rate:.0f} {unit}", f"{both / fastest:.2f}"),
        )


def forward(fn: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Call it without a gradient."""
    with torch.no_grad():
        fn(*inputs, **options)


def both_ways(fn: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Call it, and go back from a gradient of ones."""
    result = fn(*inputs, **options)
    outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.grad(outputs, leaves, [ones_like(y) for y in outputs])


def ones_like(x: Tensor, made: dict[Any, Tensor] = {}) -> Tensor:  # noqa: B006  # a cache
    """Return ones, made once, so that they cost nothing in what is measured."""
    key = x.shape, x.dtype
    if key not in made:
        made[key] = torch.ones_like(x, memory_format=torch.contiguous_format)
    return made[key]


def gpu_time(run: Callable[[Sequence[Any]], None], sets: Sequence[Any], is_captured: bool) -> float:
    """Return the microseconds of one run, over the sets in turns."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for one in [*sets, *sets]:
            run(one)
    torch.cuda.synchronize()
    again: Callable[[], None] = lambda: [run(one) for one in sets] and None  # noqa: E731
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again()
        again = graph.replay
        again()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        again()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / (REPLAYS * len(sets))


# -------------------------------------------------------------------------
# Cases: Qwen3-4B, and the experts of Qwen3-30B-A3B
# -------------------------------------------------------------------------


def random(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return leaves in bfloat16."""
    return tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes)


def cases() -> Iterator[Case]:
    """Yield every operation but the output layer, which has a script of its own."""
    for lengths in ((4096, 4096), (4096, 2048, 1024, 512, 512), (8192, 4096, 3000, 1096)):
        yield attention_case(lengths)
        yield window_case(lengths)
    for name, rows_, width in (("hidden 2560", TOKENS, 2560), ("32 heads of 128", TOKENS * 32, 128)):
        yield Case(
            "rms_norm",
            name,
            lambda n=rows_, d=width: (*random((n, d), (d,)), EPS),
            5 * rows_ * width * 2,
            {"torch": rms_norm, **liger_only({"Liger": _liger_rms_norm})},
        )
    yield Case(
        "add_rms_norm",
        "hidden 2560",
        lambda: (*random((TOKENS, 2560), (2560,)), EPS, *random((TOKENS, 2560))),
        8 * TOKENS * 2560 * 2,
        {"torch": _torch_add_norm, **liger_only({"Liger": _liger_add_norm})},
    )
    yield Case(
        "layer_norm",
        "hidden 2560",
        lambda: (*random((TOKENS, 2560), (2560,), (2560,)), EPS),
        5 * TOKENS * 2560 * 2,
        liger_only({"Liger": _liger_layer_norm}),
    )
    yield rotary_case()
    yield projection_case()
    yield Case(
        "swiglu",
        "ffn 9728",
        lambda: random((TOKENS, 2 * 9728)),
        8 * TOKENS * 9728 * 2,
        {
            "torch": swiglu,
            **liger_only({"Liger": _liger_swiglu, "Liger fused gate-up": _liger_fused_swiglu}),
        },
    )
    yield from expert_cases(2048, 128, 8, 768)
    yield Case(
        "vocab_parallel_logprob",
        "2048 tokens, vocabulary 151936",
        lambda: (*random((2048, 151936)), torch.randint(151936, (2048,), device="cuda"), 1.0, None),
        3 * 2048 * 151936 * 2,
        {"torch": _torch_logprob},
        {"entropy_grad": True},
    )
    lengths = (4096, 3000, 1000, 96)
    yield Case(
        "causal_conv1d",
        "8192 channels, width 4",
        lambda: (*random((TOKENS, 8192), (8192, 4)), lengths),
        5 * TOKENS * 8192 * 2,
        {"torch": _torch_convolution},
        facts={"width": 4},
    )
    yield delta_case(lengths)


def attention_case(lengths: tuple[int, ...]) -> Case:
    """Return the attention of Qwen3-4B; torch's own way to cuDNN is for a batch of equal lengths alone."""
    count = sum(lengths)
    return Case(
        "varlen_attention",
        " + ".join(map(str, lengths)),
        lambda: (*random((count, 32, 128), (count, 8, 128), (count, 8, 128)), lengths, 128**-0.5),
        3.5 * 2 * 32 * 128 * sum(length**2 for length in lengths),
        {"torch, as a batch": _torch_attention} if len(set(lengths)) == 1 else {},
        {"causal": True},
        attention_facts(128),
        has_reference=False,
    )


def window_case(lengths: tuple[int, ...], window: int = 128) -> Case:
    """Return the attention of gpt-oss in every other layer: a window, and a sink in each head."""
    count = sum(lengths)
    (sinks,) = random((64,))
    return Case(
        "varlen_attention",
        f"window of {window} and sinks, {' + '.join(map(str, lengths))}",
        lambda: (*random((count, 64, 64), (count, 8, 64), (count, 8, 64)), lengths, 64**-0.5),
        3.5 * 4 * 64 * 64 * sum(length * window - window**2 / 2 for length in lengths),
        options={"causal": True, "window": window, "sinks": sinks},
        facts={**attention_facts(64), "has_window": True, "has_sinks": True},
        has_reference=False,
    )


def attention_facts(size: int) -> dict[str, Any]:
    """Return the facts of plain causal attention with heads of a size."""
    absent = dict.fromkeys(("return_lse", "has_window", "has_sinks"), False)
    return {"causal": True, "head_dim": size, "value_dim": size, **absent}


def rotary_case() -> Case:
    """Return queries and keys of Qwen3-4B."""

    def inputs() -> tuple[Any, ...]:
        angles = torch.rand(TOKENS, 64, device="cuda").repeat(1, 2)
        return *random((TOKENS, 32, 128), (TOKENS, 8, 128)), angles.cos(), angles.sin()

    return Case(
        "rotary_embedding",
        "32 and 8 heads of 128",
        inputs,
        4 * TOKENS * 40 * 128 * 2,
        {"torch": rotary, **liger_only({"Liger, in place": _liger_rotary})},
        facts={"head_dim": 128, "unit_angles": True},
    )


def projection_case() -> Case:
    """Return the projection of Qwen3-4B: 8 groups of 4 query heads, a key head and a value head."""

    def inputs() -> tuple[Any, ...]:
        angles = torch.rand(TOKENS, 64, device="cuda").repeat(1, 2)
        return *random((TOKENS, 8, 6, 128), (128,), (128,)), angles.cos(), angles.sin(), EPS

    return Case(
        "qk_norm_rotary",
        "32 and 8 heads of 128",
        inputs,
        (5 * 40 + 2 * 8) * TOKENS * 128 * 2,
        facts={"head_dim": 128, "unit_angles": True},
    )


def delta_case(lengths: tuple[int, ...]) -> Case:
    """Return the linear attention of Qwen3-Next: 32 heads of 128."""

    def inputs() -> tuple[Any, ...]:
        q, k, v = random(*[(TOKENS, 32, 128)] * 3)
        q, k = (F.normalize(x.detach(), dim=-1).requires_grad_() for x in (q, k))
        g, beta = -torch.rand(TOKENS, 32, device="cuda"), torch.rand(TOKENS, 32, device="cuda")
        return q, k, v, g.requires_grad_(), beta.requires_grad_(), lengths, 128**-0.5

    facts = {"head_dim": 128, "value_dim": 128}
    work = 12 * TOKENS * 32 * 128 * 2
    return Case("gated_delta_rule", "32 heads of 128", inputs, work, facts=facts, waits=("reference",))


def expert_cases(hidden: int, experts: int, topk: int, ffn: int) -> Iterator[Case]:
    """Yield the way to the experts, their products, and the way back."""
    size = f"{topk} of {experts} experts, hidden {hidden}"
    chosen = torch.rand(TOKENS, experts, device="cuda").topk(topk, dim=1).indices
    is_chosen = torch.zeros(TOKENS, experts, dtype=torch.bool, device="cuda").scatter(1, chosen, value=True)
    token = torch.zeros(TOKENS, 1, device="cuda")
    places = reference_kernel("token_permute").fn(token, is_chosen.float(), is_chosen, topk)[2]
    copies = TOKENS * topk
    facts = {"experts": experts, "topk": topk}
    yield Case(
        "topk_router",
        size,
        lambda: (torch.randn(TOKENS, experts, device="cuda").requires_grad_(), topk),
        4 * TOKENS * experts * 4,
        options={"score_function": "softmax"},
        facts={
            **facts,
            "score_function": "softmax",
            "pre_softmax": False,
            "num_groups": None,
            "group_topk": None,
            "has_expert_bias": False,
        },
    )
    yield Case(
        "token_permute",
        size,
        lambda: (
            *random((TOKENS, hidden)),
            torch.rand(TOKENS, experts, device="cuda").requires_grad_(),
            *(is_chosen, topk),
        ),
        2 * (TOKENS + copies) * hidden * 2,
        {"torch": permute},
        facts=facts,
        waits=("reference", "torch"),
    )
    yield Case(
        "token_unpermute",
        size,
        lambda: (*random((copies, hidden)), places),
        2 * (TOKENS + copies) * hidden * 2,
        {"torch": _torch_unpermute},
        facts={"topk": topk},
    )
    counts = is_chosen.sum(0)
    for name, inner, outer in (("up", hidden, 2 * ffn), ("down", ffn, hidden)):
        yield Case(
            "grouped_matmul",
            f"{experts} experts, {inner} to {outer} ({name})",
            lambda k=inner, n=outer: (*random((copies, k), (experts, n, k)), counts),
            6 * copies * inner * outer,
            waits=("reference",),
        )


def liger_only(sources: Mapping[str, Callable[..., Any]]) -> Mapping[str, Callable[..., Any]]:
    """Return them where Liger is installed."""
    return sources if find_spec("liger_kernel") else {}


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, *, causal: bool
) -> Tensor:
    batch = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*batch, is_causal=causal, scale=scale, enable_gqa=True)


def _liger_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def _torch_add_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return total, F.rms_norm(total, weight.shape, weight, eps)


def _liger_add_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    normed, total = LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "llama", False)
    return total, normed


def _liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def _liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate where they are, and their gradients too."""
    from liger_kernel.ops.rope import LigerRopeFunction

    views = (x.transpose(0, 1).unsqueeze(0) for x in (q, k))
    return LigerRopeFunction.apply(*views, cos, sin)


def _liger_swiglu(gate_up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(*gate_up.chunk(2, dim=-1))


def _liger_fused_swiglu(gate_up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(gate_up)


def _torch_unpermute(permuted: Tensor, rows: Tensor) -> Tensor:
    """Return the sums in the dtype of the rows."""
    of_row = torch.empty(rows.numel(), dtype=torch.int64, device=rows.device)
    of_row[rows.flatten()] = torch.arange(rows.numel(), device=rows.device) // rows.shape[1]
    return permuted.new_zeros(len(rows), permuted.shape[1]).index_add(0, of_row, permuted)


def _torch_logprob(
    logits: Tensor, targets: Tensor, temperature: float, group: None, *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def _torch_convolution(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the convolution of one sequence: torch's knows no packed ones."""
    channels, width = weight.shape
    y = F.conv1d(x.t().unsqueeze(0), weight.unsqueeze(1), padding=width - 1, groups=channels)
    return F.silu(y[0, :, : len(x)].t())


# -------------------------------------------------------------------------
# The kernel table
# -------------------------------------------------------------------------


def show_overhead(table: KernelTable) -> None:
    """Compare a call through what the table resolved with a direct one: launches, and the host's time."""
    x, weight = random((64, 2560), (2560,))
    resolved = table.resolve("rms_norm", dtype="bfloat16")
    direct = table.candidates("rms_norm", dtype="bfloat16")[0].fn
    run = {
        "through the table": lambda: resolved(x, weight, EPS),
        "direct": lambda: direct(x, weight, EPS),
    }
    times = {name: [host_time(fn) for _ in range(7)] for name, fn in (*run.items(), *reversed(run.items()))}
    print("\n| rms_norm | launches of 100 calls | host, us per call |\n| --- | --- | --- |")
    for name, fn in run.items():
        print(f"| {name} | {launches(fn)} | {min(times[name]):.2f} |")


def host_time(fn: Callable[[], Any], calls: int = 500) -> float:
    """Return the microseconds until a call returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def launches(fn: Callable[[], Any]) -> int:
    """Return how many kernels a hundred calls launch."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        for _ in range(100):
            fn()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if "LaunchKernel" in e.key)
