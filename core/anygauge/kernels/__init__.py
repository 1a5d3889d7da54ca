"""Fused kernels: reference implementations and the table that modules are bound to."""
