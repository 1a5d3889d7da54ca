"""First config for a model: facts about the model, settings derived from them, and the file's text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anygauge_hooks.models import text_config

__all__ = ["DataFacts", "Machine", "ModelFacts", "facts_of_config", "facts_of_name", "recipe", "state_gib"]

GIB = 2**30
DEVICE_GIB = 64
"""Memory of an accelerator that the sizes are chosen for; most have this much or more."""
LONGEST_PROMPT = 512
LONGEST_RESPONSE = 1024
LONGEST_ROW = 2048
"""Longest SFT row, prompt and answer, in tokens."""
LARGEST_CACHE = 262_144
KV_BYTES = 131_072
"""Per token, where the model's shape is not known: between those of a 0.6B and of an 8B model."""
VOCABULARY = 152_064
"""Assumed vocabulary size where it is unknown: a large one."""
LOGIT_BYTES = 32
"""Per token and entry of the vocabulary: logits, their softmax and gradients, in float32."""
SMALLEST_BATCH, LARGEST_BATCH = 1024, 16_384
COMMENT_COLUMN = 40
COUNTS, SIZES = ("", "K", "M", "B", "T"), (" bytes", " KiB", " MiB", " GiB")
ONE_HOST = 8
"""Devices that one host usually has."""
_BILLIONS = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z\d])", re.IGNORECASE)
_VISION_NAME = re.compile(r"(?<![A-Za-z])VL(?![A-Za-z])|\dV(?![A-Za-z\d])|omni", re.IGNORECASE)

Row = tuple[str, Any, str]
"""A key, its value, and why; an empty string says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Model properties that a first config depends on."""

    name: str
    """As it goes into the config."""
    billions: float | None
    """Parameters."""
    context: int | None
    """Tokens that a prompt and its response may have."""
    kv_bytes: int
    """Bytes of one token in the rollout engine's KV cache."""
    vocabulary: int
    """Rows of the output layer."""
    chat: bool
    """Whether its tokenizer has a chat template, as far as is known."""
    thinks: bool
    """Whether its template thinks unless it is told not to."""
    has_vision: bool = False
    """Whether it takes images, as far as is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Location and fields of the prompts."""

    train: str
    evaluation: str | None
    input_key: str
    label_key: str
    note: str
    """On the fields."""
    media: Mapping[str, str] = field(default_factory=dict)
    """Fields of images, video and sound, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware that the config is written for."""

    backend: str
    accelerator: bool
    devices: int
    memory_gib: float
    """Memory of one device; on a CPU-only host, memory of the host."""


# -------------------------------------------------------------------------
# What is known
# -------------------------------------------------------------------------


def facts_of_name(name: str) -> ModelFacts:
    """Return what a name tells of a model.

    >>> facts_of_name("Qwen/Qwen3-30B-A3B").billions, facts_of_name("HuggingFaceTB/SmolLM2-135M").billions
    (30.0, 0.135)
    """
    match = _BILLIONS.search(name)
    billions = float(match[1]) / (1 if match[2] in "bB" else 1000) if match else 0.0
    return ModelFacts(
        name=name,
        billions=billions or None,
        context=None,
        kv_bytes=KV_BYTES,
        vocabulary=VOCABULARY,
        chat=True,
        thinks=_may_think(name.lower()),
        has_vision=_VISION_NAME.search(name) is not None,
    )


def facts_of_config(name: str, hf: Mapping[str, Any], *, chat: bool) -> ModelFacts:
    """Return what the ``config.json`` of a model tells.

    :param chat: Whether its tokenizer has a chat template.
    """
    hf = text_config(hf)
    layers, hidden, heads = (
        _number(hf, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_heads = _number(hf, "num_key_value_heads") or heads
    head_dim = _number(hf, "head_dim") or (hidden // heads if heads else 0)
    parameters = _parameters(hf, layers, hidden, (heads * 2 + kv_heads * 2) * head_dim)
    context = _number(hf, "max_position_embeddings")
    return ModelFacts(
        name=name,
        billions=parameters / 1e9 or facts_of_name(name).billions,
        context=context or None,
        kv_bytes=layers * kv_heads * head_dim * 4 or KV_BYTES,
        vocabulary=_number(hf, "vocab_size") or VOCABULARY,
        chat=chat,
        thinks=chat and _may_think(str(hf.get("model_type"))),
        has_vision="vision_config" in hf or "thinker_config" in hf,
    )


def _may_think(name: str) -> bool:
    """Return whether the template of a model thinks unless told otherwise; Qwen3-VL's are of two kinds."""
    return "qwen3" in name and re.search(r"qwen3[-_]vl", name) is None


def _number(hf: Mapping[str, Any], key: str) -> int:
    value = hf.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _parameters(hf: Mapping[str, Any], layers: int, hidden: int, attention: int) -> int:
    """Return about how many parameters a decoder has.

    :param attention: Width of queries, keys, values and output together.
    """
    experts = _number(hf, "num_experts")
    mlp = _number(hf, "moe_intermediate_size" if experts else "intermediate_size") * max(1, experts)
    embeddings = 1 if hf.get("tie_word_embeddings") else 2
    return hidden * (layers * (attention + 3 * mlp) + embeddings * _number(hf, "vocab_size"))


def state_gib(billions: float, devices: int) -> float:
    """Return the memory that weights, gradients and optimizer take on each device.

    Two bytes for the weights, two for the rollout engine's copy, four for gradients in float32, twelve for
    float32 weights and Adam's two moments, which are divided among the devices.
    """
    return billions * 1e9 * (8 + 12 / devices) / GIB


# -------------------------------------------------------------------------
# What follows
# -------------------------------------------------------------------------


def recipe(model: ModelFacts, data: DataFacts, machine: Machine, *, task: str, command: str) -> str:
    """Return the text of a config.

    :param task: ``rl`` or ``sft``.
    :param command: What asked for it.
    """
    base = dict(_rl(model, data, machine) if task == "rl" else _sft(model, data, machine))
    size = "a size that neither tells"
    if model.billions is not None:
        size = f"{_amount(model.billions * 1e9, 1000, COUNTS)} parameters"
    host = (
        f"devices of {DEVICE_GIB} GiB" if machine.accelerator else f"{machine.memory_gib:.0f} GiB of memory"
    )
    lines = [
        f"# Written by `{command}`",
        f"# for {size} on {machine.devices} x {machine.backend}, {host}.",
        "# `anygauge train --keys` explains every key; --section.key VALUE on the command line wins.",
        "",
        _line("model", model.name, "a Hugging Face directory, or a name on the hub"),
    ]
    for header, rows in base.items():
        lines += ["", f"[{header}]", *(_line(*row) for row in rows)]
    return "\n".join(lines) + "\n"


def _rl(model: ModelFacts, data: DataFacts, machine: Machine) -> Iterator[tuple[str, list[Row]]]:
    prompt, response = _lengths(
        model.context, LONGEST_PROMPT, LONGEST_RESPONSE if machine.accelerator else 256
    )
    yield "run", _run(model, "grpo")
    yield "data", _data(model, data, prompt, "Put the final answer within \\boxed{}.")
    yield (
        "reward",
        [("function", "math", "compares \\boxed{} with the label; yours: package.module:function")],
    )
    yield "rollout", _rollout(model, machine, prompt, response)
    yield (
        "algorithm",
        [("clip_high", 0.28, "above clip_low = 0.2: leaves unlikely tokens room to grow")],
    )
    yield "train", _train(model, machine, 1e-6, "RL needs far smaller steps than SFT")
    if data.evaluation is not None:
        yield (
            "eval",
            [
                ("data", [data.evaluation], ""),
                ("temperature", 0.0, "greedy: the same answer each time"),
                ("max_prompts", 256, "the first rows; leave it out for all"),
            ],
        )
    yield from _places(machine)
    if machine.accelerator:
        longest = prompt + min(response, 256)
        yield (
            "on.cpu.rollout",
            [
                ("prompts_per_step", 4, "enough to try the recipe where there is no accelerator"),
                ("max_new_tokens", min(response, 256), ""),
                ("max_batch_tokens", max(32_768, longest), ""),
            ],
        )
        yield from _try_on_cpu()


def _sft(model: ModelFacts, data: DataFacts, machine: Machine) -> Iterator[tuple[str, list[Row]]]:
    row, _ = _lengths(model.context, LONGEST_ROW, 256)
    yield "run", [("task", "sft", "trains on the assistant's turns; generates nothing"), *_run(model, "sft")]
    yield "data", _data(model, data, row, None)
    rows = 64 if machine.accelerator else 8
    yield "rollout", [("prompts_per_step", _multiple(rows, machine.devices), "rows of each optimizer step")]
    yield (
        "train",
        [
            *_train(model, machine, 1e-5, "ten times that of RL"),
            ("lr_schedule", "cosine", ""),
            ("warmup_steps", 10, "optimizer steps"),
        ],
    )
    yield from _places(machine)
    if machine.accelerator:
        yield (
            "on.cpu.rollout",
            [("prompts_per_step", 4, "enough to try the recipe where there is no accelerator")],
        )
        yield from _try_on_cpu()


def _run(model: ModelFacts, method: str) -> list[Row]:
    slug = re.sub(r"[^a-z0-9._]+", "-", model.name.rstrip("/").rpartition("/")[2].lower()).strip("-._")
    return [
        ("name", f"{slug or 'model'}-{method}", "everything of the run goes to runs/NAME"),
        ("steps", 200, ""),
    ]


def _data(model: ModelFacts, data: DataFacts, longest: int, prompt: str | None) -> list[Row]:
    rows: list[Row] = [
        ("train", [data.train], ""),
        ("input_key", data.input_key, data.note),
        ("label_key", data.label_key, ""),
    ]
    if model.chat:
        rows.append(("apply_chat_template", True, "false for a base model without a template"))
        if model.thinks:
            rows.append(("chat_template_kwargs", {"enable_thinking": False}, "thoughts need more tokens"))
        if prompt is not None:
            rows.append(("system_prompt", prompt, "what the reward looks for"))
    if model.has_vision and data.media:
        rows.append(("multimodal_keys", dict(data.media), "<image> in a prompt is where an image stands"))
    rows.append(("max_prompt_tokens", longest, "longer rows are dropped and counted"))
    return rows


def _rollout(model: ModelFacts, machine: Machine, prompt: int, response: int) -> list[Row]:
    cache = _power_of_two(machine.memory_gib * GIB / (5 if machine.accelerator else 10) / model.kv_bytes)
    prompts = _multiple(32 if machine.accelerator else 8, machine.devices)
    why = "" if model.context is None else f"the model takes {model.context} with the prompt"
    return [
        ("prompts_per_step", prompts, "a multiple of the devices keeps them all busy"),
        ("samples_per_prompt", 8, "GRPO compares the samples of one prompt"),
        ("max_new_tokens", response, why),
        (
            "max_batch_tokens",
            max(prompt + response, min(LARGEST_CACHE, cache)),
            f"{_amount(model.kv_bytes, 1024, SIZES)} of cache each",
        ),
    ]


def _train(model: ModelFacts, machine: Machine, lr: float, why: str) -> list[Row]:
    free = machine.memory_gib * 0.9 - state_gib(model.billions or 4.0, machine.devices)
    fits = _power_of_two(free * GIB / 2 / (LOGIT_BYTES * model.vocabulary))
    tokens = min(LARGEST_BATCH, max(SMALLEST_BATCH, fits))
    rows: list[Row] = [
        ("lr", lr, why),
        ("micro_batch_tokens", tokens, f"each has {model.vocabulary} logits; lower it if memory runs out"),
    ]
    if machine.accelerator:
        recompute = "selective" if (model.billions or 4.0) < 5 else "full"
        rows.append(("recompute", recompute, "of activations: slower, and takes less memory"))
    return rows


def _places(machine: Machine) -> Iterator[tuple[str, list[Row]]]:
    local = machine.devices <= ONE_HOST
    why = "processes of this host" if local else "more than one host: see [cluster]"
    yield (
        "placement",
        [
            ("launcher", "local" if local else "ray", why),
            ("train_workers", machine.devices, "one device each"),
        ],
    )


def _try_on_cpu() -> Iterator[tuple[str, list[Row]]]:
    yield "on.cpu.train", [("micro_batch_tokens", SMALLEST_BATCH, ""), ("recompute", "none", "")]
    yield "on.cpu.placement", [("launcher", "local", ""), ("train_workers", 1, "")]


def _lengths(context: int | None, prompt: int, response: int) -> tuple[int, int]:
    """Return how long a prompt and a response may be; together they fit the context."""
    if context is None:
        return prompt, response
    response = max(1, min(response, context // 2))
    return max(1, min(prompt, context - response)), response


def _power_of_two(limit: float) -> int:
    """Return the largest that is not above a limit, and at least 1."""
    return 1 << (max(1, int(limit)).bit_length() - 1)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


# -------------------------------------------------------------------------
# The text
# -------------------------------------------------------------------------


def _line(key: str, value: Any, why: str) -> str:
    text = f"{key} = {_toml(value)}"
    return f"{f'{text}  '.ljust(COMMENT_COLUMN)}# {why}" if why else text


def _amount(number: float, base: int, units: Sequence[str]) -> str:
    """Return a number in the unit that leaves it below 1000.

    >>> _amount(74_900, 1000, COUNTS), _amount(596e6, 1000, COUNTS), _amount(512, 1024, SIZES)
    ('74.9K', '596M', '512 bytes')
    """
    power = 0
    while round(number) >= 1000 and power < len(units) - 1:
        number, power = number / base, power + 1
    return f"{number:.3g}{units[power]}"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, str) or not isinstance(value, Iterable):
        return json.dumps(value, ensure_ascii=False)
    return "[" + ", ".join(_toml(item) for item in value) + "]"
