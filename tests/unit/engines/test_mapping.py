"""Weights under every sharding of every registered family: pure functions, ranks simulated one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anygauge.engines.megatron.weights.canonical import canonical_tensors
from anygauge.engines.megatron.weights.loading import load_weights
from anygauge.engines.megatron.weights.mapping import (
    TensorRule,
    canonical_shape,
    copied_embedding,
    expand_rules,
    from_canonical,
    hf_tensors,
    model_rules,
    to_canonical,
)
from anygauge.engines.megatron.weights.sharding import (
    ShardPosition,
    global_expert,
    local_shape,
    merge,
    padded_vocab,
    shard,
)
from anygauge.engines.megatron.weights.stacks import straight
from anygauge.plugins import load_plugins
from anygauge_hooks.errors import WeightMappingError
from anygauge_hooks.megatron import WeightRule
from anygauge_hooks.models import ModelSpec

FAMILIES: dict[str, ModelSpec] = load_plugins().named("register_models")
SEES = replace(FAMILIES["qwen3_5_moe"], tiny=lambda: {"text_config": FAMILIES["qwen3_5_moe"].tiny()})
FAMILIES["qwen3_5_moe beside vision"] = SEES


class Source:
    """A checkpoint in memory; counts the elements that are read of each tensor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.read_elements: Counter[str] = Counter()

    @property
    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> Sequence[int]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        part = self.tensors[name][index]
        self.read_elements[name] += part.numel()
        return part


def hf_shapes(rules: Sequence[TensorRule], canonical: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the shape of every Hugging Face tensor, given those of the canonical ones."""
    shaped = ((rule, torch.empty(canonical[rule.canonical], device="meta")) for rule in rules)
    return {name: tuple(tensor.shape) for name, tensor in hf_tensors(shaped)}


def sizes_of(rule: TensorRule, others: tuple[int, ...]) -> tuple[int, ...]:
    """Return a canonical shape that fits a rule; what it leaves open is taken from ``others``."""
    declared = rule.declared
    total = sum(size for part in declared.sections for size in part)
    dims = 1 if rule.canonical.endswith(("bias", "norm_weight", "layernorm.weight")) else 2
    shape = list(others[:dims])
    dim = declared.split_dim or 0
    if rule.rows is not None:
        shape[0] = rule.rows
    elif total:
        shape[dim] = total
    return tuple(shape)


def wide(spec: ModelSpec) -> dict[str, Any]:
    """Return a config with so many heads that each of four ranks has more than one group of them.

    No number of ranks divides the vocabulary.
    """
    whole = dict(spec.tiny())
    hf = whole.get("text_config", whole)
    per_group = hf["num_attention_heads"] // hf["num_key_value_heads"]
    heads = {"num_attention_heads": 8 * per_group, "num_key_value_heads": 8, "vocab_size": 61}
    linear = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    text = {**hf, **heads, **{key: value for key, value in linear.items() if key in hf}}
    return text if hf is whole else {**whole, "text_config": text}


@cache
def checkpoint_of(family: str) -> tuple[list[TensorRule], dict[str, Tensor]]:
    """Return a tiny model's rules and a checkpoint of random bits."""
    rules = model_rules(FAMILIES[family], wide(FAMILIES[family]))
    shapes = {rule.canonical: sizes_of(rule, (96, 96)) for rule in rules}
    generator = torch.Generator().manual_seed(0)
    return rules, {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in hf_shapes(rules, shapes).items()
    }


def places(rules: Sequence[TensorRule]) -> Iterator[ShardPosition]:
    """Yield how ranks may divide what all tokens use, and how they may divide experts."""
    yield from (ShardPosition(tensor=ways) for ways in (1, 2, 4, 8))
    if experts := max(rule.declared.experts for rule in rules):
        for expert in (each for each in (1, 2, 4, 8) if experts % each == 0):
            yield from (ShardPosition(tensor=2, expert_tensor=ways, expert=expert) for ways in (1, 2, 4))


def ranks(place: ShardPosition) -> Iterator[ShardPosition]:
    """Yield the places of all ranks of one stage, were the two divisions independent."""
    for tensor_rank in range(place.tensor):
        for expert_tensor_rank in range(place.expert_tensor):
            for expert_rank in range(place.expert):
                yield ShardPosition(
                    tensor=place.tensor,
                    tensor_rank=tensor_rank,
                    expert_tensor=place.expert_tensor,
                    expert_tensor_rank=expert_tensor_rank,
                    expert=place.expert,
                    expert_rank=expert_rank,
                )


def held(rules: Sequence[TensorRule], place: ShardPosition, layers: Sequence[int]) -> list[TensorRule]:
    """Return the rules of what a rank has that holds some layers, and what is outside of layers."""
    experts = max((rule.declared.experts for rule in rules), default=0) // place.expert
    mine = {global_expert(local, place.expert_rank, experts) for local in range(experts)}
    return [
        rule
        for rule in rules
        if (rule.expert is None or rule.expert in mine)
        and ((number := layer_of(rule)) is None or number in layers)
    ]


def layer_of(rule: TensorRule) -> int | None:
    found = re.match(r"decoder\.layers\.(\d+)\.", rule.canonical)
    return int(found[1]) if found else None


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_identity_under_every_sharding(family: str) -> None:
    rules, tensors = checkpoint_of(family)
    shapes = {rule.canonical: canonical_of(rule, tensors) for rule in rules}
    for place in places(rules):
        back = load_and_merge(rules, tensors, shapes, place)
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensors[name]) for name in tensors), place


def load_and_merge(
    rules: Sequence[TensorRule],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    place: ShardPosition,
) -> dict[str, Tensor]:
    """Load what each rank of two stages has, and put it together again; layers take turns in the stages."""
    written: dict[str, dict[int, Tensor]] = {rule.canonical: {} for rule in rules}
    source = Source(tensors)
    for rank in ranks(place):
        for stage in range(2):
            mine = held(rules, rank, range(stage, 100, 2))
            stored = {rule.canonical: stored_tensor(rule, shapes, rank) for rule in mine}
            source.read_elements.clear()
            load_weights(stored, mine, Part(source, mine), ShardPosition(**ways_only(rank)))
            for rule in mine:
                written[rule.canonical][rank.index(rule.declared)] = stored[rule.canonical]
            assert sum(source.read_elements.values()) <= sum(map(Tensor.numel, stored.values()))
    whole = (
        (rule, merge(rule.declared, [by for _, by in sorted(written[rule.canonical].items())], rule.rows))
        for rule in rules
    )
    return dict(hf_tensors(whole))


def ways_only(rank: ShardPosition) -> dict[str, int]:
    """Return a rank's place for a load in which it is alone, with the experts that it has."""
    return {
        "tensor": rank.tensor,
        "tensor_rank": rank.tensor_rank,
        "expert_tensor": rank.expert_tensor,
        "expert_tensor_rank": rank.expert_tensor_rank,
    }


class Part(Source):
    """Part of a checkpoint that some rules use."""

    def __init__(self, source: Source, rules: Sequence[TensorRule]) -> None:
        self.tensors = {name: source.tensors[name] for rule in rules for name in rule.hf}
        self.read_elements = source.read_elements


def canonical_of(rule: TensorRule, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    return canonical_shape(rule, [straight(Source(tensors), rule).shape(name) for name in rule.hf])


def stored_tensor(rule: TensorRule, shapes: Mapping[str, Sequence[int]], place: ShardPosition) -> Tensor:
    shape = local_shape(rule.declared, shapes[rule.canonical], place.ways(rule.declared))
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_a_shard_is_cutting_the_whole(family: str) -> None:
    rules, tensors = checkpoint_of(family)
    for rule in rules:
        parts = [tensors[name] for name in rule.hf]
        if rule.is_stacked:
            parts = [straight(Source(tensors), rule).read(name, (rule.expert or 0,)) for name in rule.hf]
        whole = to_canonical(rule.declared, parts)
        assert all(map(torch.equal, from_canonical(rule.declared, whole), parts))
        for ways in (2, 4):
            for index in range(ways):
                place = ShardPosition(
                    tensor=ways, tensor_rank=index, expert_tensor=ways, expert_tensor_rank=index
                )
                wanted = shard(rule.declared, whole, place.ways(rule.declared), index)
                found = torch.full_like(wanted, float("nan"))
                load_weights({rule.canonical: found}, [rule], Part(Source(tensors), [rule]), place)
                assert torch.equal(found, wanted)


def test_stacks_are_read_whichever_way_their_matrices_lie() -> None:
    rules, published = checkpoint_of("qwen3_vl_moe")
    turned = {rule.hf[0] for rule in rules if rule.declared.transposed}
    assert {tuple(published[name].shape) for name in turned} == {(8, 96, 80), (8, 40, 96)}
    saved = {name: tensor.mT.contiguous() if name in turned else tensor for name, tensor in published.items()}
    for place in (ShardPosition(), ShardPosition(tensor=2, expert_tensor=2, expert=2)):
        shapes = {rule.canonical: canonical_of(rule, saved) for rule in rules}
        back = load_and_merge(rules, saved, shapes, place)
        assert all(torch.equal(back[name], published[name]) for name in published)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ways", [16, 32])
def test_ranks_that_share_a_group_of_heads_have_parts_of_it(family: str, ways: int) -> None:
    rules, tensors = checkpoint_of(family)
    interleaved = [rule for rule in rules if rule.declared.transform == "interleave"]
    assert interleaved or family in ("deepseek_v3", "glm4_moe_lite")
    for rule in interleaved:
        whole = to_canonical(rule.declared, [tensors[name] for name in rule.hf])
        shards = []
        for index in range(ways):
            shards.append(torch.full_like(shard(rule.declared, whole, ways, index), float("nan")))
            place = ShardPosition(tensor=ways, tensor_rank=index)
            load_weights({rule.canonical: shards[-1]}, [rule], Part(Source(tensors), [rule]), place)
        assert torch.equal(merge(rule.declared, shards), whole)


# -------------------------------------------------------------------------
# What does not fit
# -------------------------------------------------------------------------

GATE_UP = WeightRule(
    canonical="decoder.layers.{layer}.mlp.linear_fc1.weight",
    hf=("gate.{layer}", "up.{layer}"),
    transform="concat",
    sections=((4,), (4,)),
    split_dim=0,
)
EXPERT = WeightRule(
    canonical="decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
    hf=("down.{layer}.{expert}",),
    split_dim=1,
    experts=4,
)
EMBEDDING = WeightRule(
    canonical="embedding.word_embeddings.weight", hf=("embed",), split_dim=0, pads_vocab=True
)


def test_every_problem_is_listed_and_nothing_is_copied() -> None:
    rules = expand_rules([GATE_UP, EMBEDDING], 2, vocab_size=5)
    stored = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(4, 3),
        "decoder.layers.1.mlp.linear_fc1.weight": torch.zeros(4, 3),
        "embedding.word_embeddings.weight": torch.zeros(3, 3),
        "bias": torch.zeros(1),
    }
    tensors = {name: torch.ones(4, 3) for name in ("gate.0", "up.0", "up.1", "gate.2")}
    tensors |= {"embed": torch.ones(6, 3), "mtp.x": torch.ones(1), "up.0": torch.ones(5, 3)}
    with pytest.raises(WeightMappingError) as caught:
        load_weights(stored, rules, Source(tensors), ShardPosition(tensor=2), unused=("mtp.",))
    text = str(caught.value)
    for problem in (
        "gate.1: missing in the checkpoint",
        "gate.2: in the checkpoint but unknown",
        "gate.0 + up.0: shape (4, 3) + (5, 3), where dimension 0 must have 4",
        "bias: a parameter that no rule writes",
        "embed: shape (6, 3) for a vocabulary of 5",
    ):
        assert problem in text
    assert "mtp" not in text
    assert text.startswith("5 weights")
    assert not any(tensor.any() for tensor in stored.values())


def test_heads_that_are_together_in_a_checkpoint_stay_whole() -> None:
    heads = replace(GATE_UP, hf=("qkvz.{layer}",), transform="deinterleave", sections=((4, 8),), groups=2)
    rules = expand_rules([heads], 1)
    source = Source({"qkvz.0": torch.arange(12.0)[:, None]})
    stored = {rules[0].canonical: torch.zeros(12, 1)}
    load_weights(stored, rules, source, ShardPosition())
    assert stored[rules[0].canonical][:, 0].tolist() == [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11]
    with pytest.raises(WeightMappingError, match="2 groups of rows do not divide by 4"):
        load_weights({rules[0].canonical: torch.zeros(3, 1)}, rules, source, ShardPosition(tensor=4))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_numbers_that_mean_nothing_without_scales_are_refused(dtype: torch.dtype) -> None:
    rules = expand_rules([GATE_UP], 1)
    stored = {rules[0].canonical: torch.zeros(8, 3)}
    source = Source({"gate.0": torch.ones(4, 3), "up.0": torch.ones(4, 3).to(dtype)})
    with pytest.raises(WeightMappingError, match=rf"gate\.0 \+ up\.0: of type {dtype}, and a weight"):
        load_weights(stored, rules, source, ShardPosition())
    assert not stored[rules[0].canonical].any()


def test_what_no_rank_holds_and_what_a_sharding_does_not_divide() -> None:
    rules = expand_rules([GATE_UP], 2)
    source = Source({name: torch.ones(4, 3) for rule in rules for name in rule.hf})
    stored = {"decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(2, 3)}
    with pytest.raises(WeightMappingError) as caught:
        load_weights(stored, rules, source, ShardPosition(tensor=3))
    assert "layers.1.mlp.linear_fc1.weight: a rule that writes no parameter" in str(caught.value)
    assert "layers.0.mlp.linear_fc1.weight: 4, 4 along dimension 0 do not divide by 3" in str(caught.value)


def test_a_tied_output_layer_that_differs_is_an_error_on_the_rank_that_has_its_rows() -> None:
    rules, whole = expand_rules([EMBEDDING], 1, vocab_size=5), torch.rand(5, 2)
    other = whole.clone()
    other[4] += 1
    for index, output in ((0, whole), (1, whole), (0, other), (1, other)):
        stored = {"embedding.word_embeddings.weight": torch.zeros(3, 2)}
        source = Source({"embed": whole, "lm_head.weight": output})
        options: dict[str, Any] = {"unused": ("lm_head.",), "tied": ("embed", "lm_head.weight")}
        place = ShardPosition(tensor=2, tensor_rank=index)
        if index == 0 or output is whole:
            load_weights(stored, rules, source, place, **options)
        else:
            with pytest.raises(WeightMappingError, match=r"lm_head.weight: differs from embed"):
                load_weights(stored, rules, source, place, **options)


@pytest.mark.parametrize("owner", ["", "language_model."])
def test_an_embedding_is_copied_where_no_output_layer_is_beside_it(owner: str) -> None:
    output = replace(EMBEDDING, canonical=f"{owner}output_layer.weight", hf=("head",))
    other = replace(EMBEDDING, canonical="my_embedding.word_embeddings.weight", hf=("other",))
    own = replace(EMBEDDING, canonical=f"{owner}{EMBEDDING.canonical}")
    assert copied_embedding(expand_rules([own], 1)) == own.canonical
    assert copied_embedding(expand_rules([own, output, other], 1)) is None


def test_a_rule_is_declared_once() -> None:
    with pytest.raises(WeightMappingError, match="2 rules make it"):
        expand_rules([GATE_UP, GATE_UP], 1)
    twice = WeightRule(canonical="x", hf=("embed",))
    with pytest.raises(WeightMappingError, match="embed: 2 rules use it"):
        expand_rules([EMBEDDING, twice], 1)


@given(vocab=st.integers(1, 50), ways=st.integers(1, 8))
def test_padded_rows_are_zero_and_dropped(vocab: int, ways: int) -> None:
    (rule,) = expand_rules([EMBEDDING], 1, vocab)
    whole = torch.rand(vocab, 2) + 1
    shards = [shard(EMBEDDING, whole, ways, index) for index in range(ways)]
    assert {each.shape[0] for each in shards} == {padded_vocab(vocab, ways) // ways}
    assert not torch.cat(shards)[vocab:].any()
    assert torch.equal(merge(EMBEDDING, shards, vocab), whole)
    for index, wanted in enumerate(shards):
        found = torch.full_like(wanted, float("nan"))
        place = ShardPosition(tensor=ways, tensor_rank=index)
        load_weights({rule.canonical: found}, [rule], Source({"embed": whole}), place)
        assert torch.equal(found, wanted)


# -------------------------------------------------------------------------
# What modules store
# -------------------------------------------------------------------------


class Stacked(nn.Module):
    def __init__(self, experts: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, 3, 2))
        self.rank = rank

    def canonical_tensors(self) -> dict[str, Tensor]:
        return {
            f"weight{global_expert(i, self.rank, len(self.weight))}": w for i, w in enumerate(self.weight)
        }


def experts_of(layout: str, count: int, rank: int) -> nn.Module:
    """Return experts as our modules, Transformer Engine and Megatron's own layer store them."""
    experts = nn.Module()
    experts.num_local_experts = count  # type: ignore[assignment]
    if layout == "sequential":
        each = [nn.ModuleDict({"linear_fc2": nn.Linear(2, 3, bias=False)}) for _ in range(count)]
        experts.local_experts = nn.ModuleList(each)
        return experts
    experts.linear_fc2 = Stacked(count, rank) if layout == "stacked" else nn.Module()
    if layout == "grouped":
        for index in range(count):
            setattr(experts.linear_fc2, f"weight{index}", nn.Parameter(torch.zeros(3, 2)))
    return experts


def stage(layout: str, numbers: Sequence[int], rank: int) -> nn.Module:
    """Return a chunk of a model with the layers of these numbers, from 1."""
    chunk = nn.Module()
    chunk.decoder = nn.Module()
    layers = [
        nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts_of(layout, 2, rank)})}) for _ in numbers
    ]
    for layer, number in zip(layers, numbers, strict=True):
        layer.layer_number = number  # type: ignore[assignment]
    chunk.decoder.layers = nn.ModuleList(layers)
    return chunk


@pytest.mark.parametrize("layout", ["stacked", "grouped", "sequential"])
def test_every_layout_of_experts_loads_one_checkpoint(layout: str) -> None:
    rules = expand_rules([EXPERT], 4)
    tensors = {rule.hf[0]: torch.full((3, 2), float(number)) for number, rule in enumerate(rules)}
    for rank in range(2):
        chunks = [stage(layout, numbers, rank) for numbers in ((1, 3), (2, 4))]
        stored = canonical_tensors(chunks, rank)
        mine = [rule for rule in rules if rule.expert in (2 * rank, 2 * rank + 1)]
        assert stored.keys() == {rule.canonical for rule in mine}
        load_weights(stored, mine, Part(Source(tensors), mine), ShardPosition())
        assert all(torch.equal(stored[rule.canonical], tensors[rule.hf[0]]) for rule in mine)


def test_tied_output_persistent_buffers_and_fused_norms() -> None:
    chunk = nn.Module()
    chunk.share_embeddings_and_output_weights = True  # type: ignore[assignment]
    chunk.output_layer = nn.Linear(2, 3, bias=False)
    chunk.router = nn.Module()
    chunk.router.register_buffer("expert_bias", torch.zeros(4))
    chunk.router.register_buffer("tokens", torch.zeros(4), persistent=False)
    chunk.layer = nn.ModuleDict({"input_layernorm": nn.RMSNorm(2)})
    keys = {"input_layernorm.": "linear.layer_norm_"}
    chunk.layer.submodules_config = SimpleNamespace(sharded_state_dict_keys_map=keys)  # type: ignore[assignment]
    assert canonical_tensors([chunk]).keys() == {
        "embedding.word_embeddings.weight",
        "router.expert_bias",
        "layer.linear.layer_norm_weight",
    }
