"""One engine over HTTP: token ids in, tokens with their log-probabilities and weight versions out."""

from anygauge.rollout.client.attach import Expected, check_engine
from anygauge.rollout.client.channel import EngineAwayError
from anygauge.rollout.client.engine import EngineClient, MemoryPart, PauseMode, retry_pause_s
from anygauge.rollout.client.media import ImageEncoder
from anygauge.rollout.client.wire import BootstrapRoom

__all__ = [
    "BootstrapRoom",
    "EngineAwayError",
    "EngineClient",
    "Expected",
    "ImageEncoder",
    "MemoryPart",
    "PauseMode",
    "check_engine",
    "retry_pause_s",
]
