"""Compare a train engine's model of a Hugging Face directory with transformers', on one device in float32."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.config import Config
from anygauge.config.families import family
from anygauge.data.template import TemplateRefusal, apply_template
from anygauge.engines.dequantize import open_unquantized
from anygauge.engines.hf_directory import TensorReader, read_config
from anygauge.plugins import Plugins
from anygauge.testing.model_numbers import (
    FLOOR,
    GradientOptimizer,
    batch_of,
    gradient_error,
    largest,
    layer_error,
    leave_gradients,
    made_up_tokens,
    transposed_to,
    turned_sequences,
)
from anygauge.testing.model_reference import LayerRecord, Reference, record_layers, run_reference
from anygauge.testing.model_worker import SERVED, CheckRow
from anygauge.testing.served_response import served_response
from anygauge.trainer.inputs import load_tokenizer
from anygauge.wording import listed
from anygauge_hooks.engines import HasDecoderLayers, TrainEngine, WorkerContext
from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.models import ModelSpec, text_config, transformers_model
from anygauge_hooks.resources import read_memory

__all__ = ["check_model"]

LOG_PROBS = 1e-4
"""Largest absolute difference of a token's log-prob."""
GRADIENTS = 1e-3
"""Largest difference of a parameter's gradient, by norm, relative to the reference's."""
LAYERS = 1e-3
"""Largest difference of a token's hidden states, by norm, relative to what the layer adds to them."""
BYTES_PER_WEIGHT = 16
"""Weights and gradients in float32, of the engine and of transformers."""
SHOWN = 8
"""Names that a row shows."""


def check_model(
    config: Config, plugins: Plugins, context: WorkerContext, prompt: str, *, against: str | None = None
) -> Iterator[CheckRow]:
    """Yield a row for each check that can be made, each as soon as it is known.

    :param config: With ``model.path``, ``train.engine``, ``train.dtype = "float32"``, no clipping, and room
        for two prompts in a micro-batch.
    :param plugins: Those of the context; the check registers one of its own.
    :param context: The only worker, in a process group.
    :param prompt: Text whose log-probs and gradients are compared.
    :param against: Name of a rollout engine whose server's log-probs are compared too; ``None`` for none.
    """
    check = _Check(config, plugins, context, prompt, against)
    try:
        yield from check.rows()
    except _Stopped as stop:
        yield stop.row


class _Stopped(Exception):
    """A check failed that the later ones need."""

    def __init__(self, name: str, found: str) -> None:
        super().__init__(found)
        self.row = CheckRow(name, "FAIL", found)


class _Check:
    def __init__(
        self, config: Config, plugins: Plugins, context: WorkerContext, prompt: str, against: str | None
    ) -> None:
        self.config = config
        self.plugins = plugins
        self.context = context
        self.prompt = prompt
        self.against = against
        self.directory: Path = config.model.path
        self.hf = read_config(self.directory)
        self.spec: ModelSpec = family(plugins, self.hf, config.train.engine)

    def rows(self) -> Iterator[CheckRow]:
        architecture = ", ".join(self.hf.get("architectures") or ())
        engine = f"train.engine = {self.config.train.engine!r}"
        yield CheckRow("configuration", "PASS", f"{architecture}, family {self.spec.name}, {engine}")
        tokenizer, tokens, row = self._tokenize()
        yield row
        yield _row("chat template", partial(_render, tokenizer, self.prompt))
        yield self._memory()
        sequences = turned_sequences(tokens, 2)
        engine_model = self._load()
        yield CheckRow("weights", "PASS", f"{self._stored()} tensors, none missing, none unknown")
        reference, row = self._reference(sequences)
        yield row
        yield _row("round trip", partial(self._round_trip, engine_model, reference.ignored))
        yield (layers := _row("layers", partial(_layers, engine_model, sequences[0], reference)))
        hint = "; every decoder layer is right: look at the last norm and the output layer"
        alone = partial(_compare, engine_model, sequences[:1], reference)
        yield (log_probs := _row("log-probs", alone, hint if layers.status == "PASS" else ""))
        hint = "; the prompt alone is right: the sequences of a micro-batch affect each other"
        together = partial(_compare, engine_model, sequences, reference)
        yield _row("packed", together, hint if log_probs.status == "PASS" else "")
        if self.against is not None:
            hint = f"; the train engine is right: look at {self.against}"
            served = partial(self._served, engine_model, sequences[0])
            yield _row(SERVED, served, hint if log_probs.status == "PASS" else "")
        yield _row("gradients", partial(_gradients, engine_model, sequences, reference))

    def _tokenize(self) -> tuple[Any, list[int], CheckRow]:
        """Return the tokenizer, or ``None``, and tokens that the model has, whatever comes of the check."""
        size = text_config(self.hf)["vocab_size"]
        padding = text_config(self.hf).get("pad_token_id")  # has no gradient in transformers
        tokens = [token for token in made_up_tokens(size, 14) if token != padding][:13]
        try:
            tokenizer = load_tokenizer(self.config)
        except AnygaugeError as error:
            return None, tokens, CheckRow("tokenizer", "FAIL", _text(error))
        try:
            encoded = list(tokenizer.encode(self.prompt, add_special_tokens=False))
            back = tokenizer.decode(encoded)
        except Exception as error:  # noqa: BLE001 - foreign code: a tokenizer
            found = f"cannot encode the prompt: {error}; give a --prompt of its alphabet"
            return tokenizer, tokens, CheckRow("tokenizer", "FAIL", found)
        found = f"{len(encoded)} tokens, decoded to the same text"
        if beyond := [token for token in encoded if token >= size]:
            found = f"token {beyond[0]} is beyond the model's vocab_size of {size}"
            return tokenizer, tokens, CheckRow("tokenizer", "FAIL", found)
        if back != self.prompt:
            return tokenizer, encoded, CheckRow("tokenizer", "FAIL", f"decoded to {back!r}")
        if len(encoded) < 2:
            found = f"the prompt has {len(encoded)} tokens, and a log-prob needs 2: give a longer --prompt"
            return tokenizer, tokens, CheckRow("tokenizer", "FAIL", found)
        return tokenizer, encoded, CheckRow("tokenizer", "PASS", found)

    def _memory(self) -> CheckRow:
        with open_unquantized(self.directory) as source:
            weights = sum(_size(source.shape(name)) for name in source.names)
        needed, available = weights * BYTES_PER_WEIGHT, read_memory().available
        found = f"needs {needed:,} bytes for {weights:,} weights, {available:,} are available"
        if needed > available:
            raise _Stopped("memory", f"{found}; --layers N checks the first N layers")
        return CheckRow("memory", "PASS", found)

    def _load(self) -> TrainEngine:
        """Build the engine, whose optimizer leaves gradients in the place of the weights.

        So gradients come out under the names of the checkpoint, from every engine, sharded as it likes.
        """
        self.plugins.register(GradientOptimizer(), "check-model")
        spec = self.plugins.get("register_train_engines", self.config.train.engine)
        try:
            engine: TrainEngine = spec.make(self.config, self.context)
        except AnygaugeError as error:
            raise _Stopped("weights", _text(error)) from error
        return engine

    def _stored(self) -> int:
        with open_unquantized(self.directory) as source:
            return len(source.names)

    def _reference(self, sequences: Sequence[Sequence[int]]) -> tuple[Reference, CheckRow]:
        media, own = self.spec.media, transformers_model(self.spec)
        try:
            reference = run_reference(
                self.directory,
                sequences,
                forbidden=() if media is None else media.forbidden(self.hf),
                trust_remote_code=self.config.model.trust_remote_code,
                build=None if own is None else partial(own.build, text_config(self.hf), torch.float32),
            )
        except AnygaugeError as error:
            raise _Stopped("transformers", _text(error)) from error
        known = tuple(f"unexpected: {prefix}" for prefix in self._unused())
        problems = [each for each in reference.problems if not each.startswith(known or "\0")]
        if problems:
            return reference, CheckRow("transformers", "FAIL", listed(problems, SHOWN))
        return reference, CheckRow("transformers", "PASS", f"{reference.kind} has the same tensors")

    def _served(self, engine: TrainEngine, tokens: Sequence[int]) -> tuple[bool, str]:
        assert self.against is not None
        answer = served_response(self.config, self.context, self.against, tokens)
        actual = engine.log_probs(batch_of([[*tokens, *answer.tokens]], len(tokens)), temperature=1.0)
        error = largest((actual - torch.tensor(answer.log_probs)).abs())
        response = f"a response of {len(answer.tokens)} tokens"
        return error <= LOG_PROBS, f"largest difference {error:.2g} over {response} (limit {LOG_PROBS:g})"

    def _unused(self) -> tuple[str, ...]:
        """Return how names begin that a text run leaves out: of towers, and of what is never trained."""
        media = self.spec.media
        towers = () if media is None else media.towers(self.hf)
        of_towers = (prefix for tower in towers for prefix in tower.hf_prefixes)
        return (*self.spec.unused_weights(self.hf), *of_towers)

    def _round_trip(self, engine: TrainEngine, ignored: Sequence[str]) -> tuple[bool, str]:
        with open_unquantized(self.directory) as source:
            problems: list[str] = []
            exported: set[str] = set()
            turned: list[str] = []
            for name, tensor in engine.weights():
                known = name in source.names
                as_stored = transposed_to(source.shape(name), tensor) if known else tensor
                problems += _differences(name, as_stored, source, exported)
                turned += [name] if as_stored is not tensor else []
                exported.add(name)
            left = sorted(source.names - exported)
            prefixes = self._unused()
            lost = [
                name
                for name in left
                if not (name.startswith(prefixes or "\0") or any(re.search(each, name) for each in ignored))
                and not _is_copy(name, source, exported)
            ]
        problems += [f"{name} is not exported" for name in lost]
        more = f"; left out: {listed(left, SHOWN)}" if left and not lost else ""
        more += f"; transposed, as they are published: {listed(turned, SHOWN)}" if turned else ""
        found = f"{len(exported)} tensors come back with the same name, shape and values{more}"
        return not problems, listed(problems, SHOWN) or found


def _differences(name: str, tensor: Tensor, source: TensorReader, exported: Iterable[str]) -> Iterator[str]:
    if name in exported:
        yield f"{name} is exported twice"
    if name not in source.names:
        yield f"{name} is exported, and the checkpoint has no such tensor"
    elif list(tensor.shape) != list(source.shape(name)):
        yield f"{name} is exported as {list(tensor.shape)}, and is {list(source.shape(name))}"
    elif not torch.equal(tensor.cpu().float(), source(name).float()):
        yield f"{name} comes back with other values"


def _is_copy(name: str, source: TensorReader, exported: Iterable[str]) -> bool:
    """Return whether a tensor is one that was exported under another name, as a tied output layer is."""
    shape, tensor = list(source.shape(name)), source(name)
    return any(
        list(source.shape(other)) == shape and torch.equal(source(other), tensor)
        for other in exported
        if other in source.names
    )


def _render(tokenizer: Any, prompt: str) -> tuple[bool, str]:
    if tokenizer is None:
        return False, "there is no tokenizer"
    if not tokenizer.chat_template:
        return True, "none: prompts are texts"
    try:
        text = apply_template(
            tokenizer, [{"role": "user", "content": prompt}], None, generate=True, options={}
        )
    except TemplateRefusal as refusal:
        return False, f"it refused a message of the user: {refusal}"
    if prompt.strip() not in text:
        return False, f"it renders a message of the user without its text: {text!r}"
    return True, f"renders a message of the user, in {len(text)} characters"


# -------------------------------------------------------------------------
# Numbers
# -------------------------------------------------------------------------


def _compare(
    engine: TrainEngine, sequences: Sequence[Sequence[int]], reference: Reference
) -> tuple[bool, str]:
    actual = engine.log_probs(batch_of(sequences), temperature=1.0)
    expected = torch.cat(list(reference.log_probs[: len(sequences)]))
    error = largest((actual - expected).abs())
    tokens = f"{len(expected)} tokens" + (f" of {len(sequences)} sequences" if len(sequences) > 1 else "")
    return error <= LOG_PROBS, f"largest difference {error:.2g} over {tokens} (limit {LOG_PROBS:g})"


def _layers(engine: TrainEngine, tokens: Sequence[int], reference: Reference) -> tuple[bool, str]:
    """Compare layer by layer: with the inputs of the engine's own layers before, and with the reference's."""
    if not isinstance(engine, HasDecoderLayers):
        return True, "not compared: the engine does not show its layers"
    layers, names, expected = engine.decoder_layers(), reference.layer_names, reference.layers
    batch = batch_of([tokens])
    with record_layers(layers) as free:
        engine.log_probs(batch, temperature=1.0)
    if len(free.outputs) != len(names):
        return False, f"{len(free.outputs)} decoder layers ran, and {len(names)} of transformers"
    if (shape := free.inputs[0].shape) != expected.inputs[0].shape:
        return False, f"hidden states are {list(shape)}, and {list(expected.inputs[0].shape)} in transformers"
    scale = expected.inputs[0].norm(dim=1).clamp(min=torch.finfo().tiny)  # padding may have zeros
    start = largest((free.inputs[0] - expected.inputs[0]).norm(dim=1) / scale)
    if not start <= LAYERS:
        return False, f"the input of {names[0]} differs by {start:.2g} of it: look at the embedding"
    with record_layers(layers, given=expected.inputs) as fed:
        engine.log_probs(batch, temperature=1.0)
    errors = [layer_error(fed, expected, number) for number in range(len(layers))]
    wrong = [name for name, error in zip(names, errors, strict=True) if not error <= LAYERS]
    if not wrong:
        return True, f"{len(layers)} layers, largest difference {max(errors):.2g} of what a layer adds"
    return False, (
        f"{_first(free, expected, names)}; given transformers' inputs, {len(wrong)} of {len(layers)} differ: "
        f"{', '.join(wrong)}"
    )


def _first(actual: LayerRecord, expected: LayerRecord, names: Sequence[str]) -> str:
    """Say which layer is the first whose output differs, after the engine's own layers before it."""
    errors = [layer_error(actual, expected, number) for number in range(len(names))]
    first = next((number for number, error in enumerate(errors) if not error <= LAYERS), None)
    if first is None:
        return "none differs after the layers before it"
    by = largest((actual.outputs[first] - expected.outputs[first]).abs())
    return f"the first to differ is {names[first]}, by up to {by:.2g} ({errors[first]:.2g} of what it adds)"


def _gradients(
    engine: TrainEngine, sequences: Sequence[Sequence[int]], reference: Reference
) -> tuple[bool, str]:
    """Compare gradients, which are in the place of the weights after a step."""
    leave_gradients(engine, batch_of(sequences))
    expected = reference.gradients
    floor = FLOOR * max(float(each.norm()) for each in expected.values())
    errors = {
        name: gradient_error(tensor.cpu().float(), expected[name], floor)
        for name, tensor in engine.weights()
        if name in expected
    }
    if lost := sorted(expected.keys() - errors.keys()):
        return False, f"transformers has gradients that the engine does not: {listed(lost, SHOWN)}"
    worst = sorted(errors, key=lambda name: -errors[name])
    wrong = [f"{name} ({errors[name]:.2g})" for name in worst if errors[name] > GRADIENTS]
    found = f"{len(errors)} parameters, largest difference {errors[worst[0]]:.2g} of {worst[0]}"
    if wrong:
        found = f"{len(wrong)} of {len(errors)} parameters differ: {listed(wrong, SHOWN)}"
    return not wrong, f"{found} (limit {GRADIENTS:g})"


# -------------------------------------------------------------------------
# Text
# -------------------------------------------------------------------------


def _row(name: str, check: Callable[[], tuple[bool, str]], hint: str = "") -> CheckRow:
    """Make a check; an error of the project is a failure.

    :param hint: Added to what was found if it fails.
    """
    try:
        passed, found = check()
    except AnygaugeError as error:
        passed, found = False, _text(error)
    return CheckRow(name, "PASS" if passed else "FAIL", found if passed else found + hint)


def _text(error: AnygaugeError) -> str:
    return " ".join(str(error).split())


def _size(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
