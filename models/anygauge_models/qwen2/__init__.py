"""Qwen2 and Qwen2.5, dense, with tied or untied embeddings (https://arxiv.org/abs/2412.15115)."""
