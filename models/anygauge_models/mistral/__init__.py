"""Mistral, dense, without a sliding window (https://arxiv.org/abs/2310.06825)."""
