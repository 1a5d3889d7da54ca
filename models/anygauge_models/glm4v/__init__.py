"""GLM-4.1V: GLM-4's decoder beside a vision tower (https://arxiv.org/abs/2507.01006)."""
