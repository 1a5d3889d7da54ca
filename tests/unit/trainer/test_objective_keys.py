"""Every key that enters a loss or an advantage does to them what its formula says, through the config.

Each row sets one key and takes a whole step of the loop with it: groups, advantages, mini-batches, the passes
of all models, loss and gradient. The expected numbers come from the formulas below, which share no code with
the product: plain torch, one sample at a time, in float64. The engines are tables
(:mod:`anygauge_tests.tabular`), so that a step takes milliseconds.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from anygauge.algorithms import plugin as algorithms
from anygauge.config.check import check
from anygauge.config.roles import Components
from anygauge.config.schema import Algorithm, Config, Critic, Reference, Train
from anygauge.plugins import load_plugins
from anygauge.serving.colocation import ColocationScheduler
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge.trainer.actors import ActorWorker
from anygauge.trainer.loop import train_on_rollouts
from anygauge.trainer.loop_state import Loop
from anygauge.trainer.session import Session
from anygauge.trainer.state import RunState
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.models import ModelSpec
from anygauge_hooks.rl import Group, Prompt, Sample
from anygauge_hooks.types import RunInfo
from anygauge_tests.tabular import TabularPlugin, logits, values

Settings = Mapping[str, Any]
Steps = list[tuple[float, Tensor]]
"""Loss and gradient of each optimizer step, by the model's table."""
ROOT = Path(__file__).parents[3]
VERSION = 3
"""Version of the weights being trained."""
BASE: Settings = {
    "run.name": "keys",
    "run.steps": 4,
    "model.path": "policy",
    "data.train": [],
    "reward.function": "exact_match",
    "data.label_key": "label",
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 3,
    "rollout.max_new_tokens": 8,
    "train.engine": "tabular",
    "train.optimizer_steps": 2,
    "train.dtype": "float32",
}
PARTIAL = {"rollout.over_sampling": 1, "rollout.partial_rollout": True}
TEACHER = {"algorithm.distill_coef": 0.7, "teacher.path": "teacher"}
TOP_K = {"algorithm.distill_kl_coef": 0.7, "teacher.path": "teacher", "algorithm.distill_top_k": 3}
OTHER = {"reference.path": "other"}
KL, KL_REWARD = {"algorithm.kl_coef": 0.4}, {"algorithm.kl_reward_coef": 0.4}
PPO = {"algorithm.advantage": "gae", "algorithm.advantage_options": {"gamma": 0.9, "lambd": 0.8}}
FAR_PPO = {**PPO, **KL, **OTHER}
GSPO = {"algorithm.policy_loss": "gspo", "algorithm.loss_aggregation": "sample_mean"}
ONE_STEP, ROLLOUT = {"train.optimizer_steps": 1}, {"algorithm.old_log_probs": "rollout"}

ROWS: list[tuple[str, Any, Settings]] = [
    *(("algorithm.advantage", name, {}) for name in ("dr_grpo", "rloo", "reinforce_plus_plus_baseline")),
    *(("algorithm.advantage", name, {}) for name in ("gae", "reinforce_plus_plus")),
    ("algorithm.advantage", "on_policy_distillation", TOP_K),
    ("algorithm.advantage", "grpo", {"algorithm.advantage": "rloo"}),
    ("algorithm.advantage_options", {"center": False}, {}),
    ("algorithm.advantage_options", {"scale": False, "center": False}, {}),
    ("algorithm.advantage_options", {"eps": 0.5}, {}),
    ("algorithm.advantage_options", {"gamma": 0.8}, {"algorithm.advantage": "reinforce_plus_plus"}),
    ("algorithm.advantage_options", {"lambd": 0.5, "gamma": 0.9}, {"algorithm.advantage": "gae"}),
    ("algorithm.policy_loss", "gspo", {"algorithm.loss_aggregation": "sample_mean"}),
    ("algorithm.policy_loss", "gspo", PPO),
    ("algorithm.policy_loss", "cispo", {}),
    ("algorithm.policy_loss", "policy_gradient", {**ONE_STEP, **ROLLOUT}),
    ("algorithm.policy_loss", "ppo_clip", {"algorithm.policy_loss": "cispo"}),
    *(("algorithm.clip_low", 0.05, {"algorithm.policy_loss": name}) for name in ("ppo_clip", "cispo")),
    *(
        ("algorithm.clip_high", 0.6, {"algorithm.policy_loss": name, **ROLLOUT})
        for name in ("ppo_clip", "cispo")
    ),
    ("algorithm.clip_low", 3e-4, {**GSPO, **PPO, "algorithm.clip_low": 0.9}),
    ("algorithm.clip_high", 4e-4, {**GSPO, **PPO}),
    ("algorithm.dual_clip", 1.3, {}),
    ("algorithm.kl_coef", 0.4, {}),
    *(("algorithm.kl_type", name, KL) for name in ("k1", "k2")),
    ("algorithm.kl_type", "low_var_kl", {**KL, **OTHER, "rollout.temperature": 0.5}),
    ("algorithm.kl_type", "k3", {**KL, "algorithm.kl_type": "k2"}),
    ("algorithm.kl_reward_coef", 0.4, FAR_PPO),
    ("algorithm.kl_reward_coef", 0.4, {**KL, **OTHER, "algorithm.advantage": "reinforce_plus_plus"}),
    ("algorithm.entropy_coef", 0.3, {}),
    ("algorithm.normalize_advantages", True, {}),
    ("algorithm.normalize_advantages", True, PPO),
    ("algorithm.distill_coef", 0.7, {"algorithm.distill_kl_coef": 0.1, "teacher.path": "teacher"}),
    ("algorithm.distill_kl_coef", 0.7, TEACHER),
    ("algorithm.distill_top_k", 1, TOP_K),
    ("algorithm.distill_top_k", 6, TOP_K),
    ("algorithm.loss_aggregation", "sample_mean", {}),
    ("algorithm.loss_aggregation", "constant_length", {}),
    ("algorithm.loss_aggregation", "token_mean", {"algorithm.loss_aggregation": "sample_mean"}),
    *(("algorithm.old_log_probs", "rollout", each) for each in ({}, ONE_STEP, {**KL_REWARD, **PPO})),
    ("algorithm.old_log_probs", "recompute", ROLLOUT),
    *(
        ("algorithm.correction", {"tis": {"level": level, "low": 0.5, "high": 1.4}}, {})
        for level in ("token", "sequence", "geometric")
    ),
    ("algorithm.correction", {"icepop": {"low": 0.7, "high": 1.3}}, {}),
    ("algorithm.correction", {"mis": {"level": "sequence", "high": 1.2}}, {}),
    ("algorithm.correction", {"mis": {"level": "geometric", "low": 0.9, "high": 2.0}}, KL),
    ("algorithm.correction", {"rejection": {"level": "token", "low": 0.7, "high": 1.3}}, {}),
    ("algorithm.correction", {"veto": {"threshold": 0.6}}, {"algorithm.entropy_coef": 0.3}),
    ("algorithm.correction", {"sequence_mask": {"delta": 0.05}}, {}),
    ("algorithm.correction", {"tis": {"high": 1.1}, "veto": {"threshold": 0.6}}, {}),
    ("algorithm.mask_stale", 1, PARTIAL),
    ("algorithm.mask_stale", 0, {**PARTIAL, "algorithm.advantage": "gae"}),
    ("critic.path", "reward-model", PPO),
    ("critic.warmup_steps", 1, PPO),
    ("critic.value_clip", 0.6, PPO),
    ("critic.value_clip", None, PPO),
    ("reference.path", "other", KL),
    ("reference.path", "other", {**KL_REWARD, **PPO}),
    ("train.optimizer_steps", 1, {}),
    ("train.optimizer_steps", 3, PPO),
    # Of other sections: keys that the same formulas read.
    ("model.path", "other", {}),
    ("teacher.path", "other", TEACHER),
    ("teacher.path", "other", TOP_K),
    ("rollout.temperature", 0.7, {**KL, "algorithm.entropy_coef": 0.3}),
    ("rollout.temperature", 0.7, TOP_K),
    ("rollout.max_new_tokens", 16, {"algorithm.loss_aggregation": "constant_length"}),
]
"""Key, value, and what else is set: before with the key as it is there, after with this value."""

ENGINE = "tests/unit/engines/test_megatron_engine.py::test_"
CRITIC_KEYS = "tests/unit/engines/test_critic.py::test_keys_of_the_critic_take_the_place_of_the_policys"
ADAM, SCHEDULE = f"{ENGINE}steps_follow_adamw", f"{ENGINE}learning_rate"
SIZES = "tests/unit/config/test_global_batch_size.py::test_optimizer_steps_follow_from_the_batch_size"
NO_LOSS: Mapping[str, Mapping[str, str]] = {
    "is another way to set train.optimizer_steps": {"train.global_batch_size": SIZES},
    "changes the update, not the loss": {
        **dict.fromkeys(("train.lr", "train.clip_grad", "train.weight_decay"), ADAM),
        **dict.fromkeys(("train.adam_betas", "train.adam_eps"), ADAM),
        **dict.fromkeys(("train.min_lr", "train.lr_schedule", "train.warmup_steps"), SCHEDULE),
        "train.freeze": "tests/unit/engines/test_media_engine.py::test_frozen_parts_have_no_gradients",
        "train.lora": "tests/unit/engines/test_lora.py::test_only_adapters_and_saved_modules_are_trained",
        "critic.lr": "tests/integration/test_roles.py::test_the_warm_up_leaves_the_policy_as_it_is",
        "critic.lr_warmup_steps": CRITIC_KEYS,
    },
    "divides the work, or trades memory for time: no number depends on it": {
        "train.micro_batch_tokens": f"{ENGINE}result_does_not_depend_on_micro_batches",
        "train.prefix_packing": (
            "tests/unit/engines/test_prefix_packing.py::test_a_shared_prompt_changes_nothing"
        ),
        "train.recompute": f"{ENGINE}gradients_equal_transformers",
        "train.replica_check_every": "tests/distributed/test_parallel_replicas.py",
        "train.fused_loss": (
            "tests/unit/engines/test_output_layer.py::test_a_step_has_no_tensor_as_large_as_all_logits"
        ),
        "train.loss_memory_gib": (
            "tests/unit/kernels/test_linear_logprob.py::test_the_budget_changes_no_bit"
        ),
        "train.parallel": "tests/distributed/test_parallel_modes.py",
        "critic.parallel": "tests/distributed/test_parallel_critic.py",
    },
    "changes how a model computes, before any loss": {
        "train.engine": f"{ENGINE}logits_equal_transformers",
        "train.dtype": f"{ENGINE}bfloat16_trains",
        "train.megatron": "tests/unit/engines/test_passed_fields.py",
        "train.provider": "tests/backends/npu/test_mindspeed.py",
        "train.provider_options": "tests/backends/npu/test_mindspeed.py",
        "train.router_replay": (
            "tests/unit/engines/test_experts.py::test_a_step_uses_the_experts_that_the_log_prob_pass_chose"
        ),
        **dict.fromkeys(("critic.dtype", "critic.megatron"), CRITIC_KEYS),
    },
}
"""Keys that enter neither a loss nor an advantage: why not, and the test that sees each."""
NAMES_WITHOUT_ROW = {"sft": "the loss of another task", "metrics_only": "has no weights"}


# -------------------------------------------------------------------------
# The formulas
# -------------------------------------------------------------------------


@dataclass
class Tokens:
    """The response tokens of one sample, ``[R]``, float64, before the first optimizer step."""

    before: list[int]
    tokens: list[int]
    mask: Tensor
    q: Tensor
    p: Tensor
    reference: Tensor
    teacher: Tensor
    values: Tensor
    reward: float
    baseline: float
    advantages: Tensor
    returns: Tensor

    @property
    def counts(self) -> list[int]:
        return self.mask.nonzero()[:, 0].tolist()


def expected(config: Config, groups: Sequence[Group]) -> tuple[Steps, Steps]:
    """Return the optimizer steps of the policy and of the critic."""
    a, count = config.algorithm, config.optimizer_steps
    samples = tokens_of(config, groups)
    estimate_advantages(a, samples, config.rollout.samples_per_prompt)
    policy, critic = [], []
    for step in range(count):
        own = samples[step::count]
        shares = aggregate(a.loss_aggregation, [each.mask for each in own], config.rollout.max_new_tokens)
        if config.critic.warmup_steps == 0:
            table = logits(config.model.path, step).requires_grad_()
            losses = [policy_losses(config, each, table) @ w for each, w in zip(own, shares, strict=True)]
            policy.append(with_gradient(sum(losses), table))
        if a.advantage == "gae":
            table = values(config.critic.path or config.model.path, step + 1).requires_grad_()
            losses = [value_losses(config, each, table) @ w for each, w in zip(own, shares, strict=True)]
            critic.append(with_gradient(sum(losses), table))
    return policy, critic


def with_gradient(loss: Any, table: Tensor) -> tuple[float, Tensor]:
    return loss.item(), torch.autograd.grad(loss, table)[0]


def tokens_of(config: Config, groups: Sequence[Group]) -> list[Tokens]:
    def log_probs(path: Path | None, before: list[int], tokens: list[int]) -> Tensor:
        table = (logits(path or config.model.path) / config.rollout.temperature).log_softmax(-1)
        return table[before, tokens]

    found = []
    oldest = -1 if config.algorithm.mask_stale is None else VERSION - config.algorithm.mask_stale
    for group in groups:
        for each in group.samples:
            assert each.reward is not None
            before = [*each.prompt_tokens[-1:], *each.response_tokens[:-1]]
            tokens = list(each.response_tokens)
            fresh = [float(made >= oldest) for made in each.weight_versions]
            mask = torch.tensor(each.loss_mask).double() * torch.tensor(fresh).double()
            q = torch.tensor(each.log_probs).double()
            p = log_probs(None, before, tokens)
            found.append(
                Tokens(
                    before=before,
                    tokens=tokens,
                    mask=mask,
                    q=q,
                    p=q if config.algorithm.old_log_probs == "rollout" else p,
                    reference=log_probs(config.reference.path, before, tokens),
                    teacher=log_probs(config.teacher.path, before, tokens),
                    values=values(config.critic.path or config.model.path)[before],
                    reward=each.reward,
                    baseline=sum(other.reward or 0.0 for other in group.samples) / len(group.samples),
                    advantages=torch.zeros_like(q),
                    returns=torch.zeros_like(q),
                )
            )
    return found


def estimate_advantages(a: Algorithm, samples: list[Tokens], group_size: int) -> None:
    for first in range(0, len(samples), group_size):
        group = samples[first : first + group_size]
        for x in group:
            x.advantages, x.returns = advantage(a, x, torch.tensor([each.reward for each in group]).double())
    if a.advantage.startswith("reinforce_plus_plus"):
        whiten(samples)
    for x in samples:
        x.advantages = x.advantages + a.distill_coef * (x.teacher - x.p)
    if a.normalize_advantages:
        whiten(samples)


def advantage(a: Algorithm, x: Tokens, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of the tokens of one sample, given the rewards of its group."""
    options = {"center": True, "scale": True, "eps": 1e-6, "gamma": 1.0, "lambd": 1.0, **a.advantage_options}
    ones = torch.ones_like(x.q)
    match a.advantage:
        case "grpo":
            centered = x.reward - float(rewards.mean()) * options["center"]
            scale = 1 / (float(rewards.std()) + options["eps"]) if options["scale"] else 1.0
            return ones * centered * scale, ones
        case "dr_grpo" | "reinforce_plus_plus_baseline":
            return ones * (x.reward - x.baseline), ones
        case "rloo":
            others = (float(rewards.sum()) - x.reward) / (len(rewards) - 1)
            return ones * (x.reward - others), ones
        case "on_policy_distillation":
            return x.teacher - x.p, ones
    found, returns = torch.zeros_like(x.q), torch.zeros_like(x.q)
    later = following = 0.0
    for t in reversed(x.counts):
        reward = x.reward * (t == x.counts[-1]) - a.kl_reward_coef * float(x.p[t] - x.reference[t])
        if a.advantage == "gae":
            delta = reward + options["gamma"] * following - float(x.values[t])
            later = delta + options["gamma"] * options["lambd"] * later
            following = float(x.values[t])
            returns[t] = later + following
        else:
            assert a.advantage == "reinforce_plus_plus"
            later = reward + options["gamma"] * later
        found[t] = later
    return found, returns


def whiten(samples: list[Tokens]) -> None:
    counted = torch.cat([x.advantages[x.counts] for x in samples])
    for x in samples:
        x.advantages = (x.advantages - counted.mean()) / counted.std()


def aggregate(name: str, masks: list[Tensor], longest: int) -> list[Tensor]:
    """Return the share of each token in the mean of an optimizer step."""
    taking_part = sum(bool(mask.any()) for mask in masks)
    match name:
        case "token_mean":
            return [mask / sum(float(each.sum()) for each in masks) for mask in masks]
        case "sample_mean":
            return [mask / mask.sum().clamp(min=1) / taking_part for mask in masks]
        case "constant_length":
            return [mask / longest / taking_part for mask in masks]
    raise AssertionError(name)


def policy_losses(config: Config, x: Tokens, table: Tensor) -> Tensor:
    """Return the loss of each token, all terms together."""
    a = config.algorithm
    rows = (table / config.rollout.temperature).log_softmax(-1)[x.before]
    pi = rows.gather(1, torch.tensor(x.tokens)[:, None])[:, 0]
    total = corrected(a, x, pi.detach()) * policy_term(a, x, pi)
    if a.kl_coef:
        total = total + a.kl_coef * kl(a.kl_type, pi, x.reference)
    total = total + a.entropy_coef * (rows.exp() * rows).sum(1)
    if a.distill_kl_coef:
        teacher = (logits(config.teacher.path or "") / config.rollout.temperature).softmax(-1)[x.before]
        for t in range(len(teacher)):
            top = teacher[t].sort(descending=True).indices[: a.distill_top_k].tolist()
            rest = [token for token in range(teacher.shape[1]) if token not in top]
            for outcome in [[token] for token in top] + ([rest] if rest else []):
                mine, theirs = rows[t, outcome].exp().sum(), teacher[t, outcome].sum()
                cost = a.distill_kl_coef * theirs * (theirs.log() - mine.log())
                total = total + cost * torch.eye(len(teacher), dtype=cost.dtype)[t]
    return total


def policy_term(a: Algorithm, x: Tokens, pi: Tensor) -> Tensor:
    bounds = (1 - a.clip_low, 1 + a.clip_high)
    ratio = (pi - x.p).exp()
    match a.policy_loss:
        case "policy_gradient":
            return -x.advantages * pi
        case "cispo":
            return -ratio.detach().clamp(*bounds) * x.advantages * pi
        case "gspo":
            mean = ((pi - x.p) * x.mask).sum() / x.mask.sum().clamp(min=1)
            ratio = mean.exp().detach() * (pi - pi.detach()).exp()
        case other:
            assert other == "ppo_clip"
    surrogate = torch.minimum(ratio * x.advantages, ratio.clamp(*bounds) * x.advantages)
    if a.dual_clip is not None:
        bounded = torch.maximum(surrogate, a.dual_clip * x.advantages)
        surrogate = torch.where(x.advantages < 0, bounded, surrogate)
    return -surrogate


def kl(name: str, pi: Tensor, reference: Tensor) -> Tensor:
    log_ratio = reference - pi
    match name:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio**2 / 2
        case "k3":
            return log_ratio.exp() - 1 - log_ratio
    assert name == "low_var_kl"
    return (log_ratio.exp() - 1 - log_ratio).clamp(max=10.0)


def corrected(a: Algorithm, x: Tokens, pi: Tensor) -> Tensor:
    """Return what the policy term of each token is multiplied by."""
    product = torch.ones_like(pi)
    tokens = (x.p - x.q).exp()
    whole = ((x.p - x.q) * x.mask).sum().exp() * product
    geometric = whole ** (1 / max(len(x.counts), 1))
    ratios = {"token": tokens, "sequence": whole, "geometric": geometric}
    for name, given in a.correction.items():
        options = {"level": "sequence" if name == "mis" else "token", "low": 0.0, "high": 2.0, **given}
        ratio = ratios[options["level"]]
        inside = ((ratio >= options["low"]) & (ratio <= options["high"])).double()
        match name:
            case "tis":
                weight = ratio.clamp(options["low"], options["high"])
            case "icepop" | "mis":
                weight = ratio * inside
            case "rejection":
                weight = inside
            case "veto":
                weight = torch.ones(()) * bool((tokens[x.counts] >= options["threshold"]).all())
            case other:
                assert other == "sequence_mask"
                is_far = x.counts and float((x.q - pi)[x.counts].mean()) > options["delta"]
                weight = torch.where((x.advantages < 0) & bool(is_far), 0.0, 1.0)
        product = product * weight
    return product


def value_losses(config: Config, x: Tokens, table: Tensor) -> Tensor:
    now = table[x.before]
    errors = (now - x.returns) ** 2
    if (clip := config.critic.value_clip) is not None:
        errors = torch.maximum(errors, (x.values + (now - x.values).clamp(-clip, clip) - x.returns) ** 2)
    return errors / 2


# -------------------------------------------------------------------------
# The product
# -------------------------------------------------------------------------


def make_groups() -> list[Group]:
    """Return scored rollouts of several weight versions, some of whose tokens a tool wrote."""
    generator = torch.Generator().manual_seed(5)

    def draw(high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(high, (size,), generator=generator).tolist())

    groups = []
    for index, rewards in enumerate(((1.0, 0.0, 0.25), (0.0, 2.0, 0.5))):
        prompt = Prompt(index=index, tokens=draw(6, 2), text="")
        samples = []
        for place, reward in enumerate(rewards):
            length = 2 + (3 * index + 2 * place) % 5
            tokens, noise = draw(6, length), torch.randn(length, generator=generator).double() * 0.4
            before = [prompt.tokens[-1], *tokens[:-1]]
            log_probs = logits("policy").log_softmax(-1)[before, list(tokens)] + noise
            samples.append(
                Sample(
                    prompt_index=index,
                    prompt_tokens=prompt.tokens,
                    response_tokens=tokens,
                    log_probs=tuple(log_probs.clamp(max=-0.01).tolist()),
                    loss_mask=tuple(int(t != 1) for t in range(length)),
                    weight_versions=tuple(max(1, VERSION - max(0, 2 - t)) for t in range(length)),
                    text="",
                    finish_reason="stop",
                    seed=0,
                    reward=reward,
                    raw_reward=reward,
                )
            )
        groups.append(Group(prompt=prompt, samples=tuple(samples)))
    return groups


class Driven:
    """A worker in this process, as the loop sees its group of workers."""

    def __init__(self, worker: ActorWorker) -> None:
        self.worker = worker
        self.passes = 0.0

    def call_async(self, method: str, *, per_rank: Any, **options: Any) -> Any:
        ((arguments, own),) = per_rank
        results = [getattr(self.worker, method)(*arguments, **own, **options)]
        return SimpleNamespace(result=lambda: results)

    def call(self, method: str) -> list[Any]:
        result: Any = getattr(self.worker, method)()
        self.passes += result["passes"]["log_probs"] if method == "report" else 0
        return [result]


class Product:
    """The loop of a run whose rollouts are given."""

    def __init__(self, root: Path) -> None:
        self.plugins = load_plugins(only=["cpu", "models"])
        self.plugins.register(TabularPlugin(), "tabular")
        self.backend = self.plugins.get("register_backends", "cpu")
        self.root = root
        self.groups = make_groups()
        self._compared: dict[str, tuple[Steps, Steps]] = {}

    def compare(self, settings: Settings) -> tuple[Steps, Steps]:
        """Assert that a step is the expected one, and return this."""
        if (name := repr(sorted(settings.items()))) not in self._compared:
            config = self.config(settings)
            self._compared[name] = expected(config, self.groups)
            for found, wanted in zip(self.step(config), self._compared[name], strict=True):
                assert_steps(found, wanted)
        return self._compared[name]

    def config(self, settings: Settings) -> Config:
        """Return a config that passes its check."""
        tree: dict[str, Any] = {}
        for key, value in {**BASE, **settings}.items():
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = str(self.root / value) if name == "path" else value
        config = Config.model_validate_json(json.dumps(tree))
        assert not check(config, self.backend, self.plugins, check_files=False)
        return config

    def step(self, config: Config) -> tuple[Steps, Steps]:
        """Return the optimizer steps that the loop has the policy and the critic take."""
        worker = self.trained(config).worker
        engines: list[Any] = [worker.trainer, worker._critic]
        policy, critic = ([tuple(step) for step in engine.steps] if engine else [] for engine in engines)
        return policy, critic

    def trained(self, config: Config) -> Driven:
        """Return a worker that the loop has had train on the groups."""
        context = WorkerContext(
            rank=0,
            world_size=1,
            backend=self.backend,
            device=self.plugins.make_device(self.backend, 0),
            plugins=self.plugins,
        )
        components = Components(trains=True, generates=False, learns=True)
        worker = ActorWorker(config, context, components=components)
        info = RunInfo(name="keys", directory=str(self.root), backend="cpu", total_steps=4, config=config)
        nobody: Any = SimpleNamespace(
            reports=list,
            collect=lambda step: (self.groups, 0.0),
            metrics=dict,
            read_ahead=lambda state, goes_on: None,
        )
        driven = Driven(worker)
        workers: Any = driven
        session = Session(
            config,
            self.plugins,
            components,
            workers,
            nobody,
            (),
            {},
            RunState(info, version=VERSION),
            ColocationScheduler(),
        )
        loop = Loop(
            session=session,
            directory=nobody,
            source=nobody,
            flops_per_token=float,
            checkpoints=None,
            rollouts=nobody,
        )
        train_on_rollouts(loop, 1)
        driven.passes += worker.report()["passes"]["log_probs"]
        return driven


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    root = tmp_path_factory.mktemp("models")
    for name in ("policy", "teacher", "other"):
        (root / name).mkdir()
        (root / name / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tables of 6 x 6: threads that wait for each other take most of the time
    yield Product(root)
    torch.set_num_threads(threads)


def assert_steps(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert len(found) == len(wanted)
    for (loss, gradient), (value, slope) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(value, rel=1e-4, abs=1e-5)
        assert torch.allclose(gradient, slope, rtol=1e-4, atol=1e-5), (gradient - slope).abs().max()


def largest_difference(one: Sequence[Steps], other: Sequence[Steps]) -> float:
    if [len(steps) for steps in one] != [len(steps) for steps in other]:
        return float("inf")
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return max(float((a[1] - b[1]).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("key", "value", "others"), ROWS, ids=lambda each: str(each) if isinstance(each, str) else ""
)
def test_a_key_does_what_its_formula_says(product: Product, key: str, value: Any, others: Settings) -> None:
    wanted = [product.compare(settings) for settings in (others, {**others, key: value})]
    assert largest_difference(*wanted) > 1e-3, "the row shows nothing: the key changes nothing here"


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({}, 3),  # of the second optimizer step
        (ONE_STEP, 0),
        ({**ONE_STEP, **PPO}, 0),
        ({**ONE_STEP, **KL}, 0),
        ({**ONE_STEP, "algorithm.correction": {"mis": {}, "veto": {}}}, 0),
        ({**PPO, "critic.warmup_steps": 2}, 0),
        (ROLLOUT, 0),
        ({**KL_REWARD, **PPO, **ONE_STEP}, 6),
        ({**TEACHER, **ONE_STEP}, 6),
        ({**TOP_K, **ONE_STEP}, 0),
        ({**ONE_STEP, "algorithm.advantage": "on_policy_distillation", "teacher.path": "teacher"}, 6),
    ],
    ids=str,
)
def test_log_probs_are_asked_only_of_samples_where_they_are_read(
    product: Product, settings: Settings, samples: int
) -> None:
    driven = product.trained(product.config(settings))
    trainer: Any = driven.worker.trainer
    assert trainer.asked == samples
    lengths = [
        len(each.prompt_tokens) + len(each.response_tokens)
        for group in product.groups
        for each in group.samples
    ]
    others = len({"algorithm.kl_coef", "algorithm.kl_reward_coef", "teacher.path"} & set(settings))
    part = sum(lengths[1::2]) / sum(lengths) if samples == 3 else samples / 6
    assert driven.passes == pytest.approx(others + part)


SECTIONS = {"algorithm": Algorithm, "critic": Critic, "reference": Reference, "train": Train}
"""Corrections are a key of ``[algorithm]``."""


def test_every_key_has_a_row_or_a_reason() -> None:
    rows = {key for key, *_ in ROWS if key.split(".")[0] in SECTIONS}
    reasons = [key for keys in NO_LOSS.values() for key in keys]
    schema = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
    assert sorted([*rows, *reasons]) == sorted(schema)


@pytest.mark.parametrize(
    "key", ["algorithm.kl_type", "algorithm.loss_aggregation", "algorithm.old_log_probs"]
)
def test_every_choice_has_a_row(key: str) -> None:
    choices = get_args(Algorithm.model_fields[key.split(".")[1]].annotation)
    assert {value for name, value, _ in ROWS if name == key} == set(choices)


def test_every_name_of_the_core_has_a_row() -> None:
    registered = {
        "algorithm.advantage": algorithms.register_advantage_estimators(),
        "algorithm.policy_loss": algorithms.register_policy_losses(),
        "algorithm.correction": algorithms.register_corrections(),
    }
    for key, functions in registered.items():
        named = [value for name, value, _ in ROWS if name == key]
        taken = {each for value in named for each in ([value] if isinstance(value, str) else value)}
        assert taken == {each.name for each in functions} - NAMES_WITHOUT_ROW.keys()


def test_the_tests_of_the_other_keys_are_there() -> None:
    for where in {test for tests in NO_LOSS.values() for test in tests.values()}:
        path, _, name = where.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert not name or any(isinstance(each, ast.FunctionDef) and each.name == name for each in tree.body)


class Novel:
    """A family for train engines that build any Hugging Face config."""

    @hookimpl
    def register_models(self) -> list[ModelSpec]:
        spec: ModelSpec = load_plugins(only=["models"]).named("register_models")["qwen3"]
        return [replace(spec, name="novel", architectures=("NovelForCausalLM",), engines={})]


def test_a_family_without_an_entry_of_megatron_passes_the_checks_and_trains(tmp_path: Path) -> None:
    """Neither the checks nor a step ask for what only another train engine needs."""
    product = Product(tmp_path)
    product.plugins.register(Novel(), "novel")
    for name in ("policy", "other"):
        tokens = len(tiny_tokenizer(tmp_path / name, alphabet="abc"))
        path = Path(tiny_qwen3(tmp_path / name, vocab_size=tokens)) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["NovelForCausalLM"]}))
    (tmp_path / "rows.jsonl").write_text("")
    files = {"data.train": [str(tmp_path / "rows.jsonl")], "run.directory": str(tmp_path / "runs")}
    settings = {**files, **KL, **OTHER}
    assert check(product.config(settings), product.backend, product.plugins) == []
    steps, _ = product.compare(settings)
    assert len(steps) == 2
