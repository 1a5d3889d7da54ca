"""Qwen3-VL with a mixture of experts (https://arxiv.org/abs/2511.21631)."""
