"""Command-line arguments of a server, from the config."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge.config.lora import lora_settings
from anygauge.config.modalities import TOWERS, modalities
from anygauge.serving.sglang import processors
from anygauge.serving.sglang.adapters import adapter_layers
from anygauge.serving.sglang.installed import Argument, Installed
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = [
    "argument_problems",
    "by_name",
    "command_line",
    "media_arguments",
    "media_environment",
    "run_arguments",
]

_BACKEND = "The backend decides it."
_CLIENT = "The run's own requests would not be answered."
_FRONTS = "SGLang checks no keys with more than one tokenizer process."
_GROUPS = "Use kind of [[rollout.groups]]."
_ONE_NODE = "A server lives on one node; the devices of its worker are those of tp_size and pp_size."
_PORTS = "The launcher takes a free port."
_RUN_WIDE = "What a request says must count; set it in [rollout] and [eval]."
_KEYS = ("api_key", "admin_api_key")
OWNED: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "tokenizer_path"), "Use model.path, or path of [[rollout.groups]]."),
    "revision": "Use model.revision.",
    **{key: f"Use rollout.{key}." for key in _KEYS},
    "tokenizer_worker_num": _FRONTS,
    "trust_remote_code": "Use model.trust_remote_code.",
    "dtype": "Use rollout.dtype.",
    "random_seed": "Use run.seed.",
    "max_total_tokens": "Use rollout.max_batch_tokens.",
    "weight_version": "Weight sync numbers the versions.",
    **dict.fromkeys(("host", "fastapi_root_path"), "The launcher decides where a server listens."),
    **dict.fromkeys(
        (
            *("port", "nccl_port", "dist_init_addr", "grpc_port", "disaggregation_bootstrap_port"),
            "encoder_bootstrap_port",
        ),
        _PORTS,
    ),
    **dict.fromkeys(("nnodes", "node_rank", "use_ray"), _ONE_NODE),
    **dict.fromkeys(("device", "base_gpu_id", "gpu_id_step"), _BACKEND),
    **dict.fromkeys(
        (
            *("disaggregation_mode", "encoder_only", "language_only", "encoder_urls"),
            "encoder_register_urls",
        ),
        _GROUPS,
    ),
    **dict.fromkeys(
        (
            *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "enable_http2"),
            *("smg_grpc_mode", "grpc_mode", "gated_launch_port", "is_embedding"),
            "incremental_streaming_output",
        ),
        _CLIENT,
    ),
    **dict.fromkeys(("preferred_sampling_params", "sampling_defaults"), _RUN_WIDE),
    **dict.fromkeys(
        ("enable_lora", "lora_paths", "max_lora_rank", "lora_target_modules", "max_loras_per_batch"),
        'Use train.lora and weight_sync.transport = "adapter".',
    ),
    "enable_memory_saver": "Use placement.colocated; the backend knows how its servers give memory back.",
    "config": "Write the arguments here.",
}
"""Arguments that the config decides elsewhere, or the launcher, by name; and what to do instead."""


def argument_problems(
    table: Mapping[str, Any], path: str, installed: Installed | None
) -> Iterator[ConfigProblem]:
    """Yield problems of a table of arguments.

    :param path: Path of the table in the config.
    :param installed: ``None`` checks what needs no installed SGLang.
    """
    seen: dict[str, str] = {}
    for key, value in table.items():
        name = _canonical(key, installed)
        if name in OWNED:
            hint: str | None = OWNED[name]
        elif name in seen:
            hint = f"the same argument as {seen[name]}; leave one out"
        elif installed is None:
            hint = None
        elif name not in installed.arguments:
            hint = _unknown(key, installed)
        else:
            hint = _value_hint(installed.arguments[name], value)
        seen.setdefault(name, key)
        if hint:
            shown = "..." if name in _KEYS else value  # not on the terminal
            yield ConfigProblem(path=f"{path}.{key}", found=shown, hint=hint)


def by_name(table: Mapping[str, Any], installed: Installed) -> dict[str, Any]:
    """Return a table of arguments under the names of the server's own records."""
    return {_canonical(key, installed): value for key, value in table.items()}


def run_arguments(config: Config, *, path: str | None = None) -> dict[str, Any]:
    """Return the arguments that keys of the config decide.

    :param path: Path of the model, if it is not the policy.
    """
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model_path": path or str(config.model.path),
        "dtype": rollout.dtype or config.train.dtype or "auto",
        "random_seed": config.run.seed % 2**31,  # SGLang adds a rank to it and hands it to numpy
        "trust_remote_code": config.model.trust_remote_code,
        # generation_config.json of the model has no say
        "sampling_defaults": "openai",
    }
    if "max_batch_tokens" in rollout.model_fields_set:
        arguments["max_total_tokens"] = rollout.max_batch_tokens
    return {**arguments, **_adapter_arguments(config)}


def _adapter_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments with which a server makes room for the adapter of the run."""
    if not config.pushes_adapter:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": lora_settings(config.train.lora).rank,
        # "all" would make room for those of embeddings and of the output layer, too
        "lora_target_modules": sorted(adapter_layers(config) or ["all"]),
        # Requests without an adapter, such as those of the warm-up and of probes, have a place of their own.
        "max_loras_per_batch": 2,
    }


def media_arguments(config: Config, installed: Installed) -> dict[str, Any]:
    """Return default arguments for a server of a run with images."""
    if not modalities(config):
        return {}
    # Pillow's pixels are the trainer's; versions that know no other library need no argument for it
    wanted = {"enable_multimodal": True, "image_processor_backend": "pil"}
    return {name: value for name, value in wanted.items() if name in installed.arguments}


def media_environment(config: Config) -> dict[str, str]:
    """Return variables of a server's environment in a run with media.

    A server keeps the features of media that it has seen, and forgets none of them when its tower gets new
    weights. Contents of video and audio are read by processors of the run.
    """
    kinds = modalities(config)
    environment = {}
    if kinds - {"image"}:
        environment["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"] = processors.__name__
    if any(kinds & TOWERS[tower] and tower not in config.train.freeze for tower in TOWERS):
        environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    return environment


def command_line(arguments: Mapping[str, Any], installed: Installed) -> list[str]:
    """Return the words that follow the server's program.

    :param arguments: Arguments, checked with :func:`argument_problems`; one that this version does not have
        is left out if its value is false.
    """
    words: list[str] = []
    for name, value in arguments.items():
        argument = installed.arguments.get(name)
        if argument is None and not value:
            continue
        assert argument is not None, f"SGLang {installed.version} has no argument {name}"
        words += _words(argument, value)
    return words


def _canonical(key: str, installed: Installed | None) -> str:
    plain = key.removeprefix("--").replace("-", "_")
    argument = installed.arguments.get(plain) if installed else None
    return argument.name if argument else plain


def _unknown(key: str, installed: Installed) -> str:
    close = difflib.get_close_matches(key, sorted(installed.arguments), n=4, cutoff=0.5)
    names = f"close names: {', '.join(close)}" if close else "no name is close"
    return f"not an argument of SGLang {installed.version}; {names}"


def _value_hint(argument: Argument, value: Any) -> str | None:
    """Return what is wrong with a value, or ``None``."""
    values = value if argument.kind == "list" and isinstance(value, list | tuple) else [value]
    wanted = _WANTED.get(argument.kind)
    if wanted is not None and not isinstance(value, wanted[0]):
        return f"must be {wanted[1]}"
    if argument.kind in ("int", "float") and isinstance(value, bool):
        return "must be a number"
    if argument.kind == "list" and not (
        values and all(isinstance(each, str | int | float) for each in values)
    ):
        return "must be a list of words or numbers"
    if argument.choices and not all(each in argument.choices for each in values):
        return f"must be one of {', '.join(map(str, argument.choices))}"
    return None


_WANTED: Mapping[str, tuple[Any, str]] = {
    "flag": (bool, "true or false"),
    "switch": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (int | float, "a number"),
    "str": (str, "a string"),
}


def _words(argument: Argument, value: Any) -> list[str]:
    option = argument.options[0]
    if argument.kind == "flag":
        return [option] if value else []
    if argument.kind == "switch":
        return [option if value else f"--no-{option.removeprefix('--')}"]
    if argument.kind == "list" and isinstance(value, list | tuple):
        return [option, *map(str, value)]
    text = value if isinstance(value, str) else json.dumps(value)
    # a word that begins like an option is taken for one
    return [f"{option}={text}"] if text.startswith("-") else [option, text]
