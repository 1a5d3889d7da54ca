"""Qwen3-Omni's thinker: Qwen3-VL that hears too (https://arxiv.org/abs/2509.17765)."""
