"""GLM-4.5V and GLM-4.6V: GLM-4.5-Air's mixture of experts beside GLM-4.1V's tower (https://arxiv.org/abs/2507.01006)."""
