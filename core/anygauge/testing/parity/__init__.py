"""Comparison of two ways to compute one model: backends, engines, kernels, dtypes or shardings."""
