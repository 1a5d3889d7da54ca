"""A response of a served rollout engine to one prompt, for a comparison of its log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from anygauge.config import Config
from anygauge.config.schema import RolloutClient
from anygauge.config.validate import validate
from anygauge.runtime.event_loop import EventLoop
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation

if TYPE_CHECKING:
    from anygauge_hooks.engines import RolloutEngineSpec, WorkerContext

__all__ = ["served_response"]

TOKENS = 48
"""Length of the response."""


def served_response(config: Config, context: WorkerContext, engine: str, prompt: Sequence[int]) -> Generation:
    """Start a server with the model of a config, and return what it answers, with log-probs at temperature 1.

    :param config: With ``model.path`` and ``train.dtype``.
    :param engine: Name of a rollout engine that is a server.
    :raises ConfigError: It is none, or the model does not fit it.
    :raises RolloutError: It did not start, or did not answer.
    """
    spec: RolloutEngineSpec = context.plugins.get("register_rollout_engines", engine)
    if spec.serve is None:
        raise ConfigError(
            f"The rollout engine {engine!r} is not a server.",
            hint="Compare with transformers, or with a rollout engine that is one, such as sglang.",
        )
    with ExitStack() as stack:
        logs = stack.enter_context(TemporaryDirectory())  # an error has the end of the server's
        server = spec.serve(_served(config, engine, logs), context)
        stack.callback(server.close)
        loop = stack.enter_context(EventLoop())
        server.start()
        client = server.peer().client(RolloutClient(attempts=1), name=engine, images=None)
        params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True)
        try:
            return loop.run(client.generate(GenerateRequest("check-model", tuple(prompt), params, seed=0)))
        finally:
            loop.run(client.close())


def _served(config: Config, engine: str, directory: str) -> Config:
    """Return the config of a run with a server of the same model."""
    tree: dict[str, Any] = {
        "run": {"name": config.run.name, "directory": directory},
        "model": {"path": str(config.model.path), "trust_remote_code": config.model.trust_remote_code},
        "data": {"train": ["none"]},
        "train": {"dtype": config.train.dtype},
        "rollout": {"engine": engine, "max_batch_tokens": 4096},
        "placement": {"rollout_workers": 1},
    }
    checked = validate(tree)
    assert checked.config is not None, checked.problems
    return checked.config
