"""Conformance suite of model families: ``--pyargs anygauge.testing.model_conformance --model PACKAGE``."""
