"""GLM that sees and hears: a decoder of GLM-4.1V or GLM-4.5V, its vision tower, and GLM-ASR's encoder.

No checkpoint of it is public; docs/glm_omni.md says what its directories hold.
"""
