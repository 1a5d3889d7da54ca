"""Test support of this repository: a fake SGLang server, scripted engines, chaos, forked workers."""
