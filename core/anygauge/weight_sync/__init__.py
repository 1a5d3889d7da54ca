"""Weight sync: sends new weights from the trainer to the rollout engines in buckets that both sides check."""
