"""One engine over HTTP: token ids in, tokens with their log-probabilities and weight versions out."""

from anygauge.serving.client.attach import Expected, check_engine
from anygauge.serving.client.engine import EngineClient, retry_pause_s
from anygauge.serving.client.media import ImageEncoder
from anygauge.serving.client.wire import BootstrapRoom

__all__ = [
    "BootstrapRoom",
    "EngineClient",
    "Expected",
    "ImageEncoder",
    "check_engine",
    "retry_pause_s",
]
