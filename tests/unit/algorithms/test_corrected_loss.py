"""Any policy loss with corrections: gradients by hand, metrics, and what a correction may not return."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.algorithms.aggregation import token_weights
from anygauge.algorithms.corrected_loss import CorrectedLoss, with_sample_sizes
from anygauge.algorithms.correction import (
    icepop,
    metrics_only,
    mis,
    rejection,
    sequence_mask,
    tis,
    veto,
)
from anygauge.algorithms.losses import cispo, gspo, policy_gradient, policy_objective, ppo_clip
from anygauge_hooks.algorithms import Correction
from anygauge_hooks.engines import LossFunction, LossInputs
from anygauge_hooks.errors import PluginError

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LOSSES: dict[str, LossFunction] = {
    "ppo_clip": partial(ppo_clip, dual_clip=3.0, **CLIP),
    "gspo": partial(gspo, **CLIP),
    "cispo": partial(cispo, **CLIP),
    "policy_gradient": policy_gradient,
}
LENGTHS = (3, 1, 4, 2)


def make_inputs(seed: int = 0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)

    def draw(scale: float) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * scale

    mask = (torch.arange(size) % 4 != 2).double()
    old = draw(1.0) - 3
    return LossInputs(
        log_probs=(old + draw(0.3)).requires_grad_(),
        entropy=draw(1.0).abs().requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old + draw(0.8),
        reference_log_probs=old + draw(0.3),
        advantages=draw(1.0),
        loss_mask=mask,
        loss_weights=mask / mask.sum(),
        samples=range(len(LENGTHS)),
        lengths=LENGTHS,
    )


def corrected(loss: LossFunction, **corrections: Callable[[LossInputs], Correction]) -> LossFunction:
    return policy_objective(CorrectedLoss(loss, corrections))


def gradient(loss: LossFunction, inputs: LossInputs) -> Tensor:
    return torch.autograd.grad(loss(inputs)[0], inputs.log_probs)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_each_token_is_multiplied_by_its_weight(name: str) -> None:
    inputs = make_inputs()
    plain = gradient(policy_objective(LOSSES[name]), inputs)
    found = gradient(corrected(LOSSES[name], tis=tis), inputs)
    weights = (inputs.old_log_probs - inputs.rollout_log_probs).exp().clamp(max=2.0)
    assert len({round(each, 6) for each in weights.tolist()}) > 5
    if name == "gspo":  # a ratio of whole samples: what is weighed is the share of each token in its loss
        changed = replace(inputs, loss_weights=inputs.loss_weights * weights)
        torch.testing.assert_close(found, gradient(LOSSES[name], changed), rtol=1e-12, atol=0)
    else:
        torch.testing.assert_close(found, plain * weights, rtol=1e-12, atol=1e-15)


def test_by_hand() -> None:
    """``ppo_clip`` at ratio 1 has the gradient ``-A / N``; the engine likes one token twice as well."""
    zeros = torch.zeros(2, dtype=torch.float64)
    inputs = LossInputs(
        log_probs=(zeros - 1).requires_grad_(),
        entropy=zeros,
        old_log_probs=zeros - 1,
        rollout_log_probs=torch.tensor([-1 - math.log(3), -1 + math.log(2)], dtype=torch.float64),
        reference_log_probs=None,
        advantages=torch.tensor([1.0, -4.0], dtype=torch.float64),
        loss_mask=zeros + 1,
        loss_weights=zeros + 0.5,
        samples=[0, 1],
        lengths=[1, 1],
    )
    loss = corrected(partial(ppo_clip, **CLIP), tis=tis)
    value, metrics = loss(inputs)
    assert value.item() == pytest.approx((-2.0 + 0.5 * 4.0) / 2)
    assert gradient(loss, inputs).tolist() == pytest.approx([-2.0 / 2, 0.5 * 4.0 / 2])
    assert metrics["correction/tis/weight"].item() == pytest.approx(1.25)
    assert metrics["correction/tis/clipped"].item() == 0.5
    assert metrics["correction/tis/masked"].item() == 0.0
    step = with_sample_sizes({name: each.item() for name, each in metrics.items()})
    assert step["correction/tis/effective_samples"] == pytest.approx(2.5**2 / (4 + 0.25) / 2)
    sums = {"correction/tis/weight_square", "correction/tis/total", "correction/samples"}
    assert set(step) == (set(metrics) - sums) | {"correction/tis/effective_samples"}


def test_weights_of_a_chain_are_multiplied_in_any_order() -> None:
    inputs = make_inputs()
    chain = {"tis": tis, "veto": partial(veto, threshold=0.3), "mask": partial(sequence_mask, delta=0.1)}
    found = [each(inputs).importance_weights for each in chain.values()]
    product = inputs.loss_weights.clone()
    for each in found:
        assert each is not None
        product = product * each
    assert 0 < int((product == 0).sum()) < len(product)
    loss = partial(ppo_clip, **CLIP)
    expected = gradient(loss, replace(inputs, loss_weights=product))
    backwards = dict(reversed(list(chain.items())))
    for order in (chain, backwards):
        torch.testing.assert_close(gradient(corrected(loss, **order), inputs), expected)
    metrics = with_sample_sizes(
        {key: float(each) for key, each in corrected(loss, **chain)(inputs)[1].items()}
    )
    assert {name.split("/")[1] for name in metrics if name.startswith("correction/")} == set(chain)


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_loss_reports_is_of_the_tokens_as_they_were_sampled(name: str) -> None:
    inputs = make_inputs()
    plain, found = policy_objective(LOSSES[name])(inputs), corrected(LOSSES[name], tis=tis)(inputs)
    for key, value in plain[1].items():
        if key in ("loss", "pg_loss"):
            assert found[1][key].item() == found[0].item() != value.item()
        else:
            assert found[1][key].item() == value.item(), key
    assert not any(value.requires_grad for value in found[1].values())


def test_the_policy_loss_is_evaluated_once() -> None:
    inputs, asked = make_inputs(), []

    def loss(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        asked.append(x)
        return (x.log_probs * x.loss_weights).sum(), {}

    for corrections in ({"tis": tis, "veto": veto}, {"metrics_only": metrics_only}):
        corrected(loss, **corrections)(inputs)
    one, other = asked
    assert torch.equal(one.metric_weights, inputs.loss_weights)
    assert not torch.equal(one.loss_weights, inputs.loss_weights)
    assert other.metric_weights is None


def test_other_terms_are_not_corrected() -> None:
    inputs = make_inputs()

    def objective(loss: LossFunction) -> LossFunction:
        return policy_objective(loss, kl_coef=0.5, entropy_coef=0.1)

    nothing = CorrectedLoss(
        policy_gradient, {"nothing": lambda x: Correction(torch.zeros_like(x.loss_weights), {})}
    )
    loss, metrics = objective(nothing)(inputs)
    terms = objective(policy_gradient)(inputs)[1]
    assert metrics["pg_loss"].item() == 0.0
    assert loss.item() == pytest.approx(0.5 * terms["kl_loss"].item() - 0.1 * terms["entropy_loss"].item())


def test_metrics_only_leaves_the_loss_alone() -> None:
    inputs = make_inputs()
    loss, found = corrected(policy_gradient, metrics_only=metrics_only)(inputs)
    plain, before = policy_objective(policy_gradient)(inputs)
    assert loss.item() == plain.item()
    metrics = with_sample_sizes({name: value.item() for name, value in found.items()})
    assert set(metrics) - set(before) == {
        f"correction/metrics_only/{name}"
        for name in ("kl", "kl_k3", "chi2_token", "chi2_sequence", "ppl_ratio")
    }
    assert metrics["correction/metrics_only/kl"] == pytest.approx(
        ((inputs.rollout_log_probs - inputs.old_log_probs) * inputs.loss_weights).sum().item()
    )


SAMPLE_LEVELS: dict[str, tuple[Callable[[LossInputs], Correction], Callable[[float], float]]] = {
    "tis": (partial(tis, level="sequence", low=0.5, high=1.5), lambda whole: min(max(whole, 0.5), 1.5)),
    "mis": (partial(mis, low=0.3, high=1.5), lambda whole: whole if 0.3 <= whole <= 1.5 else 0.0),
    "rejection": (
        partial(rejection, level="sequence", low=0.3, high=1.5),
        lambda whole: float(0.3 <= whole <= 1.5),
    ),
}


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "constant_length"])
def test_what_is_of_samples_is_a_mean_over_samples_whatever_the_aggregation(mode: Any) -> None:
    """In three micro-batches, of samples of 1 to 9 tokens, one of which has no token that counts."""
    lengths = (9, 1, 4, 2, 3)
    generator = torch.Generator().manual_seed(7)
    old = torch.randn(sum(lengths), generator=generator, dtype=torch.float64) - 3
    rollout = old + torch.randn(len(old), generator=generator, dtype=torch.float64) * 0.5
    masks = [[int(place % 3 != 2 and length != 2) for place in range(length)] for length in lengths]
    weights = torch.split(
        token_weights(torch.tensor([value for mask in masks for value in mask]), lengths, mode, 9), lengths
    )
    columns = [torch.split(each, lengths) for each in (old, rollout)]
    ratios = [
        math.prod(math.exp(p - q) for p, q, counts in zip(*own, mask, strict=True) if counts)
        for *own, mask in zip(*([each.tolist() for each in column] for column in columns), masks, strict=True)
        if any(mask)
    ]
    counts = [sum(mask) for mask in masks if any(mask)]
    expected = {
        "metrics_only/chi2_sequence": fmean(ratio**2 - 1 for ratio in ratios),
        "metrics_only/ppl_ratio": fmean(
            ratio ** (-1 / count) for ratio, count in zip(ratios, counts, strict=True)
        ),
    }
    for name, (_, weigh) in SAMPLE_LEVELS.items():
        own = [weigh(ratio) for ratio in ratios]
        expected |= {f"{name}/weight": fmean(own), f"{name}/masked": own.count(0.0) / len(own)}
        expected[f"{name}/effective_samples"] = sum(own) ** 2 / len(own) / sum(w**2 for w in own)
    expected["tis/clipped"] = fmean(not 0.5 <= ratio <= 1.5 for ratio in ratios)
    assert 0 < expected["mis/masked"] < 1
    assert 0 < expected["tis/clipped"] < 1
    loss = corrected(
        policy_gradient,
        metrics_only=metrics_only,
        **{name: each for name, (each, _) in SAMPLE_LEVELS.items()},
    )
    summed: Counter[str] = Counter()
    for chosen in ((0, 3), (1, 2), (4,)):
        p, q = (torch.cat([column[i] for i in chosen]) for column in columns)
        share = torch.cat([weights[i] for i in chosen])
        mask = torch.tensor([each for i in chosen for each in masks[i]], dtype=torch.float64)
        inputs = LossInputs(
            log_probs=p.clone().requires_grad_(),
            entropy=torch.zeros_like(p),
            old_log_probs=p,
            rollout_log_probs=q,
            reference_log_probs=None,
            advantages=torch.ones_like(p),
            loss_mask=mask,
            loss_weights=share,
            samples=chosen,
            lengths=[lengths[i] for i in chosen],
        )
        summed.update({name: value.item() for name, value in loss(inputs)[1].items()})
    found = with_sample_sizes(summed)
    for name, value in expected.items():
        assert found[f"correction/{name}"] == pytest.approx(value, rel=1e-9), name


def test_a_loss_of_the_users_own_is_corrected() -> None:
    def own(inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss = ((inputs.log_probs - inputs.advantages).square() * inputs.loss_weights).sum()
        return loss, {"miss": loss.detach()}

    inputs = make_inputs()
    weights = icepop(inputs).importance_weights
    assert weights is not None
    found = gradient(corrected(own, icepop=icepop), inputs)
    torch.testing.assert_close(found, gradient(policy_objective(own), inputs) * weights)


@pytest.mark.parametrize(
    "corrections",
    [
        {"tis": tis},
        {"mis": partial(mis, low=0.5, high=1.5), "veto": partial(veto, threshold=0.3)},
        {"mask": partial(sequence_mask, delta=0.0), "metrics_only": metrics_only},
    ],
    ids="-".join,
)
def test_micro_batches_add_up(corrections: dict[str, Any]) -> None:
    inputs = make_inputs(3)
    loss = corrected(LOSSES["ppo_clip"], **corrections)
    whole, metrics = loss(inputs)
    tensors = {
        field.name: torch.split(value, LENGTHS)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }

    def part(*chosen: int) -> LossInputs:
        own: dict[str, Any] = {name: torch.cat([each[i] for i in chosen]) for name, each in tensors.items()}
        return replace(inputs, **own, samples=chosen, lengths=[LENGTHS[i] for i in chosen])

    parts = [loss(part(*chosen)) for chosen in ((2,), (3, 0), (1,))]
    total = torch.stack([each for each, _ in parts]).sum()
    torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-15)
    for name, value in metrics.items():
        added = torch.stack([each[name] for _, each in parts]).sum()
        torch.testing.assert_close(added, value, rtol=1e-13, atol=1e-15, msg=name)
    (split,) = torch.autograd.grad(total, inputs.log_probs, retain_graph=True)
    torch.testing.assert_close(split, torch.autograd.grad(whole, inputs.log_probs)[0], rtol=1e-13, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_may_hold_anything(poison: float) -> None:
    inputs = make_inputs()
    masked = inputs.loss_mask == 0
    dirty: dict[str, Any] = {
        field.name: value.detach().masked_fill(masked, poison)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor) and field.name != "loss_mask"
    }
    dirty["log_probs"].requires_grad_()
    loss = corrected(LOSSES["ppo_clip"], mis=mis, veto=veto, metrics_only=metrics_only)
    poisoned = replace(inputs, **dirty)
    assert loss(poisoned)[0].item() == loss(inputs)[0].item()
    torch.testing.assert_close(gradient(loss, poisoned), gradient(loss, inputs))
    clean = loss(inputs)[1]
    assert all(value.item() == clean[name].item() for name, value in loss(poisoned)[1].items())


@pytest.mark.parametrize("rollout", [-1e9, -math.inf, -1e-12])
def test_a_token_that_the_trainer_finds_impossible_is_masked_without_a_trace(rollout: float) -> None:
    inputs = make_inputs()
    place = torch.tensor([0])
    far = replace(
        inputs,
        log_probs=inputs.log_probs.detach().index_fill(0, place, -800.0).requires_grad_(),
        old_log_probs=inputs.old_log_probs.index_fill(0, place, -800.0),
        rollout_log_probs=inputs.rollout_log_probs.index_fill(0, place, rollout),
    )
    loss = corrected(LOSSES["ppo_clip"], icepop=icepop)
    value, metrics = loss(far)
    assert value.isfinite()
    assert gradient(loss, far).isfinite().all()
    assert gradient(loss, far)[0] == 0
    assert metrics["correction/icepop/masked"] > 0


def test_everything_masked_teaches_nothing() -> None:
    inputs = make_inputs()
    loss = corrected(policy_gradient, mis=partial(mis, high=1e-9))
    value, metrics = loss(inputs)
    assert value.item() == 0.0
    assert not gradient(loss, inputs).any()
    step = with_sample_sizes({name: each.item() for name, each in metrics.items()})
    assert step["correction/mis/effective_samples"] == 0.0
    assert step["correction/mis/masked"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (torch.ones(3), "it returned a Tensor"),
        (Correction(torch.ones(3)), r"its importance_weights is \[3\]"),
        (Correction(1.0), "its importance_weights is a float"),  # type: ignore[arg-type]  # what is refused
        (Correction(None, {"far": torch.ones(())}), r"its far is \[\]"),
    ],
)
def test_what_a_correction_may_not_return(returned: Any, problem: str) -> None:
    loss = corrected(policy_gradient, mine=lambda inputs: returned)
    with pytest.raises(PluginError, match=rf"'mine' must return .* tensors \[10\]; {problem}"):
        loss(make_inputs())


def test_it_survives_pickling() -> None:
    inputs = make_inputs()
    loss = corrected(LOSSES["ppo_clip"], tis=partial(tis, high=1.5), metrics_only=metrics_only)
    assert pickle.loads(pickle.dumps(loss))(inputs)[0].item() == loss(inputs)[0].item()
