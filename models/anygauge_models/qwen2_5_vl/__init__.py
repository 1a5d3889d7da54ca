"""Qwen2.5-VL: a vision tower whose attention stays within windows (https://arxiv.org/abs/2502.13923)."""
