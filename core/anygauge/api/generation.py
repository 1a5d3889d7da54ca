"""``anygauge.generate``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.api.call import Call, check_keywords, rows_of
from anygauge.api.run_view import RunView
from anygauge.api.settings import tree_of
from anygauge.api.short_errors import short_errors
from anygauge.api.start import load_evaluation
from anygauge.config.rules.file import INPUTS
from anygauge.config.tree import Tree, flatten, merge
from anygauge.migrate.table import foreign_keys
from anygauge.observability.terminal_warnings import terminal_warnings
from anygauge_hooks.errors import ConfigError, DataError

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["generate"]

OF_RUN: Mapping[str, Sequence[str]] = {
    "run": ("seed",),
    "model": ("trust_remote_code",),
    "hub": ("source", "endpoint", "offline", "cache"),
    "data": ("apply_chat_template", "chat_template_kwargs", "system_prompt"),
    "rollout": (
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "stop_token_ids",
        "max_batch_tokens",
    ),
}
"""Keys of a run's config that decide how its model answers."""

SCORED = "Leave it out: responses are not scored."
ROWS = "Leave it out: prompts have no further columns."
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("rollout.samples_per_prompt", "eval.samples_per_prompt"), "Write samples_per_prompt=4."),
    "rollout.temperature": "Write temperature=0.5.",
    "rollout.top_p": 'Write eval={"top_p": 0.9}.',
    "rollout.top_k": 'Write eval={"top_k": 20}.',
    **dict.fromkeys(("data", "data.train", "eval.data", "eval.datasets"), "Give the texts as prompts."),
    **dict.fromkeys(("eval.max_prompts", "data.max_prompt_tokens"), "Leave it out: each prompt is answered."),
    **dict.fromkeys(("data.input_key", "data.label_key", "data.metadata_key", "data.tools_key"), ROWS),
    **dict.fromkeys(("reward", "reward.function", "reward.parts"), SCORED),
}
"""Keys that :func:`generate` does not use, and what to do instead of giving them."""
ARGUMENTS: Mapping[str, Sequence[str]] = {
    "max_new_tokens": ("rollout.max_new_tokens", "eval.max_new_tokens"),
    "temperature": ("eval.temperature",),
    "seed": ("run.seed",),
}
"""Keys that the arguments of :func:`generate` replace."""


@short_errors()
@terminal_warnings()
def generate(
    source: str | Path | Mapping[str, Any] | Config | RunView,
    prompts: str | Sequence[Any],
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    samples_per_prompt: int = 1,
    seed: int | None = None,
    backend: str | None = None,
    **tables: Any,
) -> list[str]:
    """Return responses of a model to prompts.

    Each call starts an engine, so give all prompts at once. A prompt that is a list of messages is rendered
    with the chat template; a string is given to the model as it is, unless
    ``data={"apply_chat_template": True}``.

    Example::

        generate("Qwen/Qwen3-0.6B", [[{"role": "user", "content": "What is 37+58?"}]], max_new_tokens=64)

    :param source: A model: a directory, a name on a hub, or a run that trained it; or a config, as of
        :func:`anygauge.train`.
    :param prompts: Prompts, or a single one.
    :param max_new_tokens: ``None`` takes ``rollout.max_new_tokens``: 256, or that of the run.
    :param temperature: ``0`` decodes greedily; ``None`` takes 1, or ``rollout.temperature`` of the run.
    :param samples_per_prompt: Responses to each prompt.
    :param seed: Seeds the sampling; ``None`` takes ``run.seed``.
    :param tables: Tables of the config, and single keys by dotted name; those that would have no effect on
        the responses of a call, such as ``rollout.samples_per_prompt``, are refused.
    :returns: The responses in the order of the prompts; those to one prompt follow each other.
    :raises AnygaugeError: With the codes of ``docs/errors.md``.
    """
    check_keywords(generate, tables)
    _check_used(tables, {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed})
    of_run = _settings_of(source.config) if isinstance(source, RunView) else {}
    rows = list(rows_of(prompts))
    if not rows:
        return []
    call = Call.of(source, tables, reward=_unscored, eval_data={"prompts": rows})
    call.lay_below(of_run)
    call.name_it("generation")
    call.put(tree_of(_sampling(max_new_tokens, temperature, samples_per_prompt, seed), call.functions.name))
    with tempfile.TemporaryDirectory(prefix="anygauge-rows-") as folder, _no_keys_of_rows():
        base, overrides = call.layers(Path(folder, INPUTS))
        evaluation = load_evaluation(
            base, overrides, say=lambda _: None, backend=backend, plugins={"anygauge.python": call.functions}
        )
        from anygauge.trainer.evaluation_run import generate_samples

        groups = generate_samples(evaluation.loaded.config, evaluation.loaded.plugins)
    return [sample.text for group in groups for sample in group.samples]


def _check_used(tables: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Refuse keys that a call does not use; a config may have them, for its training.

    :param arguments: Values by name, ``None`` where the caller gave none.
    :raises ConfigError: Names the key and what to write instead.
    """
    keys = {".".join(path.split(".")[:2]): path for path, value in flatten(tables).items() if value != {}}
    for key, path in keys.items():
        if hint := INSTEAD.get(key) or _foreign_hint(key):
            raise ConfigError(f"generate() does not use {path}.", hint=hint)
    for name, replaced in ARGUMENTS.items():
        for key in replaced:
            if arguments[name] is not None and key in keys:
                raise ConfigError(f"generate() is given both {name} and {key}.", hint="Give one of them.")


def _foreign_hint(name: str) -> str:
    """Return what to write for an argument of another project, if this is one that samples."""
    if name == "num_return_sequences":  # of transformers, which no run is imported from
        return INSTEAD["rollout.samples_per_prompt"]
    known = {**INSTEAD, "rollout.max_new_tokens": "Write max_new_tokens=64."}
    meanings = [key for _, row in foreign_keys(name) for key in row.keys]
    return next((known[key] for key in meanings if key in known), "")


def _sampling(
    max_new_tokens: int | None, temperature: float | None, samples_per_prompt: int, seed: int | None
) -> Tree:
    evaluation: Tree = {"samples_per_prompt": samples_per_prompt}
    if temperature is not None:
        evaluation["temperature"] = temperature
    if max_new_tokens is not None:
        evaluation["max_new_tokens"] = max_new_tokens
    # The rows have a prompt and nothing else, and each of them is answered.
    unused = ("label_key", "metadata_key", "tools_key", "max_prompt_tokens")
    data = {"input_key": "prompt"} | dict.fromkeys(unused, "none")
    tree: Tree = {"eval": {"max_prompts": "none", **evaluation}, "data": data}
    return tree if seed is None else merge(tree, {"run": {"seed": seed}})


@contextmanager
def _no_keys_of_rows() -> Iterator[None]:
    """Let no error advise keys of ``[data]`` that :func:`generate` refuses."""
    try:
        yield
    except DataError as error:
        if "data." in (error.hint or ""):
            error.hint = "Correct these prompts, or leave them out."
        raise


def _settings_of(config: Config) -> Tree:
    tree = config.model_dump(mode="json")
    settings = {section: {key: tree[section][key] for key in keys} for section, keys in OF_RUN.items()}
    return {**settings, "eval": {key: tree["rollout"][key] for key in ("temperature", "top_p", "top_k")}}


def _unscored(response: str) -> float:
    """Stand for the reward that a config needs; it is never called."""
    return 0.0
