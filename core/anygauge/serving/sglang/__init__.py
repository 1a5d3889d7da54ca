"""SGLang as a rollout engine: starts and stops its servers. The HTTP client is in ``client``."""
