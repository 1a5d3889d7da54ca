"""Transformers' model of a Hugging Face directory in float32, and what it computes of sequences of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.engines.dequantize import open_unquantized
from anygauge.engines.fsdp.model import decoder_layers
from anygauge.serving.embedded.weights import copy_weights, read_weights
from anygauge_hooks.errors import ConfigError, WeightMappingError

__all__ = ["LayerRecord", "Reference", "record_layers", "run_reference"]


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """Hidden states of one sequence around each decoder layer, by number of the layer."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    """``[T, H]``, float32, on the host; and so are the outputs."""
    outputs: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Results of transformers' model."""

    kind: str
    """Name of its class."""
    problems: Sequence[str]
    """Tensors that the checkpoint and the model do not share."""
    ignored: Sequence[str]
    """Patterns of tensors that a checkpoint may have and the model does not need."""
    log_probs: Sequence[Tensor]
    """``[T - 1]`` of each sequence, float32: those of every token after the first."""
    layer_names: Sequence[str]
    layers: LayerRecord
    """Hidden states of the first sequence."""
    gradients: Mapping[str, Tensor]
    """Those of the mean negative log-prob over all sequences, by name of the checkpoint."""


def run_reference(
    directory: Path,
    sequences: Sequence[Sequence[int]],
    *,
    forbidden: Sequence[int],
    trust_remote_code: bool,
    build: Callable[[], Any] | None = None,
) -> Reference:
    """Load transformers' model and run it over each sequence by itself.

    :param sequences: Token ids, at least two each.
    :param forbidden: Tokens that are never sampled: log-probs are over the others.
    :param build: Builds the model where transformers has no class for it.
    :raises ConfigError: Transformers cannot build or load it.
    """
    model, problems = _load(directory, trust_remote_code) if build is None else _filled(build(), directory)
    named = {id(module): name for name, module in model.named_modules()}
    layers = decoder_layers(model)
    with torch.no_grad(), record_layers(layers) as record:
        _log_probs(model, sequences[0], forbidden)
    # A model of text and images has layers of its towers too, which did not run.
    names = [named[id(layer)] for number, layer in enumerate(layers) if number in record.outputs]
    log_probs = [_log_probs(model, sequence, forbidden) for sequence in sequences]
    torch.autograd.backward(torch.cat(log_probs).mean().neg())
    return Reference(
        kind=type(model).__name__,
        problems=problems,
        ignored=tuple(model._keys_to_ignore_on_load_unexpected or ()),
        log_probs=[each.detach() for each in log_probs],
        layer_names=names,
        layers=LayerRecord(_renumbered(record.inputs), _renumbered(record.outputs)),
        gradients=_gradients(model),
    )


def _load(directory: Path, trusted: bool) -> tuple[Any, list[str]]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trusted}
    source: Path | None = directory
    try:
        config = AutoConfig.from_pretrained(directory, **options)
        sees = AutoModelForImageTextToText._model_mapping
        is_text = type(config) in AutoModelForCausalLM._model_mapping or type(config) not in sees
        auto: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        if getattr(config, "quantization_config", None) is not None:
            auto, source = auto._model_mapping[type(config)], None
            options |= _dequantized(directory, config)
        model, info = auto.from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"transformers cannot load the model of {directory}: {error}",
            hint="Compare config.json with the weights, or install a release that knows the architecture.",
        ) from error
    kinds = {
        "missing": "missing_keys",
        "unexpected": "unexpected_keys",
        "of the wrong shape": "mismatched_keys",
    }
    problems = [
        f"{kind}: {name}" for kind, key in kinds.items() for name in sorted(map(str, info.get(key, ())))
    ]
    return model.eval(), problems


def _dequantized(directory: Path, config: Any) -> dict[str, Any]:
    """Return what an FP8 model is loaded from; transformers' own reader needs blocks that divide the weights.

    :param config: Loses its ``quantization_config``.
    """
    del config.quantization_config
    with open_unquantized(directory) as source:
        return {"config": config, "state_dict": {name: source(name) for name in source.names}}


def _filled(model: Any, directory: Path) -> tuple[Any, list[str]]:
    """Return a model with the weights of a directory."""
    try:
        copy_weights(model, read_weights(directory))
    except WeightMappingError as error:
        return model.eval(), [str(error)]
    return model.eval(), []


def _log_probs(model: Any, tokens: Sequence[int], forbidden: Sequence[int]) -> Tensor:
    ids = torch.tensor([tokens])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    if forbidden:
        logits = logits.index_fill(-1, torch.tensor(forbidden), -torch.inf)
    result: Tensor = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return result


def _gradients(model: Any) -> Mapping[str, Tensor]:
    """Return the gradients under the names of the checkpoint, where experts may be one tensor each."""
    from transformers.core_model_loading import revert_weight_conversion

    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    result: Mapping[str, Tensor] = revert_weight_conversion(model, gradients)
    return result


def _renumbered(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {place: tensors[number] for place, number in enumerate(sorted(tensors))}


@contextmanager
def record_layers(
    layers: Sequence[nn.Module], given: Mapping[int, Tensor] | None = None
) -> Iterator[LayerRecord]:
    """Record the hidden states before and after each layer that runs inside of the block.

    :param layers: Decoder layers, whose first argument or ``hidden_states`` and first result are the states
        of one sequence, in any layout whose last dimension is ``H``.
    :param given: Inputs ``[T, H]`` that each layer gets in the place of the layer before's output.
    """
    record = LayerRecord()

    def before(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        record.inputs[number] = _flat(states)
        if given is None:
            return None
        states = given[number].reshape(states.shape).to(states)
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    def after(number: int, output: Any) -> None:
        record.outputs[number] = _flat(output[0] if isinstance(output, tuple) else output)

    hooks = []
    for number, layer in enumerate(layers):
        hooks += [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: before(number, args, kwargs), with_kwargs=True
            ),
            layer.register_forward_hook(lambda _, __, output, number=number: after(number, output)),
        ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


def _flat(states: Tensor) -> Tensor:
    return states.detach().flatten(0, -2).float().cpu().clone()
