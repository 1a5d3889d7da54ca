"""Conversion of whole models between checkpoint formats."""
