"""Train engines."""
