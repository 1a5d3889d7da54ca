"""What every backend passes: ``pytest --pyargs anygauge.testing.conformance --backend NAME``."""
