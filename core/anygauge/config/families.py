"""Family of a model: the one that a plugin registers, else one that the train engine makes of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import AnygaugeError, UnknownNameError
from anygauge_hooks.models import text_config

if TYPE_CHECKING:
    from anygauge_hooks.engines import TrainEngineSpec
    from anygauge_hooks.models import ModelSpec
    from anygauge_hooks.types import LoadedPlugins

__all__ = ["family", "with_defaults"]

_ENGINES = "register_train_engines"


def family(plugins: LoadedPlugins, hf: Mapping[str, Any], engine: str | None) -> ModelSpec:
    """Return the family of a model.

    :param hf: The Hugging Face config.
    :param engine: Name of the train engine: some build models that no plugin knows. ``None`` is no such one.
    :raises UnknownNameError: No plugin knows its architecture, and the engine does not build it.
    :raises DuplicateNameError: Two families claim it.
    """
    try:
        return plugins.model(hf.get("architectures") or ())
    except UnknownNameError as error:
        spec: TrainEngineSpec | None = plugins.find(_ENGINES, engine) if engine else None
        if spec is not None and spec.make_family is not None:
            return spec.make_family(hf)
        if others := list(_other_engines(plugins, hf)):
            raise UnknownNameError(
                error.args[0],
                hint=f"train.engine = {others[0]!r} trains it without one. "
                "docs/hooks.md, register_models, shows how to add a family.",
            ) from error
        raise


def with_defaults(plugins: LoadedPlugins, hf: Mapping[str, Any], engine: str) -> Mapping[str, Any]:
    """Return the config of a model's text part with the defaults of its family, or as written without one.

    :param hf: The Hugging Face config.
    :param engine: As of :func:`family`.
    """
    try:
        return family(plugins, hf, engine).read_config(hf)
    except (AnygaugeError, KeyError, TypeError, ValueError, AttributeError):
        return text_config(hf)


def _other_engines(plugins: LoadedPlugins, hf: Mapping[str, Any]) -> Iterator[str]:
    """Yield the train engines that build a model which no plugin knows."""
    for name, spec in plugins.named(_ENGINES).items():
        if spec.make_family is None:
            continue
        try:
            spec.make_family(hf)
        except AnygaugeError:
            continue
        yield name
