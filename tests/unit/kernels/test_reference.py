"""The references mean what transformers and torch mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.kernels import reference
from anygauge.plugins import load_plugins

DTYPES = [torch.float64, torch.float32]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 3, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    expected = F.rms_norm(x, (16,), weight, 1e-5)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_is_qwens() -> None:
    norm = qwen3.Qwen3RMSNorm(32, eps=1e-6)
    norm.weight.data.normal_()
    x = torch.randn(5, 32)
    assert torch.equal(reference.rms_norm(x, norm.weight, 1e-6), norm(x))


def test_rms_norm_of_bfloat16_is_rounded_once() -> None:
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    exact = reference.rms_norm(x.double(), weight.double(), 1e-6)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6).double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = 3 + torch.randn(7, 3, 16, dtype=dtype), *torch.randn(2, 16, dtype=dtype)
    expected = F.layer_norm(x, (16,), weight, bias, 1e-5)
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_is_qwens(dtype: torch.dtype) -> None:
    config = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    positions = torch.tensor([[0, 1, 2, 0, 1, 5, 9]])
    q, k = torch.randn(1, 4, 7, 16, dtype=dtype), torch.randn(1, 2, 7, 16, dtype=dtype)
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(q, positions)
    expected = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    found = reference.rotary_embedding(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.transpose(0, 1).unsqueeze(0), other)


def test_rotary_embedding_leaves_the_other_dimensions() -> None:
    q, angles = torch.randn(3, 2, 8), torch.randn(3, 4)
    turned, _ = reference.rotary_embedding(q, q, angles.cos(), angles.sin())
    assert torch.equal(turned[..., 4:], q[..., 4:])
    assert not torch.equal(turned[..., :4], q[..., :4])


def test_swiglu_is_qwens_mlp() -> None:
    mlp = qwen3.Qwen3MLP(Qwen3Config(hidden_size=16, intermediate_size=24))
    x = torch.randn(5, 16)
    gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
    torch.testing.assert_close(mlp.down_proj(reference.swiglu(gate_up)), mlp(x))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_varlen_attention_is_sdpa_per_sequence(dtype: torch.dtype, causal: bool) -> None:
    lengths = (3, 0, 1, 9)
    q, k, v = (torch.randn(13, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    found = reference.varlen_attention(q, k, v, lengths, 0.3, causal=causal)
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    expected = [
        F.scaled_dot_product_attention(*part, is_causal=causal, scale=0.3, enable_gqa=True)
        for part in parts
        if part[0].numel()
    ]
    torch.testing.assert_close(found, torch.cat(expected, dim=1).transpose(0, 1))


def test_a_sequence_sees_nothing_of_its_neighbors() -> None:
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    before = reference.varlen_attention(q, k, v, (4, 5), 1.0, causal=True)
    k[4:], v[4:] = 0, 0
    after = reference.varlen_attention(q, k, v, (4, 5), 1.0, causal=True)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


def test_a_window_and_sinks_are_those_of_torchs_attention() -> None:
    """A sink is a key whose score is given, and whose values are 0."""
    q, k, v, sinks = (torch.randn(*shape) for shape in ((9, 2, 8), (9, 2, 8), (9, 2, 8), (2,)))
    found = reference.varlen_attention(q, k, v, (9,), 0.3, causal=True, window=4, sinks=sinks)
    ago = torch.arange(9)[:, None] - torch.arange(9)
    seen = torch.where((ago >= 0) & (ago <= 3), 0.0, -torch.inf).expand(2, -1, -1)
    mask = torch.cat((seen, sinks[:, None, None].expand(-1, 9, 1)), -1)
    heads = [F.pad(x, (0, 0, 0, 0, 0, int(x is not q))).transpose(0, 1) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads, mask, scale=0.3).transpose(0, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_log_sum_exp_is_that_of_the_scores(causal: bool) -> None:
    q, k, v = (torch.randn(n, 4, 8, requires_grad=True) for n in (3, 5, 5))
    output, sums = reference.varlen_attention(
        q, k, v, (3,), 0.3, causal=causal, key_lengths=(5,), return_lse=True
    )
    scores = 0.3 * torch.einsum("qhd,khd->qhk", q, k)
    if causal:
        scores = scores.masked_fill(torch.ones(3, 5, dtype=torch.bool).triu(3).unsqueeze(1), -torch.inf)
    torch.testing.assert_close(sums, scores.logsumexp(-1).detach())
    assert not sums.requires_grad
    assert torch.equal(
        output, reference.varlen_attention(q, k, v, (3,), 0.3, causal=causal, key_lengths=(5,))
    )


# -------------------------------------------------------------------------
# Experts
# -------------------------------------------------------------------------

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"score_function": "softmax"},
    "pre-softmax": {"score_function": "softmax", "pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid-of-one": {"score_function": "sigmoid", "topk": 1},
    "bias": {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, 16)},
    "groups-of-logits": {"score_function": "softmax", "num_groups": 4, "group_topk": 2},
    "deepseek": {
        **{"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
        "expert_bias": torch.linspace(-1, 1, 16),
    },
}


@pytest.fixture(scope="module")
def megatron() -> Any:
    plugins = load_plugins()
    prepare_megatron(plugins, plugins.get("register_backends", "cpu"))
    from megatron.core.transformer.moe import moe_utils

    return moe_utils


def dense(weights: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    probs = weights.new_zeros(len(weights), experts)
    return probs.scatter(1, chosen, weights), torch.zeros_like(probs, dtype=torch.bool).scatter(
        1, chosen, True
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_topk_router_is_megatrons(megatron: Any, name: str) -> None:
    options = {"topk": 4, **ROUTERS[name]}
    logits = torch.randn(60, 16, requires_grad=True)
    found = dense(*reference.topk_router(logits, **options), 16)
    named = {"use_pre_softmax" if key == "pre_softmax" else key: value for key, value in options.items()}
    expected = megatron.topk_routing_with_score_function(logits, **named)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])
    cotangent = torch.randn(60, 16)
    gradients = [torch.autograd.grad(probs, logits, cotangent)[0] for probs in (found[0], expected[0])]
    torch.testing.assert_close(*gradients)


def test_topk_router_is_deepseeks() -> None:
    """The bias decides who is chosen, and weighs nothing."""
    config = DeepseekV3Config(
        **{"hidden_size": 16, "n_routed_experts": 16, "num_experts_per_tok": 4},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    )
    router = deepseek_v3.DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(16)
    router.e_score_correction_bias.copy_(torch.linspace(-1, 1, 16))
    logits, weights, chosen = router(torch.randn(50, 16))
    found = reference.topk_router(logits, 4, **ROUTERS["deepseek"])
    torch.testing.assert_close(dense(*found, 16), dense(weights, chosen, 16))


@pytest.mark.parametrize("name", ROUTERS)
def test_a_choice_that_was_made_before_is_weighed_alike(name: str) -> None:
    options = {"topk": 4, **ROUTERS[name]}
    logits = torch.randn(20, 16)
    weights, chosen = reference.topk_router(logits, **options)
    weighing = ("score_function", "pre_softmax", "scaling_factor")
    again = reference.expert_weights(logits, chosen, **{k: options[k] for k in weighing if k in options})
    assert torch.equal(weights, again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_to_experts_and_back_is_megatrons(megatron: Any, dtype: torch.dtype) -> None:
    tokens = torch.randn(30, 12, dtype=dtype, requires_grad=True)
    probs, chosen = dense(*reference.topk_router(torch.randn(30, 8), 3, score_function="softmax"), 8)
    probs.requires_grad_()

    def there_and_back(permute: Any, unpermute: Any) -> list[Tensor]:
        permuted, weights, places = permute()
        back = unpermute(permuted.tanh() * weights.unsqueeze(1), places)
        return [permuted, weights, back, *torch.autograd.grad(back.square().sum(), (tokens, probs))]

    found = there_and_back(
        lambda: reference.token_permute(tokens, probs, chosen, 3), reference.token_unpermute
    )
    expected = there_and_back(
        lambda: megatron.permute(tokens, chosen, probs=probs, num_out_tokens=90),
        lambda permuted, places: megatron.unpermute(permuted, places, tokens.shape),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_copies_of_a_token_are_summed_in_float32() -> None:
    """In bfloat16 each of the ones is lost beside the 256."""
    permuted = torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16().unsqueeze(1)
    rows = torch.arange(4).unsqueeze(0)
    assert reference.token_unpermute(permuted, rows).item() == 260
    token = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    everyone = torch.ones(1, 4, dtype=torch.bool)
    copies, *_ = reference.token_permute(token, torch.ones(1, 4), everyone, 4)
    assert torch.autograd.grad(copies, token, permuted)[0].item() == 260


def logprob(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    return reference.vocab_parallel_logprob(logits, targets, temperature, None, entropy_grad=True)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprob_and_entropy_are_those_of_torchs_distribution(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = torch.randn(11, 30, dtype=dtype).requires_grad_(), torch.randint(30, (11,))
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    expected = distribution.log_prob(targets), distribution.entropy()
    found = logprob(logits, targets, temperature)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected[0].sum() + expected[1].square().sum(), logits)
    torch.testing.assert_close(torch.autograd.grad(found[0].sum() + found[1].square().sum(), logits), wanted)


def test_entropy_has_a_gradient_only_if_it_is_asked_for() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    targets = torch.tensor([0, 1])
    assert logprob(logits, targets)[1].requires_grad
    _, entropy = reference.vocab_parallel_logprob(logits, targets, 1.0, None, entropy_grad=False)
    assert not entropy.requires_grad


def test_impossible_tokens_add_nothing() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 4:] = -torch.inf
    logits.requires_grad_()
    values, entropy = logprob(logits, torch.tensor([1]))
    assert values.item() == pytest.approx(-math.log(4))
    assert entropy.item() == pytest.approx(math.log(4))
    (gradient,) = torch.autograd.grad(values.sum() + entropy.sum(), logits)
    assert torch.equal(gradient[0, 4:], torch.zeros(2))
    assert gradient.isfinite().all()


def test_bfloat16_logits_give_float32_results() -> None:
    values, entropy = logprob(torch.randn(3, 5).bfloat16(), torch.tensor([0, 1, 2]))
    assert values.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("width", [1, 4])
def test_causal_conv1d_is_torchs_per_sequence(width: int) -> None:
    lengths = (5, 0, 1, 9)
    x, weight = torch.randn(15, 6, dtype=torch.float64), torch.randn(6, width, dtype=torch.float64)
    padded = [F.pad(part.T, (width - 1, 0)) for part in x.split(lengths) if len(part)]
    expected = [F.silu(F.conv1d(part, weight.unsqueeze(1), groups=6)).T for part in padded]
    torch.testing.assert_close(reference.causal_conv1d(x, weight, lengths), torch.cat(expected))


def test_gated_delta_rule_is_the_recurrence() -> None:
    """Equation 10 of https://arxiv.org/abs/2412.06464 token by token, over more than one chunk."""
    lengths = (3, 0, 70, 1)
    tokens, heads, width, value_width = sum(lengths), 2, 8, 5
    q, k = (F.normalize(torch.randn(tokens, heads, width, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(tokens, heads, value_width, dtype=torch.float64)
    g, beta = -torch.rand(2, tokens, heads, dtype=torch.float64)
    expected, start, eye = [], 0, torch.eye(width, dtype=torch.float64)
    for length in lengths:
        for head in range(heads):
            state = torch.zeros(value_width, width, dtype=torch.float64)
            for t in range(start, start + length):
                key, size = k[t, head], -beta[t, head]
                kept = state @ (eye - size * torch.outer(key, key))
                state = g[t, head].exp() * kept + size * torch.outer(v[t, head], key)
                expected.append((t, head, 0.3 * state @ q[t, head]))
        start += length
    found = reference.gated_delta_rule(q, k, v, g, -beta, lengths, 0.3)
    for t, head, output in expected:
        torch.testing.assert_close(found[t, head], output)
    assert len(expected) == tokens * heads


def test_gated_delta_rule_is_qwens() -> None:
    q, k = (F.normalize(torch.randn(1, 100, 2, 16), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(1, 100, 2, 8), -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
    expected, _ = qwen3_5.torch_recurrent_gated_delta_rule(q, k, v, g, beta)
    found = reference.gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], (100,), 16**-0.5)
    torch.testing.assert_close(found, expected[0])
