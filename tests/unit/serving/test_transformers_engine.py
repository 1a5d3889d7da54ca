"""The embedded rollout engine: what it samples, when responses end, and weight updates."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.serving import plugin as serving_plugin
from anygauge.serving.embedded.batches import PendingSample, plan_batches
from anygauge.serving.embedded.engine import TransformersEngine
from anygauge.serving.embedded.sampling import seed_tensor, uniforms
from anygauge.serving.embedded.weights import copy_weights
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import CheckpointError, RolloutError, WeightMappingError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import GenerateRequest
from anygauge_tests.embedded import sample_all

ALPHABET = "0123456789+="
PAD, EOS = 12, 13
HOST = torch.device("cpu")


def make_model(path: Path, **options: Any) -> Path:
    """Write a model whose next-token distributions are neither flat nor certain."""
    if not (path / "tokenizer.json").exists():
        tiny_tokenizer(path, alphabet=ALPHABET)
    return tiny_qwen3(path, **{"hidden": 32, "head_dim": 8, "mlp": 48, "init_std": 0.3, **options})


def open_engine(
    path: Path, *, max_batch_tokens: int = 100_000, dtype: torch.dtype = torch.float32
) -> TransformersEngine:
    return TransformersEngine(path, dtype=dtype, device=HOST, max_batch_tokens=max_batch_tokens)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(path: Path) -> TransformersEngine:
    return open_engine(path)


def prompts_of(*texts: str) -> list[Prompt]:
    return [
        Prompt(index=index, tokens=tuple(map(ALPHABET.index, text)), text=text)
        for index, text in enumerate(texts)
    ]


MIXED = prompts_of("37+58=", "1+2=", "9", "37+5", "11111111+22222222=")


def seeds_for(prompts: Sequence[Prompt], samples: int, start: int = 0) -> list[list[int]]:
    counter = itertools.count(start)
    return [[next(counter) for _ in range(samples)] for _ in prompts]


def flat(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def reference_log_probs(path: Path, sample: Sample, temperature: float) -> torch.Tensor:
    """Return the distributions ``[R, V]`` of a sample's tokens from one pass, alone and without a cache."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([sample.prompt_tokens + sample.response_tokens])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_tokens) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


@contextmanager
def recorded_inputs(engine: TransformersEngine) -> Iterator[list[torch.Tensor]]:
    """Collect the token ids of every forward pass."""
    seen: list[torch.Tensor] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["input_ids"])

    hook = engine._model.register_forward_pre_hook(record, with_kwargs=True)
    yield seen
    hook.remove()


# -- what is sampled -------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("prompts", [MIXED, prompts_of("1+2=", "3+4=")], ids=["padded", "equal"])
def test_log_probs_are_those_of_a_full_forward_pass(
    engine: TransformersEngine, path: Path, prompts: list[Prompt], temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=temperature)
    samples = flat(sample_all(engine, prompts, params, seeds_for(prompts, 3)))
    assert len({sample.response_tokens for sample in samples}) > len(prompts)
    for sample in samples:
        expected = reference_log_probs(path, sample, temperature)
        chosen = expected.gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.log_probs), chosen, rtol=0, atol=1e-5)


def test_tokens_are_the_inverse_cdf_of_the_samples_own_numbers(
    engine: TransformersEngine, path: Path
) -> None:
    samples = flat(sample_all(engine, MIXED, SamplingParams(max_new_tokens=6), seeds_for(MIXED, 4)))
    for sample in samples:
        probs = reference_log_probs(path, sample, 1.0).exp().to(torch.float64)
        for position, token in enumerate(sample.response_tokens):
            number = uniforms(seed_tensor([sample.seed], HOST), position).item()
            below = probs[position, :token].sum().item()
            assert below - 1e-5 <= number <= below + probs[position, token].item() + 1e-5


def test_a_sample_does_not_depend_on_its_batch(engine: TransformersEngine, path: Path) -> None:
    params = SamplingParams(max_new_tokens=8, top_p=0.95, top_k=10)
    seeds = seeds_for(MIXED, 4)
    together = sample_all(engine, MIXED, params, seeds)
    order = [3, 0, 4, 2, 1]
    shuffled = sample_all(engine, [MIXED[i] for i in order], params, [seeds[i][::-1] for i in order])
    narrow = sample_all(open_engine(path, max_batch_tokens=40), MIXED, params, seeds)
    alone = [
        [sample_all(engine, [p], params, [[s]])[0][0] for s in some]
        for p, some in zip(MIXED, seeds, strict=True)
    ]
    others = [narrow, alone, [shuffled[order.index(i)][::-1] for i in range(5)]]
    for other in others:
        for one, two in zip(flat(together), flat(other), strict=True):
            assert one.response_tokens == two.response_tokens
            assert one.log_probs == pytest.approx(two.log_probs, abs=1e-5)


def test_the_same_call_gives_the_same_samples(engine: TransformersEngine) -> None:
    params = SamplingParams(max_new_tokens=8)
    seeds = seeds_for(MIXED, 4)
    first = sample_all(engine, MIXED, params, seeds)
    assert sample_all(engine, MIXED, params, seeds) == first
    assert sample_all(engine, MIXED, params, seeds_for(MIXED, 4, start=1000)) != first


def test_equal_seeds_of_one_prompt_give_equal_samples(engine: TransformersEngine) -> None:
    one, two, other = sample_all(engine, MIXED[:1], SamplingParams(max_new_tokens=8), [[5, 5, 6]])[0]
    assert one == two
    assert one != other


def test_temperature_zero_is_greedy(engine: TransformersEngine, path: Path) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0)
    for sample in flat(sample_all(engine, MIXED, params, seeds_for(MIXED, 2))):
        expected = reference_log_probs(path, sample, 1.0)
        assert list(sample.response_tokens) == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(sample.log_probs), expected.amax(-1), rtol=0, atol=1e-5)


def test_truncation_limits_every_token(engine: TransformersEngine, path: Path) -> None:
    params = SamplingParams(max_new_tokens=5, top_k=3, top_p=0.9)
    for sample in flat(sample_all(engine, MIXED, params, seeds_for(MIXED, 4))):
        probs = reference_log_probs(path, sample, 1.0).exp()
        values, tokens = probs.topk(3, dim=-1)
        for position, token in enumerate(sample.response_tokens):
            rank = tokens[position].tolist().index(token)
            assert values[position, :rank].sum() < 0.9 * values[position].sum() + 1e-5


def test_sliding_windows_keep_their_meaning(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"]
    config |= {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds}
    (path / "config.json").write_text(json.dumps(config))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    for sample in flat(sample_all(open_engine(path), MIXED, params, seeds_for(MIXED, 2))):
        expected = reference_log_probs(path, sample, 1.0)
        chosen = expected.gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.log_probs), chosen, rtol=0, atol=1e-5)


def test_low_precision_follows_the_dtype(path: Path) -> None:
    engine = open_engine(path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in engine._model.parameters()} == {torch.bfloat16}
    sample = sample_all(engine, MIXED[:1], SamplingParams(max_new_tokens=4), [[1]])[0][0]
    expected = reference_log_probs(path, sample, 1.0).gather(1, torch.tensor(sample.response_tokens)[:, None])
    torch.testing.assert_close(torch.tensor(sample.log_probs), expected[:, 0], rtol=0, atol=0.2)


# -- what is computed ------------------------------------------------------


def test_each_distinct_prefix_is_computed_once(engine: TransformersEngine) -> None:
    prompts = [*MIXED, MIXED[0]]
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    with recorded_inputs(engine) as inputs:
        samples = flat(sample_all(engine, prompts, params, seeds_for(prompts, 6)))
    assert inputs[0].shape == (len(MIXED), max(len(prompt.tokens) for prompt in MIXED))
    for step, ids in enumerate(inputs[1:], start=1):
        assert ids.shape == (len({(s.prompt_tokens, s.response_tokens[:step]) for s in samples}), 1)


def test_equal_tokens_of_different_images_are_prefixes_of_their_own() -> None:
    def row(index: int, *keys: str) -> PendingSample:
        media = tuple(Media("image", key, ((0, 1),), (1, 2, 2)) for key in keys)
        return PendingSample(index=index, tokens=(1, 2, 3), seed=index, max_new_tokens=1, media=media)

    rows = [row(0, "a"), row(1, "b"), row(2, "a"), row(3, "a", "b"), row(4)]
    assert len({each.prompt for each in rows}) == 4
    assert rows[0].prompt == rows[2].prompt


def test_forbidden_tokens_are_never_drawn_and_the_rest_adds_up(
    engine: TransformersEngine, path: Path
) -> None:
    forbidden = (3, 7)
    params = SamplingParams(max_new_tokens=6, forbidden=forbidden)
    samples = flat(sample_all(engine, MIXED, params, seeds_for(MIXED, 20)))
    assert not {token for sample in samples for token in sample.response_tokens} & set(forbidden)
    for sample in samples[::50]:
        logits = reference_log_probs(path, sample, 1.0).index_fill(1, torch.tensor(forbidden), -torch.inf)
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.log_probs), chosen, rtol=0, atol=1e-5)
    with pytest.raises(RolloutError, match=r"forbidden tokens \[14\] outside"):
        sample_all(engine, MIXED, SamplingParams(max_new_tokens=1, forbidden=(3, 14)), seeds_for(MIXED, 1))


def test_ended_samples_leave_the_batch(engine: TransformersEngine) -> None:
    prompts = prompts_of(*(f"{number}+" for number in range(100, 140)))
    with recorded_inputs(engine) as inputs:
        samples = flat(sample_all(engine, prompts, SamplingParams(max_new_tokens=40), seeds_for(prompts, 1)))
    for step, ids in enumerate(inputs[1:], start=1):
        alive = sum(len(sample.response_tokens) > step for sample in samples)
        assert alive <= len(ids) <= alive / 0.75 + 1
    assert len(inputs[-1]) < len(prompts) / 2


def test_batches_stay_within_the_bound() -> None:
    rows = [
        PendingSample(index=i, tokens=(0,) * (1 + i * 7 % 23), seed=i, max_new_tokens=10)
        for i in range(60)
        for _ in range(3)
    ]
    batches = list(plan_batches(rows, 10, 120))
    assert sorted(row.index for batch in batches for row in batch) == sorted(row.index for row in rows)
    for batch in batches:
        assert len(batch) * (max(len(row.tokens) for row in batch) + 10) <= 120
    assert len(batches) <= 60
    assert [len(batch) for batch in plan_batches(rows[:3], 10, 5)] == [1, 1, 1]


def test_the_global_random_state_and_autograd_are_left_alone(path: Path) -> None:
    state = torch.get_rng_state()
    engine = open_engine(path)
    sample_all(engine, MIXED, SamplingParams(max_new_tokens=3), seeds_for(MIXED, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(parameter.requires_grad for parameter in engine._model.parameters())
    assert not engine._model.training
    assert torch.is_grad_enabled()


# -- when responses end ----------------------------------------------------


def test_responses_end_at_eos_or_at_the_limit(engine: TransformersEngine) -> None:
    samples = flat(sample_all(engine, MIXED, SamplingParams(max_new_tokens=12), seeds_for(MIXED, 8)))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        ended = sample.response_tokens[-1] == EOS
        assert EOS not in sample.response_tokens[:-1]
        assert ended or len(sample.response_tokens) == 12
        assert sample.finish_reason == ("stop" if ended else "length")


def test_samples_are_complete(engine: TransformersEngine) -> None:
    groups = sample_all(engine, MIXED, SamplingParams(max_new_tokens=12), seeds_for(MIXED, 8))
    assert [[sample.seed for sample in group] for group in groups] == seeds_for(MIXED, 8)
    for prompt, group in zip(MIXED, groups, strict=True):
        for sample in group:
            length = len(sample.response_tokens)
            assert (sample.prompt_index, sample.prompt_tokens) == (prompt.index, prompt.tokens)
            assert sample.loss_mask == (1,) * length
            assert sample.weight_versions == (0,) * length
            assert len(sample.log_probs) == length
            assert all(isinstance(value, float) for value in sample.log_probs)
            assert sample.text == "".join(ALPHABET[t] for t in sample.response_tokens if t < len(ALPHABET))


def test_eos_can_be_ignored(engine: TransformersEngine) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    samples = flat(sample_all(engine, MIXED, params, seeds_for(MIXED, 8)))
    assert {(len(sample.response_tokens), sample.finish_reason) for sample in samples} == {(12, "length")}
    assert any(EOS in sample.response_tokens[:-1] for sample in samples)


def test_stop_tokens_end_a_response(engine: TransformersEngine) -> None:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(3, PAD))
    samples = flat(sample_all(engine, MIXED, params, seeds_for(MIXED, 8)))
    for sample in samples:
        assert not {3, PAD} & set(sample.response_tokens[:-1])
        assert (sample.response_tokens[-1] in (3, PAD)) == (sample.finish_reason == "stop")
    assert {sample.response_tokens[-1] for sample in samples} >= {3, PAD}


def test_eos_comes_from_the_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [4, 5]}))
    samples = flat(
        sample_all(open_engine(path), MIXED, SamplingParams(max_new_tokens=40), seeds_for(MIXED, 16))
    )
    assert {sample.response_tokens[-1] for sample in samples if sample.finish_reason == "stop"} == {4, 5, EOS}


def test_a_stop_string_ends_at_the_token_that_completes_it(engine: TransformersEngine) -> None:
    free = SamplingParams(max_new_tokens=40, ignore_eos=True)
    stops = ("12", "+", "777")
    seeds = seeds_for(MIXED, 8)
    whole = flat(sample_all(engine, MIXED, free, seeds))
    cut = flat(
        sample_all(engine, MIXED, SamplingParams(max_new_tokens=40, ignore_eos=True, stop=stops), seeds)
    )
    assert sum(sample.finish_reason == "stop" for sample in cut) > len(cut) / 2
    for long, short in zip(whole, cut, strict=True):
        length = next((n for n in range(1, 41) if ends_in_stop(long.response_tokens[:n], stops)), 40)
        assert short.response_tokens == long.response_tokens[:length]
        stopped = ends_in_stop(short.response_tokens, stops)
        assert short.finish_reason == ("stop" if stopped else "length")


def ends_in_stop(tokens: Sequence[int], stops: Sequence[str]) -> bool:
    # A special token between two characters parts them.
    text = "".join(ALPHABET[token] if token < len(ALPHABET) else "#" for token in tokens)
    return text.endswith(tuple(stops))


@pytest.mark.parametrize("stop", ["the ans", "r is", "\u00e9\u4e2d", "is ", "<|im_end|>\n"])
def test_stop_strings_of_several_tokens_and_bytes(tmp_path: Path, stop: str) -> None:
    text = "so the answer is caf\u00e9\u4e2d\u6587<|im_end|>\nand more text after it"
    tiny_tokenizer(tmp_path, texts=["so the answer is"] * 3, vocab_size=275)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(text).input_ids
    engine = scripted_engine(tmp_path, tokens)
    prompt = Prompt(index=0, tokens=(tokens[0],), text="")
    params = SamplingParams(max_new_tokens=len(tokens) - 1, temperature=0, stop=(stop,), ignore_eos=True)
    sample = sample_all(engine, [prompt], params, [[0]])[0][0]
    ends = [n for n in range(1, len(tokens)) if stop in tokenizer.decode(tokens[1 : n + 1])]
    assert list(sample.response_tokens) == tokens[1 : ends[0] + 1]
    assert sample.finish_reason == "stop"
    assert sample.text == tokenizer.decode(tokens[1 : ends[0] + 1], skip_special_tokens=True)


def scripted_engine(path: Path, tokens: Sequence[int]) -> TransformersEngine:
    """Return an engine that decodes ``tokens`` greedily: its logits are replaced by the script."""
    engine = open_engine(make_model(path))

    def script(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        position = int(kwargs["position_ids"][0, -1])
        output.logits = torch.zeros_like(output.logits)
        output.logits[..., tokens[position + 1]] = 10.0
        return output

    engine._model.register_forward_hook(script, with_kwargs=True)
    return engine


def test_a_response_ends_where_the_context_is_full(tmp_path: Path) -> None:
    engine = open_engine(make_model(tmp_path, max_positions=10))
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    prompts = prompts_of("37+58=", "1")
    for prompt, group in zip(prompts, sample_all(engine, prompts, params, [[0], [1]]), strict=True):
        assert len(prompt.tokens) + len(group[0].response_tokens) == 10
        assert group[0].finish_reason == "length"
    with pytest.raises(RolloutError, match=r"Request 0-0 has 12 tokens; the model's context is 10"):
        sample_all(engine, prompts_of("37+58=37+58="), params, [[0]])


def test_a_row_that_has_filled_its_context_waits_for_the_others(tmp_path: Path) -> None:
    """It stays in the cache, and some models have nothing at the position after the last."""
    tiny_tokenizer(tmp_path, alphabet=ALPHABET)
    shape = {"vocab_size": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None}
    GPT2LMHeadModel(GPT2Config(n_positions=24, eos_token_id=15, **shape)).save_pretrained(tmp_path)
    prompts = prompts_of("11111111+22222222=33", "1+2=", "37=", "9+")
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    samples = flat(sample_all(open_engine(tmp_path), prompts, params, seeds_for(prompts, 1)))
    assert [len(sample.response_tokens) for sample in samples] == [4, 12, 12, 12]


def test_abort_from_another_thread_returns_what_there_is(engine: TransformersEngine) -> None:
    under_way = threading.Event()
    passes = itertools.count(1)
    results: list[list[list[Sample]]] = []
    params = SamplingParams(max_new_tokens=3000, ignore_eos=True)

    def notice(module: Any, args: Any) -> None:
        if next(passes) == 5:
            under_way.set()

    hook = engine._model.register_forward_pre_hook(notice)
    thread = threading.Thread(
        target=lambda: results.append(sample_all(engine, MIXED, params, seeds_for(MIXED, 2)))
    )
    thread.start()
    assert under_way.wait(60)
    engine.abort()
    thread.join(60)
    hook.remove()
    samples = flat(results[0])
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert all(4 <= len(sample.response_tokens) < 3000 for sample in samples)
    assert len(sample_all(engine, MIXED, SamplingParams(max_new_tokens=3), seeds_for(MIXED, 1))) == len(MIXED)


def test_abort_keeps_finished_batches_and_starts_no_other(path: Path) -> None:
    engine = open_engine(path, max_batch_tokens=1)
    passes = itertools.count(1)

    def abort_at_seventh(module: Any, args: Any) -> None:
        if next(passes) == 7:
            engine.abort()

    engine._model.register_forward_pre_hook(abort_at_seventh)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    samples = flat(sample_all(engine, prompts_of("123", "12", "1"), params, [[0], [1], [2]]))
    # Four passes for the first, longest prompt; the seventh is the third of the second.
    assert [len(sample.response_tokens) for sample in samples] == [4, 3, 0]
    assert [sample.finish_reason for sample in samples] == ["length", "abort", "abort"]
    assert samples[2].text == ""


# -- weights ---------------------------------------------------------------


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(path / "model.safetensors"))


def generate_some(engine: TransformersEngine) -> list[Sample]:
    return flat(sample_all(engine, MIXED, SamplingParams(max_new_tokens=6), seeds_for(MIXED, 2)))


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_replaces_the_weights_in_place(tmp_path: Path, tied: bool) -> None:
    before = make_model(tmp_path / "before", tied=tied, seed=1)
    after = make_model(tmp_path / "after", tied=tied, seed=2)
    engine = open_engine(before)
    old = generate_some(engine)
    addresses = [parameter.data_ptr() for parameter in engine._model.parameters()]
    engine.update_weights(iter(weights_of(after).items()), version=7)
    assert engine.version == 7
    assert addresses == [parameter.data_ptr() for parameter in engine._model.parameters()]
    new = generate_some(engine)
    fresh = generate_some(open_engine(after))
    assert [sample.response_tokens for sample in new] == [sample.response_tokens for sample in fresh]
    assert [sample.log_probs for sample in new] == [sample.log_probs for sample in fresh]
    assert [sample.log_probs for sample in new] != [sample.log_probs for sample in old]
    assert {version for sample in new for version in sample.weight_versions} == {7}


def test_an_update_converts_the_dtype(path: Path) -> None:
    engine = open_engine(path)
    engine.update_weights(
        ((name, tensor.to(torch.float64)) for name, tensor in weights_of(path).items()), version=1
    )
    assert generate_some(engine)[0].log_probs == generate_some(open_engine(path))[0].log_probs


def test_a_tied_weight_may_come_under_any_of_its_names(path: Path) -> None:
    engine = open_engine(path)
    expected = [sample.response_tokens for sample in generate_some(engine)]
    weights = weights_of(path)
    embedding = weights.pop("model.embed_tokens.weight")
    engine.update_weights([("lm_head.weight", embedding), *weights.items()], version=1)
    assert [sample.response_tokens for sample in generate_some(engine)] == expected
    both = [("model.embed_tokens.weight", embedding), ("lm_head.weight", embedding * 0), *weights.items()]
    for order in (both, both[::-1]):
        engine.update_weights(order, version=2)
        assert [sample.response_tokens for sample in generate_some(engine)] == expected


def test_a_part_takes_weights_under_the_names_of_the_whole(path: Path) -> None:
    """As transformers does by ``base_model_prefix``; 5.19 has the names of a thinker from nothing else."""
    whole = {name: tensor for name, tensor in weights_of(path).items() if name.startswith("model.")}
    part = AutoModel.from_config(AutoConfig.from_pretrained(path))
    copy_weights(part, whole.items())
    assert all(torch.equal(tensor, whole[f"model.{name}"]) for name, tensor in part.state_dict().items())


def test_a_bad_update_lists_everything_and_stops_the_engine(path: Path) -> None:
    engine = open_engine(path)
    good = weights_of(path)
    bad = dict(good)
    del bad["model.norm.weight"]
    del bad["model.layers.1.mlp.up_proj.weight"]
    bad["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 5)
    bad["model.layers.9.extra.weight"] = torch.zeros(1)
    bad["visual.weight"] = torch.zeros(1)
    with pytest.raises(WeightMappingError) as caught:
        engine.update_weights(bad.items(), version=1)
    assert caught.value.args[0] == (
        "These weights do not fit Qwen3ForCausalLM. "
        "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; "
        "unknown: model.layers.9.extra.weight, visual.weight; "
        "of the wrong shape: model.layers.0.self_attn.q_proj.weight is [3, 5] and not [32, 32]."
    )
    assert engine.version == 0
    with pytest.raises(RolloutError, match="update to weight version 1 failed"):
        generate_some(engine)
    engine.update_weights(good.items(), version=2)
    assert generate_some(engine)[0].weight_versions[0] == 2


def test_a_stream_that_breaks_off_stops_the_engine(path: Path) -> None:
    engine = open_engine(path)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.zeros(32)
        raise ConnectionError("the trainer went away")

    with pytest.raises(ConnectionError):
        engine.update_weights(broken(), version=1)
    with pytest.raises(RolloutError, match="update to weight version 1 failed"):
        generate_some(engine)


def test_weights_that_are_not_finite_are_noticed(path: Path) -> None:
    engine = open_engine(path)
    weights = weights_of(path)
    weights["model.norm.weight"] = torch.full((32,), torch.nan)
    engine.update_weights(weights.items(), version=1)
    with pytest.raises(RolloutError, match="not finite"):
        generate_some(engine)


def test_sharded_weights_are_loaded(tmp_path: Path) -> None:
    whole = make_model(tmp_path / "whole", seed=5)
    parts = make_model(tmp_path / "parts", seed=5, max_shard_size="20KB")
    assert not (parts / "model.safetensors").exists()
    assert generate_some(open_engine(parts)) == generate_some(open_engine(whole))


# -- what is refused -------------------------------------------------------


def test_an_incomplete_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json not found"):
        open_engine(tmp_path / "nowhere")
    path = make_model(tmp_path / "parts", max_shard_size="20KB")
    missing = sorted(path.glob("model-*.safetensors"))[0]
    missing.unlink()
    with pytest.raises(CheckpointError, match=missing.name):
        open_engine(path)


def test_a_checkpoint_without_all_weights_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    weights = weights_of(path)
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMappingError, match=r"missing: model\.norm\.weight"):
        open_engine(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5, "top_k": -1}, "top_p = 1.5.*top_k = -1"),
        ({"stop": ("",)}, "stop conditions"),
        ({"stop_token_ids": (99,)}, r"tokens \[99\] of a vocabulary of 14"),
    ],
)
def test_impossible_parameters_are_refused(
    engine: TransformersEngine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        sample_all(engine, MIXED, SamplingParams(**{"max_new_tokens": 4, **options}), seeds_for(MIXED, 1))


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ((), "has no tokens"),
        ((3, 14), "has token 14, outside the vocabulary of 14"),
        ((-1, 3), "has token -1, outside the vocabulary of 14"),
    ],
)
def test_prompts_outside_the_vocabulary_are_refused(
    engine: TransformersEngine, tokens: tuple[int, ...], problem: str
) -> None:
    prompt = Prompt(index=4, tokens=tokens, text="", source="train.jsonl:5")
    with pytest.raises(RolloutError, match=rf"Request 4-0 \(train.jsonl:5\) {problem}\."):
        sample_all(engine, [prompt], SamplingParams(max_new_tokens=4), [[0]])


def test_requests_of_a_batch_keep_their_own_lengths(engine: TransformersEngine) -> None:
    params = SamplingParams(max_new_tokens=7, ignore_eos=True)
    asked = [GenerateRequest(str(n), (3, 4), replace(params, max_new_tokens=n), seed=5) for n in (7, 4, 5)]
    whole, short, middle = engine.answer(asked)
    assert [short.tokens, middle.tokens] == [whole.tokens[:4], whole.tokens[:5]]
    assert (len(short.log_probs), len(short.weight_versions), short.finish_reason) == (4, 4, "length")


def test_nothing_to_do_is_done(engine: TransformersEngine) -> None:
    params = SamplingParams(max_new_tokens=4)
    assert sample_all(engine, [], params, []) == []
    assert [len(group) for group in sample_all(engine, MIXED[:2], params, [[], [1]])] == [0, 1]


def test_a_closed_engine_refuses(path: Path) -> None:
    engine = open_engine(path)
    engine.close()
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        generate_some(engine)
    with pytest.raises(RolloutError, match="closed"):
        engine.update_weights([], version=1)


# -- as a plugin -----------------------------------------------------------


def config_for(path: Path, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": path},
        "data": {"train": ["train.jsonl"]},
        "reward": {"function": "exact_match"},
    }
    return Config.model_validate(base | sections)


@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({}, torch.float32),
        ({"train": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"train": {"dtype": "bfloat16"}, "rollout": {"dtype": "float32"}}, torch.float32),
    ],
)
def test_the_engine_is_made_from_a_config(path: Path, sections: dict[str, Any], dtype: torch.dtype) -> None:
    plugins = Plugins()
    plugins.register(serving_plugin, "serving")
    context = WorkerContext(
        rank=0,
        world_size=1,
        backend=cast(Any, None),
        device=cast(Any, SimpleNamespace(type="cpu", torch_device=torch.device("cpu"), capture_graph=None)),
        plugins=plugins,
    )
    engine = plugins.get("register_rollout_engines", "transformers").make(
        config_for(path, **sections), context
    )
    assert engine.version == 0
    assert {parameter.dtype for parameter in engine._model.parameters()} == {dtype}
    assert len(generate_some(engine)) == 2 * len(MIXED)
