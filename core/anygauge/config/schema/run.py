"""The run itself: its limits, where its files come from and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anygauge.config.schema.section import Name, NonNegative, Positive, Seconds, Section
from anygauge.health.rules import RuleName

__all__ = ["Debug", "Health", "Hub", "Profile", "Run", "Save"]

Limit = Annotated[float, Field(gt=0)]


class Run(Section):
    """The run as a whole."""

    task: Literal["rl", "sft"] = "rl"
    """``rl`` generates, scores and trains; ``sft`` trains on the assistant's turns of the data itself."""
    name: Name
    """Names the run directory. A file without it names the run after itself: ``first.toml`` is ``first``."""
    directory: Path = Path("runs")
    """Run directories are made here."""
    steps: Positive = 100
    """RL steps: generate, score, train, sync."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds the data order, the sampling and the model's random state."""
    overwrite: bool = False
    """Delete an earlier run of the same name instead of stopping. On the command line: ``--overwrite``."""
    resume: bool = False
    """Go on from the last checkpoint of an earlier run of the same name; start if there is none. On the
    command line: ``--resume``."""
    accept_changes: tuple[str, ...] = ()
    """Keys or tables in which a resumed run may differ from its earlier part, such as ``["train.lr",
    "data"]``; other data start from their beginning."""
    deterministic: bool = False
    """Let two runs of one config give the same bits, where that costs speed."""
    trackers: tuple[str, ...] = ("jsonl",)
    """Trackers of metrics: ``jsonl`` (always), ``tensorboard``, ``wandb``, ``trackio``."""
    tracker_options: dict[str, dict[str, Any]] = {}
    """Settings of trackers by name, such as ``{wandb = {project = "demo", mode = "offline"}}``."""
    metrics: tuple[str, ...] = ()
    """Functions of your own that add metrics to each step, as ``package.module:function`` or by a registered
    name. They are recorded as ``custom/NAME``."""
    report: bool = True
    """Write ``report.html``, every so often while the run goes on and when it ends."""
    progress: bool = True
    """Show live progress on a terminal."""
    log_every: Positive = 1
    """Steps between two lines where the output is no terminal, or has no live progress."""
    timeout_s: Seconds = 1800.0
    """Longest wait for any answer of a worker, in seconds."""
    stop_on: tuple[RuleName, ...] = ()
    """Health rules that end the run when they fire: it saves a checkpoint and exits with AG801. The rules are
    in docs/health.md."""


class Hub(Section):
    """Model and data hub, searched after local directories and the cache."""

    source: Literal["huggingface", "modelscope"] = "huggingface"
    """Which hub."""
    endpoint: str | None = None
    """Address of a mirror; ``None`` takes the hub's own, or ``HF_ENDPOINT``."""
    offline: bool = False
    """Use only the cache; download nothing."""
    cache: Path | None = None
    """Directory of downloads; ``None`` takes the hub's own."""


class Save(Section):
    """Checkpoints, from which a run resumes exactly, and exports."""

    every: Positive | None = 20
    """Steps between checkpoints, written while the run goes on; ``None`` for none."""
    keep: Positive = 2
    """Checkpoints that are kept, the latest ones."""
    best: str | None = None
    """Metric whose best checkpoint is kept beside these, such as ``eval/held-out``; ``None`` for none."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of it is best."""
    hf_every: Positive | None = None
    """Steps between exports of a complete Hugging Face directory ``hf-step-N/``."""
    hf_at_end: bool = True
    """Write the trained model as a Hugging Face directory ``hf/`` when the run ends."""


class Debug(Section):
    """Debug modes, dumps and replays."""

    mode: Literal["none", "rollout_only", "train_only"] = "none"
    """``rollout_only`` generates and scores and builds no train engine; ``train_only`` trains on a replay and
    builds no rollout engine."""
    dump_rollouts: bool = False
    """Write the scored groups of each step to ``dumps/``."""
    dump_batches: bool = False
    """Write what each rank trained on in each step to ``dumps/``, with the log-probs of every pass."""
    replay_rollouts: Path | None = None
    """Directory of dumps: take the groups of each step from there instead of generating."""
    replay_batches: Path | None = None
    """Directory of dumps: train on these batches; needs ``mode = "train_only"``."""


class Health(Section):
    """Health rules, checked after each step."""

    logprob_abs_diff_warning: Limit | Literal["auto"] | None = "auto"
    """Warn where the mean absolute difference of the trainer's and the rollout engine's log-probs, the metric
    ``health/logprob_abs_diff``, is above this. ``auto`` is 1e-4, or 0.15 if one of the two computes in
    bfloat16; ``None`` never warns. Tokens of older weights do not count."""
    logprob_abs_diff_error: Limit | Literal["auto"] | None = "auto"
    """End the run where it is above this. ``auto`` is 1e-3, or 0.3 if one of the two computes in bfloat16;
    ``None`` never ends it."""
    limits: dict[RuleName, Annotated[float, Field(ge=0)] | None] = {}
    """Limits of other rules, where those of docs/health.md do not fit: ``{truncation = 0.8}``; ``None`` turns
    a rule off."""


class Profile(Section):
    """Profiles of some steps, and the timeline of the whole run."""

    steps: tuple[Positive, ...] = ()
    """Steps to record a profile of, such as ``[3, 20]``; the first step of a run is 1."""
    kind: str = "torch"
    """``torch`` (operators and kernels), the name of the rollout engine if its servers can be profiled
    (``sglang``), or a kind of the backend: ``memory`` (history of allocations) on ``cuda`` and ``npu``,
    ``npu`` (Ascend's profiler) on ``npu``."""
    ranks: tuple[NonNegative, ...] = ()
    """Workers, or servers, to record; ``[]`` records all. Profiles are large: of many ranks, take a few."""
    timeline: bool = True
    """Write ``timeline.json``: what each process and each server did when."""
