"""The mapping at the sizes of published models, under layouts that users run: shapes, on the meta device.

The whole tensors are transformers'; what a rank has of them, Megatron builds, as that rank of a process group
that communicates with nobody.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.config import Config
from anygauge.config.rules.parallel import size_problems
from anygauge.config.schema import Parallel
from anygauge.distributed.layout import Layout
from anygauge.engines.megatron.config_fields import option_problems
from anygauge.engines.megatron.model_checks import model_problems
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.engines.megatron.weights.mapping import (
    TensorRule,
    canonical_shape,
    division_problems,
    model_rules,
)
from anygauge.engines.megatron.weights.shapes import shape_problem
from anygauge.engines.megatron.weights.sharding import ShardPosition, hf_ranges, local_shape, ranks_of_group
from anygauge.engines.megatron.weights.stacks import straight
from anygauge.plugins import Plugins, load_plugins
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.types import BackendSpec, Device
from anygauge_tests.engine_config import engine_config
from anygauge_tests.ranks import coordinates

MODELS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "real_models.json").read_text())
"""Published sizes, parameters in billions, and layouts: ``[train.parallel]`` and ``[train.megatron]``."""


def config_of(model: str) -> dict[str, Any]:
    tiny = dict(load_plugins().named("register_models")[MODELS[model]["family"]].tiny())
    for kinds in ("layer_types", "mlp_layer_types"):
        tiny.pop(kinds, None)
    hf = tiny | MODELS[model]["config"]
    if (architecture := MODELS[model].get("with_vision")) is None:
        return hf
    return hf | {"architectures": [architecture], "text_config": hf}


BUILT = 5
"""Layers that transformers builds: at least one of each kind. The others have the shapes of these."""


def built_shapes(hf: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that transformers has, by the names in checkpoints without the layers' numbers.

    Text models beside a vision tower are published under a longer prefix and with their experts in stacks, as
    transformers has them in memory, and so are experts with biases; all others have a tensor for each expert.
    """
    config = AutoConfig.for_model(**hf.get("text_config", hf) | {"num_hidden_layers": BUILT})
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    shapes: dict[str, tuple[int, ...]] = {}
    has_stacks = "text_config" in hf or any(name.endswith(".gate_up_proj_bias") for name in state)
    for name, tensor in state.items():
        each = {name: tuple(tensor.shape)}
        if "text_config" in hf:
            each = {re.sub(r"^model\.", "model.language_model.", name): tuple(tensor.shape)}
        found = re.fullmatch(r"(.*\.experts\.)(gate_up_proj|down_proj)", name)
        if found and not has_stacks:
            each = single_experts(found[1], found[2], tuple(tensor.shape))
        shapes |= {_without_layer(key): shape for key, shape in each.items()}
    return shapes


def _without_layer(name: str) -> str:
    return re.sub(r"layers\.\d+\.", "layers.", name)


def single_experts(start: str, stack: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return what checkpoints have in the place of a stack of experts.

    :param start: Of the stack's name.
    :param shape: Of the stack.
    """
    parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
    each = (shape[1] // len(parts), shape[2])
    return {f"{start}{expert}.{part}.weight": each for expert in range(shape[0]) for part in parts}


@dataclass(frozen=True, slots=True)
class Published:
    """A model by what transformers and the rules say about it."""

    hf: Mapping[str, Any]
    rules: Sequence[TensorRule]
    whole: Mapping[str, tuple[int, ...]]
    """Shapes of the HF tensors, in the names of checkpoints."""
    canonical: Mapping[str, tuple[int, ...]]
    """Shapes of the canonical tensors."""
    by_layer: Mapping[tuple[int | None, int | None], Sequence[TensorRule]]
    """The rules by layer and by expert."""


@pytest.fixture(scope="module")
def published() -> Callable[[str], Published]:
    """Return a function that describes a model; once, for all layouts of it."""
    known: dict[str, Published] = {}

    def describe(model: str) -> Published:
        if model not in known:
            known.clear()  # one at a time: each has up to 30,000 rules
            hf = config_of(model)
            rules = model_rules(load_plugins().model(hf["architectures"]), hf)
            built = built_shapes(hf)
            whole = {name: built[_without_layer(name)] for rule in rules for name in rule.hf}
            assert {_without_layer(name) for name in whole} == built.keys() - tied(hf)
            source: Any = SimpleNamespace(shape=whole.__getitem__)
            canonical = {
                rule.canonical: canonical_shape(
                    rule, [straight(source, rule).shape(name) for name in rule.hf]
                )
                for rule in rules
            }
            fields = megatron_model(load_plugins().model(hf["architectures"])).transformer_config(hf)
            assert [rule for rule in rules if shape_problem(rule, canonical[rule.canonical], fields)] == []
            for rule in rules:
                shape = canonical[rule.canonical]
                assert shape_problem(rule, (*shape, 1), fields)
                # The length of a bias of queries, keys and values, or of gate and up, is in the rule.
                is_bias = re.search(r"(qkv\.bias|fc1\.bias\d+)$", rule.canonical)
                assert is_bias or shape_problem(rule, (*shape[:-1], 7), fields)
            known[model] = Published(hf, rules, whole, canonical, by_layer(rules))
        return known[model]

    return describe


def by_layer(rules: Sequence[TensorRule]) -> dict[tuple[int | None, int | None], list[TensorRule]]:
    found: defaultdict[tuple[int | None, int | None], list[TensorRule]] = defaultdict(list)
    for rule in rules:
        layer = re.match(r"decoder\.layers\.(\d+)\.", rule.canonical)
        found[int(layer[1]) if layer else None, rule.expert].append(rule)
    return found


def tied(hf: Mapping[str, Any]) -> set[str]:
    return {"lm_head.weight"} if hf["tie_word_embeddings"] else set()


LARGE = {"Qwen3-235B-A22B", "Qwen3-Next-80B-A3B", "GLM-4.5", "Qwen3.5-397B-A17B", "DeepSeek-V3"}
FAST = {"Qwen2.5-7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B", "GLM-4-9B"}
"""Their first layouts are built in a few seconds together; all layouts of all models in 4 minutes."""


def marks(is_fast: bool) -> list[pytest.MarkDecorator]:
    return [] if is_fast else [pytest.mark.soak]


@pytest.mark.parametrize("model", [pytest.param(name, marks=marks(name not in LARGE)) for name in MODELS])
def test_rules_have_every_parameter(model: str, published: Callable[[str], Published]) -> None:
    parameters = sum(map(math.prod, published(model).canonical.values()))
    assert parameters / 1e9 == pytest.approx(MODELS[model]["billions"], rel=0.005)


# -------------------------------------------------------------------------
# Layouts
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    plugins: Plugins
    backend: BackendSpec
    device: Device

    @contextmanager
    def tensors_of(self, config: Config, rank: int, rules: Sequence[TensorRule]) -> Iterator[Any]:
        """Build what a rank has of a model, without weights.

        :param rules: Of the model; they are expanded once for all ranks.
        """
        from megatron.core import parallel_state

        from anygauge.engines.megatron import model
        from anygauge.engines.megatron.scope import make_scope

        on_meta = SimpleNamespace(torch_device=torch.device("meta"))
        store, world_size = FakeStore(), config.placement.train_workers
        dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        try:
            with pytest.MonkeyPatch.context() as patch, make_scope(self.device):
                patch.setattr(model, "model_rules", lambda spec, hf: rules)
                # Megatron sums the two copies of a tied embedding, which have no values here.
                patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
                patch.setattr(dist, "all_reduce", lambda tensor, group: None)
                model.initialize_parallel(0, 60, config.train.parallel)
                with torch.device("meta"):
                    yield model.build_policy(config, self.plugins, self.backend, on_meta, load=False)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def host() -> Host:
    plugins = load_plugins()
    backend = plugins.get("register_backends", "cpu")
    prepare_megatron(plugins, backend)
    return Host(plugins, backend, plugins.make_device(backend, 0))


LAYOUTS = [
    pytest.param(model, layout, id=f"{model}-{number}", marks=marks(model in FAST and number == 0))
    for model in MODELS
    for number, layout in enumerate(MODELS[model]["layouts"])
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_every_rank_has_its_part(
    model: str,
    layout: Mapping[str, Any],
    published: Callable[[str], Published],
    host: Host,
    tmp_path: Path,
) -> None:
    known = published(model)
    config = config_with(layout, tmp_path, known.hf)
    assert problems(config, known.hf) == []
    ranks = Layout(config.placement.train_workers, config.train.parallel)
    layers_of: dict[int, set[int]] = {}
    for rank in built_ranks(ranks):
        with host.tensors_of(config, rank, known.rules) as policy:
            found = {name: tuple(tensor.shape) for name, tensor in policy.tensors.items()}
            assert policy.position == place_of(ranks, rank)
        stage = coordinates(ranks, rank).pipeline
        layers_of[stage] = {int(name.split(".")[2]) for name in found if name.startswith("decoder.layers.")}
        assert found == dict(expected_tensors(known, ranks, rank, layers_of[stage]))
    assert sorted(layer for each in layers_of.values() for layer in each) == [*range(layers(known.hf))]
    check_all_ranks(known, ranks, layers_of)


def layers(hf: Mapping[str, Any]) -> int:
    return int(hf["num_hidden_layers"])


def experts(hf: Mapping[str, Any]) -> int:
    return int(hf.get("num_experts") or hf.get("n_routed_experts") or 0)


def config_with(layout: Mapping[str, Any], directory: Path, hf: Mapping[str, Any]) -> Config:
    """Return the config of a run with two copies of the model, of which experts may need both."""
    (directory / "config.json").write_text(json.dumps(hf))
    sizes = Parallel(**{name: size for name, size in layout.items() if name != "megatron"})
    stage = math.lcm(2 * sizes.tensor * sizes.context, sizes.expert * sizes.expert_tensor)
    return engine_config(
        directory,
        placement={"train_workers": stage * sizes.pipeline},
        train={"dtype": "bfloat16", "parallel": sizes, "megatron": layout.get("megatron", {})},
    )


def problems(config: Config, hf: Mapping[str, Any]) -> list[str]:
    """Return what the driver refuses about a layout."""
    sizes, options = config.train.parallel, config.train.megatron
    architecture = megatron_model(load_plugins().model(hf["architectures"])).transformer_config(hf)
    found = [
        *size_problems(config.placement.train_workers, sizes),
        *model_problems(sizes, architecture, options),
        *option_problems(config.train),
    ]
    return [f"{problem.path}: {problem.hint}" for problem in found]


def built_ranks(layout: Layout) -> list[int]:
    """Return ranks of all stages: the first, the last, and others of different places in theirs."""
    size, stages = layout.stage_ranks, layout.parallel.pipeline
    if stages == 1:
        return sorted({0, size // 2 - 1, size - 1})
    inside = [0, *(stage * size // stages + stage % 2 for stage in range(1, stages - 1)), size - 1]
    return [stage * size + rank for stage, rank in enumerate(inside)]


def place_of(layout: Layout, rank: int) -> ShardPosition:
    at, sizes = coordinates(layout, rank), layout.parallel
    return ShardPosition(
        tensor=sizes.tensor,
        tensor_rank=at.tensor,
        expert_tensor=sizes.expert_tensor,
        expert_tensor_rank=at.expert_tensor,
        expert=sizes.expert,
        expert_rank=at.expert,
        stages=sizes.pipeline,
    )


def expected_rules(
    known: Published, layout: Layout, rank: int, layers_of_stage: set[int]
) -> Iterator[TensorRule]:
    """Yield the rules of the tensors that a rank has, said here once more, without Megatron."""
    at, sizes = coordinates(layout, rank), layout.parallel
    held = experts(known.hf) // sizes.expert
    numbers = [None, *range(at.expert * held, (at.expert + 1) * held)]
    for layer in sorted(layers_of_stage):
        for expert in numbers:
            yield from known.by_layer.get((layer, expert), ())
    is_first, is_last = at.pipeline == 0, at.pipeline == sizes.pipeline - 1
    for rule in known.by_layer[None, None]:
        is_embedding = rule.canonical.startswith("embedding.")
        needs_copy = is_last and known.hf["tie_word_embeddings"]
        if (is_first or needs_copy) if is_embedding else is_last:
            yield rule


def expected_tensors(
    known: Published, layout: Layout, rank: int, layers_of_stage: set[int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    place = place_of(layout, rank)
    for rule in expected_rules(known, layout, rank, layers_of_stage):
        shape = known.canonical[rule.canonical]
        yield rule.canonical, local_shape(rule.declared, shape, place.ways(rule.declared))


def check_all_ranks(known: Published, layout: Layout, layers_of: Mapping[int, set[int]]) -> None:
    """Check that the ranks have every shard of every tensor, as often as there are copies of the model."""
    held: Counter[tuple[str, int]] = Counter()
    for rank in range(layout.world_size):
        place, stage = place_of(layout, rank), coordinates(layout, rank).pipeline
        for rule in expected_rules(known, layout, rank, layers_of[stage]):
            held[rule.canonical, place.index(rule.declared)] += 1
    place = place_of(layout, 0)
    assert (
        list(
            division_problems(
                (rule, known.canonical[rule.canonical], place.ways(rule.declared)) for rule in known.rules
            )
        )
        == []
    )
    for rule in known.rules:
        ways = place.ways(rule.declared)
        copies = layout.stage_ranks // (ways * (place.expert if rule.declared.experts else 1))
        if known.hf["tie_word_embeddings"] and "embedding" in rule.canonical and place.stages > 1:
            copies *= 2
        assert [held.pop((rule.canonical, index), 0) for index in range(ways)] == [copies] * ways
        for number, name in enumerate(rule.hf):
            check_ranges(rule, number, known.whole[name], ways)
    assert not held


def check_ranges(rule: TensorRule, number: int, shape: tuple[int, ...], ways: int) -> None:
    """Check that the shards use each row or column of a Hugging Face tensor once; one group for several."""
    ways //= ranks_of_group(rule.declared, ways)
    inner = shape[1:] if rule.is_stacked else shape
    size = inner[rule.declared.split_dim or 0]
    used = [
        stretch for index in range(ways) for stretch in hf_ranges(rule.declared, number, size, ways, index)
    ]
    end = 0
    for start, stop in sorted(used):
        assert start == end
        end = stop
    assert end == size


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ({"pipeline": 4}, "pipeline * virtual_pipeline = 4 must divide the model's 94 layers"),
        ({"tensor": 12, "expert": 8}, "must divide the model's 64 attention heads"),
        ({"expert": 48}, "must divide the model's 128 experts"),
        ({"expert_tensor": 1024}, "must divide the model's 1536 rows of each expert"),
    ],
)
def test_the_driver_refuses_what_does_not_divide(
    layout: Mapping[str, Any], hint: str, tmp_path: Path
) -> None:
    hf = config_of("Qwen3-235B-A22B")
    found = problems(config_with(layout, tmp_path, hf), hf)
    assert [problem for problem in found if hint in problem]


@pytest.mark.parametrize(
    ("megatron", "reason"),
    [
        ({"num_layers_in_first_pipeline_stage": 3}, "number of layers at middle stage: 58"),
        ({"pipeline_model_parallel_layout": "Et*3|(tt|)*29|L"}, r"has 2 parts .*\.virtual_pipeline = 1"),
        ({"pipeline_model_parallel_layout": "Et*3|t*4|(t*4|)*13L"}, "layers"),
    ],
)
def test_layers_divided_otherwise_are_checked_before_a_model_is_built(
    megatron: Mapping[str, Any], reason: str, host: Host, tmp_path: Path
) -> None:
    from anygauge.engines.megatron.options import megatron_options

    hf = config_of("DeepSeek-V3")
    config = config_with({"pipeline": 16, "megatron": megatron}, tmp_path, hf)
    with pytest.raises(ConfigError, match=reason):
        megatron_options(
            config, megatron_model(host.plugins.model(hf["architectures"])).transformer_config(hf)
        )
