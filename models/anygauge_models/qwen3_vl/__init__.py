"""Qwen3-VL, dense: deepstack, and positions in time, height and width (https://arxiv.org/abs/2511.21631)."""
