"""Rollout control, from prompts to the groups of a step: rollouts, filters, partial samples.

It works on any :class:`anygauge_hooks.rollout.Generator`.
"""

from __future__ import annotations

from anygauge.rollout.control.context import ProducerContext, RolloutContext
from anygauge.rollout.control.evaluation import sample_all
from anygauge.rollout.control.functions import UserFunctions, resolve_functions
from anygauge.rollout.control.producer import Continuous, Producer
from anygauge.rollout.control.scoring import GroupScorer
from anygauge.rollout.control.staleness import Staleness
from anygauge.rollout.control.text import TextTools

__all__ = [
    "Continuous",
    "GroupScorer",
    "Producer",
    "ProducerContext",
    "RolloutContext",
    "Staleness",
    "TextTools",
    "UserFunctions",
    "resolve_functions",
    "sample_all",
]
