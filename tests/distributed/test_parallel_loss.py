"""The loss on two and four processes: a divided vocabulary, tied embeddings over pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

VOCAB, PADDED, WIDTH, TOKENS = 21, 24, 8, 17
"""Two ranks have 12 rows each, of which the second uses 9."""


# -------------------------------------------------------------------------
# What a rank runs
# -------------------------------------------------------------------------


def op(config: Any, context: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank's part of the vocabulary gives, on every rank alike but for the weight."""
    from anygauge.kernels import reference
    from anygauge.kernels.linear_logprob import linear_logprob, linear_topk

    ranks = case["world"]
    group = dist.group.WORLD if ranks > 1 else None
    dtype = getattr(torch, case["dtype"])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    whole = torch.randn(PADDED, WIDTH, generator=generator)
    whole[VOCAB:] = 50.0  # padding that would be seen
    rows = PADDED // ranks
    weight = whole[rows * context.rank :][:rows].to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS, 3), generator=generator)
    options: dict[str, Any] = {"entropy_grad": case["entropy_grad"], "vocab_size": VOCAB}

    def run(budget: int) -> list[Tensor]:
        logprobs, entropy = linear_logprob(
            hidden, weight, targets, 0.7, group, rest=True, budget=lambda: budget, **options
        )
        loss = (logprobs * torch.arange(TOKENS)[:, None]).sum()
        loss = loss + (entropy.square().sum() if case["entropy_grad"] else 0.0)
        return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    logprobs, entropy, *grads = kept = run(1 << 20)
    one = linear_logprob(hidden, weight, targets[:, 0], 0.7, group, **options)[0]
    none = linear_logprob(hidden[:0], weight, targets[:0], 0.7, group, **options)
    none[0].sum().backward()
    plain = reference.linear_logprob(hidden, weight, targets, 0.7, group, rest=True, **options)[0]
    plain_grads = torch.autograd.grad((plain * torch.arange(TOKENS)[:, None]).sum(), (hidden, weight))
    return {
        "logprobs": logprobs,
        "entropy": entropy,
        "as_kept": all(map(torch.equal, kept, run(0))),
        "hidden": grads[0],
        "weight": grads[1],
        "one": one.detach(),
        "ids": linear_topk(hidden, weight, 15, group, vocab_size=VOCAB),
        "plain": plain.detach(),
        "plain_hidden": plain_grads[0],
        "none": weight.grad,
    }


def gradients(config: Any, context: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return the main gradients of a step with and without the logits of all tokens."""
    from anygauge.distributed.layout import layout_of
    from anygauge.trainer.actors import ActorWorker
    from anygauge_tests.batches import plan_samples, sample_of

    generator = torch.Generator().manual_seed(0)
    samples = [
        sample_of(
            torch.randint(0, case["vocab"], (length,), generator=generator).tolist(),
            length // 2,
            log_prob=-2.0,
            advantage=length % 3 - 0.5,
        )
        for length in (9, 14, 22, 5)
    ]
    actor = ActorWorker(config, context)
    layout = layout_of(config)
    shares = plan_samples(samples, 1, layout.data, config.algorithm.loss_aggregation)
    actor.train(shares[layout.dp_rank(context.rank)])
    engine: Any = actor.trainer
    return {
        f"{number}.{name}": parameter.main_grad.clone()
        for number, chunk in enumerate(engine.policy.chunks)
        for name, parameter in chunk.named_parameters()
    }


# -------------------------------------------------------------------------
# Tests
# -------------------------------------------------------------------------


def run(
    crew: Any, make_model: Any, action: str, *, vocab: int = 63, tied: bool = True, **case: Any
) -> list[Any]:
    model = make_model("qwen3", vocab_size=vocab, num_hidden_layers=4, tie_word_embeddings=tied)
    found: list[Any] = crew.run(action=f"{__file__}:{action}", model=str(model), vocab=vocab, **case)
    for rank, result in enumerate(found):
        assert not hasattr(result, "text"), f"rank {rank}: {getattr(result, 'text', '')}"
    return found


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=atol, msg=lambda text: f"{what}\n{text}")


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2)])
def test_a_divided_vocabulary_changes_nothing(
    crew: Any, make_model: Any, dtype: str, tolerance: float, entropy_grad: bool
) -> None:
    options = {"dtype": dtype, "entropy_grad": entropy_grad}
    (alone,) = run(crew, make_model, "op", world=1, **options)
    ranks = run(crew, make_model, "op", world=2, parallel={"tensor": 2}, **options)
    for result in ranks:
        for name in ("logprobs", "entropy", "hidden", "one", "plain", "plain_hidden"):
            assert_close(result[name], alone[name], tolerance, name)
        assert_close(result["plain"], result["logprobs"].to(result["plain"]), tolerance, "all logits")
        assert dtype == "bfloat16" or torch.equal(result["ids"], alone["ids"])
        assert not result["none"].any()
        assert result["as_kept"]
    assert_close(torch.cat([result["weight"] for result in ranks]), alone["weight"], tolerance, "weight")
    assert not ranks[1]["weight"][VOCAB - PADDED // 2 :].any()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("parallel", [{"tensor": 2, "pipeline": 2}, {"tensor": 2, "context": 2}], ids=str)
def test_gradients_are_those_of_all_logits(
    crew: Any, make_model: Any, parallel: dict[str, int], tied: bool
) -> None:
    results = [
        run(
            crew,
            make_model,
            "gradients",
            tied=tied,
            world=4,
            parallel=parallel,
            train={"fused_loss": fused, "megatron": {"overlap_grad_reduce": True}},
        )
        for fused in (True, False)
    ]
    for fused, plain in zip(*results, strict=True):
        assert fused.keys() == plain.keys()
        for name, gradient in fused.items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6, msg=name)
    if tied and "pipeline" in parallel:  # the copies of both ends have the gradient of both
        first, last = results[0][0], results[0][2]
        torch.testing.assert_close(
            first["0.embedding.word_embeddings.weight"], last["0.output_layer.weight"], rtol=0, atol=0
        )
