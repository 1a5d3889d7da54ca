"""Which key SGLang asks for, and where: alike in the versions that are played."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from anygauge_tests.fake_engine.options import Options

__all__ = ["ADMIN", "OPEN", "require_keys"]

OPEN = ("/health", "/ready", "/metrics")
"""Beginnings of paths that never need a key."""
ADMIN = frozenset(
    {
        "/abort_request",
        "/begin_weight_update",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/flush_cache",
        "/init_weights_update_group",
        "/load_lora_adapter",
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/start_profile",
        "/stop_profile",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/weights_checker",
    }
)
"""Paths that need the admin key, and not the other one; the API key where there is no admin key."""
_OWN = "/fake/"


def require_keys(options: Options) -> Middleware:
    """Return the middleware that refuses requests without the right key."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        needed = _needed(request.path, options)
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        if needed and not (scheme.lower() == "bearer" and hmac.compare_digest(shown, needed)):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check


def _needed(path: str, options: Options) -> str:
    """Return the key that a path needs; empty if it needs none."""
    if path.startswith((*OPEN, _OWN)):
        return ""
    return (options.admin_api_key or options.api_key) if path in ADMIN else options.api_key
