"""slime: the arguments of ``train.py`` in a shell script, and the keys that several of them decide."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from anygauge.migrate.arguments import options, whole
from anygauge.migrate.shell import Words, commands
from anygauge.migrate.table import Imported, Input, Unresolved

__all__ = ["read", "rules"]

ASYNC = "train_async.py"
PROGRAMS = ("train.py", ASYNC)
REWARDS = {
    **dict.fromkeys(("math", "deepscaler"), "math"),
    "dapo": "dapo",
    "f1": "f1",
    "gpqa": "multiple_choice",
    "remote_rm": "remote",
}
ADVANTAGES = {
    "grpo": ("grpo", "ppo_clip"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "ppo": ("gae", "ppo_clip"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo_clip"),
}
CRITIC = {
    "value-clip": "critic.value_clip",
    "num-critic-only-steps": "critic.warmup_steps",
    "critic-lr": "critic.lr",
    "critic-load": "critic.path",
}
SWITCHES = re.compile(
    r"(sglang-)?(use|no|disable|enable|skip|debug)-.*|apply-chat-template|async-save|balance-data"
    r"|bf16|calculate-per-token-loss|check-weight-update-equal|colocate|deterministic-mode|finetune"
    r"|get-mismatch-metrics|group-rm|keep-old-actor|mask-offpolicy-in-partial-rollout|normalize-advantages"
    r"|offload-(train|rollout)|partial-rollout|rollout-shuffle|sequence-parallel"
)
"""Arguments without a value: a variable after one is not its value."""
LISTS = re.compile(
    r"(eval-)?prompt-data|rollout-stop(-token-ids)?|rollout-external-engine-addrs"
    r"|sglang-(.*-graph-bs(-.*)?|lora-paths|lora-target-modules)"
)
"""Arguments with several values: a variable after one may be its value."""
ICEPOP = "icepop_function"
FULLY_ASYNC, SFT_ROLLOUT = "generate_rollout_fully_async", "sft_rollout"
SFT_TABLES = ("algorithm.", "reward.", "rollout.", "eval.", "critic.")
SFT_KEYS = ("rollout.prompts_per_step", "algorithm.loss_aggregation")


def read(text: str, name: str) -> Input:
    """Read the arguments that a shell script passes to slime.

    :raises ValueError: The script passes none.
    """
    del name
    arrays: Words = []
    for words in commands(text):
        program = next((at for at, word in enumerate(words) if _is_program(word)), None)
        if program is not None:
            launched = {ASYNC: True} if str(words[program]).endswith(ASYNC) else {}
            return _input(words[program + 1 :], text, launched)
        if words and str(words[0]).startswith("--"):
            arrays += words
    if not arrays:
        raise ValueError("it neither calls train.py nor has arrays of --arguments")
    return _input(arrays, text, {})


def _input(words: Words, text: str, launched: Mapping[str, Any]) -> Input:
    command = options(words, SWITCHES, LISTS)
    return Input({**command.arguments, **launched}, (*_notes(text), *command.notes))


def _is_program(word: str | Unresolved) -> bool:
    return str(word).rpartition("/")[2] in PROGRAMS


def _notes(text: str) -> tuple[str, ...]:
    if "source " not in text:
        return ()
    return ("files that it sources are not read; a model's shape comes from its config.json",)


# -------------------------------------------------------------------------
# Keys that several arguments decide
# -------------------------------------------------------------------------


def rules(given: Mapping[str, Any], out: Imported) -> None:
    """Set the keys that several arguments decide together."""
    is_sft = given.get("loss-type") == "sft_loss"
    out.put("run.task", "sft" if is_sft else "rl")
    out.put("train.engine", out.keys.get("train.engine", "megatron"))
    _data(given, out)
    _batches(given, out)
    _optimizer(given, out)
    token_mean = given.get("calculate-per-token-loss")
    out.put("algorithm.loss_aggregation", "token_mean" if token_mean else "sample_mean")
    _trackers(given, out)
    _function(given, out)
    out.put("data.apply_chat_template", given.get("apply-chat-template") or (is_sft or None))
    if is_sft:
        _devices(given, out, served=False)
        out.keys = {key: value for key, value in out.keys.items() if _is_of_sft(key)}
        return
    out.put("rollout.engine", "sglang")
    _devices(given, out, served=True)
    _algorithm(given, out)
    _corrections(given, out)
    _reward(given, out)
    _evaluation(given, out)
    if given.get("debug-train-only"):
        out.put("debug.mode", "train_only")
    if given.get("save-debug-rollout-data"):
        out.put("debug.dump_rollouts", True)


def _function(given: Mapping[str, Any], out: Imported) -> None:
    path = str(given.get("rollout-function-path", ""))
    if path.endswith(FULLY_ASYNC):
        out.put("rollout.schedule", "async")
    elif path and SFT_ROLLOUT not in path:
        out.miss("rollout-function-path", f"{path}: write it as a rollout function (docs/rollout.md)")


def _is_of_sft(key: str) -> bool:
    return key in SFT_KEYS or not key.startswith(SFT_TABLES)


def _data(given: Mapping[str, Any], out: Imported) -> None:
    out.put("data.train", _files(given.get("prompt-data")))
    for name, key in (
        ("multimodal-keys", "data.multimodal_keys"),
        ("apply-chat-template-kwargs", "data.chat_template_kwargs"),
    ):
        if name in given and not isinstance(given[name], Unresolved):
            try:
                out.put(key, json.loads(str(given[name])))
            except (ValueError, RecursionError):
                out.miss(name, f"is not a JSON object; set {key}")
    for name, key in (("rollout-stop", "rollout.stop"), ("rollout-stop-token-ids", "rollout.stop_token_ids")):
        out.put(key, _listed(given.get(name)))
    if (addresses := _listed(given.get("rollout-external-engine-addrs"))) is not None:
        out.put("rollout.external", [f"http://{each}" for each in addresses])


def _listed(value: Any) -> list[Any] | None:
    if value is None or isinstance(value, Unresolved):
        return None
    return value if isinstance(value, list) else [value]


def _files(value: Any) -> list[Any] | None:
    """Return data files; names and paths alternate where there are several words."""
    words = _listed(value)
    if words is None:
        return None
    if len(words) == 1 or len(words) % 2:
        return words
    return [{"name": str(name), "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]


def _batches(given: Mapping[str, Any], out: Imported) -> None:
    prompts, samples = whole(given, "rollout-batch-size", None), whole(given, "n-samples-per-prompt", None)
    batch = whole(given, "global-batch-size", None)
    if (
        batch is not None
        and "num-steps-per-rollout" not in given
        and batch != (prompts or 0) * (samples or 0)
    ):
        out.put("train.global_batch_size", batch)
    if (started := whole(given, "over-sampling-batch-size", None)) is not None and prompts is not None:
        out.put("rollout.over_sampling", max(0, started - prompts))
    if (tokens := whole(given, "max-tokens-per-gpu", None)) is not None:
        out.put("train.micro_batch_tokens", tokens * whole(given, "context-parallel-size", 1))


def _optimizer(given: Mapping[str, Any], out: Imported) -> None:
    betas = [given["adam-beta1"], given["adam-beta2"]]
    if not any(isinstance(each, Unresolved) for each in betas):
        out.put("train.adam_betas", betas)
    if given.get("sequence-parallel") and (whole(given, "tensor-model-parallel-size", None) or 1) > 1:
        out.put("train.parallel.sequence", True)


def _devices(given: Mapping[str, Any], out: Imported, *, served: bool) -> None:
    nodes, each = whole(given, "actor-num-nodes", None), whole(given, "actor-num-gpus-per-node", None)
    if nodes is None or each is None:
        out.miss("actor-num-gpus-per-node", "set placement.train_workers to the number of training devices")
        return
    workers = nodes * each
    out.put("placement.train_workers", workers)
    out.put("placement.launcher", "local" if nodes == 1 else "ray")
    if not served:
        out.keys.pop("placement.colocated", None)
        return
    devices = workers if given.get("colocate") else whole(given, "rollout-num-gpus", None)
    size = whole(given, "rollout-num-gpus-per-engine", None)
    if not devices or not size:
        out.miss("rollout-num-gpus", "set placement.rollout_workers to the number of engines")
        return
    out.put("placement.rollout_workers", max(1, devices // size))
    if (parallel := size // max(1, whole(given, "sglang-pp-size", 1))) > 1:
        out.put("rollout.sglang.tp_size", parallel)


def _algorithm(given: Mapping[str, Any], out: Imported) -> None:
    estimator = str(given["advantage-estimator"])
    if estimator not in ADVANTAGES:
        out.miss("advantage-estimator", f"{estimator}: see `anygauge keys algorithm.advantage`")
    advantage, loss = ADVANTAGES.get(estimator, ADVANTAGES["grpo"])
    out.put("algorithm.advantage", advantage)
    out.put("algorithm.policy_loss", loss)
    advantage_options = _advantage_options(given, advantage)
    if advantage_options:
        out.put("algorithm.advantage_options", advantage_options)
    out.put("algorithm.clip_high", given.get("eps-clip-high", given["eps-clip"]))
    coefficient = given.get("kl-loss-coef", 0.0) if given.get("use-kl-loss") else 0.0
    out.put("algorithm.kl_coef", coefficient)
    if coefficient:
        out.put("algorithm.kl_type", given["kl-loss-type"])
    if given.get("use-opd"):
        out.put("algorithm.distill_coef", given["opd-kl-coef"])
    for name, key in CRITIC.items():
        if advantage == "gae":
            out.put(key, given.get(name))


def _advantage_options(given: Mapping[str, Any], advantage: str) -> dict[str, Any]:
    taken = {"gae": ("gamma", "lambd"), "reinforce_plus_plus": ("gamma",)}.get(advantage, ())
    chosen = {name: given[name] for name in taken if name in given}
    if advantage == "grpo" and given.get("disable-rewards-normalization"):
        chosen |= {"center": False, "scale": False}
    elif advantage == "grpo" and given.get("disable-grpo-std-normalization"):
        chosen["scale"] = False
    return {name: value for name, value in chosen.items() if not isinstance(value, Unresolved)}


def _corrections(given: Mapping[str, Any], out: Imported) -> None:
    corrections: dict[str, Any] = {}
    function = str(given.get("custom-tis-function-path", ""))
    if given.get("use-tis") and function and not function.endswith(ICEPOP):
        out.miss("custom-tis-function-path", f"{function}: combine corrections in algorithm.correction")
    elif given.get("use-tis"):
        corrections["icepop" if function else "tis"] = {
            "low": given["tis-clip-low"],
            "high": given["tis-clip"],
        }
    elif given.get("get-mismatch-metrics"):
        corrections["metrics_only"] = {}
    if given.get("use-opsm"):
        corrections["sequence_mask"] = {"delta": given["opsm-delta"]}
    if corrections:
        out.put("algorithm.correction", corrections)


def _reward(given: Mapping[str, Any], out: Imported) -> None:
    if (kind := given.get("rm-type")) is None:
        return
    name = str(kind).removeprefix("boxed_")
    if name not in REWARDS:
        out.miss("rm-type", f"{kind} has no counterpart; set reward.function (docs/rewards.md)")
        return
    out.put("reward.function", REWARDS[name])
    if str(kind) != name:
        out.put("reward.extract", "boxed")
    if REWARDS[name] == "remote" and isinstance(url := given.get("rm-url"), str):
        out.put("reward.options", {"url": url})


def _evaluation(given: Mapping[str, Any], out: Imported) -> None:
    files = _files(given.get("eval-prompt-data"))
    if files is None:
        out.keys = {key: value for key, value in out.keys.items() if not key.startswith("eval.")}
        return
    out.put("eval.data", files)
    out.put("eval.temperature", given.get("eval-temperature", given["rollout-temperature"]))


def _trackers(given: Mapping[str, Any], out: Imported) -> None:
    trackers = [name for name in ("wandb", "tensorboard") if given.get(f"use-{name}")]
    if trackers:
        out.put("run.trackers", ["jsonl", *trackers])
    if given.get("use-wandb"):
        for name, key in (("project", "project"), ("group", "group"), ("team", "entity")):
            out.put(f"run.tracker_options.wandb.{key}", given.get(f"wandb-{name}"))
