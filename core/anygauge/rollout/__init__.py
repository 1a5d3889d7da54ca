"""Rollout control, from prompts to the groups of a step: rollouts, filters, partial samples.

It works on any :class:`anygauge_hooks.rollout.Generator`.
"""
