"""Corrections of whole samples in workers, against advantages weighed by hand and against one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

LOW, HIGH, THRESHOLD, DELTA = 0.6, 1.1, 0.12, 0.02
CORRECTION = {
    "tis": {"level": "geometric", "low": LOW, "high": HIGH},
    "veto": {"threshold": THRESHOLD},
    "sequence_mask": {"delta": DELTA},
    "metrics_only": {},
}
"""All of them look at whole samples."""


# -------------------------------------------------------------------------
# What a rank runs
# -------------------------------------------------------------------------


def train(config: Any, context: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of one optimizer step, the weights after it, and what it was by hand."""
    from anygauge.distributed.layout import layout_of
    from anygauge.trainer.actors import ActorWorker
    from anygauge_tests import batches
    from anygauge_tests.batches import TrainSample

    generator = torch.Generator().manual_seed(1)
    samples = []
    for index, length in enumerate((9, 14, 22, 5, 17, 12)):
        size = length // 2
        samples.append(
            TrainSample(
                tokens=torch.randint(0, case["vocab"], (length,), generator=generator).tolist(),
                response_length=size,
                loss_mask=[int(place % 4 != 2) for place in range(size)],
                rollout_log_probs=[0.0] * size,
                advantages=[-1.0 if index % 2 else 0.5] * size,
            )
        )
    actor = ActorWorker(config, context)
    layout = layout_of(config)
    old = batches.log_probs(actor.trainer, samples, temperature=0.8)
    samples = [
        sample._replace(rollout_log_probs=(own + torch.randn(own.shape, generator=generator) * 0.8).tolist())
        for sample, own in zip(samples, old, strict=True)
    ]
    weights = [by_hand(sample, own.tolist()) for sample, own in zip(samples, old, strict=True)]
    if case["by_hand"]:
        samples = [
            sample._replace(advantages=[a * w for a, w in zip(sample.advantages, own, strict=True)])
            for sample, own in zip(samples, weights, strict=True)
        ]
    shares = batches.plan_samples(samples, 1, layout.data, config.algorithm.loss_aggregation)
    (metrics,) = actor.train(shares[layout.dp_rank(context.rank)])
    after = {name: tensor.clone() for name, tensor in actor.trainer.weights()}
    return {"metrics": metrics, "weights": after, "by_hand": weights}


def by_hand(sample: Any, old: Sequence[float]) -> list[float]:
    """Return the product of the three weights of each token of a sample."""
    rows = zip(old, sample.rollout_log_probs, sample.loss_mask, strict=True)
    gaps = [own - rollout for own, rollout, mask in rows if mask]
    mean = sum(gaps) / len(gaps)
    weight = min(max(math.exp(mean), LOW), HIGH)
    if any(math.exp(gap) < THRESHOLD for gap in gaps):
        weight = 0.0
    return [0.0 if advantage < 0 and -mean > DELTA else weight for advantage in sample.advantages]


# -------------------------------------------------------------------------
# Tests
# -------------------------------------------------------------------------


def run(crew: Any, make_model: Any, *, world: int = 1, by_hand: bool = False, **case: Any) -> list[Any]:
    model = make_model("qwen3", vocab_size=63, num_hidden_layers=4, tie_word_embeddings=True)
    found: list[Any] = crew.run(
        action=f"{__file__}:train", model=str(model), vocab=63, world=world, by_hand=by_hand, **case
    )
    for rank, result in enumerate(found):
        assert not hasattr(result, "text"), f"rank {rank}: {getattr(result, 'text', '')}"
    return found


@pytest.mark.parametrize("loss", ["ppo_clip", "policy_gradient"])
def test_a_step_is_that_of_advantages_weighed_by_hand(crew: Any, make_model: Any, loss: str) -> None:
    algorithm = {"policy_loss": loss}
    (corrected,) = run(crew, make_model, algorithm={**algorithm, "correction": CORRECTION})
    (expected,) = run(crew, make_model, algorithm=algorithm, by_hand=True)
    (plain,) = run(crew, make_model, algorithm=algorithm)
    weights = {round(own[0], 4) for own in expected["by_hand"]}
    assert 0.0 in weights
    assert len(weights) > 2, weights
    for name in ("loss", "pg_loss", "grad_norm"):
        found = corrected["metrics"][name]
        assert found == pytest.approx(expected["metrics"][name], rel=1e-5)
        assert abs(found - plain["metrics"][name]) > 0.05 * abs(found)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(corrected["weights"][name], tensor, rtol=0, atol=1e-6, msg=name)
    for name in ("log_probs", "ratio", "train_rollout_logprob_abs_diff"):
        assert corrected["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-6)


@pytest.mark.parametrize("parallel", [{"context": 2}, {"tensor": 2}, {}], ids=["cp2", "tp2-sp", "dp2"])
def test_two_processes_give_what_one_gives(crew: Any, make_model: Any, parallel: dict[str, int]) -> None:
    algorithm = {"correction": CORRECTION}
    (alone,) = run(crew, make_model, algorithm=algorithm)
    for result in run(crew, make_model, world=2, parallel=parallel, algorithm=algorithm):
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=2e-5, abs=1e-5)
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=0, atol=2e-5, msg=name)
    assert 0 < alone["metrics"]["correction/veto/masked"] < 1
    assert 0 < alone["metrics"]["correction/sequence_mask/masked"] < 1
    assert 0 < alone["metrics"]["correction/tis/effective_samples"] < 1
