"""Rotary angles: default and scaled, of positions in one dimension and in three."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Rotary",
    "half_rotary",
    "interleaved_rotary",
    "magnitude",
    "of_layer_type",
    "rope_parameters",
    "turning_part",
    "yarn_factor",
]

Rotary = Callable[[Mapping[str, Any], "Tensor"], tuple["Tensor", "Tensor"]]
"""As ``ModelSpec.rotary``."""

_TRAINED_LENGTH = "original_max_position_embeddings"
_KNOW_TRAINED_LENGTH = ("llama3", "yarn")
"""Scalings that depend on the length that the model was trained with."""


def half_rotary(size: Callable[[Mapping[str, Any]], int]) -> Rotary:
    """Return the angles of a family in the half-rotated layout.

    :param size: Returns how many dimensions of a head turn.
    """

    def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of each position's angles (https://arxiv.org/abs/2104.09864 eq. 15).

        :param positions: ``[T]``, int64; or ``[3, T]`` of time, height and width, where the checkpoint says
            by which of them each pair of dimensions turns (https://arxiv.org/abs/2409.12191 section 2.1).
        :returns: Two ``[T, size]`` float32 tensors.
        :raises ConfigError: The checkpoint scales its angles in a way that is not implemented.
        """
        frequencies = _scaled_frequencies(hf, size(hf), positions)
        if positions.dim() == 2:
            positions = positions[_axes(rope_parameters(hf), len(frequencies))].t()
        else:
            positions = positions.unsqueeze(1)
        return _half_rotated(frequencies, positions, _yarn_magnitude(hf))

    return rotary


def interleaved_rotary(
    size: Callable[[Mapping[str, Any]], int], sections: Sequence[int], theta: float
) -> Rotary:
    """Return the angles of a decoder whose pairs always take turns.

    :param size: Returns how many dimensions of a head turn.
    :param sections: Pairs that turn by time, height and width, where a checkpoint does not say.
    :param theta: The base of the angles, where a checkpoint does not say.
    """
    halves = half_rotary(size)

    def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of each position's angles.

        :param positions: ``[T]`` or ``[3, T]``, int64.
        :returns: Two ``[T, size]`` float32 tensors.
        """
        key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
        given = {"mrope_section": sections, **(hf.get(key) or {}), "mrope_interleaved": True}
        return halves({"rope_theta": theta, **hf, key: given}, positions)

    return rotary


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the angles, whichever way the checkpoint writes them.

    transformers 5 keeps all in ``rope_parameters``; before, the base and the part of a head that turns were
    keys of the config itself. Where both are there, its order is kept (modeling_rope_utils.py,
    ``convert_rope_params_to_dict`` and ``standardize_rope_params``), so that rollouts have the same angles.
    """
    parameters = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] == "mrope":  # which scales nothing: mrope_section says the same
        parameters["rope_type"] = "default"
    for name, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", None)):
        parameters.setdefault(name, hf.get(name, default))
    if parameters["rope_type"] in _KNOW_TRAINED_LENGTH:
        if (trained := hf.get(_TRAINED_LENGTH)) is not None:
            parameters[_TRAINED_LENGTH] = trained
        elif _TRAINED_LENGTH not in parameters:
            parameters[_TRAINED_LENGTH] = hf["max_position_embeddings"]
    return parameters


def of_layer_type(hf: Mapping[str, Any], kind: str, theta: float) -> dict[str, Any]:
    """Return a config whose angles are those of one type of its layers.

    Checkpoints have the parameters of each type, or, as before transformers 5, a base for all and a scaling
    that is not of layers with a window.

    :param kind: One of ``layer_types``.
    :param theta: The base of the angles, where the parameters do not say.
    """
    given = dict((hf.get("rope_parameters") or {}).get(kind) or {"rope_type": "default"})
    scaling = hf.get("rope_scaling") if kind == "full_attention" else None
    parameters = {"rope_theta": theta, **given, **(scaling or {})}
    return {**hf, "rope_scaling": None, "rope_parameters": parameters}


def turning_part(hf: Mapping[str, Any], size: int, default: float) -> int:
    """Return how many dimensions of a head turn with the position.

    :param size: Size of the head.
    :param default: The part of them that turns if the checkpoint does not say.
    """
    part = rope_parameters(hf)["partial_rotary_factor"]
    return int(size * (default if part is None else part))


def _inverse_frequencies(theta: float, size: int, positions: Tensor) -> Tensor:
    """Return ``theta ** (-2 i / size)`` of each pair (https://arxiv.org/abs/2104.09864 equation 15).

    :param size: Dimensions of a head that turn.
    :param positions: Their device is taken.
    :returns: ``[size / 2]``, float32.
    """
    import torch

    # The powers are taken as transformers takes them, so that angles agree to the bit.
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device=positions.device).float() / size
    frequencies: Tensor = 1.0 / (theta**exponents)
    return frequencies


def _half_rotated(frequencies: Tensor, positions: Tensor, length: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the half-rotated layout, whose two halves are alike.

    :param frequencies: ``[R / 2]``.
    :param positions: ``[T, R / 2]`` or ``[T, 1]``, int64.
    :param length: Factor of both.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    import torch

    angles = positions.float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * length, angles.sin() * length


def _axes(parameters: Mapping[str, Any], pairs: int) -> list[int]:
    """Return by which axis each pair turns: 0 is time, 1 height, 2 width.

    ``mrope_section`` has the number of pairs of each. They follow one another, as in Qwen2-VL, or take turns
    from the first pair on, as in Qwen3-VL, where time takes those that are left.

    :raises ConfigError: The checkpoint does not say it, or not for all pairs.
    """
    sections = parameters.get("mrope_section")
    if sections is None or len(sections) != 3 or sum(sections) != pairs:
        raise ConfigError(
            f"The checkpoint has mrope_section {sections} for positions in time, height and width, "
            f"and {pairs} pairs of dimensions that turn.",
            hint=f"It has three numbers that add up to {pairs}.",
        )
    if parameters.get("mrope_interleaved"):
        return [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs)]
    return [axis for axis, size in enumerate(sections) for _ in range(size)]


def _scaled_frequencies(hf: Mapping[str, Any], size: int, positions: Tensor) -> Tensor:
    """Return the frequencies of a checkpoint.

    :param size: Dimensions of a head that turn.
    :raises ConfigError: The checkpoint scales its angles in another way.
    """
    parameters = rope_parameters(hf)
    kind = parameters["rope_type"]
    if kind not in ("default", *_SCALINGS):
        names = ", ".join(repr(name) for name in ("default", *_SCALINGS))
        raise ConfigError(
            f"Rotary scaling {kind!r} of the checkpoint is not supported; supported: {names}.",
            hint="Remove rope_scaling from config.json if the model is used within its trained length.",
        )
    if kind == "yarn":
        parameters["factor"] = yarn_factor(hf)
    frequencies = _inverse_frequencies(float(parameters["rope_theta"]), size, positions)
    return _SCALINGS[kind](frequencies, parameters) if kind in _SCALINGS else frequencies


def _linear(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    scaled: Tensor = frequencies / parameters["factor"]
    return scaled


def _llama3(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Return long wavelengths divided by a factor, short ones as they are, and those between mixed.

    Llama 3.1's scaling (https://arxiv.org/abs/2407.21783 names the base alone).
    """
    import torch

    factor, low, high = (parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = parameters[_TRAINED_LENGTH]
    wavelengths = 2 * math.pi / frequencies
    share = (trained / wavelengths - low) / (high - low)
    mixed = (1 - share) * frequencies / factor + share * frequencies
    scaled = torch.where(wavelengths > trained / low, frequencies / factor, frequencies)
    between = (wavelengths <= trained / low) & (wavelengths >= trained / high)
    return torch.where(between, mixed, scaled)


def _yarn(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Return long wavelengths divided by a factor, short ones as they are, and those between mixed by number.

    https://arxiv.org/abs/2309.00071 section 3.2: how often a pair turns within the trained length says which
    it is; the mix goes linearly with the number of the pair between the two bounds.
    """
    import torch

    size = 2 * len(frequencies)
    bounds = [
        _correction_dim(parameters.get(key) or turns, size, parameters)
        for key, turns in (("beta_fast", 32), ("beta_slow", 1))
    ]
    low, high = bounds
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    share = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    mixed: Tensor = frequencies / parameters["factor"] * share + frequencies * (1 - share)
    return mixed


def _correction_dim(turns: float, size: int, parameters: Mapping[str, Any]) -> float:
    """Return the number of the pair, with a fraction, that turns so often within the trained length."""
    trained, theta = parameters[_TRAINED_LENGTH], parameters["rope_theta"]
    return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))


def magnitude(factor: float, weight: float = 1.0) -> float:
    """Return how much larger queries and keys are made for a context that is longer by a factor."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_factor(hf: Mapping[str, Any]) -> float:
    """Return by how much YaRN lengthens the context of a checkpoint."""
    parameters = rope_parameters(hf)
    factor = parameters.get("factor")
    if factor is None:
        factor = hf["max_position_embeddings"] / parameters[_TRAINED_LENGTH]
    return float(factor)


def _yarn_magnitude(hf: Mapping[str, Any]) -> float:
    """Return what multiplies cosines and sines; 1 where a checkpoint does not have YaRN."""
    parameters = rope_parameters(hf)
    if parameters["rope_type"] != "yarn":
        return 1.0
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    some, every = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if some and every:
        return magnitude(yarn_factor(hf), some) / magnitude(yarn_factor(hf), every)
    return magnitude(yarn_factor(hf))


_SCALINGS: Mapping[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
