"""Checks between the keys of a config, a module for each of its sections."""
