"""One training run, from a checked config to a trained model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anygauge.config import Config
from anygauge.config.load import LoadedConfig
from anygauge.data.jsonl import evaluation_data
from anygauge.plugins import Plugins
from anygauge.rollout.rewards import resolve_reward
from anygauge.trainer.directory import open_run_directory
from anygauge.trainer.launch import launch_workers
from anygauge.trainer.loop import Loop, run_loop
from anygauge.trainer.signals import terminate_as_exception
from anygauge.trainer.state import RunState
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.rl import Prompt
from anygauge_hooks.types import RunInfo, Tracker

__all__ = ["train"]

ACTOR = "anygauge.trainer.actors:ActorWorker"


def train(loaded: LoadedConfig, plugins: Plugins) -> RunInfo:
    """Run a config to its end.

    Data and reward are checked before the run directory is made, and the directory before any process starts.

    :param loaded: From :func:`anygauge.config.load.load_config`.
    :returns: The run as it ended.
    """
    config = loaded.config
    tokenizer = load_tokenizer(config.model.path)
    source = plugins.get("register_data_sources", config.data.source).fn(
        config.data, tokenizer, config.run.seed, max_tokens=prompt_room(config, config.rollout.max_new_tokens)
    )
    eval_prompts = load_eval_prompts(config, plugins, tokenizer)
    reward = resolve_reward(config.reward.function, plugins, config.reward.options)
    advantage = plugins.get("register_advantage_estimators", config.algorithm.advantage)
    estimator = partial(advantage.fn, **config.algorithm.advantage_options)
    directory = open_run_directory(config, plugins.environment())
    info = RunInfo(
        name=config.run.name,
        directory=str(directory),
        backend=loaded.backend.name,
        total_steps=config.run.steps,
        config=config,
    )
    state = RunState(info)
    with terminate_as_exception(), ExitStack() as stack, observed(plugins, state):
        trackers = open_trackers(config, plugins, info, stack)
        workers = stack.enter_context(
            launch_workers(
                config, loaded.backend, plugins, worker_class=ACTOR, role="actor", run_directory=directory
            )
        )
        run_loop(Loop(config, plugins, workers, source, eval_prompts, reward, estimator, trackers, state))
        if config.run.save_hf:
            workers.call("save_hf", path=str(directory / "hf"))
    return state.info


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer of a Hugging Face directory.

    :raises CheckpointError: It has none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"transformers cannot load a tokenizer from {directory}: {error}",
            hint="The directory needs tokenizer.json and tokenizer_config.json.",
        ) from error


def load_eval_prompts(config: Config, plugins: Plugins, tokenizer: Any) -> Sequence[Prompt]:
    """Return the evaluation prompts, in file order."""
    if not config.eval.data:
        return ()
    make = plugins.get("register_data_sources", config.data.source).fn
    room = prompt_room(config, config.eval.max_new_tokens or config.rollout.max_new_tokens)
    source = make(evaluation_data(config), tokenizer, config.run.seed, max_tokens=room)
    prompts: list[Prompt] = source.all(config.eval.max_prompts)
    return prompts


def prompt_room(config: Config, max_new_tokens: int) -> int | None:
    """Return how many tokens of the model's context a response leaves to its prompt, if it has a limit."""
    hf = json.loads((config.model.path / "config.json").read_text(encoding="utf-8"))
    context = hf.get("max_position_embeddings")
    return max(0, context - max_new_tokens) if isinstance(context, int) else None


def open_trackers(config: Config, plugins: Plugins, info: RunInfo, stack: ExitStack) -> list[Tracker]:
    """Return the run's trackers; the stack closes them."""
    trackers = [plugins.get("register_trackers", name).make(info) for name in config.run.trackers]
    for tracker in trackers:
        stack.callback(tracker.close)
    return trackers


@contextmanager
def observed(plugins: Plugins, state: RunState) -> Iterator[None]:
    """Tell the observers of an error, and of the end, while the workers are still there."""
    try:
        yield
    except BaseException as error:
        plugins.notify("on_error", run=state.info, error=error)
        raise
    finally:
        plugins.notify("after_train", run=state.info)
