"""Chart catalog: the charts of a report, and the metrics that each shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from anygauge.observability.eval_names import EVAL_LOSS, EVAL_MEAN

__all__ = [
    "SECTIONS",
    "SFT_SECTIONS",
    "ChartSpec",
    "Lines",
    "Section",
    "eval_losses",
    "eval_means",
    "phase_metrics",
]


@dataclass(frozen=True, slots=True)
class Lines:
    """Metrics of a chart whose names match a pattern as a whole."""

    pattern: str
    label: str
    """In the legend; groups of the pattern fill it in."""
    marked: bool = False
    """Points of their own, for what is recorded now and then."""

    def find(self, names: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """Yield name and label of each metric that is shown."""
        for name in names:
            match = re.fullmatch(self.pattern, name)
            if match:
                yield name, match.expand(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """A chart, drawn where at least one of its metrics was recorded."""

    key: str
    """Identifies the chart in the page."""
    title: str
    about: str
    """Description of the chart, in a sentence."""
    lines: tuple[Lines, ...]
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    key: str
    title: str
    charts: tuple[ChartSpec, ...]


_PHASES = ("rollout", "reward", "log_probs", "train", "update_weights", "save")
"""In the order of a step; after them come those of plugins, and last what is in none."""
_REST = "overhead"

_REWARD = ChartSpec(
    key="reward",
    title="Reward",
    about="Mean over the samples of a step: as scored, and as trained on. Points are evaluations.",
    lines=(
        Lines("rollout/raw_reward", "as scored"),
        Lines("rollout/reward", "as trained on"),
        Lines(EVAL_MEAN, r"evaluation: \1", marked=True),
    ),
    wide=True,
)
_EVAL = ChartSpec(
    key="eval",
    title="Evaluation",
    about="Mean reward of each evaluation data set.",
    lines=(Lines(EVAL_MEAN, r"\1", marked=True),),
)
_PASS = ChartSpec(
    key="pass",
    title="pass@k in training",
    about="Chance that at least one of k samples of a prompt passes, from all samples of the prompt.",
    lines=(Lines(r"passrate/(pass@\d+)", r"\1"),),
    floor=0,
    ceiling=1,
)
_EVAL_PASS = ChartSpec(
    key="eval-pass",
    title="pass@k in evaluation",
    about="Chance that at least one of k samples of a prompt passes, by data set.",
    lines=(Lines(r"passrate/(.+)-(pass@\d+)", r"\1 \2", marked=True),),
    floor=0,
    ceiling=1,
)
_SOURCES = ChartSpec(
    key="reward-by-data-set",
    title="Reward by training data set",
    about="Mean reward as scored, by the data set that a prompt came from.",
    lines=(Lines(r"rollout/([^/]+)/raw_reward", r"\1"),),
)
_SIGNAL = ChartSpec(
    key="signal",
    title="Groups without a signal",
    about="Share of groups whose rewards are all equal, and of samples that could not be scored.",
    lines=(Lines("rollout/zero_std_ratio", "all equal"), Lines("rollout/failed_ratio", "not scored")),
    floor=0,
    ceiling=1,
)
_KL = ChartSpec(
    key="kl",
    title="KL",
    about="Estimate of how far the policy is from the one that sampled, and from the reference.",
    unit="nats per token",
    lines=(Lines("train/ppo_kl", "to the sampling policy"), Lines("train/kl_loss", "to the reference")),
)
_ENTROPY = ChartSpec(
    key="entropy",
    title="Entropy",
    about="Of the policy's next-token distribution, mean over the tokens that are trained on.",
    unit="nats per token",
    lines=(Lines("train/entropy(?:_loss)?", "entropy"),),
    floor=0,
)
_DIFFERENCE = ChartSpec(
    key="logprob-difference",
    title="Log-prob difference, trainer to engine",
    about="Mean absolute difference for the same tokens and weights: how well the two agree.",
    unit="nats",
    lines=(Lines("train/train_rollout_logprob_abs_diff", "difference"),),
    floor=0,
)
_LOSS = ChartSpec(
    key="loss",
    title="Loss",
    about="The objective that is minimised, its policy term, and the loss of the critic.",
    lines=(
        Lines("train/loss", "loss"),
        Lines("train/pg_loss", "policy term"),
        Lines("train/value_loss", "critic"),
    ),
)
_NLL = ChartSpec(
    key="loss",
    title="Loss",
    about="Mean negative log-likelihood of the tokens that are trained on.",
    unit="nats per token",
    lines=(Lines("train/loss", "loss"),),
)
_EVAL_LOSS = ChartSpec(
    key="eval-loss",
    title="Evaluation loss",
    about="The same of each evaluation data set, of which nothing is trained on.",
    unit="nats per token",
    lines=(Lines(EVAL_LOSS, r"\1", marked=True),),
)
_TRAINED = ChartSpec(
    key="trained-tokens",
    title="Trained tokens",
    about="Tokens of a step that the loss is on, in all and by data set.",
    unit="tokens",
    lines=(Lines("train/tokens", "all"), Lines("train/([^/]+)/tokens", r"\1")),
    floor=0,
)
_SEQUENCES = ChartSpec(
    key="sequence-length",
    title="Sequence length",
    about="Mean over the rows of a step, prompt included, in all and by data set.",
    unit="tokens",
    lines=(
        Lines("train/sequence_len/mean", "all"),
        Lines("train/([^/]+)/sequence_len/mean", r"\1"),
    ),
    floor=0,
)
_CLIP = ChartSpec(
    key="clipped",
    title="Clipped tokens",
    about="Share of tokens whose ratio is clipped, so that they have no gradient.",
    lines=(Lines("train/pg_clipfrac", "clipped"),),
    floor=0,
    ceiling=1,
)
_CORRECTED = ChartSpec(
    key="corrected",
    title="Effective tokens after correction",
    about="How many tokens of equal weight tell as much as these do with theirs, as a share of all.",
    lines=(Lines(r"train/correction/([^/]+)/effective_samples", r"\1"),),
    floor=0,
    ceiling=1,
)
_GRADIENT = ChartSpec(
    key="gradient-norm",
    title="Gradient norm",
    about="Global norm before clipping.",
    lines=(Lines("train/grad_norm", "norm"),),
    floor=0,
)
_RATE = ChartSpec(
    key="learning-rate",
    title="Learning rate",
    about="Of the optimizer, at the end of a step.",
    lines=(Lines("train/lr", "learning rate"),),
    floor=0,
)
_LENGTH = ChartSpec(
    key="length",
    title="Response length",
    about="Of the samples of a step.",
    unit="tokens",
    lines=(
        Lines("rollout/response_len/mean", "mean"),
        Lines("rollout/response_len/median", "median"),
        Lines("rollout/response_len/max", "longest"),
    ),
    floor=0,
)
_TRUNCATED = ChartSpec(
    key="truncated",
    title="Truncated and repetitive responses",
    about="Share of samples that reached the length limit, and that end in repetition.",
    lines=(
        Lines("rollout/truncated_ratio", "truncated"),
        Lines("rollout/repetition_frac", "repetitive"),
        Lines(r"eval/([^/]+)-truncated_ratio", r"truncated, evaluation: \1", marked=True),
    ),
    floor=0,
    ceiling=1,
)
_LAG = ChartSpec(
    key="lag",
    title="Age of tokens",
    about="Weight updates between the weights that made a token and those that are trained on it.",
    unit="versions",
    lines=(Lines("rollout/lag/mean", "mean"), Lines("rollout/lag/max", "most")),
    floor=0,
)
_ROUNDS = ChartSpec(
    key="rounds",
    title="Rounds",
    about="Turns of the model in a sample.",
    lines=(Lines("multi_turn/rounds/mean", "mean"), Lines("multi_turn/rounds/max", "most")),
    floor=0,
)
_OWN_LENGTH = ChartSpec(
    key="own-length",
    title="Length without observations",
    about="Tokens of a sample that the model wrote itself.",
    unit="tokens",
    lines=(
        Lines("multi_turn/response_len_without_observations/mean", "mean"),
        Lines("multi_turn/response_len_without_observations/max", "longest"),
    ),
    floor=0,
)
_TOKENS = ChartSpec(
    key="tokens",
    title="Throughput",
    about="Tokens of prompts and responses per second of a step, and generated ones per second of rollout.",
    unit="tokens/s",
    lines=(Lines("perf/tokens_per_s", "step"), Lines("perf/rollout_tokens_per_s", "rollout")),
    floor=0,
)
_ROW_TOKENS = ChartSpec(
    key="tokens",
    title="Throughput",
    about="Tokens of the rows, prompts included, per second of a step.",
    unit="tokens/s",
    lines=(Lines("perf/tokens_per_s", "step"),),
    floor=0,
)
_FLOPS = ChartSpec(
    key="flops",
    title="Model FLOP/s",
    about="Arithmetic of the model by its own count, per second and training device.",
    unit="TFLOP/s",
    lines=(Lines("perf/tflops", "training"), Lines(r"perf/(\w+)_tflops", r"\1")),
    floor=0,
)
_MEMORY = ChartSpec(
    key="memory",
    title="Memory",
    about="In use on the host, by the processes, and on the device that uses most.",
    unit="GiB",
    lines=(Lines(r"perf/(\w+)_(?:memory|rss)_gib", r"\1"),),
    floor=0,
)

_MEDIA = ChartSpec(
    key="media",
    title="Images, video and sound",
    about="Tokens of a sample that hold their places.",
    unit="tokens",
    lines=(Lines("rollout/media_tokens", "mean"),),
    floor=0,
)
_DECODING = ChartSpec(
    key="decoding",
    title="Decoding of media",
    about="Seconds of all threads, beside the work of the step before, and rows that were left out.",
    lines=(Lines("data/media_decode_s", "seconds"), Lines("data/media_dropped", "rows left out")),
    floor=0,
)

_COSTS = (_FLOPS, _MEMORY)

SECTIONS = (
    Section("outcome", "Reward and evaluation", (_REWARD, _EVAL, _PASS, _EVAL_PASS, _SOURCES, _SIGNAL)),
    Section("policy", "Policy", (_KL, _ENTROPY, _DIFFERENCE, _LOSS, _CLIP, _CORRECTED, _GRADIENT, _RATE)),
    Section("responses", "Responses", (_LENGTH, _TRUNCATED, _LAG, _ROUNDS, _OWN_LENGTH, _MEDIA)),
    Section("speed", "Speed and memory", (_TOKENS, *_COSTS, _DECODING)),
)
"""The charts of a report, in order. The time of a step by phase comes first in the last section."""
SFT_SECTIONS = (
    Section("outcome", "Loss and evaluation", (_NLL, _EVAL_LOSS, _EVAL, _EVAL_PASS)),
    Section("optimization", "Optimization", (_ENTROPY, _GRADIENT, _RATE)),
    Section("rows", "Rows", (_TRAINED, _SEQUENCES)),
    Section("speed", "Speed and memory", (_ROW_TOKENS, *_COSTS)),
)
"""The same of an SFT run, which has rewards in its evaluations alone, if at all."""


def phase_metrics(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return name and label of the metrics that divide the time of a step, in the order of a step."""
    names_of_phases = dict(Lines(r"perf/(\w+)_time", r"\1").find(names))
    # ``turns`` is the old name of ``sleep`` and ``wake_up`` together; runs of older versions have it alone.
    other = {"step", "turns"} if "perf/sleep_time" in names_of_phases else {"step"}
    phases = {phase: name for name, phase in names_of_phases.items() if phase not in other}
    others = [phase for phase in phases if phase not in (*_PHASES, _REST)]
    order = [phase for phase in (*_PHASES, *others, _REST) if phase in phases]
    return [(phases[phase], phase.replace("_", " ")) for phase in order]


def eval_means(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return name and data set of the metrics that are an evaluation's mean reward."""
    return list(Lines(EVAL_MEAN, r"\1").find(names))


def eval_losses(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return name and data set of the metrics that are an evaluation's loss."""
    return list(Lines(EVAL_LOSS, r"\1").find(names))
