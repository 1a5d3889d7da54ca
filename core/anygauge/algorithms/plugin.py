"""Built-in advantage estimators, policy losses and corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anygauge_hooks import hookimpl
from anygauge_hooks.types import NamedFunction


@hookimpl
def register_advantage_estimators() -> list[NamedFunction]:
    """Return the group-level estimators ``grpo``, ``dr_grpo``, ``rloo``, and the token-level ones."""
    from anygauge.algorithms import advantages, token_advantages

    by_token: dict[Callable[..., Any], dict[str, Any]] = {
        token_advantages.gae: {"needs": ("values",)},
        token_advantages.reinforce_plus_plus: {},
        token_advantages.reinforce_plus_plus_baseline: {"min_samples": 2},
        token_advantages.on_policy_distillation: {"needs": ("teacher_log_probs", "old_log_probs")},
    }
    return [
        *(_named(fn, min_samples=2) for fn in (advantages.grpo, advantages.dr_grpo, advantages.rloo)),
        *(_named(fn, kind="token", **options) for fn, options in by_token.items()),
    ]


@hookimpl
def register_policy_losses() -> list[NamedFunction]:
    """Return ``ppo_clip``, ``gspo``, ``cispo``, ``policy_gradient`` and ``sft``."""
    from anygauge.algorithms import losses

    return [
        _named(fn) for fn in (losses.ppo_clip, losses.gspo, losses.cispo, losses.policy_gradient, losses.sft)
    ]


@hookimpl
def register_corrections() -> list[NamedFunction]:
    """Return the weighting corrections ``tis``, ``icepop``, ``mis``, the masks, and ``metrics_only``."""
    from anygauge.algorithms import correction as c

    compare = (c.tis, c.icepop, c.mis, c.rejection, c.veto, c.metrics_only)
    return [*(_named(fn, needs=("old_log_probs",)) for fn in compare), _named(c.sequence_mask)]


def _named(fn: Callable[..., Any], **options: Any) -> NamedFunction:
    return NamedFunction(name=fn.__name__, fn=fn, **options)
