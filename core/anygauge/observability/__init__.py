"""Metrics, trackers and live progress."""
