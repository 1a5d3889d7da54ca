"""Training checkpoints, written in the background."""
