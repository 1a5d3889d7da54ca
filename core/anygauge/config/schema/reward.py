"""Scoring."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from anygauge.config.schema.section import NonNegative, Positive, Seconds, Section

__all__ = ["Reward", "RewardFunction", "RewardPart"]


class RewardFunction(Section):
    """A reward function, and how it is called."""

    function: str | None = None
    """A registered name (``exact_match``, ``math``), or ``package.module:function``."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    key: str | None = None
    """Key of the reward in a result that is a dict."""
    scope: Literal["sample", "group"] = "sample"
    """Input of a call: one response, or the responses of a group as a list."""
    extract: Literal["none", "boxed"] = "none"
    """``boxed`` gives the function what is in the last ``\\boxed{}`` of a response alone; without a box, an
    empty string."""


class RewardPart(RewardFunction):
    """One of several rewards that are added up."""

    function: str
    """A registered name (``exact_match``, ``math``), or ``package.module:function``."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class Reward(RewardFunction):
    """Scoring."""

    parts: dict[str, RewardPart] = {}
    """Several rewards by name, summed with their weights; instead of ``function``."""
    overlong_buffer: NonNegative = 0
    """Tokens before ``max_new_tokens`` over which a penalty grows from 0; 0 is off."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Penalty for a response that fills ``max_new_tokens``."""
    num_workers: Positive = 1
    """Processes that run functions which may be slow or may crash."""
    concurrency: Positive = 64
    """Concurrent calls of an ``async`` function in one process."""
    timeout_s: Seconds = 30.0
    """Longest time for one sample, or one group."""
    pass_env: list[str] = []
    """Variables of the environment with keys, such as ``["OPENAI_API_KEY"]``, that reward processes get."""
    memory_gib: Annotated[float, Field(ge=0.125, le=2**20)] = 4.0
    """Memory limit of a scoring process, which takes up to 0.1 before it imports a function of yours."""
    max_failed_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of a step's samples that may fail to be scored; they are left out. More end the run."""
