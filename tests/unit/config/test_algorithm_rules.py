"""Errors about a wrong ``[algorithm]``, ``[critic]`` or ``[teacher]`` before a run starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.algorithms import advantages, plugin
from anygauge.config import Config
from anygauge.config.check import check
from anygauge.config.load import LoadedConfig
from anygauge.config.rules.algorithm import compares, has_critic, has_teacher, value_problems
from anygauge.config.rules.correction import stale_rule
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import NamedFunction

Load = Callable[..., LoadedConfig]
GAE = "--algorithm.advantage=gae"
DISTILL = "--algorithm.advantage=on_policy_distillation"


class Algorithms:
    """The core's, but for those that the config's tests stand in for."""

    @hookimpl
    def register_advantage_estimators(self) -> list[NamedFunction]:
        wrong: list[Any] = [{"name": "strange", "kind": "tokens"}, {"name": "needy", "needs": ["value"]}]
        own = [each for each in plugin.register_advantage_estimators() if each.name != "grpo"]
        return [*own, *(NamedFunction(fn=len, **each) for each in wrong)]

    @hookimpl
    def register_policy_losses(self) -> list[NamedFunction]:
        return [each for each in plugin.register_policy_losses() if each.name != "ppo_clip"]

    @hookimpl
    def register_corrections(self) -> list[NamedFunction]:
        wrong: list[Any] = [{"name": "greedy", "needs": ["values"]}]
        return [*plugin.register_corrections(), *(NamedFunction(fn=len, **each) for each in wrong)]


@pytest.fixture(autouse=True)
def algorithms(plugins: Plugins) -> None:
    plugins.register(Algorithms(), "algorithms")


def other_model(directory: Path, name: str, vocab_size: int = 8) -> Path:
    """Write a model beside the policy's, with another vocabulary if asked."""
    target = directory / name
    target.mkdir()
    for path in (directory / "model").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    hf = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(hf | {"vocab_size": vocab_size}))
    return target


@pytest.mark.parametrize(
    ("overrides", "found", "hint"),
    [
        (
            ["--algorithm.kl_reward_coef=0.1"],
            "algorithm.kl_reward_coef: found 0.1",
            "'grpo' has one reward",
        ),
        (["--critic.lr=1e-5"], "critic.lr: found '1e-05'", "has no effect here: the critic is there for"),
        (["--teacher.path=x"], "teacher.path: found 'x'", "has no effect here: the teacher is there for"),
        ([DISTILL], "teacher.path: not set", "name the model that is to be distilled"),
        (["--algorithm.distill_coef=0.5"], "teacher.path: not set", "name the model that is to be distilled"),
        (
            ["--algorithm.distill_kl_coef=0.5"],
            "teacher.path: not set",
            "name the model that is to be distilled",
        ),
        (
            ["--algorithm.distill_top_k=8"],
            "algorithm.distill_top_k: found 8",
            "has no effect without algorithm.distill_kl_coef",
        ),
        (
            [GAE, "--critic.warmup_steps=100"],
            "critic.warmup_steps: found 100",
            "leaves no step for the policy",
        ),
        (
            [GAE, "--algorithm.advantage_options={lam=1.0}"],
            "algorithm.advantage_options.lam: found 1.0",
            "'gae' has no such option; known: gamma, lambd",
        ),
        (["--algorithm.policy_loss=gspp"], "algorithm.policy_loss: found 'gspp'", "no plugin provides it"),
        (
            ["--algorithm.advantage=rloo", "--rollout.samples_per_prompt=1"],
            "rollout.samples_per_prompt: found 1",
            "'rloo' compares the samples of a prompt, and learns nothing from a single one; write 2 or more",
        ),
        (
            ["--algorithm.advantage=reinforce_plus_plus_baseline", "--rollout.samples_per_prompt=1"],
            "rollout.samples_per_prompt: found 1",
            "'reinforce_plus_plus_baseline' compares",
        ),
        (
            ["--algorithm.policy_loss=gspo", "--algorithm.dual_clip=3"],
            "algorithm.dual_clip: found 3.0",
            "has no effect: 'gspo' takes clip_low, clip_high",
        ),
        (
            ["--algorithm.policy_loss=policy_gradient", "--algorithm.clip_low=0.1"],
            "algorithm.clip_low: found 0.1",
            "has no effect: 'policy_gradient' takes none of clip_low, clip_high, dual_clip",
        ),
        (
            ["--algorithm.policy_loss=policy_gradient", "--train.optimizer_steps=2"],
            "train.optimizer_steps: found 2",
            "'policy_gradient' has no ratio",
        ),
        (
            [GAE, "--algorithm.advantage_options={gamma='a'}"],
            "algorithm.advantage_options.gamma: found 'a'",
            "'gae' cannot take it: input should be a valid number",
        ),
        (
            [GAE, "--algorithm.advantage_options={gamma=1.5}"],
            "algorithm.advantage_options.gamma: found 1.5",
            "'gae' cannot take it: input should be less than or equal to 1",
        ),
        (
            [GAE, "--algorithm.advantage_options={lambd=-2}"],
            "algorithm.advantage_options.lambd: found -2",
            "'gae' cannot take it: input should be greater than or equal to 0",
        ),
        (
            ["--algorithm.advantage=strange"],
            "algorithm.advantage: found 'strange'",
            "its plugin registers it with kind = 'tokens'; known: 'group', 'token'",
        ),
        (
            ["--algorithm.advantage=needy"],
            "algorithm.advantage: found 'needy'",
            "its plugin registers it with needs = 'value'; known: 'values', 'teacher_log_probs'",
        ),
        (
            ["--algorithm.correction={tiss={}}"],
            "algorithm.correction: found 'tiss'",
            "no plugin provides it; available: greedy, icepop, metrics_only, mis, rejection",
        ),
        (
            ["--algorithm.correction={tis={cap=2.0}}"],
            "algorithm.correction.tis.cap: found 2.0",
            "'tis' has no such option; known: level, low, high",
        ),
        (
            ["--algorithm.correction.tis.level=sample"],
            "algorithm.correction.tis.level: found 'sample'",
            "'tis' cannot take it: input should be 'token', 'sequence' or 'geometric'",
        ),
        (
            ["--algorithm.correction={mis={high=0.0}}"],
            "algorithm.correction.mis.high: found 0.0",
            "'mis' cannot take it: input should be greater than 0",
        ),
        (
            ["--algorithm.correction={icepop={low=7}}"],
            "algorithm.correction.icepop.low: found 7",
            "must be at most icepop.high = 5.0",
        ),
        (
            ["--algorithm.correction={rejection={level='geometric', low=0.9}}"],
            "algorithm.correction.rejection.high: not set",
            "'rejection' needs it",
        ),
        (
            ["--algorithm.correction={sequence_mask={}}"],
            "algorithm.correction.sequence_mask.delta: not set",
            "'sequence_mask' needs it",
        ),
        (
            ["--algorithm.correction={tis={},mis={},veto={}}"],
            "algorithm.correction: found ['mis', 'tis', 'veto']",
            "'tis', 'mis' would weigh each token by the ratio more than once",
        ),
        (
            [
                "--algorithm.correction={tis={},sequence_mask={delta=0.1}}",
                "--algorithm.old_log_probs=rollout",
            ],
            "algorithm.old_log_probs: found 'rollout'",
            "leaves 'tis' nothing to correct",
        ),
        (
            ["--algorithm.correction={greedy={}}"],
            "algorithm.correction: found 'greedy'",
            "its plugin registers it with needs = 'values'; known: 'old_log_probs'",
        ),
        (
            ["--algorithm.correction=tis"],
            "algorithm.correction: found 'tis'",
            "must be a table",
        ),
        (
            ["--algorithm.correction={tis=2.0}"],
            "algorithm.correction.tis: found 2.0",
            "must be a table",
        ),
        (
            ["--run.task=sft", "--algorithm.correction={tis={}}"],
            "algorithm.correction: found {'tis': {}}",
            'has no effect with run.task = "sft"',
        ),
        (
            ["--algorithm.mask_stale=-1"],
            "algorithm.mask_stale: found -1",
            "must be greater than or equal to 0",
        ),
        (
            ["--algorithm.mask_stale=0"],
            "algorithm.mask_stale: found 0",
            "has no effect: without rollout.partial_rollout all tokens are of the trained weights",
        ),
        *(
            ([f"--{key}={value}"], f"{key}: found {value}", "log-probs are over the whole vocabulary")
            for key, value in (("rollout.top_p", 0.95), ("rollout.top_k", 20))
        ),
    ],
)
def test_a_wrong_algorithm(load: Load, overrides: list[str], found: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load({}, overrides, check_files=False)
    assert "has 1 problem:" in str(error.value), error.value
    assert found in str(error.value)
    assert f"; {hint}" in str(error.value)


GSPO = ("--algorithm.policy_loss=gspo", "--algorithm.loss_aggregation=sample_mean")
NARROW = ("--algorithm.clip_low=3e-4", "--algorithm.clip_high=4e-4")


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (GSPO[:1], ["loss_aggregation: found 'token_mean'", "clip_low: found 0.2", "clip_high: found 0.2"]),
        (GSPO, ["clip_low: found 0.2", "clip_high: found 0.2"]),
        ((*GSPO, *NARROW[:1]), ["clip_high: found 0.2"]),
        ((*GSPO, *NARROW), []),
        ((GSPO[0], *NARROW), ["loss_aggregation: found 'token_mean'"]),
        ((GSPO[0], *NARROW, "--algorithm.loss_aggregation=constant_length"), []),
        (("--algorithm.policy_loss=cispo",), []),
        ((), []),
    ],
)
def test_gspo_with_settings_of_ppo_is_a_warning(
    load: Load, caplog: pytest.LogCaptureFixture, overrides: list[str], warned: list[str]
) -> None:
    load({}, overrides, check_files=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(warned)
    paper = {"loss_aggregation": "sample_mean", "clip_low": "0.0003", "clip_high": "0.0004"}
    for line, text in zip(caplog.messages, warned, strict=True):
        assert line.startswith(f"algorithm.{text}")
        assert paper[text.split(":")[0]] in line
        assert "2507.18071" in line


def test_an_evaluation_does_not_care_how_training_samples(load: Load, plugins: Plugins) -> None:
    config = load({}, check_files=False).config
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"top_p": 0.9})})
    backend = plugins.get("register_backends", "cpu")
    for trains in (True, False):
        problems = check(config, backend, plugins, check_files=False, trains=trains)
        assert [each.path for each in problems] == ["rollout.top_p"] * trains


def test_distillation_twice(load: Load, tmp_path: Path, model_dir: Path) -> None:
    teacher = other_model(tmp_path, "teacher")
    overrides = [DISTILL, f"--teacher.path={teacher}", "--algorithm.distill_coef=0.5"]
    with pytest.raises(ConfigError, match="is distillation already"):
        load({}, overrides)


@pytest.mark.parametrize(("role", "estimator"), [("teacher", DISTILL), ("critic", GAE)])
def test_another_vocabulary(load: Load, tmp_path: Path, model_dir: Path, role: str, estimator: str) -> None:
    good, bad = other_model(tmp_path, "good"), other_model(tmp_path, "bad", vocab_size=9)
    load({}, [estimator, f"--{role}.path={good}"])
    with pytest.raises(ConfigError, match=rf"{role}\.path: .*holds vocab_size = 9; model\.path holds 8"):
        load({}, [estimator, f"--{role}.path={bad}"])


@pytest.mark.parametrize(
    "overrides",
    [
        [GAE, "--rollout.samples_per_prompt=1"],
        [GAE, "--algorithm.advantage_options={gamma=1,lambd=0.95}"],
        ["--rollout.samples_per_prompt=1", "--algorithm.distill_coef=1", "--teacher.path=a/b"],
        ["--algorithm.policy_loss=cispo", "--algorithm.clip_low=0.9"],
        ["--algorithm.correction={tis={level='sequence',high=3},veto={},metrics_only={}}"],
        ["--algorithm.correction={rejection={level='geometric',low=0.999,high=1.001}}"],
        ["--algorithm.correction={sequence_mask={delta=0.1}}", "--algorithm.old_log_probs=rollout"],
        ["--algorithm.mask_stale=0", "--rollout.partial_rollout=true", "--rollout.over_sampling=4"],
        ["--algorithm.correction={}"],
        ['--eval.data=["a.jsonl"]', "--eval.top_p=0.95", "--eval.top_k=20"],
        ['--eval.datasets.hard={files=["a.jsonl"],top_p=0.95,top_k=20}'],
        ["--run.task=sft", "--rollout.top_p=0.95"],
    ],
)
def test_a_right_algorithm(load: Load, overrides: list[str]) -> None:
    load({}, overrides, check_files=False)


@pytest.mark.parametrize(("role", "estimator"), [("teacher", DISTILL), ("critic", GAE)])
def test_a_tokenizer_of_other_tokens(
    load: Load, tmp_path: Path, model_dir: Path, role: str, estimator: str
) -> None:
    def write(directory: Path, vocabulary: Any, *added: str) -> None:
        tokens = [{"id": 6 + index, "content": content} for index, content in enumerate(added)]
        tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": tokens}
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))

    other = other_model(tmp_path, "other")
    write(model_dir, {"a": 0, "b": 1}, "<eos>")
    for alike in ({"b": 1, "a": 0}, [["a", -1.0], ["b", -2.0]]):
        write(other, alike, "<eos>", "<of this one alone>")
        load({}, [estimator, f"--{role}.path={other}"])
    for vocabulary, added, message in (
        ({"a": 0, "c": 1}, "<eos>", "token 1 is 'c' there and 'b' in model.path"),
        ({"a": 0, "b": 1}, "<end>", "token 6 is '<end>' there and '<eos>' in model.path"),
    ):
        write(other, vocabulary, added)
        with pytest.raises(ConfigError, match=rf"{role}\.path: (.|\n)*{message}"):
            load({}, [estimator, f"--{role}.path={other}"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id2label": {"0": "LABEL_0"}}, None),
        ({}, None),
        ({"num_labels": 1}, None),
        ({"id2label": {"0": "bad", "1": "good"}}, "has 2 labels; a critic has one"),
        (
            {"architectures": ["MyToyForSequenceClassification"]},
            "registers the architecture MyToyForCausalLM",
        ),
    ],
)
def test_a_reward_model_is_a_critic(
    load: Load, tmp_path: Path, model_dir: Path, changes: dict[str, Any], problem: str | None
) -> None:
    other = other_model(tmp_path, "other")
    hf = json.loads((other / "config.json").read_text())
    hf |= {"architectures": ["ToyForSequenceClassification"], **changes}
    (other / "config.json").write_text(json.dumps(hf))
    if problem is None:
        load({}, [GAE, f"--critic.path={other}"])
    else:
        with pytest.raises(ConfigError, match=rf"critic\.path: (.|\n)*{problem}"):
            load({}, [GAE, f"--critic.path={other}"])
    with pytest.raises(ConfigError, match=r"teacher\.path: (.|\n)*registers the architecture"):
        load({}, [DISTILL, f"--teacher.path={other}"])


def test_a_model_that_is_not_there(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"critic\.path: .*there is no directory of that path"):
        load({}, [GAE, "--critic.path=/nowhere/at/all"])


def test_who_is_needed(load: Load, plugins: Plugins) -> None:
    ppo = load({}, [GAE, "--critic.lr=1e-5", "--algorithm.kl_reward_coef=0.1"], check_files=False).config
    assert has_critic(ppo, plugins)
    assert not has_teacher(ppo, plugins)
    assert compares(ppo)
    distilled = load({}, ["--algorithm.distill_coef=1.0", "--teacher.path=a/b"], check_files=False).config
    assert has_teacher(distilled, plugins)
    assert not has_critic(distilled, plugins)
    assert not compares(distilled)


@pytest.mark.parametrize(
    "override",
    [
        "--algorithm.kl_reward_coef=0.1",
        "--algorithm.normalize_advantages=true",
        "--algorithm.distill_coef=1.0",
        "--algorithm.loss_aggregation=constant_length",
        "--critic.lr=1.0",
    ],
)
def test_sft_has_none_of_it(load: Load, override: str) -> None:
    with pytest.raises(ConfigError, match=override.removeprefix("--").partition("=")[0]):
        load({}, ["--run.task=sft", override], check_files=False)


@pytest.mark.parametrize(
    ("schedule", "bound", "hint"),
    [
        ("one_step_off", 0, "masks every token"),
        ("one_step_off", 1, "no token is older than one version"),
        ("async", 0, ""),
        ("async", 2, ""),
        ("async", 3, "no token is older than rollout.max_staleness = 3"),
    ],
)
def test_a_bound_on_age_is_within_that_of_the_schedule(schedule: Any, bound: int, hint: str) -> None:
    tree = {"run": {"name": "t"}, "model": {"path": "m"}, "data": {"train": []}}
    rollout, algorithm = {"schedule": schedule, "max_staleness": 3}, {"mask_stale": bound}
    config = Config.model_validate({**tree, "rollout": rollout, "algorithm": algorithm})
    hints = [problem.hint for problem in stale_rule(config, ())]
    assert len(hints) == bool(hint)
    assert all(hint in found for found in hints)


def test_options_are_checked_beside_arguments_of_types_that_are_not_imported() -> None:
    function = NamedFunction(name="grpo", fn=advantages.grpo)  # rewards_G is a Tensor for type checkers alone
    problems = [*value_problems("options", function, {"scale": True, "eps": -1.0, "unknown": 1})]
    assert [problem.path for problem in problems] == ["options.eps"]
