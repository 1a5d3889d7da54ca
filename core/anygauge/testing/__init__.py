"""Test support for this project and for plugins outside it: tiny models, tasks and the conformance suite."""
