"""A few arguments, declared in both ways that SGLang's source knows, and a maker of configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.config.validate import validate
from anygauge.serving.sglang.installed import Installed, read_arguments

SOURCE = """
class Parallel(msgspec.Struct):
    tp_size: A[int, Arg(help="ranks", aliases=["--tensor-parallel-size"], resolvable=True)] = 1
    dp_size: A[int, Arg(help="copies", aliases=["--data-parallel-size"])] = 1
    pp_size: A[int, Arg(help="stages", aliases=["--pipeline-parallel-size"])] = 1
    world: A[int, Derived("size of all")]
    disable_cuda_graph: A[bool, Arg(help="old", no_cli=True)] = False


class Model(msgspec.Struct):
    model_path: A[str, Arg(help="where", aliases=["--model"])]
    dtype: A[str, Arg(help="precision", choices=["auto", "float32", "bfloat16"])] = "auto"
    host: A[str, "address"] = "127.0.0.1"
    port: A[int, "port"] = 30000
    nccl_port: A[Optional[int], "port"] = None
    random_seed: A[Optional[int], "seed"] = None
    trust_remote_code: A[bool, "code"] = False
    sampling_defaults: A[Literal["openai", "model"], "whose"] = "model"
    max_total_tokens: A[Optional[int], "cache"] = None
    context_length: A[int | None, "longest"] = None
    mem_fraction_static: A[Optional[float], "share"] = None
    attention_backend: A[Optional[str], Arg(help="kernels", choices=KNOWN_AT_RUN_TIME)] = None
    enable_metrics: A[bool, "metrics"] = False
    enable_multimodal: A[Optional[bool], "images"] = None
    skip_tokenizer_init: A[bool, "tokens"] = False
    enable_tf32: A[bool, Arg(help="tf32", action=argparse.BooleanOptionalAction)] = True
    cuda_graph_bs: A[Optional[List[int]], "sizes"] = None
    lora_paths: A[Any, Arg(help="loras", action=Reads, action_kwargs={"nargs": "*"})] = None
    json_model_override_args: A[str, "json"] = "{}"
    extra: A[Optional[dict], Arg(help="json", type_parser=json.loads)] = None
    elastic: A[Literal[None, "fast"], "or none"] = None


class Disagg(msgspec.Struct):
    disaggregation_mode: A[Literal["null", "prefill", "decode"], "half"] = "null"
    disaggregation_bootstrap_port: A[int, "port"] = 8998
    disaggregation_transfer_backend: A[str, "how"] = "mooncake"
    encoder_only: A[bool, "half"] = False
    language_only: A[bool, "half"] = False
    encoder_urls: A[List[str], "where"] = msgspec.field(default_factory=list)
    encoder_bootstrap_port: A[int, "port"] = 8997


def add_cli_args(parser):
    parser.add_argument("--disable-cuda-graph", action=DeprecatedStoreTrueAction, new_flag="--other")
    parser.add_argument("--reasoning-parser", type=str, choices=known(), default=None)
    parser.add_argument("--old-name", action=DeprecatedAliasStoreAction, dest="context_length", type=int)
"""


@pytest.fixture
def installed() -> Installed:
    return Installed("0.5.23", read_arguments([SOURCE]))


@pytest.fixture
def config() -> Callable[..., Config]:
    def make(rollout: dict[str, Any] | None = None, **sections: Any) -> Config:
        tree: dict[str, Any] = {
            "run": {"name": "unit", "seed": 7},
            "model": {"path": "/models/tiny"},
            "data": {"train": ["train.jsonl"]},
            "train": {"dtype": "float32"},
            "placement": {"rollout_workers": 1},
            **sections,
        }
        checked = validate({**tree, "rollout": {"engine": "sglang", **(rollout or {})}})
        assert not checked.problems, checked.problems
        return checked.config

    return make
