"""From tables of the config to a command line, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.serving.sglang.arguments import (
    OWNED,
    argument_problems,
    by_name,
    command_line,
    media_arguments,
    media_environment,
    run_arguments,
)
from anygauge.serving.sglang.installed import Installed, how_to_install, missing, read_arguments


def hints(table: dict[str, Any], installed: Installed | None) -> dict[str, str]:
    return {each.path: each.hint for each in argument_problems(table, "rollout.sglang", installed)}


def test_the_source_tells_names_spellings_and_kinds(installed: Installed) -> None:
    found = {name: argument.kind for name, argument in installed.arguments.items()}
    assert found["tp_size"] == found["tensor_parallel_size"] == "int"
    assert installed.arguments["tensor_parallel_size"].name == "tp_size"
    assert found["context_length"] == "int"
    assert found["mem_fraction_static"] == "float"
    assert (found["enable_metrics"], found["disable_cuda_graph"]) == ("flag", "flag")
    assert found["enable_tf32"] == "switch"
    assert (found["cuda_graph_bs"], found["encoder_urls"], found["lora_paths"]) == ("list",) * 3
    assert (found["extra"], found["elastic"], found["reasoning_parser"]) == ("text",) * 3
    assert "world" not in found
    assert installed.arguments["sampling_defaults"].choices == ("openai", "model")
    assert installed.arguments["attention_backend"].choices == ()  # known at run time alone


def test_a_run_with_images_names_the_library_that_reads_them(
    config: Callable[..., Config], installed: Installed
) -> None:
    model = {"path": "/models/tiny", "modalities": ["image"]}
    assert media_arguments(config(), installed) == {}
    assert media_environment(config()) == {}
    assert media_environment(config(model=model)) == {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
    frozen = {"dtype": "float32", "freeze": ["vision"]}
    assert media_environment(config(model=model, train=frozen)) == {}
    sounds = {"path": "/models/tiny", "modalities": ["image", "audio"]}
    contents = {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "anygauge.serving.sglang.processors"}
    assert media_environment(config(model=sounds, train=frozen)) == {
        **contents,
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
    }
    frozen["freeze"] = ["vision", "audio"]
    assert media_environment(config(model=sounds, train=frozen)) == contents
    assert media_arguments(config(model=model), installed) == {"enable_multimodal": True}
    newer = read_arguments(['image_processor_backend: A[str, "library"] = "auto"'])
    newer |= installed.arguments
    wanted = {"enable_multimodal": True, "image_processor_backend": "pil"}
    assert media_arguments(config(model=model), installed._replace(arguments=newer)) == wanted


def test_a_word_in_a_source_that_is_no_argument_is_none() -> None:
    assert read_arguments(["x: int = 1\ny: List[int] = []\nlist.append('--no')\nf('--x')"]) == {}


def test_a_command_line_spells_each_kind_as_the_server_reads_it(installed: Installed) -> None:
    table = {
        "tensor-parallel-size": 2,
        "enable_metrics": True,
        "disable_cuda_graph": False,
        "enable_tf32": False,
        "cuda_graph_bs": [1, 2, 4],
        "extra": {"a": 1},
        "json_model_override_args": "-1",
        "mem_fraction_static": 0.4,
    }
    assert command_line(by_name(table, installed), installed) == [
        *("--tp-size", "2", "--enable-metrics", "--no-enable-tf32"),
        *("--cuda-graph-bs", "1", "2", "4", "--extra", '{"a": 1}', "--json-model-override-args=-1"),
        *("--mem-fraction-static", "0.4"),
    ]


def test_a_false_that_a_version_does_not_know_is_left_out(installed: Installed) -> None:
    assert command_line({"of_another_version": False}, installed) == []


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("tp_sise", 2, "not an argument of SGLang 0.5.23; close names: tp_size"),
        ("zzz", 2, "no name is close"),
        ("tp_size", "two", "must be a whole number"),
        ("tp_size", True, "must be a number"),
        ("mem_fraction_static", "half", "must be a number"),
        ("enable_metrics", 1, "must be true or false"),
        ("attention_backend", 3, "must be a string"),
        ("cuda_graph_bs", [], "must be a list of words or numbers"),
        ("cuda_graph_bs", [{}], "must be a list of words or numbers"),
        ("port", 30000, "The launcher takes a free port."),
        ("model", "/other", "Use model.path"),
        ("dtype", "float32", "Use rollout.dtype."),
        ("max_total_tokens", 1, "Use rollout.max_batch_tokens."),
        ("disaggregation_mode", "prefill", "Use kind of [[rollout.groups]]."),
    ],
)
def test_what_is_wrong_with_an_argument_is_named(
    key: str, value: Any, hint: str, installed: Installed
) -> None:
    (problem,) = argument_problems({key: value}, "rollout.sglang", installed)
    assert (problem.path, problem.found) == (f"rollout.sglang.{key}", value)
    assert hint in problem.hint


@pytest.mark.parametrize("key", ["api_key", "admin-api-key"])
def test_a_key_among_the_arguments_is_refused_and_not_repeated(key: str, installed: Installed) -> None:
    (problem,) = argument_problems({key: "secret"}, "rollout.sglang", installed)
    assert "secret" not in repr(problem)
    assert problem.hint == f"Use rollout.{key.replace('-', '_')}."


def test_one_argument_under_two_names_is_refused(installed: Installed) -> None:
    found = hints({"tp_size": 1, "tensor_parallel_size": 2}, installed)
    assert found == {"rollout.sglang.tensor_parallel_size": "the same argument as tp_size; leave one out"}


def test_without_sglang_what_the_config_owns_is_refused_all_the_same() -> None:
    found = hints({"port": 1, "enable_ssl": True, "made_up": 1}, None)
    assert list(found) == ["rollout.sglang.port"]


def test_what_the_config_decides_becomes_arguments(config: Callable[..., Config]) -> None:
    found = run_arguments(config({"dtype": "bfloat16", "max_batch_tokens": 4096}))
    assert found == {
        "model_path": "/models/tiny",
        "dtype": "bfloat16",
        "random_seed": 7,
        "trust_remote_code": False,
        "sampling_defaults": "openai",
        "max_total_tokens": 4096,
    }
    assert found.keys() <= OWNED.keys()
    assert "max_total_tokens" not in run_arguments(config())


@pytest.mark.parametrize(
    ("targets", "names"),
    [(None, ["all"]), (".*_proj", ["all"]), (("v_proj", "self_attn.q_proj"), ["q_proj", "v_proj"])],
)
def test_a_server_makes_room_for_the_adapter_that_it_gets(
    config: Callable[..., Config], targets: Any, names: list[str]
) -> None:
    base = config()
    lora = base.train.lora.model_copy(update={"rank": 8, "targets": targets})
    train = base.train.model_copy(update={"lora": lora})
    sync = base.weight_sync.model_copy(update={"transport": "adapter"})
    found = run_arguments(base.model_copy(update={"train": train, "weight_sync": sync}))
    wanted = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": names, "max_loras_per_batch": 2}
    assert found == {**run_arguments(base), **wanted}
    assert found.keys() <= OWNED.keys()


def test_a_backend_says_how_sglang_is_installed_beside_it() -> None:
    found = {name: how_to_install(each) for name, each in load_plugins().named("register_backends").items()}
    assert found["cpu"] == "in a clone of anygauge, pip install --no-deps -r requirements/sglang-cpu.txt"
    if "cuda" in found:
        assert found["cuda"] == "pip install sglang==0.5.23"
    if "npu" in found:  # the wheel would replace its torch
        assert "pyproject_npu.toml" in found["npu"]
        assert "pip install sglang" not in found["npu"]


def test_where_sglang_is_missing_the_error_has_the_backends_words() -> None:
    cpu = load_plugins().named("register_backends")["cpu"]
    other = replace(cpu, engine_installs={"sglang": "from source, with a file of its own"})
    assert missing(other).hint == "Install it: from source, with a file of its own. docs/sglang.md says more."
