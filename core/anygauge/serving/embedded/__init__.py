"""The embedded rollout engine, on transformers."""
