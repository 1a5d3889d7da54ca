"""The advantage estimators and policy losses that come with the core."""

from __future__ import annotations

from anygauge_hooks import hookimpl
from anygauge_hooks.types import NamedFunction


@hookimpl
def register_advantage_estimators() -> list[NamedFunction]:
    """Return ``grpo``."""
    from anygauge.algorithms import advantages

    return [NamedFunction(name="grpo", fn=advantages.grpo)]


@hookimpl
def register_policy_losses() -> list[NamedFunction]:
    """Return ``ppo_clip`` and ``sft``."""
    from anygauge.algorithms import losses

    return [
        NamedFunction(name="ppo_clip", fn=losses.ppo_clip),
        NamedFunction(name="sft", fn=losses.sft),
    ]
