"""Qwen3, dense, with tied or untied embeddings (https://arxiv.org/abs/2505.09388)."""
