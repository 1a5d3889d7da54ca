"""Files of a run: its directory, checkpoints, resume and dumps."""
