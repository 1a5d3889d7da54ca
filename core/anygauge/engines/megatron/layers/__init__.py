"""Megatron layers built from our modules."""
