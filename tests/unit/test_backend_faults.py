"""Faults of ``bench/backend_faults``: each is there once, and changes what it wraps."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.kernels import linear_logprob, reference
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl, megatron, specs
from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.types import Availability, BackendSpec

BENCH = Path(__file__).parents[2] / "bench"
LARGE_OR_GROUPS = {  # these need a long input, several ranks, or what no value shows
    "rms_norm.grid_limit",
    "rms_norm.input_overwritten_without_gradient",
    "rms_norm.large_tensor",
    "varlen_attention.zeros_past_4096",
    "vocab_parallel_logprob.targets_of_next_rank",
    "rms_norm.any_tolerance",
    "rms_norm.more_dtypes",
    "swiglu.large_tensor",
    "varlen_attention.block_of_4096",
    "vocab_parallel_logprob.group_ignored",
    "linear_logprob.group_ignored",
    "linear_logprob.hidden_gradient_unsummed",
    "linear_logprob.full_logits",
}
CPU = BackendSpec(
    name="cpu",
    device_type="cpu",
    dist_backend="gloo",
    probe=lambda: Availability(ok=True),
    scheduler_resource="slot",
    local_device=lambda ids, environ: 0,
)


@pytest.fixture(autouse=True, scope="module")
def bench() -> Iterator[None]:
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


def catalog() -> Any:
    return importlib.import_module("backend_faults.catalog")


def test_names_are_distinct_and_hooks_exist() -> None:
    faults = [*catalog().faults()]
    assert len({fault.name for fault in faults}) == len({fault.statement for fault in faults}) == len(faults)
    for fault in faults:
        assert all(hasattr(specs, hook) or hasattr(megatron, hook) for hook in fault.hook.split())
    names = {fault.name for fault in faults}
    stranger = importlib.import_module("backend_faults.stranger").STRANGER
    assert {name for _, name in catalog().EXPLAINED} <= names >= set(stranger.values())
    assert len(set(stranger.values())) == len(stranger)


def test_the_plugin_wraps_the_hook_of_its_fault_for_its_backend_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = importlib.import_module("backend_faults.fault")
    doubled = fault.Fault("doubled", "", "register_kernels", lambda answers, a: [x * 2 for x in answers])
    kernel = KernelImpl(op="swiglu", fn=reference.swiglu, source="")
    plugins = Plugins()
    plugins.register(SimpleNamespace(register_kernels=hookimpl(lambda: [kernel])), "vendor")
    plugins.register(fault.plugin_of("register_kernels", lambda: doubled), "fault")
    assert plugins.collect("register_kernels", backend=CPU) == [kernel, kernel]
    monkeypatch.setenv(fault.BACKEND, "abacus")
    assert plugins.collect("register_kernels", backend=CPU) == [kernel]


def of_ops() -> list[Any]:
    sys.path.insert(0, str(BENCH))
    try:
        return [fault for fault in catalog().faults() if fault.hook == "register_kernels"]
    finally:
        sys.path.remove(str(BENCH))


@pytest.mark.parametrize("fault", of_ops(), ids=lambda fault: fault.name)
def test_a_fault_of_an_op_shows(fault: Any) -> None:
    op = fault.name.partition(".")[0]
    own = getattr(linear_logprob if op == "linear_logprob" else reference, op)
    answers = [[KernelImpl(op=op, fn=own, source="")]]
    ((kernel,),) = fault.change(answers, SimpleNamespace())
    example = SPECIAL.get(fault.name, EXAMPLES[op])
    assert fault.name in LARGE_OR_GROUPS or any(differs(example, kernel.fn, own, seed) for seed in range(4))


def differs(example: Any, function: Any, own: Any, seed: int) -> bool:
    """Return whether a caller can tell two functions from each other."""
    try:
        return seen(example, function, seed) != seen_of_reference(example, own, seed)
    except ZeroDivisionError:  # the fault itself
        return True


@cache
def seen_of_reference(example: Any, own: Any, seed: int) -> list[Any]:
    return seen(example, own, seed)


def seen(example: Any, function: Any, seed: int) -> list[Any]:
    """Return what a caller can see of two calls of an op: results, gradients, inputs, random state."""
    notes: list[Any] = []
    results = []
    for again in range(2):
        torch.manual_seed(10 * seed + again)
        arguments = example(torch.bfloat16 if seed % 2 else torch.float32, seed + again, seed)
        result = function(**arguments)
        result = result if isinstance(result, tuple) else (result,)
        results += result
        notes += [[(x.dtype, x.shape) for x in results], torch.get_rng_state().sum().item(), backward(result)]
        for x in arguments.values():
            if isinstance(x, torch.Tensor):
                notes += [
                    bits(x),
                    bits(x.grad.to_dense()) if x.is_leaf and x.grad is not None else None,
                ]
                notes += [
                    bits(getattr(x, "main_grad", x)),
                    hasattr(x, "grad_added_to_main_grad") and x.grad_added_to_main_grad,
                ]
    return [*notes, [bits(x) for x in results]]


def bits(x: torch.Tensor) -> bytes:
    """Return the values of a tensor; all that are not a number are alike."""
    if x.is_floating_point():
        x = x.detach().double()
        x = x.masked_fill(x.isnan(), torch.nan)
    return x.numpy().tobytes()


def backward(results: tuple[torch.Tensor, ...]) -> bool:
    """Take gradients that differ and are strided; return whether they are left as they were."""
    outputs = [x for x in results if x.requires_grad and x.grad_fn is not None]
    grads = [torch.rand((*x.shape, 2)).to(x.dtype).select(-1, 0) for x in outputs]
    before = [grad.clone() for grad in grads]
    torch.autograd.backward(outputs, grads, retain_graph=True)
    return all(map(torch.equal, grads, before))


def rand(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def packed(count: int) -> list[int]:
    return [[40, 100], [100, 40]][count % 2]


def attention(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    cross = seed >= 2
    return {
        "q": rand(dtype, 140, 4, 16).detach()[:, :, ::2].requires_grad_(),
        "k": rand(dtype, 160 if cross else 140, 2, 8),
        "v": rand(dtype, 160 if cross else 140, 2, 6),
        "lengths": packed(count),
        "scale": 0.7,
        "causal": cross or seed == 1,
        "key_lengths": [n + 10 for n in packed(count)] if cross else None,
        "return_lse": True,
        "window": 5 if cross or seed == 1 else None,
        "sinks": rand(dtype, 4),
    }


def router(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    sigmoid = seed >= 2
    return {
        "logits": rand(dtype, 12, 8),
        "topk": 1 if seed == 3 else 4,
        "score_function": "sigmoid" if sigmoid else "softmax",
        "pre_softmax": not sigmoid,
        **({"num_groups": 4, "group_topk": 2} if seed == 2 else {}),
        "scaling_factor": 2.5,
        "expert_bias": torch.randn(8) if sigmoid else None,
    }


def permuted(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    routing = torch.zeros(6, 4, dtype=torch.bool).scatter(1, torch.rand(6, 4).topk(2).indices, value=True)
    return {
        "tokens": rand(dtype, 6, 8),
        "probs": rand(torch.float32, 6, 4),
        "routing_map": routing,
        "topk": 2,
    }


def unpermuted(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    return {"permuted": rand(dtype, 12, 8), "rows": torch.randperm(12).view(3, 4)}


def logprob(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    return {
        "logits": (50 * rand(dtype, 6, 10)).detach().requires_grad_(),
        "targets": torch.randint(1, 10, (6,)),
        "temperature": 0.6,
        "group": None,
        "entropy_grad": seed >= 2,
    }


def output_layer(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    weight = rand(dtype, 10, 8)
    weight.main_grad = torch.rand(10, 8)  # type: ignore[attr-defined]
    shared = {"weight": weight, "targets": torch.randint(1, 9, (6, 2)), "temperature": 0.6, "group": None}
    rest = {"hidden": rand(dtype, 6, 8), "entropy_grad": seed >= 2, "vocab_size": 9, "rest": True}
    return {**rest, **shared}


def projection(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    weights = {"q_weight": rand(dtype, 8), "k_weight": rand(dtype, 8)}
    return {"qkv": rand(dtype, 6, 2, 5, 8), **weights, **angles(), "eps": 0.1}


def angles() -> dict[str, torch.Tensor]:
    return {"cos": 1.3 * torch.rand(6, 4), "sin": 1.3 * torch.rand(6, 4)}


def delta(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    q, k = (rand(dtype, 140, 2, 4).detach().div(3).requires_grad_() for _ in range(2))
    decay = {"g": (-2 * torch.rand(140, 2)).requires_grad_(), "beta": torch.rand(140, 2).requires_grad_()}
    return {"q": q, "k": k, "v": rand(dtype, 140, 2, 6), **decay, "lengths": packed(count), "scale": 0.7}


def experts(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    weight = rand(dtype, 3, 8, 8).detach().transpose(1, 2).requires_grad_()
    return {"x": rand(dtype, 200, 8), "weight": weight, "tokens_per_expert": torch.tensor([150, 0, 50])}


EXAMPLES: dict[str, Any] = {
    "rms_norm": lambda t, n, s: {"x": rand(t, 4 * (s != 3), 10, 13), "weight": rand(t, 13), "eps": 0.1},
    "layer_norm": lambda t, n, s: {
        "x": rand(t, 8, 12),
        "weight": rand(t, 12),
        "bias": rand(t, 12),
        "eps": 0.1,
    },
    "add_rms_norm": lambda t, n, s: {
        "x": rand(t, 8, 12),
        "weight": rand(t, 12),
        "eps": 0.1,
        "residual": rand(t, 8, 12),
    },
    "rotary_embedding": lambda t, n, s: {"q": rand(t, 6, 4, 8), "k": rand(t, 6, 2, 8), **angles()},
    "qk_norm_rotary": projection,
    "swiglu": lambda t, n, s: {"gate_up": (5 * rand(t, 6, 16)).detach().requires_grad_()},
    "varlen_attention": attention,
    "causal_conv1d": lambda t, n, s: {"x": rand(t, 140, 6), "weight": rand(t, 6, 5), "lengths": packed(n)},
    "gated_delta_rule": delta,
    "vocab_parallel_logprob": logprob,
    "linear_logprob": output_layer,
    "grouped_matmul": experts,
    "topk_router": router,
    "token_permute": permuted,
    "token_unpermute": unpermuted,
}
"""Arguments of each op, from a dtype, the number of the call and a seed."""


BUFFER = torch.empty(4, 13)


def refilled() -> torch.Tensor:
    """Return other numbers at the same address."""
    return BUFFER.copy_(torch.randn(BUFFER.shape)).detach().requires_grad_()


def strided(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return rand(dtype, *reversed(shape)).detach().t().requires_grad_()


def sequences(lengths: list[int], width: int = 4) -> Any:
    tokens = sum(lengths)

    def example(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
        q, k, v = (rand(dtype, tokens, 1, width) for _ in range(3))
        return {"q": q, "k": k, "v": v, "lengths": lengths, "scale": 0.7, "causal": True}

    return example


def changed(op: str, **others: Any) -> Any:
    """Return an example of an op with other arguments, made of a dtype."""
    return lambda t, n, s: {**EXAMPLES[op](t, n, s), **{name: make(t) for name, make in others.items()}}


def frozen(op: str, name: str = "weight") -> Any:
    def example(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
        arguments = EXAMPLES[op](dtype, count, seed)
        return {**arguments, name: arguments[name].detach()}

    return example


def by_call(op: str, name: str, **others: Any) -> Any:
    """Return an example with another number in each call."""
    return lambda t, n, s: {**EXAMPLES[op](t, n, s), name: 0.1 + 0.2 * n, **others}


def of_tile(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    """Return more tokens than a tile has."""
    example = output_layer(dtype, count, seed)
    return {**example, "hidden": rand(dtype, 70, 8), "targets": torch.randint(1, 9, (70, 2))}


def narrow_main_grad(dtype: torch.dtype, count: int, seed: int) -> dict[str, Any]:
    example = output_layer(dtype, count, seed)
    example["weight"].main_grad = example["weight"].main_grad.bfloat16()
    return example


SPECIAL: dict[str, Any] = {
    "varlen_attention.middle_lengths": sequences([1100]),
    "varlen_attention.blocks_in_bfloat16": sequences([300]),
    "varlen_attention.first_scale": by_call("varlen_attention", "scale", lengths=[40, 100], key_lengths=None),
    "gated_delta_rule.first_scale": by_call("gated_delta_rule", "scale", lengths=[40, 100]),
    "add_rms_norm.first_eps": by_call("add_rms_norm", "eps"),
    "qk_norm_rotary.first_eps": by_call("qk_norm_rotary", "eps"),
    "linear_logprob.first_temperature": by_call("linear_logprob", "temperature"),
    "topk_router.first_scaling_factor": by_call("topk_router", "scaling_factor"),
    "linear_logprob.main_grad_of_first_tile": of_tile,
    "linear_logprob.main_grad_narrow_left": narrow_main_grad,
    "rms_norm.partial_sums": lambda t, n, s: {"x": rand(t, 600, 512), "weight": rand(t, 512), "eps": 0.1},
    "rms_norm.cached_by_address": lambda t, n, s: {"x": refilled(), "weight": torch.ones(13), "eps": 0.1},
    "rms_norm.frozen_weight": frozen("rms_norm"),
    "layer_norm.frozen_weight": frozen("layer_norm"),
    "linear_logprob.frozen_weight": frozen("linear_logprob"),
    "grouped_matmul.frozen_weight": frozen("grouped_matmul"),
    "grouped_matmul.weight_gradient_with_input": frozen("grouped_matmul", "x"),
    "rotary_embedding.positions_wrap": lambda t, n, s: {
        **{"q": rand(t, 4100, 1, 2), "k": rand(t, 4100, 1, 2)},
        **{"cos": torch.rand(4100, 2), "sin": torch.rand(4100, 2)},
    },
    "swiglu.strided_input": lambda t, n, s: {"gate_up": strided(t, 6, 16)},
    "varlen_attention.window_128": sequences([300]),
    "varlen_attention.window_512": sequences([20, 700]),
    "varlen_attention.many_sequences": sequences([2] * 70),
    "varlen_attention.declared_width": sequences([3], 80),
    "causal_conv1d.many_sequences": lambda t, n, s: {
        **{"x": rand(t, 140, 6), "weight": rand(t, 6, 5), "lengths": [2] * 70}
    },
    "vocab_parallel_logprob.masked_nan": changed(
        "vocab_parallel_logprob",
        logits=lambda t: torch.tensor([[0.5, 1.0, -torch.inf]] * 6, dtype=t, requires_grad=True),
        targets=lambda t: torch.zeros(6, dtype=torch.int64),
    ),
    "vocab_parallel_logprob.targets_wrap": changed(
        "vocab_parallel_logprob",
        logits=lambda t: rand(t, 1, (1 << 16) + 4),
        targets=lambda t: torch.full((1,), (1 << 16) + 2),
    ),
    "linear_logprob.targets_wrap": lambda t, n, s: {
        **{"hidden": rand(t, 2, 1), "weight": rand(t, (1 << 16) + 4, 1), "temperature": 1.0, "group": None},
        **{"targets": torch.full((2,), (1 << 16) + 2), "entropy_grad": False},
    },
    "topk_router.few_experts": lambda t, n, s: {
        "logits": rand(t, 3, 300),
        "topk": 100,
        "score_function": "softmax",
    },
    "token_permute.after_empty_expert": lambda t, n, s: {
        **{"tokens": rand(t, 6, 8), "probs": rand(torch.float32, 6, 4), "topk": 2},
        "routing_map": torch.tensor([[True, False, True, False]] * 6),
    },
    "token_unpermute.rows_as_int16": lambda t, n, s: {
        "permuted": rand(t, (1 << 15) + 4, 1),
        "rows": torch.randperm((1 << 15) + 4).view(-1, 2),
    },
}
"""Arguments of an op that a fault takes to show."""
