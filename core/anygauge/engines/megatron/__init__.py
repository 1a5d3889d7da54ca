"""The Megatron-core train engine."""
