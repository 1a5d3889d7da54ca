"""Replaces a few functions when it is imported, and more when it is told the config. Simulated.

Like the real one it patches before and after it imports Megatron, makes up modules, puts a function under
every name that it was imported under, and takes a mapping where it says args. When it is applied again it
restores what it wrapped, except in modules with its name in theirs, and wraps that once more.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import os
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

FIRST = {"argv": sys.argv[1:], "megatron_before": "megatron.core" in sys.modules}
SEEN: list[dict[str, Any]] = []
VERSION = importlib.metadata.version

if os.environ.get("FAKE_MINDSPEED_TRANSFER"):
    importlib.import_module("torch_npu.contrib.transfer_to_npu")


def put(dotted: str, value: Any) -> None:
    """Replace an attribute, and everything that holds the same object under the same name."""
    path, _, name = dotted.rpartition(".")
    try:
        owner: Any = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, cls = path.rpartition(".")
        owner = getattr(importlib.import_module(module), cls)
    old = getattr(owner, name, None)
    setattr(owner, name, value)
    for module in list(sys.modules.values()):
        if old is not None and vars(module).get(name) is old:
            setattr(module, name, value)


def made_up(name: str) -> None:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = module


def wrapper(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapped


def cuda_type(function: Any) -> Any:
    """Let Megatron, which compares names of types, take NPU tensors for CUDA's: the transfer does not."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return f"torch.cuda.{found.rpartition('.')[2]}" if str(found).startswith("torch.npu.") else found

    return named


def dummy_compile(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    return function


def wrap_version() -> None:
    put("importlib.metadata.version", wrapper(VERSION))


def restore_version() -> None:
    wrapped = importlib.metadata.version
    for name, module in list(sys.modules.items()):
        if "mindspeed" not in name and vars(module).get("version") is wrapped:
            module.version = VERSION  # type: ignore[attr-defined]


def repatch(args: Any) -> None:
    SEEN.append(dict(args.items()))
    restore_version()
    wrap_version()
    core = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    put("megatron.core.transformer.moe.moe_utils.permute", wrapper(core.permute))


if os.environ.get("FAKE_MINDSPEED_TRANSFER"):
    tensor: Any = importlib.import_module("torch").Tensor
    for owner_of_type in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        put(f"{owner_of_type}.type", cuda_type(tensor.type))
put("torch.jit.script", dummy_compile)
wrap_version()
made_up("fused_weight_gradient_mlp_cuda")
config = importlib.import_module("megatron.core.transformer.transformer_config")
put(
    "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__",
    wrapper(config.TransformerConfig.__post_init__),
)
for extra in json.loads(os.environ.get("FAKE_MINDSPEED_EXTRA", "[]")):
    put(extra, wrapper(getattr(importlib.import_module(extra.rpartition(".")[0]), extra.rpartition(".")[2])))
