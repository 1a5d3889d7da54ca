"""Words of names that the field has other words for, for code_metrics.py and the test of the language."""

from __future__ import annotations

RETIRED = {
    "angles": "rope, rotary",
    "answered": "summary, response",
    "ask": "request",
    "asked": "request",
    "asks": "request",
    "beside": "extra",
    "controlled": "rollout scheduler",
    "hearing": "audio",
    "hold": "set_memory_state, acquire",
    "holds": "memory state",
    "keeper": "supervisor",
    "likeliest": "top-k",
    "making": "rollout context",
    "meeting": "rendezvous, bootstrap room",
    "observed": "recorded",
    "pictures": "images",
    "residency": "memory state",
    "rest": "release, remaining",
    "saved": "checkpoint",
    "sees": "vision, multimodal",
    "senses": "multimodal",
    "share": "data-parallel rank, mini-batch, fraction",
    "shares": "data-parallel ranks, mini-batches, fractions",
    "sight": "vision",
    "sights": "vision",
    "speakers": "reporting ranks",
    "storm": "chaos",
    "turns": "colocation",
    "warm": "fork server",
}
"""Retired words of names, each with its replacements.

"work" and "calls" are not among them: a tool has calls, and a step, a thread or a collective has work.
"""
