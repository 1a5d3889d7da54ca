"""Start options of a fake engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from anygauge_tests.fake_engine.lengths import parse_lengths

__all__ = ["VERSIONS", "Options", "parse_options"]

VERSIONS = ("0.5.17", "0.5.23")
"""SGLang versions whose differences are played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A fake engine: what it says it is, and how fast it is."""

    sglang: str = "0.5.23"
    """Version whose API it has."""
    model_path: str = "fake"
    """Said in ``/model_info``, as is the next; nothing is read from it at start."""
    tokenizer_path: str = ""
    """Empty takes ``model_path``."""
    architecture: str = "Qwen3ForCausalLM"
    vocab_size: int = 32768
    """Prompts use the lower half, responses the upper half."""
    context_length: int = 131072
    """Prompt and response together, in tokens."""
    weight_version: str = "default"
    """Weight version before the first update."""
    device: str = "cpu"
    """Type of the device that weights are broadcast to."""
    tp_size: int = 1
    """Processes that split the model; each has a store of weights of its own."""
    dp_size: int = 1
    """Data-parallel ranks, each with its own slots."""
    slots: int = 64
    """Requests that one rank generates at once; others wait in its queue."""
    start_s: float = 0.0
    """Seconds from the request's start in a slot to its first token; again after it was retracted."""
    token_s: float = 0.001
    """Seconds from one token to the next."""
    lengths: str = "uniform:16:128"
    """Distribution of response lengths in tokens; see :func:`parse_lengths`."""
    health_s: float = 0.005
    """How long ``/health`` takes; the real one takes one second."""
    health_timeout_s: float = 20.0
    """Seconds after which ``/health`` gives up, as it does while the engine is paused."""
    profile_s: float = 0.0
    """How long a profile takes to be written; ``/health`` fails meanwhile."""
    abort_poll_s: float = 0.02
    """Between the looks of a pause with aborts at what still runs; the real one takes one second."""
    disconnect_s: float = 4.0
    """Until a request is ended whose client has gone, as the real one does without an abort."""
    skip_tokenizer: bool = False
    """Answer without text (``--skip-tokenizer-init``)."""
    disaggregation: str = "null"
    """``prefill`` reads prompts for others, ``decode`` writes what follows those that others have read."""
    bootstrap_s: float = 5.0
    """How long one half of a request waits for the other."""
    image_token: int = -1
    """Token of a prompt that stands for one image."""
    image_factor: int = 32
    """Pixels, in height and in width, of what becomes one token."""
    api_key: str = ""
    """Asked for as SGLang does; empty lets everybody in, as does the next."""
    admin_api_key: str = ""
    adapter: str = ""
    """Name of the adapter that every request must ask for; empty plays a server without ``--enable-lora``."""
    faults: str = ""
    """Faults that occur by themselves, such as ``die@generate:20,refuse@update:1``; see :class:`Faults`."""


_HELP = {
    "sglang": f"version whose API is played: {', '.join(VERSIONS)}",
    "lengths": "fixed:N, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA or "
    "longtail:SHORT:LONG:SHARE, in tokens",
    "faults": "KIND@EVENT:COUNT[:ARGUMENT], separated by commas",
}


def parse_options(arguments: Sequence[str] | None = None) -> tuple[Options, argparse.Namespace]:
    """Return the options of a command line, and what else it says: host, port, parent and lifeline."""
    parser = argparse.ArgumentParser(prog="python -m anygauge_tests.fake_engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; the address is printed")
    parser.add_argument("--parent", type=int, default=0, help="process id with which this one dies")
    parser.add_argument("--lifeline", action="store_true", help="end with standard input")
    for field in fields(Options):
        _add(parser, field.name, field.default)
    parsed = parser.parse_args(arguments)
    options = Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)})
    if options.sglang not in VERSIONS:
        parser.error(f"--sglang {options.sglang} is none of {', '.join(VERSIONS)}")
    parse_lengths(options.lengths)
    return options, parsed


def _add(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_true", default=default)
    else:
        parser.add_argument(flag, type=type(default), default=default, help=_HELP.get(name))
