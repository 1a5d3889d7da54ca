"""A tiny model with towers in the trainer and in transformers, and what both make of the same samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForMultimodalLM

from anygauge.engines.hf_directory import write_directory
from anygauge.serving.embedded.engine import TransformersEngine
from anygauge.serving.embedded.multimodal import MultimodalContext
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.media import Media, MediaKind
from anygauge_hooks.models import ModelSpec, text_config, transformers_model
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_tests.batches import TrainSample, log_probs, make_batch
from anygauge_tests.embedded import sample_all
from anygauge_tests.engine_config import engine_config

__all__ = ["ParityPair", "build", "check_fsdp_log_probs", "exported_tensors", "sample"]

_ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 62)))
"""With the padding token and the end of a sequence as many tokens as the tiny models have."""


@dataclass(frozen=True)
class ParityPair:
    """A model twice."""

    spec: ModelSpec
    path: Path
    store: Any
    samples: Sequence[TrainSample]
    policy: Any
    reference: Any
    """Reference model, called and saved like a transformers model."""
    given: Callable[[ParityPair, TrainSample], Mapping[str, Any]]
    """Keyword arguments of the reference, beside the tokens."""
    context: WorkerContext

    def logits(self) -> Tensor:
        """Return the trainer's logits of all samples in one micro-batch, ``[T, V]``."""
        from anygauge.engines.megatron.inputs import micro_batches
        from anygauge.engines.megatron.media.batch import StageReader
        from anygauge.engines.megatron.scope import make_scope

        reader = StageReader(self.policy.spec.media, self.policy.hf, self.store, is_first_stage=True)
        device = torch.device("cpu")
        seen = reader if self.policy.has_towers else None
        batches = micro_batches(make_batch(self.samples), 10_000, self.policy.rotary, device, media=seen)
        (batch,) = batches.readers(1)[0]
        with make_scope(self.context.device):
            packed = self.policy.chunks[0](**batch.inputs).flatten(0, 1)
        lengths = [len(self.samples[index].tokens) for index in batch.indices]
        parts = dict(zip(batch.indices, packed.split(lengths), strict=True))
        return torch.cat([parts[index] for index in sorted(parts)])

    def expected(self) -> Tensor:
        """Return the reference's logits, one sample after another."""
        return torch.cat(
            [
                self.reference(input_ids=torch.tensor([each.tokens]), **self.given(self, each)).logits[0]
                for each in self.samples
            ]
        )

    def check(self, towers: Iterable[str]) -> None:
        """Compare logits and gradients.

        :param towers: Parts of names that must be among those of the gradients.
        """
        actual, expected = self.logits(), self.expected()
        assert expected.std() > 0.1
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(actual.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)
        targets = torch.tensor([token for each in self.samples for token in each.tokens]).roll(-1)
        for logits in (actual, expected):
            torch.autograd.backward(torch.nn.functional.cross_entropy(logits, targets))
        gradients, wanted = self.gradients(), self.reference_gradients()
        assert gradients.keys() == wanted.keys()
        for tower in towers:
            assert any(tower in name for name in gradients), tower
        for name, gradient in gradients.items():
            # That of a key's bias is nothing but rounding, since softmax does not see it.
            error = (gradient - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-3)
            assert error < 1e-5, f"{name}: {error}"

    def check_sampling(self, kinds: Collection[MediaKind], tokens: int) -> None:
        """Compare the log-probabilities of what the embedded engine samples with the trainer's.

        :param kinds: That it is shown.
        :param tokens: To sample after each of the samples.
        """
        media = self.spec.media
        assert media is not None
        tiny_tokenizer(self.path, alphabet=_ALPHABET)
        hf = text_config(self.policy.hf)
        store = self.store if kinds else None
        senses, own = MultimodalContext.of(self.spec, hf, kinds, store), transformers_model(self.spec)
        cpu = torch.device("cpu")
        engine = TransformersEngine(
            self.path,
            dtype=torch.float32,
            device=cpu,
            max_batch_tokens=10_000,
            build=None if own is None else partial(own.build, hf),
            multimodal=senses,
        )
        forbidden = tuple(media.forbidden(self.policy.hf))
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, forbidden=forbidden)
        prompts = [
            Prompt(index=number, tokens=tuple(each.tokens), text="", media=each.media)
            for number, each in enumerate(self.samples)
        ]
        sampled = [group[0] for group in sample_all(engine, prompts, params, [[1]] * len(prompts))]
        longer = [
            before._replace(tokens=[*before.tokens, *after.response_tokens])
            for before, after in zip(self.samples, sampled, strict=True)
        ]
        with torch.no_grad():
            logits = replace(self, samples=longer).logits()
        log_probs = logits.index_fill(-1, torch.tensor(forbidden), -torch.inf).log_softmax(-1)
        lengths = [len(each.tokens) for each in longer]
        for each, part in zip(sampled, torch.split(log_probs, lengths), strict=True):
            assert not set(each.response_tokens) & set(forbidden)
            wanted = part[-tokens - 1 : -1].gather(1, torch.tensor(each.response_tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(each.log_probs), wanted, rtol=0, atol=1e-5)

    def check_text(self) -> None:
        """Compare logits and samples of the first sample, a text, in a model without towers."""
        policy = build(self.path, self.context, ())
        text = replace(self, policy=policy, samples=self.samples[:1])
        with torch.no_grad():
            torch.testing.assert_close(text.logits(), text.expected(), rtol=0, atol=1e-5)
        text.check_sampling((), 3)

    def check_export(self, directory: Path) -> None:
        """Check that weights come out as they went in, and that transformers reads what is written."""
        expected = load_file(self.path / "model.safetensors")
        actual = dict(self.policy.weights())
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        write_directory(directory, self.path, actual.items(), torch.float32)
        read = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            assert torch.equal(replace(self, reference=read).expected(), self.expected())

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the trainer's parameters, by name of the checkpoint."""
        parameters = [each for chunk in self.policy.chunks for each in chunk.parameters()]
        buffers = {name for chunk in self.policy.chunks for name, _ in chunk.named_buffers()}
        with _gradients_for_values(parameters):
            tensors = {name: tensor.clone() for name, tensor in self.policy.weights()}
        left = {rule.hf[0] for rule in self.policy.rules if rule.canonical in buffers}
        return {name: tensor for name, tensor in tensors.items() if name not in left}

    def reference_gradients(self) -> dict[str, Tensor]:
        """Return those of the reference."""
        buffers = {name.rpartition(".")[2] for name, _ in self.reference.named_buffers()}
        with _gradients_for_values(list(self.reference.parameters())):
            tensors = exported_tensors(self.reference)
        return {name: each for name, each in tensors.items() if name.rpartition(".")[2] not in buffers}


@contextmanager
def _gradients_for_values(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters hold their gradients, and then none."""
    values = [each.detach().clone() for each in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    yield
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
            parameter.grad = None


def exported_tensors(model: Any) -> dict[str, Tensor]:
    """Return what a model writes."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tensors: dict[str, Tensor] = load_file(Path(directory) / "model.safetensors")
    return tensors


def build(path: Path, context: WorkerContext, modalities: Sequence[str], **options: Any) -> Any:
    """Return the trainer's model of a directory.

    :param options: Of ``build_policy``.
    """
    from anygauge.engines.megatron.model import build_policy, initialize_parallel
    from anygauge.engines.megatron.scope import make_scope

    config = engine_config({"path": path, "modalities": list(modalities)})
    with make_scope(context.device):
        initialize_parallel(seed=0, timeout_s=60)
        return build_policy(config, context.plugins, context.backend, context.device, **options)


def sample(parts: Iterable[int | tuple[Media, Sequence[int]]], holder: Mapping[str, int]) -> TrainSample:
    """Return a sample of so many tokens of text, or of a medium with the tokens between its spans.

    :param parts: A medium's tokens hold -1 where its features go; its spans are made here.
    """
    tokens: list[int] = []
    media: list[Media] = []
    for part in parts:
        if isinstance(part, int):
            generator = torch.Generator().manual_seed(len(tokens))
            tokens += torch.randint(2, 50, (part,), generator=generator).tolist()
        else:
            medium, inside = part
            media.append(medium.moved(len(tokens)))
            tokens += [holder[medium.kind] if token < 0 else token for token in inside]
    return TrainSample(tokens, 2, [1, 1], [-0.5] * 2, [1.0] * 2, media=tuple(media))


def check_fsdp_log_probs(pair: ParityPair, modalities: Sequence[str]) -> Any:
    """Compare the log-probabilities of the FSDP engine with those of the Megatron engine's model.

    :returns: The engine.
    """
    config = engine_config(
        {"path": pair.path, "modalities": list(modalities)},
        train={"engine": "fsdp", "micro_batch_tokens": 10_000},
    )
    spec = pair.context.plugins.get("register_train_engines", "fsdp")
    engine = spec.make(config, replace(pair.context, media=pair.store))
    media = pair.spec.media
    assert media is not None
    logits = pair.logits().index_fill(-1, torch.tensor(media.forbidden(pair.policy.hf)), -torch.inf)
    parts = torch.split(logits, [len(sample.tokens) for sample in pair.samples])
    actual = log_probs(engine, pair.samples, temperature=1.0)
    for each, sample, rows in zip(actual, pair.samples, parts, strict=True):
        count = sample.response_length
        taken = torch.tensor(sample.tokens[-count:])[:, None]
        expected = rows[-count - 1 : -1].log_softmax(-1).gather(1, taken)[:, 0]
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-5)
    return engine
