"""Training loop, its roles and their worker processes."""
