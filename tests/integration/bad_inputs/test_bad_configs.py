"""Keys, values, files and paths that are wrong: each ends in an error with a code, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anygauge.config.validate import keys
from anygauge_hooks.errors import AnygaugeError

Attempt = Callable[..., AnygaugeError]

generated = settings.get_profile("bad_inputs")


WRONG: list[tuple[str, Any]] = [
    ("run.steps", 0),
    ("run.steps", -1),
    ("run.steps", 1.5),
    ("run.name", ""),
    ("run.name", "../escape"),
    ("run.name", "a/b"),
    ("run.name", "x" * 300),
    ("run.name", ".hidden"),
    ("run.seed", -1),
    ("run.seed", 2**63),
    ("run.task", "dpo"),
    ("run.trackers", ["jsonl", "no-such-tracker"]),
    ("run.timeout_s", 0),
    ("run.tracker_options", {"no-such-tracker": {"project": "x"}}),
    ("model.path", ""),
    ("model.path", "no-such-directory"),
    ("model.path", "/dev/null"),
    ("model.path", "x" * 300),
    ("model.path", "owner/" + "x" * 300),
    ("model.path", "a\0b"),
    ("data.cache", "a\0b"),
    ("hub.cache", "a\0b"),
    ("run.directory", "x" * 300),
    ("run.directory", "a\0b"),
    ("model", 5),
    ("data.train", []),
    ("data.train", "train.jsonl"),
    ("data.train", ["no-such-file.jsonl"]),
    ("data.train", ["."]),
    ("data.train", ["/dev/zero"]),
    ("data.train", ["x" * 300]),
    ("data.train", ["a\0b"]),
    ("data.train", ["train.jsonl@[1:2"]),
    ("data.train", ["train.jsonl@[a:b]"]),
    ("data.train", ["train.jsonl@[5]"]),
    ("data.train", ["train.jsonl@[0:0]"]),
    ("data.train", ["train.jsonl@[100:]"]),
    ("data.train", [{"path": "train.jsonl", "weight": 0}]),
    ("data.train", [{"path": "train.jsonl", "weight": -1.0}]),
    ("data.train", [{"path": "train.jsonl", "weight": 1.0}, "eval.jsonl"]),
    ("data.train", [{"path": "train.jsonl", "name": "a b"}]),
    ("data.train", [{"file": "train.jsonl"}]),
    ("data.train", ["train.jsonl", "train.jsonl"]),
    ("data.source", "no-such-source"),
    ("data.input_key", "question"),
    ("data.label_key", "answer"),
    ("data.metadata_key", "extra"),
    ("data.tools_key", "tools"),
    ("data.apply_chat_template", True),
    ("data.system_prompt", "be kind"),
    ("data.chat_template_kwargs", {"enable_thinking": False}),
    ("data.max_prompt_tokens", 1),
    ("data.max_prompt_tokens", 0),
    ("reward.function", "no_such_reward"),
    ("reward.function", "no_such_module:f"),
    ("reward.function", "json:no_such_function"),
    ("reward.function", "json:"),
    ("reward.function", ":f"),
    ("reward.function", "none"),
    ("reward.function", "json:__name__"),
    ("reward.options", {"loud": True}),
    ("reward.parts", {"a": {"function": "exact_match"}}),
    ("reward.scope", "batch"),
    ("reward.timeout_s", 0),
    ("reward.memory_gib", -1),
    ("reward.max_failed_ratio", 1.5),
    ("reward.overlong_buffer", 5000),
    ("rollout.engine", "no-such-engine"),
    ("rollout.prompts_per_step", 0),
    ("rollout.samples_per_prompt", 0),
    ("rollout.max_new_tokens", 10**9),
    ("rollout.temperature", 0),
    ("rollout.temperature", -1.0),
    ("rollout.top_p", 0),
    ("rollout.top_p", 1.5),
    ("rollout.top_k", -1),
    ("rollout.stop", [""]),
    ("rollout.stop_token_ids", [10**6]),
    ("rollout.max_batch_tokens", 2),
    ("rollout.dtype", "int8"),
    ("algorithm.advantage", "no-such-estimator"),
    ("algorithm.advantage_options", {"loud": True}),
    ("algorithm.policy_loss", "no-such-loss"),
    ("algorithm.clip_low", 1.0),
    ("algorithm.clip_low", 0),
    ("algorithm.dual_clip", 0.5),
    ("algorithm.kl_coef", -0.1),
    ("algorithm.kl_type", "k9"),
    ("algorithm.loss_aggregation", "mean"),
    ("train.engine", "no-such-engine"),
    ("train.optimizer_steps", 3),
    ("train.optimizer_steps", 0),
    ("train.micro_batch_tokens", 0),
    ("train.lr", 0),
    ("train.lr", -1e-6),
    ("train.lr", "fast"),
    ("train.min_lr", 1.0),
    ("train.lr_schedule", "linear-ish"),
    ("train.adam_betas", [0.9]),
    ("train.adam_betas", [0.9, 1.0]),
    ("train.adam_betas", [0.9, 0.99, 0.999]),
    ("train.clip_grad", -1),
    ("train.recompute", "everything"),
    ("train.megatron", {"no_such_field": 1}),
    ("train.megatron", {"num_layers": 3}),
    ("eval.interval", 0),
    ("eval.data", ["no-such-file.jsonl"]),
    ("eval.temperature", -1),
    ("eval.datasets", {"eval": {"files": ["eval.jsonl"]}}),
    ("eval.datasets", {"math": {"files": []}}),
    ("eval.datasets", {"math": {"files": ["no-such-file.jsonl"]}}),
    ("eval.datasets", {"math": {"path": "eval.jsonl"}}),
    ("eval.datasets", {"a b": {"files": ["eval.jsonl"]}}),
    ("eval.datasets", {"math": {"files": ["eval.jsonl"], "reward": {"function": "no_such_reward"}}}),
    ("eval.datasets", {"math": {"files": ["eval.jsonl"], "temperature": 0, "samples_per_prompt": 4}}),
    ("save.every", 0),
    ("save.keep", 0),
    ("save.hf_every", -1),
    ("debug.mode", "both"),
    ("debug.mode", "train_only"),
    ("debug.replay_rollouts", "no-such-directory"),
    ("debug.replay_batches", "no-such-directory"),
    ("hub.source", "somewhere"),
    ("placement.launcher", "slurm"),
    ("placement.train_workers", 0),
    ("placement.train_workers", 1000),
    ("cluster.address", ""),
    ("cluster.ip_version", 5),
    ("no_such_table.key", 1),
    ("run.no_such_key", 1),
    ("train.leaning_rate", 1e-3),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{n}-{path}" for n, (path, _) in enumerate(WRONG)])
def test_bad_values(attempt: Attempt, path: str, value: Any) -> None:
    attempt((path, value))


TEXTS = [
    "",
    "[run]",
    "run",
    "run = 5",
    '[run]\nname = "x"',
    "[run]\nname = x",
    '[run\nname = "x"',
    '[run]\nname = "x"\nname = "y"',
    '[run]\nname = "x"\n[run]\nsteps = 1',
    '{"run": {"name": "x"}}',
    "run:\n  name: x\n",
    '[run]\nname = "x"\n[on]\ncpu = 3',
    '[run]\nname = "x"\n[on.CPU.train]\nlr = 1.0',
    "\x00",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_bad_files(attempt: Attempt, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert "bad.toml" in str(attempt(config=path))


@pytest.mark.parametrize("name", ["missing.toml", ".", "runs", "model/model.safetensors"])
def test_what_is_no_config_file(attempt: Attempt, workplace: Path, name: str) -> None:
    attempt(config=workplace / name)


def wrong_types() -> Iterator[tuple[str, Any]]:
    """Yield a value of a wrong kind for every key of the schema."""
    for path, field in keys():
        shown = str(field.annotation)
        yield path, 3 if "dict" in shown and "Literal" not in shown else {"a": object.__name__}


KINDS = [
    (path, value) for path, value in wrong_types() if not path.endswith(("options", "megatron", "kwargs"))
]


@pytest.mark.parametrize(("path", "value"), KINDS, ids=[path for path, _ in KINDS])
def test_values_of_a_wrong_kind(attempt: Attempt, path: str, value: Any) -> None:
    assert path.split(".")[0] in str(attempt((path, value)))


@generated
@given(
    path=st.sampled_from([path for path, _ in keys()]),
    noise=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3, max_size=8),
)
def test_misspelled_keys(attempt: Attempt, path: str, noise: str) -> None:
    assert "unknown key" in str(attempt((f"{path}{noise}q", 1)))


# -------------------------------------------------------------------------
# Paths
# -------------------------------------------------------------------------


def test_a_run_directory_that_no_run_made(attempt: Attempt, workplace: Path) -> None:
    directory = workplace / "runs" / "photos"
    directory.mkdir(exist_ok=True)
    (directory / "cat.png").write_bytes(b"meow")
    assert "was not created by a run" in str(attempt(("run.name", "photos")))


def test_an_earlier_run_without_leave(attempt: Attempt) -> None:
    assert "--resume" in str(attempt(("run.overwrite", False)))


def test_both_resume_and_overwrite(attempt: Attempt) -> None:
    attempt(("run.resume", True))


@pytest.mark.parametrize("directory", ["/dev/null", "/proc/nowhere", "train.jsonl", "train.jsonl/below"])
def test_no_place_for_a_run(attempt: Attempt, directory: str) -> None:
    assert "run.directory" in str(attempt(("run.directory", directory)))


def test_a_pipe_is_not_opened(attempt: Attempt, tmp_path: Path) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    assert "is a pipe" in str(attempt(("data.train", [str(pipe)])))


def test_there_are_more_than_two_hundred() -> None:
    assert len(WRONG) + len(TEXTS) + len(KINDS) >= 200
