"""``docs/metrics.md`` has a row for every metric, and no row for what is none."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch

from anygauge.algorithms.corrected_loss import CorrectedLoss, with_sample_sizes
from anygauge.algorithms.correction import metrics_only, tis
from anygauge.algorithms.losses import policy_objective, ppo_clip
from anygauge.algorithms.on_policy import ON_POLICY
from anygauge.algorithms.plugin import register_advantage_estimators
from anygauge.algorithms.values import value_loss
from anygauge.config.schema import Algorithm
from anygauge.observability.memory import METERS, driver_memory
from anygauge.observability.metric_functions import custom_metrics
from anygauge.observability.metrics import (
    StepWork,
    conversation_metrics,
    eval_metrics,
    performance_metrics,
    rollout_metrics,
    with_step_axes,
)
from anygauge.rollout.tally import Tally
from anygauge.trainer.estimate import estimate
from anygauge.trainer.health import health_metrics
from anygauge.trainer.loop import mean_over_steps
from anygauge.trainer.plan import plan_metrics
from anygauge_hooks.algorithms import ValueInputs
from anygauge_hooks.engines import LossInputs
from anygauge_hooks.rl import Group, Prompt
from anygauge_tests.batches import TrainSample, make_batch, plan_samples
from anygauge_tests.scoring import sample as make_sample

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([a-z_]+/\S+)` \| (\S.*?) \| (.*?) ?\| ?(.*?) ?\|$", re.M)
OF_THE_LOOP = {
    *("train/grad_norm", "train/lr", "eval/<dataset>-loss", "eval/<dataset>/versions", "perf/save_time"),
    *("train/critic_grad_norm", "train/critic_lr"),
    *("train/moe/load_max_over_mean", "train/moe/load_max_over_mean/layer_<n>"),
    *("rollout/media_tokens", "data/step", "data/media_bytes", "data/media_decode_s", "data/media_dropped"),
}
"""Metrics that an engine or the loop itself records; a run's own test checks them."""
NAMES = {
    **{"dataset-a": "<dataset>", "dataset-b": "<dataset>", "prefill": "<phase>"},
    **{"correction/tis/": "correction/<name>/", "<name>/clipped": "tis/clipped"},
    **{"reward/part": "reward/<part>", "custom/mine": "custom/<name>"},
    **{"share_0": "share_<n>", "share_1": "share_<n>"},
}


def rows() -> list[tuple[str, ...]]:
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


def groups() -> list[Group]:
    """Return samples of two data sets and two turns."""
    sample = make_sample(
        3, loss_mask=(1, 0, 1), weight_versions=(0, 1, 1), reward=1.0, raw_reward={"part": 1.0}
    )
    return [
        Group(prompt=Prompt(index=0, tokens=(1,), text="a", dataset=name), samples=(sample, sample))
        for name in ("dataset-a", "dataset-b")
    ]


def rows_of_conversations() -> list[Prompt]:
    return [Prompt(index=0, tokens=(1,), text="", dataset="dataset-a", response=(2,), loss_mask=(1,))]


def training() -> dict[str, float]:
    ones = torch.ones(2)
    inputs = LossInputs(
        log_probs=-ones,
        entropy=ones,
        old_log_probs=-ones,
        rollout_log_probs=-ones,
        reference_log_probs=-ones,
        advantages=ones,
        loss_mask=ones,
        loss_weights=ones / 2,
        teacher_top_k_log_probs=-ones[:, None],
        top_k_log_probs=-ones[:, None],
        samples=[0],
        lengths=[2],
    )
    loss = partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    corrected = CorrectedLoss(loss, {"tis": tis, "metrics_only": metrics_only})
    objective = policy_objective(corrected, kl_coef=1.0, distill_kl_coef=1.0)
    metrics = with_sample_sizes({name: value.item() for name, value in objective(inputs)[1].items()})
    return {f"train/{name}": value for name, value in mean_over_steps([metrics]).items()}


def criticism() -> dict[str, float]:
    one = torch.ones(1)
    sample = TrainSample(
        tokens=(1, 2), response_length=1, loss_mask=(1,), rollout_log_probs=(-0.5,), advantages=(1.0,)
    )
    (gae,) = [each for each in register_advantage_estimators() if each.name == "gae"]
    passes = ("old_log_probs", "reference_log_probs", "teacher_log_probs", "values")
    batch = make_batch([sample], **dict.fromkeys(passes, one))
    found = estimate(Algorithm(advantage="gae", distill_coef=1.0), gae, batch, lambda x: x)
    inputs = ValueInputs(values=one, old_values=one, returns=one, loss_mask=one, loss_weights=one)
    metrics = {**found, **value_loss(inputs, clip=0.2)[1]}
    return {f"train/{name}": float(value) for name, value in metrics.items()}


def division() -> dict[str, float]:
    sample = TrainSample(
        tokens=(1, 2), response_length=1, loss_mask=(1,), rollout_log_probs=(-0.5,), advantages=(1.0,)
    )
    return plan_metrics(plan_samples([sample], 1, 2, "token_mean"), float)


def performance() -> dict[str, float]:
    phases = ("generate", "log_probs", "teacher", "values", "train_values", "forward_backward", "optimizer")
    seconds = dict.fromkeys((*phases, "weight_sync", "prefill"), 1.0)
    report = {
        "seconds": seconds,
        "memory": {"rss": 1.0, "device": 1.0, **dict.fromkeys(METERS, 1.0)},
        "passes": {"log_probs": 1},
    }
    work = StepWork.of_groups(groups(), lambda length: 1e9)
    return performance_metrics(
        work,
        [{**report, "servers": {"idle": 0}}],
        wall_s=9.0,
        driver_seconds={"reward": 1.0, "sleep": 1.0, "wake_up": 1.0},
    )


def emitted() -> set[str]:
    metrics = {
        **training(),
        **criticism(),
        **rollout_metrics(groups(), lambda raw: raw["part"], version=1),
        **Tally(most_failed=0.0, most_unscored=0.0).metrics(1),
        **eval_metrics("dataset-a", groups(), lambda raw: raw["part"]),
        **custom_metrics({"mine": lambda: {"mine": 1}}, (), {}, step=1),
        **division(),
        **performance(),
        **driver_memory(),
        **health_metrics(dict.fromkeys(ON_POLICY, 1.0)),
        **conversation_metrics(rows_of_conversations(), datasets=2),
    }
    return {generic(name) for name in with_step_axes(metrics, 1)} | OF_THE_LOOP


def generic(name: str) -> str:
    """Return a metric's name as the page writes it."""
    for real, stands_for in NAMES.items():
        name = name.replace(real, stands_for)
    return re.sub(r"pass@\d+", "pass@<k>", name)


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    documented = [name for name, *_ in rows()]
    assert len(set(documented)) == len(documented)
    assert set(documented) == emitted()


def test_each_row_is_in_the_section_of_its_group() -> None:
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    wrong = [
        name
        for section in sections
        for name, *_ in ROW.findall(section)
        if not section.startswith(f"`{name.partition('/')[0]}/`")
    ]
    assert not wrong
