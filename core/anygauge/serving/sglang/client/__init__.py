"""One engine over HTTP: token ids in, tokens with their log-probabilities and weight versions out."""

from anygauge.serving.sglang.client.attach import Expected, check_engine, running_limit
from anygauge.serving.sglang.client.engine import EngineClient

__all__ = ["EngineClient", "Expected", "check_engine", "running_limit"]
