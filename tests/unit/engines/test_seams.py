"""Differences from upstream before, inside and after a real use, against the ledger in ``docs/seams.md``."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from anygauge.config import Config
from anygauge.distributed.process_groups import destroy_process_group, init_process_group
from anygauge.engines import megatron as engine
from anygauge.engines.megatron import prepare, scope
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import LossInputs, TrainEngine, WorkerContext
from anygauge_tests import batches
from anygauge_tests.engine_config import engine_config

LEDGER = Path(__file__).parents[3] / "docs" / "seams.md"
ROW = re.compile(r"^\| `(?P<name>[\w.*]+)` \|", re.MULTILINE)
UPSTREAM = ("torch", "megatron", "transformers")
CLASSES = (
    torch.Tensor,
    torch.nn.Module,
    torch.nn.Parameter,
    torch.optim.Optimizer,
    torch.optim.AdamW,
    torch.amp.autocast_mode.autocast,
    torch.autograd.Function,
    PreTrainedModel,
)
ONCE_PER_PROCESS = {
    "torch.optim.adamw.AdamW.step": "torch wraps it for its profiler when the first one is made",
    "torch.autograd.profiler._cupti_monitor*": "torch 2.13 looks once for an optional library",
}
"""Attributes that torch sets on first use: allowed but not required, since an earlier test may have been the
first."""

ABSENT = object()
Identities = dict[str, Any]


# -------------------------------------------------------------------------
# The ledger and the process
# -------------------------------------------------------------------------


def ledger(section: str) -> set[str]:
    """Return the first column of a section's table."""
    text = LEDGER.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, f"docs/seams.md has no section {section!r}"
    return {match["name"] for match in ROW.finditer(text)}


def owners() -> dict[str, Any]:
    """Return what has the attributes that are compared: every upstream module, and some classes."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in UPSTREAM}
    return modules | {f"{cls.__module__}.{cls.__qualname__}": cls for cls in CLASSES}


def identities() -> Identities:
    """Return every attribute of :func:`owners`, except what the import system sets.

    It sets names with two underscores, and a submodule on its parent when it is first imported.
    """
    return {
        f"{owner}.{name}": value
        for owner, module in owners().items()
        for name, value in list(vars(module).items())
        if not issubclass(type(value), ModuleType) and (name == "__init__" or not name.startswith("__"))
    }


def changed(before: Identities, now: Identities) -> set[str]:
    """Return what was replaced, added or removed, in owners that there were before.

    A module that is first imported in between has nothing to compare with; :func:`kept` looks into it.
    """
    different = before.keys() - now.keys()
    different |= {name for name, value in now.items() if before.get(name, ABSENT) is not value}
    if not different:
        return set()
    known = {name.rpartition(".")[0] for name in before}
    return {name for name in different if name.rpartition(".")[0] in known}


def kept(before: Identities, inside: Identities, after: Identities) -> set[str]:
    """Return what still holds, under any name, a value that only a scope had put in place."""
    names = scope.scoped_attributes()
    original = {id(value) for value in before.values()}
    ours = {id(inside[name]) for name in names} - original
    return {name for name, value in after.items() if id(value) in ours}


def unlisted(names: set[str], *patterns: set[str]) -> set[str]:
    """Return the names that no pattern stands for."""
    known = set[str]().union(*patterns, ONCE_PER_PROCESS)
    return {name for name in names if not any(matches(name, pattern) for pattern in known)}


def matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


# -------------------------------------------------------------------------
# A real use
# -------------------------------------------------------------------------


class Witness:
    """Takes the identities of the process in the middle of what the engine does."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Identities]] = {}

    def look(self, where: str) -> None:
        self.seen.setdefault(where, []).append(identities())

    @hookimpl(tryfirst=True)
    def make_optimizer(self, param_groups: Any) -> None:
        """Look while the engine is built; the backend makes the optimizer."""
        self.look("construction")

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.look("loss")
        inputs.log_probs.register_hook(lambda grad: self.look("backward"))
        loss = -(inputs.log_probs * inputs.loss_weights).sum()
        return loss, {"loss": loss.detach()}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    loaded = load_plugins()
    prepare.prepare_megatron(loaded, loaded.get("register_backends", "cpu"))
    import anygauge.engines.megatron.engine  # noqa: F401 - "before" is after the imports

    return loaded


@pytest.fixture
def witness(plugins: Plugins) -> Iterator[Witness]:
    witness = Witness()
    plugins.manager.register(witness)
    yield witness
    plugins.manager.unregister(witness)


@pytest.fixture
def context(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerContext]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    backend = plugins.get("register_backends", "cpu")
    init_process_group(
        plugins, backend, dist.HashStore(), rank=0, world_size=1, timeout_s=60.0, single_host=True
    )
    device = plugins.make_device(backend, 0)
    yield WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    parallel_state.destroy_model_parallel()
    destroy_process_group()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tiny_qwen3(tmp_path / "model", vocab_size=64, head_dim=32)
    return engine_config(path, train={"lr": 1e-3, "micro_batch_tokens": 64, "recompute": "full"})


SAMPLES = [batches.sample_of(range(18, 18 + length), response) for length, response in ((40, 20), (33, 30))]
"""Two micro-batches."""


def make_engine(config: Config, context: WorkerContext) -> Any:
    return context.plugins.get("register_train_engines", "megatron").make(config, context)


def train_step(engine: TrainEngine, witness: Witness) -> None:
    metrics = batches.train_step(
        engine, SAMPLES, witness.loss, loss_weights=[[0.02] * sample.response_length for sample in SAMPLES]
    )
    assert metrics["grad_norm"] > 0


def use(engine: Any, witness: Witness, path: Path, output: Path) -> Iterator[str]:
    """Do all that an engine can, and stop after each part."""
    layer = engine.policy.chunks[0].decoder.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: witness.look("layer"))
    batches.log_probs(engine, SAMPLES, temperature=0.7)
    yield "log_probs"
    train_step(engine, witness)
    yield "train_step"
    engine.load_role("reference", str(path))
    yield "load_role"
    batches.log_probs(engine, SAMPLES, temperature=0.7, role="reference")
    yield "log_probs of a role"
    weights = engine.weights()
    next(weights)
    yield "between two weights"
    list(weights)
    engine.save_hf(str(output))
    yield "save_hf"


def test_before_inside_and_after_match_the_ledger(
    config: Config, context: WorkerContext, witness: Witness, tmp_path: Path
) -> None:
    own_state = ledger("Upstream's own state")
    scoped = scope.scoped_attributes()
    before = identities()
    engine = make_engine(config, context)
    for part in chain(["construction"], use(engine, witness, config.model.path, tmp_path / "saved")):
        # nothing of the scope outlives the call that opened it
        after = identities()
        assert unlisted(changed(before, after), own_state) == set(), part
    # log_probs twice, a step, and what the step recomputes: 2 micro-batches each
    assert {where: len(seen) for where, seen in witness.seen.items()} == {
        "construction": 1,
        "layer": 8,
        "loss": 2,
        "backward": 2,
    }
    used = changed(before, after)
    for where, seen in witness.seen.items():
        for inside in seen:
            replaced = changed(before, inside)
            used |= replaced
            assert scoped - replaced == set(), where
            assert unlisted(replaced, own_state, set(scoped)) == set(), where
            assert kept(before, inside, after) == set(), where
    assert {row for row in own_state if not any(matches(name, row) for name in used)} == set()


def test_instances_are_as_the_ledger_says(
    config: Config, context: WorkerContext, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anygauge.engines.megatron.layers.embedding import Embedding
    from anygauge.engines.megatron.layers.output import HiddenOutput

    engine = make_engine(config, context)
    assert type(engine.policy.chunks[0].embedding.word_embeddings) is Embedding
    output = engine.policy.chunks[0].output_layer
    assert type(output) is HiddenOutput
    handed: list[torch.Size] = []
    output.register_forward_hook(lambda _, inputs, found: handed.append(found[0].shape))
    train_step(engine, witness)
    assert sorted(shape[0] for shape in handed) == sorted(sample.response_length for sample in SAMPLES)
    assert {shape[2] for shape in handed} == {engine.policy.options.transformer.hidden_size}
    assert output.rows is None
    inner = [part.optimizer for part in engine.optimizer.chained_optimizers]
    assert all(optimizer.defaults["fused"] for optimizer in inner), "torch's own, not the backend's"
    assert engine.policy.chunks[0].shared_embedding_or_output_weight().zero_out_wgrad
    assert ledger("On instances") == {
        "megatron.core.optimizer.MegatronOptimizer.optimizer",
        "megatron.core.optimizer.DistributedOptimizer.shard_fp32_from_float16_groups",
        "megatron.core.models.gpt.GPTModel.output_layer",
        "megatron.core.models.common.embeddings.LanguageModelEmbedding.word_embeddings",
        "megatron.core.tensor_parallel.VocabParallelEmbedding.weight",
        *ADAPTED,
        "megatron.core.transformer.moe.moe_layer.MoELayer.token_dispatcher",
        # where several ranks share gradients: tests/unit/engines/test_reduction_check.py
        "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync",
        "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.finish_grad_sync",
    }


ADAPTED = {
    "megatron.core.tensor_parallel.layers.ColumnParallelLinear": ["linear_fc1", "linear_qkv"],
    "megatron.core.tensor_parallel.layers.RowParallelLinear": ["linear_fc2", "linear_proj"],
    "megatron.core.models.common.embeddings.LanguageModelEmbedding": ["embedding"],
}
"""Modules with a hook where a model has adapters and recomputes its layers, by class."""


def test_adapters_are_as_the_ledger_says(config: Config, context: WorkerContext) -> None:
    lora = config.train.lora.model_copy(update={"rank": 2})
    train = config.train.model_copy(update={"lora": lora, "recompute": "full"})
    before = make_engine(config, context).policy.chunks[0]
    chunk = make_engine(config.model_copy(update={"train": train}), context).policy.chunks[0]
    hooked = {
        (name.rpartition(".")[2], row)
        for name, module in before.named_modules()
        if len(chunk.get_submodule(name)._forward_hooks) > len(module._forward_hooks)
        for row in ADAPTED
        if row.rpartition(".")[2] in {base.__name__ for base in type(module).__mro__}
    }
    assert hooked == {(name, row) for row, names in ADAPTED.items() for name in names}
    assert [name for name, _ in chunk.decoder.layers[0].mlp.linear_fc1.named_children()] == ["adapter"]


def test_experts_are_as_the_ledger_says(config: Config, context: WorkerContext, tmp_path: Path) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    fields = dict(context.plugins.get("register_models", "qwen3_moe").tiny())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.save_pretrained(tmp_path / "experts")
    model = config.model.model_copy(update={"path": tmp_path / "experts"})
    train = config.train.model_copy(update={"router_replay": True})
    engine = make_engine(config.model_copy(update={"model": model, "train": train}), context)
    batches.log_probs(engine, SAMPLES, temperature=1.0)
    layer = engine.policy.chunks[0].decoder.layers[1].mlp
    assert type(layer.token_dispatcher) is not MoEAlltoAllTokenDispatcher
    assert isinstance(layer.token_dispatcher, MoEAlltoAllTokenDispatcher)
    assert layer.router.router_replay is None


def test_building_a_rollout_model_restores_the_initializers(
    config: Config, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anygauge.serving.embedded.engine import _from_transformers, _load

    build = AutoModelForCausalLM.from_config

    def looking(*args: Any, **options: Any) -> Any:
        witness.look("building")
        return build(*args, **options)

    path = Path(config.model.path)
    of_text = partial(_from_transformers, path, False, None)
    arguments = path, torch.float32, torch.device("cpu"), False, of_text
    _load(*arguments)  # transformers imports the model's module on first use
    before = identities()
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_config", looking)
        _load(*arguments)
    (inside,) = witness.seen["building"]
    rows = ledger("While the rollout model is built")
    assert unlisted(changed(before, inside), rows) == set()
    assert all(any(matches(name, row) for name in changed(before, inside)) for row in rows)
    assert changed(before, identities()) == set()


def test_an_exception_in_the_middle_of_a_step_leaves_nothing(
    config: Config, context: WorkerContext, witness: Witness
) -> None:
    engine = make_engine(config, context)
    before = identities()

    def loss(inputs: LossInputs) -> Any:
        witness.look("failing loss")
        raise KeyError("boom")

    witness.loss = loss  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="boom"):
        train_step(engine, witness)
    (inside,) = witness.seen["failing loss"]
    after = identities()
    assert scope.scoped_attributes() <= changed(before, inside)
    assert unlisted(changed(before, after), ledger("Upstream's own state")) == set()
    assert kept(before, inside, after) == set()


@pytest.mark.parametrize(
    "owner", [torch, torch.cuda, torch.Tensor], ids=["torch", "torch.cuda", "torch.Tensor"]
)
def test_what_is_added_or_removed_is_seen(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identities()
    monkeypatch.setattr(owner, "brand_new", 1, raising=False)
    after = identities()
    name = "torch.Tensor" if owner is torch.Tensor else owner.__name__
    assert unlisted(changed(before, after)) == unlisted(changed(after, before)) == {f"{name}.brand_new"}


# -------------------------------------------------------------------------
# Tables whose rows the code names
# -------------------------------------------------------------------------


def test_ledger_lists_what_the_scope_replaces() -> None:
    assert ledger("Redirected") == scope.redirected_attributes()
    assert ledger("Fenced") == {f"{module}.*" for module in scope.FENCED_MODULES}
    assert ledger("Replaced elsewhere") == set(scope.OTHER_SEAMS)
    fence = LEDGER.read_text().partition("\n## Fenced\n")[2].partition("\n## ")[0]
    for name in (*scope.FENCED_PRIVATE, *scope.HARMLESS):
        assert f"`{name}`" in fence


def test_ledger_lists_what_is_set_before_the_import(plugins: Plugins) -> None:
    import megatron.core.fusions.fused_bias_swiglu as fused

    assert ledger("Set before the first import of Megatron") == {prepare.JIT_MODULE}
    assert sys.modules[prepare.JIT_MODULE].__spec__ is None, "Megatron's own module was imported after all"
    assert not hasattr(fused.swiglu, "_torchdynamo_orig_callable")


def test_ledger_lists_the_private_methods_that_are_overridden(plugins: Plugins) -> None:
    prepare.prepare_megatron(plugins, plugins.get("register_backends", "cpu"))
    modules = [
        importlib.import_module(each.name) for each in walk_packages(engine.__path__, f"{engine.__name__}.")
    ]
    own = {each for module in modules for each in vars(module).values() if is_defined_in(each, module)}
    found = {
        f"{base.__module__}.{base.__qualname__}.{name}" for each in own for base, name in overridden(each)
    }
    assert ledger("Private methods that a subclass overrides") == found


def is_defined_in(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def overridden(cls: type) -> Iterator[tuple[type, str]]:
    """Yield the private functions that stand in a class for one of an upstream base, and that base."""
    order = cls.__mro__
    for place, owner in enumerate(order):
        bases = [base for base in order[place + 1 :] if base.__module__.partition(".")[0] in UPSTREAM]
        if owner.__module__.partition(".")[0] not in UPSTREAM:
            for name, value in vars(owner).items():
                if inspect.isfunction(value) and name.startswith("_") and not name.startswith("__"):
                    yield from ((base, name) for base in bases if name in vars(base))


def test_ledger_lists_the_warning_filters(plugins: Plugins) -> None:
    text = LEDGER.read_text().partition("\n## Per process\n")[2].partition("\n## ")[0]
    with warnings.catch_warnings():
        warnings.resetwarnings()
        prepare.prepare_megatron(plugins, plugins.get("register_backends", "cpu"))
        assert len(warnings.filters) == 5
    assert ledger("Per process") == {"warnings.filters"}
    for words in (
        "five filters",
        "`barrier()`",
        "`.grad`",
        "`torch.distributed`",
        "`Please use DTensor instead`",
    ):
        assert words in text


def test_ledger_lists_what_is_replaced_while_the_optimizer_is_made(
    monkeypatch: pytest.MonkeyPatch, plugins: Plugins, context: WorkerContext
) -> None:
    from anygauge.engines.megatron import optimizer

    unpicklers: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> None:
        unpicklers.append(c10d._unpickler)
        raise KeyError("far enough")

    monkeypatch.setattr(optimizer, "get_megatron_optimizer", make)
    options: Any = SimpleNamespace(optimizer=None)
    with pytest.raises(KeyError):
        optimizer.make_optimizer([], options, plugins, context.backend)
    assert c10d._unpickler not in unpicklers
    assert ledger("While the optimizer is made") == {f"{c10d.__name__}._unpickler"}
