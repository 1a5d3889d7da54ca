"""What differs from upstream before, inside and after a real use, against the ledger in ``docs/seams.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
import pytest
import torch
import torch.distributed as dist

import anygauge_cpu.plugin
from anygauge.engines.megatron import scope
from anygauge.engines.megatron.prepare import JIT_MODULE, prepare_megatron
from anygauge.plugins import Plugins
from anygauge_cpu.device import CpuDevice
from anygauge_hooks import PROJECT, specs

LEDGER = Path(__file__).parents[3] / "docs" / "seams.md"
ROW = re.compile(r"^\| `(?P<name>[\w.*]+)` \|", re.MULTILINE)

Identities = dict[str, Any]

# Megatron calls torch.distributed by names that torch 2.13 is about to retire
pytestmark = pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning")


def ledger(section: str) -> set[str]:
    """Return the first column of a section's table."""
    text = LEDGER.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, f"docs/seams.md has no section {section!r}"
    return {match["name"] for match in ROW.finditer(text)}


def watched() -> dict[str, Any]:
    """Return the modules and classes whose attributes are compared."""
    modules = (torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.autograd, torch.distributed)
    owners: dict[str, Any] = {module.__name__: module for module in modules}
    owners["torch.Tensor"] = torch.Tensor
    owners["torch.amp.autocast_mode.autocast"] = torch.amp.autocast_mode.autocast
    return owners | {name: module for name, module in sys.modules.items() if name.startswith("megatron.core")}


def identities() -> Identities:
    """Return every attribute of :func:`watched`, except what the import system sets."""
    return {
        f"{owner}.{name}": value
        for owner, module in watched().items()
        for name, value in vars(module).items()
        if not issubclass(type(value), ModuleType) and not (name.startswith("__") and name != "__init__")
    }


def changed(before: Identities) -> set[str]:
    now = identities()
    return {name for name, value in before.items() if now.get(name, now) is not value}


@pytest.fixture(autouse=True, scope="module")
def megatron() -> None:
    plugins = Plugins(pluggy.PluginManager(PROJECT))
    plugins.manager.add_hookspecs(specs)
    plugins.register(anygauge_cpu.plugin, "cpu")
    prepare_megatron(plugins, anygauge_cpu.plugin.CPU)
    import megatron.core.distributed
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel
    import megatron.core.tensor_parallel  # noqa: F401


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def train() -> None:
    """Take a step through what names devices literally: recompute, DDP buffers, clipping, optimizer."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    layer = tensor_parallel.ColumnParallelLinear(
        8, 8, config=config, init_method=torch.nn.init.ones_, gather_output=True, bias=False
    )
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp_config, layer.cuda())
    settings = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model])
    model.zero_grad_buffer()
    inputs = torch.ones(2, 8, device="cuda", requires_grad=True)
    tensor_parallel.checkpoint(lambda x: model(x)[0], False, inputs).sum().backward()
    model.finish_grad_sync()
    success, norm, _ = optimizer.step()
    assert success
    assert norm > 0
    assert torch.all(layer.weight < 1)


def test_before_inside_and_after_match_the_ledger(process_group: None) -> None:
    before = identities()
    with scope.make_scope(CpuDevice()):
        assert changed(before) == scope.scoped_attributes()
        train()
    after = changed(before)
    own_state = ledger("Megatron's own state")
    assert {name for name in after if not any(matches(name, pattern) for pattern in own_state)} == set()
    assert {pattern for pattern in own_state if not any(matches(name, pattern) for name in after)} == set()


def matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def test_ledger_lists_what_the_scope_replaces() -> None:
    assert ledger("Redirected") == scope.redirected_attributes()
    assert ledger("Fenced") == {f"{module}.*" for module in scope.FENCED_MODULES}
    assert ledger("Replaced elsewhere") == set(scope.OTHER_SEAMS)
    fence = LEDGER.read_text().partition("\n## Fenced\n")[2].partition("\n## ")[0]
    for name in (*scope.FENCED_PRIVATE, *scope.HARMLESS):
        assert f"`{name}`" in fence


def test_ledger_lists_what_is_set_before_the_import() -> None:
    import megatron.core.fusions.fused_bias_swiglu as fused

    assert ledger("Set before the first import of Megatron") == {JIT_MODULE}
    assert sys.modules[JIT_MODULE].__spec__ is None, "Megatron's own module was imported after all"
    assert not hasattr(fused.swiglu, "_torchdynamo_orig_callable")
