"""Health rules: which metrics of a run are beyond their limits, for how long, and what to do about it."""
