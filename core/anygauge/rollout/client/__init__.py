"""One engine over HTTP: token ids in, tokens with their log-probabilities and weight versions out."""

from anygauge.rollout.client.attach import Expected, check_engine
from anygauge.rollout.client.channel import EngineAwayError
from anygauge.rollout.client.engine import EngineClient, MemoryPart, PauseMode, retry_pause_s
from anygauge.rollout.client.media import Pictures
from anygauge.rollout.client.wire import Meeting

__all__ = [
    "EngineAwayError",
    "EngineClient",
    "Expected",
    "Meeting",
    "MemoryPart",
    "PauseMode",
    "Pictures",
    "check_engine",
    "retry_pause_s",
]
