"""A rank of one side of a comparison: it records what a model computes, or compares it with a record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.config import Config
from anygauge.distributed.layout import layout_of
from anygauge.engines.hf_directory import read_config
from anygauge.kernels.observer import ResolvedKernel, observe_kernels
from anygauge.kernels.table import resolve_kernels
from anygauge.testing.model_numbers import (
    FLOOR,
    GradientOptimizer,
    batch_of,
    gradient_error,
    largest,
    layer_error,
    leave_gradients,
    made_up_tokens,
    turned_sequences,
)
from anygauge.testing.model_reference import LayerRecord, record_layers
from anygauge.testing.parity.chosen_kernels import ChosenKernels
from anygauge.testing.parity.differences import Difference, limits_of
from anygauge.testing.parity.kernel_calls import CallRecorder, Outcome, errors_of, limit_of, repeat_call
from anygauge.trainer.inputs import load_tokenizer
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import HasDecoderLayers, TrainEngine, TrainEngineSpec, WorkerContext
from anygauge_hooks.errors import AnygaugeError, NonFiniteError
from anygauge_hooks.models import text_config

__all__ = ["ParityWorker"]

MADE_UP = 37
"""Tokens of a prompt for a model without a tokenizer."""
_NUMBER = re.compile(r"\.layers\.(\d+)\.")
_TRACE, _GRADIENTS = "trace.pt", "gradients.pt"

ModuleOutputs = Mapping[tuple[int, str], Tensor]
"""First result of each module inside of a decoder layer, by the number of the layer and its name in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """Results of a forward pass over the first sequence, on a side with one rank."""

    engine: str
    dtype: str
    layers: LayerRecord
    modules: ModuleOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """A repeated call, and what served it."""

    source: str
    limit: float
    outcome: Outcome


class ParityWorker:
    """Runs a model over a few sequences, forward and backward.

    :param directory: Directory of this side's record.
    :param prompt: Text of the first sequence.
    :param sequences: Their number, at least one for each data-parallel rank.
    :param traces: Whether layers and calls of kernels are recorded, of a side with one rank.
    :param kernels: A word in the sources of the kernels to prefer.
    """

    def __init__(
        self,
        config: Config,
        context: WorkerContext,
        *,
        directory: str,
        prompt: str,
        sequences: int,
        traces: bool,
        kernels: str | None,
    ) -> None:
        self.config, self.context = config, context
        self.directory, self.traces = Path(directory), traces
        self.dtype = str(config.train.dtype)
        layout = layout_of(config)
        every = turned_sequences(_tokens(config, prompt), sequences)
        self._mine = range(len(every))[layout.dp_rank(context.rank) :: layout.data]
        self._reports = context.rank in layout.reporting_ranks()
        self.sequences = [every[number] for number in self._mine]
        self._total = sum(len(each) - 1 for each in every)
        context.plugins.register(GradientOptimizer(), "parity")  # type: ignore[attr-defined]
        if kernels is not None:
            context.plugins.register(ChosenKernels(kernels), "parity kernels")  # type: ignore[attr-defined]
        self.recorder = CallRecorder(self.directory, self.dtype)
        spec: TrainEngineSpec = context.plugins.get("register_train_engines", config.train.engine)
        with observe_kernels(self.recorder):
            self.engine: TrainEngine = spec.make(config, context)

    def log_probs(self) -> dict[int, list[float]]:
        """Return the log-probs of this rank's sequences, by number of the sequence; none on a silent rank."""
        values = self.engine.log_probs(batch_of(self.sequences), temperature=1.0)
        if not self._reports:
            return {}
        parts = torch.split(values, [len(each) - 1 for each in self.sequences])
        return {number: part.tolist() for number, part in zip(self._mine, parts, strict=True)}

    # -------------------------------------------------------------------------
    # The first side
    # -------------------------------------------------------------------------

    def record(self) -> None:
        """Write what this side computes; its weights are gradients afterwards."""
        if self.traces:
            trace = self._trace(None)
            torch.save(trace, self.directory / _TRACE)
        with self._recorded_calls():
            leave_gradients(self.engine, self._batch())
        self._save_gradients()
        for file in self.recorder.files() if self.traces else ():
            call = torch.load(file, weights_only=False)
            torch.save((call, self._repeat(call)), file)

    def _save_gradients(self) -> None:
        names, floor = {}, 0.0
        for number, (name, tensor) in enumerate(self.engine.weights()):
            if self.context.rank == 0:
                gradient = tensor.detach().cpu().float()
                names[name] = f"gradient-{number:06}.pt"
                torch.save(gradient.clone(), self.directory / names[name])
                floor = max(floor, FLOOR * float(gradient.norm()))
        if self.context.rank == 0:
            torch.save((names, floor), self.directory / _GRADIENTS)

    # -------------------------------------------------------------------------
    # The second side
    # -------------------------------------------------------------------------

    def compare(self, record: str, dtype: str) -> list[Difference]:
        """Compare what this side computes with the record of the other; the first rank returns differences.

        :param record: Directory of the other side.
        :param dtype: Dtype of the other side.
        """
        other = Path(record)
        differences: list[Difference] = []
        if self.traces:
            differences += self._compare_layers(torch.load(other / _TRACE, weights_only=False))
            for number, file in enumerate(sorted(other.glob("call-*.pt"))):
                differences.append(self._compare_call(number, *torch.load(file, weights_only=False)))
        differences += self._compare_gradients(other, limits_of(dtype, self.dtype).gradients)
        return differences

    def _compare_layers(self, other: _Trace) -> Iterator[Difference]:
        """Compare layers that get the other side's inputs, and the modules in them."""
        mine, limit = self._trace(other.layers.inputs), limits_of(other.dtype, self.dtype).states
        if not other.layers.inputs or not mine.layers.inputs:
            return  # an engine shows no layers
        embedded, expected = mine.layers.inputs[0], other.layers.inputs[0]
        yield Difference(
            kind="layer", name="embedding", forward=_token_error(embedded, expected), limit=limit
        )
        if mine.engine == other.engine:
            yield from _module_differences(mine.modules, other.modules, limit)
        for number in other.layers.outputs:
            error = layer_error(mine.layers, other.layers, number)
            place = f"layer {number}"
            yield Difference(
                kind="layer", name="decoder layer", layer=number, place=place, forward=error, limit=limit
            )

    def _compare_gradients(self, other: Path, limit: float) -> Iterator[Difference]:
        try:
            leave_gradients(self.engine, self._batch())
        except NonFiniteError:
            yield Difference(kind="parameter", name="all", gradient=torch.inf, limit=limit)
            return
        mine = self.engine.weights()
        if self.context.rank:
            for _ in mine:
                pass  # the tensors are gathered together
            return
        names, floor = torch.load(other / _GRADIENTS, weights_only=False)
        errors = dict.fromkeys(names, torch.inf)
        for name, tensor in mine:
            if name in names:
                expected = torch.load(other / names[name])
                errors[name] = gradient_error(tensor.detach().cpu().float(), expected, floor)
        for name, error in errors.items():
            layer = _NUMBER.search(name)
            yield Difference(
                kind="parameter",
                name=_numberless(name.removeprefix("model.").removesuffix(".weight")),
                layer=int(layer[1]) if layer else -1,
                place=name,
                gradient=error,
                limit=limit,
            )

    def _compare_call(self, number: int, call: Any, other: _Served) -> Difference:
        mine = self._repeat(call)
        forward, gradient = errors_of(mine.outcome, other.outcome)
        where = f"layer {call.layer}" if 0 <= call.layer < len(self._layers()) else "outside of the layers"
        return Difference(
            kind="op",
            name=call.op,
            layer=call.layer,
            place=f"{where}, call {number} of a kernel",
            forward=forward,
            gradient=gradient,
            limit=mine.limit + other.limit,
            sources=(other.source, mine.source),
        )

    # -------------------------------------------------------------------------
    # Both
    # -------------------------------------------------------------------------

    def _batch(self) -> TrainBatch:
        batch = batch_of(self.sequences)
        batch.loss_weights = torch.full((len(batch.loss_mask),), 1 / self._total)
        return batch

    def _layers(self) -> Sequence[nn.Module]:
        return self.engine.decoder_layers() if isinstance(self.engine, HasDecoderLayers) else ()

    def _trace(self, given: Mapping[int, Tensor] | None) -> _Trace:
        layers = self._layers()
        with record_layers(layers, given) as record, _record_modules(layers) as modules:
            self.engine.log_probs(batch_of(self.sequences[:1]), temperature=1.0)
        return _Trace(engine=self.config.train.engine, dtype=self.dtype, layers=record, modules=modules)

    @contextmanager
    def _recorded_calls(self) -> Iterator[None]:
        """Record the calls of kernels inside of the block, with the layer that they are in."""
        recorder, layers = self.recorder, self._layers()

        def reach(number: int) -> None:
            recorder.layer = number

        with ExitStack() as stack:
            for number, layer in enumerate(layers):
                before = layer.register_forward_pre_hook(lambda *_, number=number: reach(number))
                after = layer.register_forward_hook(lambda *_, number=number: reach(number + 1))
                stack.callback(before.remove)
                stack.callback(after.remove)
            recorder.is_on = self.traces
            yield
            recorder.is_on = False

    def _repeat(self, call: Any) -> _Served:
        resolved = self._resolved(call)
        outcome = repeat_call(resolved.fn, call, self.dtype_of(call), self.context.device.torch_device)
        limit = limit_of(resolved.kernel, resolved.dtype)
        return _Served(source=resolved.kernel.source, limit=limit, outcome=outcome)

    def dtype_of(self, call: Any) -> str:
        """Return the dtype of a call on this side: what is wider than the run's on one is so on the other."""
        return call.dtype if call.dtype != call.run_dtype else self.dtype

    def _resolved(self, call: Any) -> ResolvedKernel:
        dtype = self.dtype_of(call)
        if found := self.recorder.find(call.op, dtype, call.facts):
            return found
        finder = CallRecorder(self.directory, self.dtype)
        with observe_kernels(finder):
            table = resolve_kernels(self.context.plugins, self.context.backend)
            table.resolve(call.op, dtype=dtype, **dict(call.facts))
        found = finder.find(call.op, dtype, call.facts)
        assert found is not None
        return found


def _tokens(config: Config, prompt: str) -> list[int]:
    """Return the tokens of a prompt, or some that the model has."""
    size = text_config(read_config(config.model.path))["vocab_size"]
    try:
        tokens = list(load_tokenizer(config).encode(prompt, add_special_tokens=False))
    except AnygaugeError:
        tokens = []
    except Exception:  # noqa: BLE001 - foreign code: a tokenizer
        tokens = []
    return tokens if len(tokens) > 1 and max(tokens) < size else made_up_tokens(size, MADE_UP)


@contextmanager
def _record_modules(layers: Sequence[nn.Module]) -> Iterator[dict[tuple[int, str], Tensor]]:
    """Record the first result of each module inside of the layers that runs inside of the block."""
    outputs: dict[tuple[int, str], Tensor] = {}

    def after(key: tuple[int, str], given: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if given and first is given[0]:
            return  # a place of the layer that nothing fills
        if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1:
            outputs[key] = first.detach().flatten(0, -2).float().cpu().clone()

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            for name, module in layer.named_modules():
                key = (number, name)
                if name:
                    hook = module.register_forward_hook(lambda _, args, out, key=key: after(key, args, out))
                    stack.callback(hook.remove)
        yield outputs


def _module_differences(mine: ModuleOutputs, other: ModuleOutputs, limit: float) -> Iterator[Difference]:
    for (number, name), expected in other.items():
        if (number, name) in mine:
            yield Difference(
                kind="module",
                name=_numberless(name),
                layer=number,
                place=f"layer {number}",
                forward=_token_error(mine[number, name], expected),
                limit=limit,
            )


def _token_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a token's values, by norm."""
    if actual.shape != expected.shape:
        return torch.inf
    if not expected.numel():
        return 0.0
    scale = expected.norm(dim=1)
    scale = scale.maximum(FLOOR * scale.max()).clamp(min=torch.finfo().tiny)
    return largest((actual - expected).norm(dim=1) / scale)


def _numberless(name: str) -> str:
    """Return the name of a module or parameter without the numbers of its layer and expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
