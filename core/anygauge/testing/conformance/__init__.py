"""Conformance suite of backends: ``pytest --pyargs anygauge.testing.conformance --backend NAME``."""
