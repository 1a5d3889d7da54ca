"""First config for a model: facts about the model, and the sizes in ``recipe.toml.jinja`` that follow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.planning.choose import Choice, Wishes, any_config, choose
from anygauge.planning.plan import Assumptions
from anygauge.planning.rates import RATES
from anygauge.planning.shape import ModelShape, read_shape
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.models import text_config

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = [
    "DataFacts",
    "Machine",
    "ModelFacts",
    "choice_of",
    "facts_of_config",
    "facts_of_name",
    "recipe",
    "state_gib",
]

GIB = 2**30
DEVICE_GIB = 64
"""Memory that is assumed of an accelerator where nothing tells it; most have this much or more."""
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
SAMPLES = 8
"""Samples of each prompt."""
COMMENT_COLUMN = 40
COUNTS, SIZES = ("", "K", "M", "B", "T"), (" bytes", " KiB", " MiB", " GiB")
ONE_HOST = 8
"""Devices that one host usually has."""
_BILLIONS = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z\d])", re.IGNORECASE)
_VISION_NAME = re.compile(r"(?<![A-Za-z])VL(?![A-Za-z])|\dV(?![A-Za-z\d])|omni", re.IGNORECASE)


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
    shape: ModelShape | None = None
    """Its sizes, if its ``config.json`` tells them all."""
    accepts: Callable[[Config], bool] = any_config
    """Whether the train engine can divide it as a config says."""


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
    is_assumed: bool = True
    """Whether nothing tells the memory of a device."""
    master_bytes: int = 4
    """See :attr:`anygauge_hooks.types.BackendSpec.master_weight_bytes`."""
    has_servers: bool = False
    """Whether SGLang is installed."""


# -------------------------------------------------------------------------
# What is known
# -------------------------------------------------------------------------


def facts_of_name(name: str) -> ModelFacts:
    """Guess facts about a model from its name.

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
    """Return facts about a model from its ``config.json``.

    :param chat: Whether its tokenizer has a chat template.
    """
    hf = text_config(hf)
    layers, hidden, heads = (
        _number(hf, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_heads = _number(hf, "num_key_value_heads") or heads
    head_dim = _number(hf, "head_dim") or (hidden // heads if heads else 0)
    shape = _shape(hf)
    parameters = 0 if shape is None else shape.parameters
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
        shape=shape,
    )


def _shape(hf: Mapping[str, Any]) -> ModelShape | None:
    try:
        return read_shape(hf)
    except ConfigError:
        return None


def _may_think(name: str) -> bool:
    """Return whether the template of a model thinks unless told otherwise; Qwen3-VL's are of two kinds."""
    return "qwen3" in name and re.search(r"qwen3[-_]vl", name) is None


def _number(hf: Mapping[str, Any], key: str) -> int:
    value = hf.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def state_gib(billions: float, devices: int, *, engine: str | None = None) -> float:
    """Return the memory that weights, gradients and optimizer take on each device.

    Two bytes for the weights, two for the rollout engine's copy, four for gradients in float32, twelve for
    float32 weights and Adam's two moments, which are divided among the devices. The engine ``fsdp`` divides
    weights and gradients too.
    """
    whole, divided = (2, 18) if engine == "fsdp" else (8, 12)
    return billions * 1e9 * (whole + divided / devices) / GIB


# -------------------------------------------------------------------------
# What follows
# -------------------------------------------------------------------------


def recipe(
    model: ModelFacts,
    data: DataFacts,
    machine: Machine,
    *,
    task: str,
    command: str,
    engine: str | None = None,
) -> str:
    """Return the text of a config.

    :param task: ``rl`` or ``sft``.
    :param engine: Train engine, if it is not the default one.
    :param command: Command that writes the recipe.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["toml"] = _toml
    choice = choice_of(model, machine, task=task, engine=engine)
    text = environment.get_template("recipe.toml.jinja").render(
        model=model,
        data=data,
        machine=machine,
        task=task,
        engine=engine,
        command=command,
        one_host=ONE_HOST,
        **_texts(model, machine, task),
        **_sizes(model, machine, task, engine),
        **_chosen(choice, machine),
    )
    return "\n".join(map(_aligned, text.split("\n")))


def _texts(model: ModelFacts, machine: Machine, task: str) -> dict[str, str]:
    """Return the words of the template that depend on the model and the machine."""
    size = "a size that neither tells"
    if model.billions is not None:
        size = f"{_amount(model.billions * 1e9, 1000, COUNTS)} parameters"
    host = f"{machine.memory_gib:.0f} GiB of memory"
    if machine.accelerator:
        host = f"devices of {machine.memory_gib:.0f} GiB{', assumed' if machine.is_assumed else ''}"
    slug = re.sub(r"[^a-z0-9._]+", "-", model.name.rstrip("/").rpartition("/")[2].lower()).strip("-._")
    name = f"{slug or 'model'}-{'grpo' if task == 'rl' else 'sft'}"
    return {"size": size, "host": host, "name": name, "kv_size": _amount(model.kv_bytes, 1024, SIZES)}


def choice_of(model: ModelFacts, machine: Machine, *, task: str, engine: str | None) -> Choice | None:
    """Return the chosen layout; ``None`` on a CPU, and of a model whose sizes are not known.

    Rollout engines are servers where SGLang is installed, and where those in the workers do not fit.
    """
    if model.shape is None or not machine.accelerator:
        return None
    given = Assumptions(
        backend=machine.backend,
        master_bytes=machine.master_bytes,
        device_bytes=machine.memory_gib * GIB,
        rates=RATES["H200"],
    )
    wishes = Wishes(
        devices=machine.devices,
        engine=engine or "megatron",
        task=task,
        has_servers=machine.has_servers,
        **_batch_sizes(model, machine, task),
    )
    chosen = choose(model.shape, wishes, given, model.accepts)
    if chosen.fits or machine.has_servers or task == "sft":
        return chosen
    return choose(model.shape, replace(wishes, has_servers=True), given, model.accepts)


def _chosen(choice: Choice | None, machine: Machine) -> dict[str, Any]:
    """Return the words of the template that a choice decides."""
    servers = 0 if choice is None else choice.server_devices
    parallel = {} if choice is None else choice.parallel
    return {
        "parallel": parallel,
        "server_devices": servers,
        "servers": machine.devices // servers if servers else 0,
        "runs_on_cpu": not (servers or parallel),
    }


def _batch_sizes(model: ModelFacts, machine: Machine, task: str) -> dict[str, int]:
    """Return the sizes of a batch, which do not depend on the layout."""
    accelerator = machine.accelerator
    longest = (
        (LONGEST_PROMPT, LONGEST_RESPONSE if accelerator else 256) if task == "rl" else (LONGEST_ROW, 256)
    )
    prompt, response = _lengths(model.context, *longest)
    cache = _power_of_two(machine.memory_gib * GIB / (5 if accelerator else 10) / model.kv_bytes)
    prompts = (32 if task == "rl" else 64) if accelerator else 8
    return {
        "prompts": _multiple(prompts, machine.devices),
        "samples": SAMPLES,
        "prompt_tokens": prompt,
        "response_tokens": response,
        "cache_tokens": max(prompt + response, min(LARGEST_CACHE, cache)),
    }


def _sizes(model: ModelFacts, machine: Machine, task: str, engine: str | None) -> dict[str, Any]:
    """Return the numbers of the template."""
    sizes = _batch_sizes(model, machine, task)
    choice = choice_of(model, machine, task=task, engine=engine)
    micro_batch, recompute = _guess(model, machine, engine)
    if choice is not None:
        micro_batch, recompute = choice.micro_batch, choice.recompute
    return {
        "prompt": sizes["prompt_tokens"],
        "response": sizes["response_tokens"],
        "cpu_response": min(sizes["response_tokens"], 256),
        "prompts": sizes["prompts"],
        "samples": SAMPLES,
        "cache": sizes["cache_tokens"],
        "micro_batch": micro_batch,
        "recompute": recompute,
    }


def _guess(model: ModelFacts, machine: Machine, engine: str | None) -> tuple[int, str]:
    """Return micro-batch tokens and recompute mode if no more than the size of the model is known."""
    billions = model.billions or 4.0
    free = machine.memory_gib * 0.9 - state_gib(billions, machine.devices, engine=engine)
    fits = _power_of_two(free * GIB / 2 / (LOGIT_BYTES * model.vocabulary))
    recompute = "full" if billions >= 5 or engine == "fsdp" else "selective"
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, fits)), recompute


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


def _aligned(line: str) -> str:
    """Return a line whose comment, behind a tab, stands in the column of the others."""
    text, tab, comment = line.partition("\t")
    return f"{text}  ".ljust(COMMENT_COLUMN) + comment if tab else text


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
