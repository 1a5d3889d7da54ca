"""The table of health rules. ``docs/health.md`` shows it; ``bench/health_page.py`` writes it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from anygauge.health.measures import (
    Measure,
    average,
    entropy_left,
    gradient_spike,
    latest,
    memory_growth,
    typical,
    without_signal,
)

__all__ = ["NAMES", "RULES", "Limit", "Rule", "RuleName", "Unit", "format_value"]

RuleName = Literal[
    "logprob_abs_diff",
    "stale_weights",
    "no_signal",
    "truncation",
    "repetition",
    "failed_samples",
    "entropy_collapse",
    "policy_kl",
    "reference_kl",
    "gradient_spike",
    "idle_devices",
    "idle_servers",
    "memory_growth",
    "host_memory",
]
"""Names of the rules, as ``run.stop_on`` and ``health.limits`` have them."""
NAMES: tuple[RuleName, ...] = get_args(RuleName)
Unit = Literal["nats", "fraction", "times", "GiB", "versions", "count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition that a healthy run never meets.

    A rule fires once its value is beyond the limit: above it, or below it if ``is_floor``.
    """

    name: RuleName
    metrics: tuple[str, ...]
    """Metrics that the value needs: a step that lacks one of them is not judged."""
    others: tuple[str, ...] = ()
    """Metrics that it takes into account where they are recorded."""
    over: str
    """How the value is made of the metrics, as a phrase."""
    measure: Measure
    unit: Unit
    limit: float | None
    """``None`` where the config decides."""
    is_floor: bool = False
    says: str
    """Clause about the value; ``{value}`` stands for the number with its unit."""
    advice: str
    """Advice for the reader of a warning, as a sentence."""
    reason: str
    """Why the limit is where it is, as a sentence."""

    def is_beyond(self, value: float, limit: float) -> bool:
        """Return whether a value breaks the rule; one that is not a number does."""
        return not (value >= limit if self.is_floor else value <= limit)


def format_value(value: float, unit: Unit) -> str:
    """Return a value as a text with its unit: ``62 %``, ``0.15 nats``, ``12 times``."""
    match unit:
        case "fraction":
            return f"{100 * value:.3g} %"
        case "count":
            return f"{value:g}"
        case "versions":
            return f"{value:g} version{'' if value == 1 else 's'}"
    return f"{value:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of a rule in one run."""

    value: float | None
    """``None`` for a rule that is off."""
    key: str
    """Config key that changes it."""
    note: str = ""
    """Why it is this one."""

    def broken_by(self, rule: Rule, value: float) -> str:
        """Return a sentence about a value that is beyond the limit."""
        assert self.value is not None
        said = rule.says.format(value=format_value(value, rule.unit))
        side = "below" if rule.is_floor else "above"
        note = f" ({self.note})" if self.note else ""
        return f"{said}, {side} {self.key} = {format_value(self.value, rule.unit)}{note}."


RULES: tuple[Rule, ...] = (
    Rule(
        name="logprob_abs_diff",
        metrics=("health/logprob_abs_diff",),
        over="the step's own",
        measure=latest("health/logprob_abs_diff"),
        unit="nats",
        limit=None,
        says=(
            "trainer and rollout engine disagree about the log-probs of the same tokens under the same "
            "weights: their mean absolute difference is {value}"
        ),
        advice="docs/debugging.md says how to find out which of the two is wrong.",
        reason=(
            "Correct models differ by 1e-6 in float32, and even random weights of 4B parameters by no more "
            "than 0.09 in bfloat16."
        ),
    ),
    Rule(
        name="stale_weights",
        metrics=("rollout/lag/max",),
        over="the step's own",
        measure=latest("rollout/lag/max"),
        unit="versions",
        limit=None,
        says="tokens were sampled with weights {value} older than those that are trained",
        advice=(
            "A rollout engine did not take an update: look for it in logs/driver.log and in the engine's log."
        ),
        reason=(
            "The schedule guarantees it: 0 with sync, 1 with one_step_off, rollout.max_staleness with async; "
            "none with rollout.partial_rollout in sync, whose samples may continue for any number of steps."
        ),
    ),
    Rule(
        name="no_signal",
        metrics=("rollout/reward_std",),
        others=(
            "rollout/zero_std_ratio",
            "rollout/filtered_ratio",
            "passrate/pass@2",
            "train/value_loss",
        ),
        over=(
            "median over 10 steps of the groups that a filter rejected or whose rewards are all equal; with "
            "one sample for each prompt or a critic, the fraction of 10 steps whose rewards are all equal"
        ),
        measure=without_signal,
        unit="fraction",
        limit=0.95,
        says="{value} of the generated groups teach nothing, because all their samples have the same reward",
        advice=(
            "Compare raw_reward and the samples in the report: all wrong asks for easier prompts or another "
            "reward, all right for harder ones or the end of the run."
        ),
        reason=(
            "A step then learns from one group in twenty and costs twenty times what it should. The demo "
            "stays at 91 %, with nine of ten prompts solved."
        ),
    ),
    Rule(
        name="truncation",
        metrics=("rollout/truncated_ratio",),
        over="median over 10 steps",
        measure=typical("rollout/truncated_ratio", 10),
        unit="fraction",
        limit=0.5,
        says="{value} of the responses are cut off at rollout.max_new_tokens",
        advice="Raise rollout.max_new_tokens, penalize length in the reward, or check the stop tokens.",
        reason=(
            "Most answers then never come, and their reward judges the cut. Runs whose responses fit stay "
            "below 0.2."
        ),
    ),
    Rule(
        name="repetition",
        metrics=("rollout/repetition_frac",),
        over="median over 5 steps",
        measure=typical("rollout/repetition_frac", 5),
        unit="fraction",
        limit=0.1,
        says="{value} of the responses end in the same passage over and over",
        advice=(
            "Look at the samples in the report; lower train.lr, add algorithm.kl_coef, or penalize it in the "
            "reward."
        ),
        reason=(
            "Pretrained models that are sampled at temperature 1 get stuck in less than 2 % of their "
            "responses."
        ),
    ),
    Rule(
        name="failed_samples",
        metrics=("rollout/failed_ratio",),
        over="median over 5 steps",
        measure=typical("rollout/failed_ratio", 5),
        unit="fraction",
        limit=0.05,
        says="{value} of the samples have no reward, because their rollout or their scoring failed",
        advice="logs/scorer.log and the samples in the report have the errors.",
        reason=(
            "Single timeouts happen; more than one sample in twenty means that a kind of prompt or response "
            "is never learned from."
        ),
    ),
    Rule(
        name="entropy_collapse",
        metrics=("train/entropy_loss", "passrate/pass@1"),
        over=(
            "entropy as a fraction of that of the first steps, divided by the failures (1 - pass@1) as a "
            "fraction of theirs, medians over 5 steps; not judged without a failure"
        ),
        measure=entropy_left,
        unit="fraction",
        limit=0.1,
        is_floor=True,
        says="the policy got surer without getting better: {value} of its first entropy is left per failure",
        advice="Set algorithm.entropy_coef, raise algorithm.clip_high, lower train.lr, or add a KL term.",
        reason=(
            "A policy that is this sure of wrong answers samples nearly the same response each time, and "
            "finds no better one. Runs that learn stay above 0.3, also when their task is nearly solved."
        ),
    ),
    Rule(
        name="policy_kl",
        metrics=("train/ppo_kl",),
        over="mean over 5 steps",
        measure=average("train/ppo_kl", 5),
        unit="nats",
        limit=0.2,
        says="a step moves the policy by {value} for each token",
        advice="Lower train.lr or train.optimizer_steps, or warm the learning rate up.",
        reason=(
            "The clipped objective assumes small steps: at 0.2 the mean ratio of a token is off by a fifth. "
            "Usual values are 1e-4 to 0.06; means of tiny models without warm-up begin at 0.12. A mean "
            "sees the one step that ruins a policy, which moves no more after it."
        ),
    ),
    Rule(
        name="reference_kl",
        metrics=("train/kl_loss",),
        over="median over 5 steps",
        measure=typical("train/kl_loss", 5),
        unit="nats",
        limit=1.0,
        says="the policy is {value} for each token away from the reference",
        advice="Raise algorithm.kl_coef, lower train.lr, or check the reward for a loophole in the samples.",
        reason=(
            "Fine-tuned policies are 0.001 to 0.3 away. At 1 nat a token that the policy picks was e times "
            "less likely in the reference, on average: it has left the model that was trained from."
        ),
    ),
    Rule(
        name="gradient_spike",
        metrics=("train/grad_norm",),
        over="largest of 5 steps, divided by the largest of up to 55 before",
        measure=gradient_spike,
        unit="times",
        limit=10.0,
        says="the gradient norm reached {value} its largest of the steps before",
        advice=(
            "Look at the samples of that step; lower train.max_grad_norm or train.lr if it happens often."
        ),
        reason=(
            "Runs that go well stay below 3; a tiny model of audio, whose first gradients are small, below 8."
        ),
    ),
    Rule(
        name="idle_devices",
        metrics=("perf/device_utilization_min",),
        over="median over 10 steps",
        measure=typical("perf/device_utilization_min", 10),
        unit="fraction",
        limit=0.1,
        is_floor=True,
        says="a device computes in only {value} of the time",
        advice=(
            "The phases in the report show what it waits for: share devices (placement.colocated), move some "
            'between trainer and servers, or use rollout.schedule = "async".'
        ),
        reason="Below a tenth the device could be given back without a step taking longer by much.",
    ),
    Rule(
        name="idle_servers",
        metrics=("perf/idle_servers",),
        over="median over 5 steps",
        measure=typical("perf/idle_servers", 5),
        unit="count",
        limit=0.0,
        says="{value} of the rollout servers got no request",
        advice=(
            "Look for their state in logs/driver.log; use fewer servers where a step has fewer samples than "
            "they have room for."
        ),
        reason="Requests go to the server with the fewest tokens in flight, so that each gets some.",
    ),
    Rule(
        name="memory_growth",
        metrics=("perf/driver_rss_gib",),
        others=("perf/worker_rss_gib",),
        over="growth in 40 steps of the least of 20 steps, twice that of the slower half",
        measure=memory_growth,
        unit="GiB",
        limit=1.0,
        says="the memory of the driver or of a worker grew by {value} in 40 steps",
        advice=(
            "Look which process grows (perf/driver_rss_gib, perf/worker_rss_gib): a reward, a rollout "
            "function or a callback of the driver may keep what it has seen."
        ),
        reason=(
            "A run of 1,000 steps that grows so takes 25 GiB more at its end. Small runs without a leak grow "
            "by up to 0.25 GiB while allocators settle."
        ),
    ),
    Rule(
        name="host_memory",
        metrics=("perf/host_memory_ratio",),
        over="median over 3 steps",
        measure=typical("perf/host_memory_ratio", 3),
        unit="fraction",
        limit=0.95,
        says="{value} of the host's memory, or of the cgroup's limit, is in use",
        advice=(
            "The kernel is about to kill a process: use fewer workers, smaller media caches, or more memory."
        ),
        reason="The page cache does not count, so what is left is all there is.",
    ),
)
"""In the order in which the report lists them: what makes a run worthless first."""
