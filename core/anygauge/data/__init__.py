"""Prompts in: sources, chat templates, packing."""
