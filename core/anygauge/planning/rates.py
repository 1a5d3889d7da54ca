"""Rates of GPUs, fitted to measured steps of docs/performance.md and docs/plan.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RATES", "Rates"]

TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one kind of GPU, in operations, bytes and tokens per second."""

    measured: str
    """Date of the figures."""
    source: str
    product: float
    """Matrix products in bfloat16, of large matrices."""
    small_width: int
    """A product whose inner width is this runs at half of that rate."""
    experts: float
    """Products of experts in a train step, with the routing and the movement of their tokens."""
    attention: float
    """Attention, forward and backward together."""
    copy: float
    """Bytes read and written by kernels that only move memory."""
    passes: float
    """Bytes that other kernels of a training step move per byte of activations."""
    layer_s: float
    """Seconds of the host per layer and micro-batch, forward and backward, of samples of equal length."""
    packed_layer_s: float
    """The same of samples of many lengths, which attention cannot take as a plain batch."""
    gathered_layer_s: float
    """The same of the FSDP engine, whose workers gather each layer."""
    experts_s: float
    """Seconds that experts add to any of these three: 13 ms in all were measured (docs/plan.md)."""
    step_s: float
    """Seconds of an optimizer step in which no kernel runs."""
    fsdp: float
    """Time of a step of the FSDP engine over one of Megatron's."""
    fsdp_lora: float
    """The same with adapters."""
    adapters: float
    """Bytes that adapters move per byte of the inputs and outputs of their layers."""
    link: float
    """Bytes that a GPU exchanges with others of its host, waiting for them included."""
    decode_s: float
    """Seconds of a decode step beyond reading weights and cache and computing products."""
    sample_s: float
    """Seconds of a server's front end per sample."""
    embedded_decode_s: float
    """Seconds of a decode step of the embedded engine per layer."""
    sync: float
    """Bytes of weights per second from trainers to servers."""
    offload: float
    """Bytes per second between device and pinned host memory."""


H200 = Rates(
    measured="2026-11-29",
    source="docs/performance.md",
    product=735 * TERA,
    small_width=128,
    experts=180 * TERA,
    attention=430 * TERA,
    copy=4.0 * TERA,
    passes=3.5,
    layer_s=2.5e-3,
    packed_layer_s=4.4e-3,
    gathered_layer_s=7.5e-3,
    experts_s=10.5e-3,
    step_s=8e-3,
    fsdp=1.05,
    fsdp_lora=1.17,
    adapters=5.0,
    link=200e9,
    decode_s=2.9e-3,
    sample_s=1.4e-3,
    embedded_decode_s=0.33e-3,
    sync=100e9,
    offload=40e9,
)
RATES: Mapping[str, Rates] = {"H200": H200}
"""Rates by the name that ``--gpu`` takes."""
