"""A rollout engine with vLLM's HTTP API and a tiny real model, written as a stranger would write its plugin.

It imports nothing of the project but the contract: the core speaks to its servers through that alone.
"""
