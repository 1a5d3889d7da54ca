"""verl: Hydra overrides in a shell script, or a YAML config, and the keys that several of them decide."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import dropwhile
from pathlib import PurePath
from typing import Any

from anygauge.migrate.arguments import TRACKERS, added_note, flat_yaml, whole
from anygauge.migrate.shell import commands, scalar
from anygauge.migrate.table import Imported, Input, Unresolved, rows

__all__ = ["read", "rules"]

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
EPOCHS = "trainer.total_epochs"
MEGATRON = f"{ACTOR}megatron."
ADVANTAGES = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k3": "k3", "low_var_kl": "low_var_kl"}
CRITIC = {
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.lr",
    "critic.cliprange_value": "critic.value_clip",
    "trainer.critic_warmup": "critic.warmup_steps",
    "critic.megatron.tensor_model_parallel_size": "critic.parallel.tensor",
    "critic.megatron.pipeline_model_parallel_size": "critic.parallel.pipeline",
}
SFT_DEFAULTS: Mapping[str, tuple[str, Any]] = {
    "rollout.prompts_per_step": ("data.train_batch_size", 256),
    "data.max_prompt_tokens": ("data.max_length", 1024),
    "data.input_key": ("data.prompt_key", "question"),
    "data.label_key": ("data.response_key", "answer"),
    "train.lr": ("optim.lr", 1e-5),
    "train.lr_schedule": ("optim.lr_scheduler", "cosine"),
    "train.adam_betas": ("optim.betas", [0.9, 0.95]),
}
"""Argument and default of verl's SFT trainer, by key: others than those of its PPO trainer."""
SIZES = {
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "pipeline_model_parallel_size": "pp_size",
}
MEDIA = {"data.image_key": "images", "data.video_key": "videos"}
LABEL = (
    "the answer is in reward_model.ground_truth of verl's rows, inside a table: write it into a field of its "
    "own, whose name data.label_key is"
)
LAST = ("$@", "$*")
"""Ends nearly all scripts of verl, and is empty unless the user adds overrides."""
_OVERRIDE = re.compile(r"(?P<name>\+{0,2}[A-Za-z_]\w*(\.\w+)*)=(?P<value>.*)", re.S)
_ENVIRONMENT = re.compile(r"\w+=.*", re.S)


def read(text: str, name: str) -> Input:
    """Read a YAML config, or the overrides in a shell script.

    :raises ValueError: There are none.
    """
    if PurePath(name).suffix in (".yaml", ".yml"):
        leaves = flat_yaml(text)
        # The full config names fields of media for models of text too.
        return Input({name: value for name, value in leaves.items() if MEDIA.get(name) != value})
    arguments: dict[str, Any] = {}
    notes: list[str] = []
    for words in commands(text):
        is_verl = False
        for word in dropwhile(_is_environment, words):
            match = _OVERRIDE.fullmatch(str(word))
            if match is None or ("." not in match["name"] and "verl" not in " ".join(map(str, words[:8]))):
                if is_verl and isinstance(word, Unresolved) and str(word) not in LAST:
                    notes.append(added_note(word))
                continue
            is_verl = True
            unresolved = isinstance(word, Unresolved) and "$" in match["value"]
            value = Unresolved(match["value"]) if unresolved else _value(match["value"])
            arguments[match["name"].lstrip("+")] = value
    if not arguments:
        raise ValueError("it has no overrides such as data.train_batch_size=1024")
    return Input(arguments, tuple(notes))


def _is_environment(word: str | Unresolved) -> bool:
    """Return whether a word before the program sets an environment variable."""
    return _ENVIRONMENT.fullmatch(str(word)) is not None


def _value(text: str) -> Any:
    """Return the value of an override: a list of scalars, or one scalar."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return scalar(text.strip("'\""))
    return [scalar(each.strip().strip("'\"")) for each in text[1:-1].split(",") if each.strip()]


# -------------------------------------------------------------------------
# Keys that several arguments decide
# -------------------------------------------------------------------------


def rules(given: Mapping[str, Any], out: Imported) -> None:
    """Set the keys that several arguments decide together."""
    is_sft = "model.partial_pretrain" in given or not any(
        name.startswith("actor_rollout_ref.") for name in (*out.converted, *out.unneeded)
    )
    workers = whole(given, "trainer.nnodes", 1) * whole(given, "trainer.n_gpus_per_node", 8)
    out.put("run.task", "sft" if is_sft else "rl")
    out.put("placement.train_workers", workers)
    out.put("placement.launcher", "local" if whole(given, "trainer.nnodes", 1) == 1 else "ray")
    _engine(given, out, workers)
    _data(given, out)
    _trainer(given, out)
    _lora(given, out)
    if is_sft:
        _sft(given, out)
        return
    out.put("data.apply_chat_template", True)
    out.put("data.label_key", "ground_truth")
    out.miss("reward_model.ground_truth", LABEL)
    _batches(given, out)
    _rollout(given, out, workers)
    _algorithm(given, out)
    _optimizer(given, out)
    _reward(given, out)
    _evaluation(given, out)


def _engine(given: Mapping[str, Any], out: Imported, workers: int) -> None:
    strategy = str(given.get(f"{ACTOR}strategy", ""))
    has_sizes = any(name.startswith(MEGATRON) for name in given) and not strategy.startswith("fsdp")
    is_megatron = strategy == "megatron" or has_sizes
    out.put("train.engine", "megatron" if is_megatron else "fsdp")
    if not is_megatron:
        size = whole(given, f"{ACTOR}fsdp_config.fsdp_size", -1)
        out.put("train.parallel.replicate", workers // size if 0 < size < workers else None)
        recomputes = given.get(f"{MODEL}enable_gradient_checkpointing") is True
        out.put("train.recompute", "full" if recomputes else None)
    split = whole(
        given, f"{ACTOR}ulysses_sequence_parallel_size", whole(given, "ulysses_sequence_parallel_size", 1)
    )
    if split > 1:
        out.put("train.parallel.context", split)


def _data(given: Mapping[str, Any], out: Imported) -> None:
    out.put("data.train", _files(given.get("data.train_files")))
    media = {kind: given.get(f"data.{kind}_key") for kind in ("image", "video")}
    if any(media.values()):
        out.put("data.multimodal_keys", {kind: key for kind, key in media.items() if isinstance(key, str)})


def _files(value: Any) -> list[Any] | None:
    if value is None or isinstance(value, Unresolved):
        return None
    paths = [PurePath(str(each)) for each in (value if isinstance(value, list) else [value])]
    if len({path.stem for path in paths}) == len(paths):
        return [str(path) for path in paths]
    return [{"name": f"{path.parent.name}-{path.stem}", "path": str(path)} for path in paths]


def _trainer(given: Mapping[str, Any], out: Imported) -> None:
    if not {EPOCHS, "trainer.total_training_steps"} & given.keys():
        out.miss(EPOCHS, rows("verl")[EPOCHS].note)
    every = whole(given, "trainer.save_freq", -1)
    out.put("save.every", every if every > 0 else "none")
    if given.get("trainer.val_before_train") is False:
        out.miss("trainer.val_before_train", "an evaluation before the first step is always made")
    logger = given.get("trainer.logger")
    named = [str(each) for each in (logger if isinstance(logger, list) else [logger])]
    trackers = [name for name in TRACKERS if name in named]
    if trackers:
        out.put("run.trackers", ["jsonl", *trackers])
    if "wandb" in trackers:
        out.put("run.tracker_options.wandb.project", given.get("trainer.project_name"))


def _lora(given: Mapping[str, Any], out: Imported) -> None:
    for prefix in (f"{MODEL}lora_", f"{MODEL}lora.", "model.lora_"):
        if (rank := whole(given, f"{prefix}rank", 0)) > 0:
            out.put("train.lora.rank", rank)
            out.put("train.lora.alpha", given.get(f"{prefix}alpha"))
            targets = given.get(f"{prefix.rpartition('lora')[0]}target_modules")
            out.put(
                "train.lora.targets",
                [targets] if targets not in (None, "all-linear") and isinstance(targets, str) else targets,
            )


def _sft(given: Mapping[str, Any], out: Imported) -> None:
    """Leave what SFT takes: the batch, the data, the model and the optimizer."""
    kept = "rollout.prompts_per_step", "algorithm.loss_aggregation"
    gone = "rollout.", "algorithm.", "critic.", "reward.", "eval.", "placement.colocated"
    out.keys = {key: value for key, value in out.keys.items() if key in kept or not key.startswith(gone)}
    out.put("data.apply_chat_template", True)
    for key, (name, default) in SFT_DEFAULTS.items():
        out.put(key, given[name] if name in out.converted else default)
    if given.get("data.multiturn.enable") is True:
        out.put("data.input_key", given.get("data.multiturn.messages_key", "messages"))
        out.put("data.label_key", "none")
        return
    for name, key in (("prompt", "data.input_key"), ("response", "data.label_key")):
        inner = given.get(f"data.{name}_dict_keys")
        if isinstance(inner, list) and len(inner) == 1:
            out.put(key, inner[0])
            out.miss(
                f"data.{name}_dict_keys", f"{inner[0]} is inside a table: write it into a field of its own"
            )
        elif f"data.{name}_key" in out.converted:
            out.put(key, given[f"data.{name}_key"])


def _batches(given: Mapping[str, Any], out: Imported) -> None:
    prompts, samples = whole(given, "data.train_batch_size", 1024), whole(given, f"{ROLLOUT}n", 1)
    mini = whole(given, f"{ACTOR}ppo_mini_batch_size", 256)
    if mini < prompts:
        out.put("train.global_batch_size", mini * samples)
    split = whole(given, f"{MEGATRON}context_parallel_size", 1) * whole(
        given, f"{ACTOR}ulysses_sequence_parallel_size", 1
    )
    longest = whole(given, "data.max_prompt_length", 512) + whole(given, "data.max_response_length", 512)
    if given.get(f"{ACTOR}use_dynamic_bsz") is True:
        out.put("train.micro_batch_tokens", whole(given, f"{ACTOR}ppo_max_token_len_per_gpu", 16384) * split)
    elif (rows := whole(given, f"{ACTOR}ppo_micro_batch_size_per_gpu", 0)) > 0:
        out.put("train.micro_batch_tokens", rows * longest)


def _rollout(given: Mapping[str, Any], out: Imported, workers: int) -> None:
    name = str(given.get(f"{ROLLOUT}name", "vllm"))
    if name == "hf":
        out.put("rollout.engine", "transformers")
        out.keys = {key: value for key, value in out.keys.items() if not key.startswith("rollout.sglang.")}
        return
    if name != "sglang":
        out.miss(f"{ROLLOUT}name", f"{name} is no engine here; rollout.engine is sglang instead")
    size = whole(given, f"{ROLLOUT}tensor_model_parallel_size", 2)
    out.put("rollout.engine", "sglang")
    out.put("rollout.sglang.tp_size", size if size > 1 else None)
    for theirs, ours in SIZES.items():
        if (parallel := whole(given, ROLLOUT + theirs, 1)) > 1:
            out.put(f"rollout.sglang.{ours}", parallel)
    out.put("rollout.sglang.mem_fraction_static", given.get(f"{ROLLOUT}gpu_memory_utilization"))
    out.put("placement.colocated", given.get("actor_rollout_ref.hybrid_engine", True))
    out.put("placement.rollout_workers", max(1, workers // max(1, size)))
    if (top_k := given.get(f"{ROLLOUT}top_k")) is not None:
        out.put("rollout.top_k", 0 if top_k == -1 else top_k)
    if megabytes := whole(given, f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes", 0):
        out.put("weight_sync.bucket_bytes", megabytes << 20)


def _algorithm(given: Mapping[str, Any], out: Imported) -> None:
    advantage = str(given["algorithm.adv_estimator"])
    if advantage not in ADVANTAGES:
        out.miss(
            "algorithm.adv_estimator",
            f"{advantage}: see `anygauge keys algorithm.advantage`; grpo is written",
        )
        advantage = "grpo"
    out.put("algorithm.advantage", advantage)
    names = {"gae": {"gamma": "gamma", "lam": "lambd"}, "reinforce_plus_plus": {"gamma": "gamma"}}
    chosen = {
        ours: given[f"algorithm.{theirs}"]
        for theirs, ours in names.get(advantage, {}).items()
        if f"algorithm.{theirs}" in given
    }
    if advantage == "grpo" and given.get("algorithm.norm_adv_by_std_in_grpo") is False:
        chosen["scale"] = False
    if chosen:
        out.put("algorithm.advantage_options", chosen)
    _clipping(given, out)
    _kl(given, out)
    _correction(given, out)
    for name, key in CRITIC.items():
        if advantage == "gae":
            out.put(key, given.get(name))


def _clipping(given: Mapping[str, Any], out: Imported) -> None:
    for bound in ("low", "high"):
        out.put(
            f"algorithm.clip_{bound}", given.get(f"{ACTOR}clip_ratio_{bound}", given[f"{ACTOR}clip_ratio"])
        )
    if given[f"{ACTOR}policy_loss.loss_mode"] == "vanilla":
        out.put("algorithm.dual_clip", given[f"{ACTOR}clip_ratio_c"])


def _kl(given: Mapping[str, Any], out: Imported) -> None:
    if given.get(f"{ACTOR}use_kl_loss") is True:
        kind = str(given[f"{ACTOR}kl_loss_type"]).rstrip("+")
        out.put("algorithm.kl_coef", given[f"{ACTOR}kl_loss_coef"])
        out.put("algorithm.kl_type", KL_TYPES.get(kind))
        if kind not in KL_TYPES:
            out.miss(f"{ACTOR}kl_loss_type", f"{kind}: see `anygauge keys algorithm.kl_type`")
    if given.get("algorithm.use_kl_in_reward") is True:
        out.put("algorithm.kl_reward_coef", given["algorithm.kl_ctrl.kl_coef"])
    for name, taken in (("algorithm.kl_ctrl.type", "fixed"), ("algorithm.kl_penalty", "kl")):
        if given.get(name, taken) != taken:
            out.miss(name, f"the penalty is the log-ratio with a constant coefficient, not {given[name]}")


def _correction(given: Mapping[str, Any], out: Imported) -> None:
    level, cap = given.get("algorithm.rollout_correction.rollout_is"), given.get(f"{ACTOR}tis_imp_ratio_cap")
    if level in ("token", "sequence"):
        high = given["algorithm.rollout_correction.rollout_is_threshold"]
        out.put("algorithm.correction", {"tis": {"level": level, "high": high}})
    elif isinstance(cap, int | float) and cap > 0:
        out.put("algorithm.correction", {"tis": {"high": cap}})
    if (batches := whole(given, "algorithm.filter_groups.max_num_gen_batches", 0)) > 0:
        out.put("rollout.max_num_gen_batches", batches)


def _optimizer(given: Mapping[str, Any], out: Imported) -> None:
    warmup = whole(given, f"{ACTOR}optim.lr_warmup_steps", -1)
    ratio = given.get(f"{ACTOR}optim.lr_warmup_steps_ratio")
    steps = whole(given, "trainer.total_training_steps", 0)
    if warmup > 0:
        out.put("train.warmup_steps", warmup)
    elif isinstance(ratio, int | float) and ratio > 0 and steps:
        out.put("train.warmup_steps", round(ratio * steps))
    elif ratio:
        out.miss(
            f"{ACTOR}optim.lr_warmup_steps_ratio",
            "set train.warmup_steps: the ratio times the optimizer steps",
        )
    rate, least = given[f"{ACTOR}optim.lr"], given.get(f"{ACTOR}optim.min_lr_ratio")
    if isinstance(rate, int | float) and isinstance(least, int | float):
        out.put("train.min_lr", rate * least)


def _reward(given: Mapping[str, Any], out: Imported) -> None:
    manager, path = given["reward_model.reward_manager"], given.get("custom_reward_function.path")
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg."
    if isinstance(path, str):
        out.put("reward.function", f"{PurePath(path).stem}:{given['custom_reward_function.name']}")
        out.miss(
            "custom_reward_function.path", "let the function declare response and label (docs/rewards.md)"
        )
    else:
        out.put("reward.function", "dapo" if manager == "dapo" else "math")
        text = (
            "verl chooses a function by the data_source of each row; check reward.function (docs/rewards.md)"
        )
        out.miss("reward_model.reward_manager", text)
    if given.get(f"{overlong}enable") is True:
        out.put("reward.overlong_buffer", given.get(f"{overlong}len"))
        out.put("reward.overlong_penalty", given.get(f"{overlong}penalty_factor"))


def _evaluation(given: Mapping[str, Any], out: Imported) -> None:
    files, interval = _files(given.get("data.val_files")), whole(given, "trainer.test_freq", -1)
    if files is None or interval <= 0:
        return
    sampling = f"{ROLLOUT}val_kwargs."
    out.put("eval.data", files)
    out.put("eval.interval", interval)
    out.put("eval.samples_per_prompt", given.get(f"{sampling}n"))
    out.put("eval.temperature", given[f"{sampling}temperature"] if given.get(f"{sampling}do_sample") else 0.0)
    out.put("eval.top_p", given.get(f"{sampling}top_p"))
    out.put("eval.top_k", 0 if given.get(f"{sampling}top_k", -1) == -1 else given[f"{sampling}top_k"])
