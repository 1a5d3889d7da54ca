"""TRL: arguments in a Python script, a YAML config or a command line, and the keys they decide together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeGuard

from anygauge.migrate.arguments import TRACKERS, flat_yaml, options, whole
from anygauge.migrate.shell import commands
from anygauge.migrate.table import Imported, Input, rows
from anygauge.migrate.trl_script import TASK, function_names, read_script

__all__ = ["read", "rules"]

AGGREGATIONS = {
    "grpo": "sample_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant_length",
    "cispo": "token_mean",
    "nll": "token_mean",
}
LISTS = re.compile("lora_(target_modules|modules_to_save)|report_to|reward_funcs")
EPOCHS = "num_train_epochs"
LINEAR = "linear"
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine", LINEAR: "cosine"}
ACCURACY = "accuracy_reward"
MOVE = (
    'move the function into a module and set reward.function = "my_rewards:NAME", or [reward.parts] for '
    "several; TRL's signature is taken"
)
MODES = {"truncate": "tis", "mask": "mis"}


def read(text: str, name: str) -> Input:
    """Read a Python script, a YAML config, or a shell script with a command line.

    :raises ValueError: It has no arguments of TRL.
    """
    suffix = PurePath(name).suffix
    if suffix in (".yaml", ".yml"):
        return Input(flat_yaml(text))
    return _read_command(text) if suffix == ".sh" else read_script(text)


def _read_command(text: str) -> Input:
    """Read the command that starts ``trl`` or a script of that kind."""
    for words in commands(text):
        names = [PurePath(str(word)).name for word in words]
        at = next(
            (at for at, name in enumerate(names) if name.endswith(".py") or name in ("grpo", "rloo", "sft")),
            None,
        )
        if at is None:
            continue
        command = options(words[at + 1 :], lists=LISTS)
        if "trl" not in names[:at] and not command.arguments.keys() & rows("trl").keys():
            continue  # a script of somebody else
        task = next((kind for kind in ("rloo", "sft") if kind in names[at]), "grpo")
        launched = {k: v for k, v in options(words[:at]).arguments.items() if k == "num_processes"}
        return Input({TASK: task, **launched, **command.arguments}, command.notes)
    raise ValueError("it calls neither trl nor a Python script with arguments of TRL")


# -------------------------------------------------------------------------
# Keys that several arguments decide
# -------------------------------------------------------------------------


def rules(given: Mapping[str, Any], out: Imported) -> None:
    """Set the keys that several arguments decide together."""
    task = str(given.get(TASK, "grpo"))
    out.put("run.task", "sft" if task == "sft" else "rl")
    out.put("train.engine", "fsdp")
    out.put("placement.train_workers", whole(given, "num_processes", 1))
    out.put("placement.launcher", "local")
    _data(given, out)
    _optimizer(given, out, task)
    _run(given, out)
    _lora(given, out)
    steps = _batches(given, out, task)
    if (most := whole(given, "max_steps", -1)) > 0:
        out.put("run.steps", max(1, most // steps))
    if task == "sft":
        kept = "rollout.prompts_per_step", "algorithm.loss_aggregation"
        gone = "rollout.", "algorithm.", "reward.", "eval.", "placement.colocated"
        out.keys = {key: value for key, value in out.keys.items() if key in kept or not key.startswith(gone)}
        return
    _algorithm(given, out, task)
    _engine(given, out)
    _reward(given, out)


def _data(given: Mapping[str, Any], out: Imported) -> None:
    data = given.get("train_dataset", given.get("dataset_name"))
    out.put("data.apply_chat_template", True)
    if isinstance(data, str) and PurePath(data).suffix in (".json", ".jsonl", ".parquet"):
        out.put("data.train", [data])
    elif isinstance(data, str):
        text = f"{data}: name its files in data.train, such as hf://datasets/{data}/FILE.parquet"
        out.miss("train_dataset", text)
    if given.get(TASK) == "sft":
        out.put("data.input_key", out.keys.get("data.input_key", "messages"))
        out.put("data.label_key", "none")


def _is_names(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of words, each of them known."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _batches(given: Mapping[str, Any], out: Imported, task: str) -> int:
    """Set the batch sizes, and return the optimizer steps of a step."""
    accumulated = whole(given, "gradient_accumulation_steps", 1)
    batch = whole(given, "per_device_train_batch_size", 8) * whole(given, "num_processes", 1)
    if "num_processes" not in out.converted:
        out.miss(
            "num_processes",
            "the script does not tell the devices: batches are those of one (placement.train_workers)",
        )
    if task == "sft":
        out.put("rollout.prompts_per_step", batch * accumulated)
        return 1
    samples = whole(given, "generation_batch_size", batch * whole(given, "steps_per_generation", accumulated))
    group = whole(given, "num_generations", 8)
    if task == "rloo" and "num_generations" not in out.converted:
        group = 2
    out.put("rollout.samples_per_prompt", group)
    out.put("rollout.prompts_per_step", max(1, samples // max(1, group)))
    if samples % max(1, group):
        out.miss("num_generations", f"{samples} samples of a step are not a multiple of it")
    if batch * accumulated < samples:
        out.put("train.global_batch_size", batch * accumulated)
        return samples // (batch * accumulated)
    return 1


def _optimizer(given: Mapping[str, Any], out: Imported, task: str) -> None:
    if task == "sft" and "learning_rate" not in out.converted:
        out.put("train.lr", 2e-5)
    else:
        out.put("train.lr", given["learning_rate"])
    kind = str(given["lr_scheduler_type"])
    schedule = SCHEDULES.get(kind, "cosine" if kind.startswith("cosine") else "constant")
    out.put("train.lr_schedule", schedule)
    if kind == LINEAR or kind not in SCHEDULES:
        out.miss("lr_scheduler_type", f"{kind} is no schedule here; {schedule} is written")
    if isinstance(warmup := given.get("warmup_steps"), int):
        out.put("train.warmup_steps", warmup)
    betas = [given["adam_beta1"], given["adam_beta2"]]
    if all(isinstance(each, int | float) for each in betas):
        out.put("train.adam_betas", betas)


def _run(given: Mapping[str, Any], out: Imported) -> None:
    if EPOCHS not in given and given.get("max_steps", -1) == -1:
        out.miss(EPOCHS, rows("trl")[EPOCHS].note)
    if isinstance(directory := given.get("output_dir"), str) and "run_name" not in out.converted:
        out.put("run.name", PurePath(directory).name or None)
    if given.get("save_strategy") == "no":
        out.put("save.every", "none")
    reports = given.get("report_to")
    names = reports if _is_names(reports) else [reports]
    if trackers := [name for name in TRACKERS if name in names]:
        out.put("run.trackers", ["jsonl", *trackers])
    if "trackio" in names:
        out.put("run.tracker_options.trackio.space_id", given.get("trackio_space_id"))


def _lora(given: Mapping[str, Any], out: Imported) -> None:
    if not (given.get("use_peft") or "lora_r" in given):
        return
    out.put("train.lora.rank", given.get("lora_r", 16))
    out.put("train.lora.alpha", given.get("lora_alpha", 32 if given.get("use_peft") else 8))
    for name, key in (("lora_target_modules", "targets"), ("lora_modules_to_save", "modules_to_save")):
        value = given.get(name)
        names = [each.strip(", ") for each in value] if _is_names(value) else value
        out.put(f"train.lora.{key}", [names] if isinstance(names, str) and names != "all-linear" else names)


def _algorithm(given: Mapping[str, Any], out: Imported, task: str) -> None:
    kind, high = str(given["loss_type"]), given.get("epsilon_high")
    out.put("algorithm.advantage", "rloo" if task == "rloo" else "grpo")
    out.put("algorithm.clip_high", given["epsilon"] if high is None else high)
    if kind not in AGGREGATIONS:
        out.miss("loss_type", f"{kind} has no counterpart (converted: {', '.join(AGGREGATIONS)})")
    out.put("algorithm.loss_aggregation", AGGREGATIONS.get(kind))
    sequence = given.get("importance_sampling_level") == "sequence"
    out.put("algorithm.policy_loss", "cispo" if kind == "cispo" else "gspo" if sequence else "ppo_clip")
    default = 0.05 if task == "rloo" and "beta" not in out.converted else given["beta"]
    out.put("algorithm.kl_coef", default)
    if isinstance(default, int | float) and default > 0:
        out.put("algorithm.kl_type", "k3")
    scaled = given["scale_rewards"]
    if task == "grpo" and scaled in (False, "none"):
        out.put("algorithm.advantage_options", {"scale": False})
    elif scaled not in (True, "group"):
        out.miss("scale_rewards", f"{scaled}: advantages are divided by the deviation of their group")


def _engine(given: Mapping[str, Any], out: Imported) -> None:
    workers, size = whole(given, "num_processes", 1), whole(given, "vllm_tensor_parallel_size", 1)
    if given.get("use_vllm") is not True:
        out.put("rollout.engine", "transformers")
        return
    out.put("rollout.engine", "sglang")
    out.miss("use_vllm", "vLLM is no engine here; rollout.engine is sglang instead")
    is_colocated = given["vllm_mode"] == "colocate"
    out.put("placement.colocated", is_colocated)
    out.put("placement.rollout_workers", max(1, workers // max(1, size)) if is_colocated else 1)
    out.put("rollout.sglang.tp_size", size if size > 1 else None)
    out.put("rollout.sglang.context_length", given.get("vllm_max_model_length"))
    if is_colocated:
        out.put("rollout.sglang.mem_fraction_static", given["vllm_gpu_memory_utilization"])
    level, _, kind = str(given["vllm_importance_sampling_mode"]).partition("_")
    if given["vllm_importance_sampling_correction"] is True and kind in MODES:
        high = given.get("vllm_importance_sampling_cap", given["vllm_importance_sampling_clip_max"])
        low = given.get("vllm_importance_sampling_clip_min", 0.0)
        out.put("algorithm.correction", {MODES[kind]: {"level": level, "low": low, "high": high}})


def _reward(given: Mapping[str, Any], out: Imported) -> None:
    functions = given.get("reward_funcs")
    names = [] if functions is None else function_names(functions)
    if ACCURACY in names:
        out.put("data.label_key", "solution")
    if names == [ACCURACY]:
        out.put("reward.function", "math")
    else:
        # A part of the reward alone would train another objective: without any, the config is not complete.
        out.unfinished += _reward_lines(names)
    for name in names:
        if name != ACCURACY:
            out.miss("reward_funcs", f"{name}: {MOVE}")
    if not names:
        out.miss("reward_funcs", "set reward.function (docs/rewards.md)")
    out.put("data.label_key", out.keys.get("data.label_key", "none"))


def _reward_lines(names: Sequence[str]) -> list[str]:
    """Return lines for a reward whose functions are still to be moved."""
    if len(names) < 2:
        return [f"reward.function = {_function(name)}" for name in names]
    parts = [name.rpartition(".")[2] if _is_path(name) else f"part_{at}" for at, name in enumerate(names)]
    return [
        f"reward.parts.{part}.function = {_function(name)}" for part, name in zip(parts, names, strict=True)
    ]


def _function(name: str) -> str:
    """Return the function that a name of TRL stands for, as TOML; where it is not known, as an example."""
    if name == ACCURACY:
        return '"math"'
    module, _, function = name.rpartition(".") if _is_path(name) else ("", "", "NAME")
    return f'"{module or "my_rewards"}:{function}"'


def _is_path(name: str) -> bool:
    return name.isascii() and all(part.isidentifier() for part in name.split("."))
