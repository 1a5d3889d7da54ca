"""Processes of a run: launchers, placement, workers, and calls between them."""
