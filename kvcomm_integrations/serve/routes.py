"""Who may use which of a server's routes where there are tenants: a list of what is allowed, by method and path.

``ROUTES`` names every route of vLLM's server, and a test compares it with the server that vLLM builds. A route that it
does not name, of a newer vLLM or of a plugin, is treated as the operator's. ``docs/security.md`` holds the same list.
"""

from __future__ import annotations

import re
from enum import Enum

from kvcomm_integrations.wire import INFO_PATH, TOKENIZER_PATH


class Access(Enum):
    """What a route needs."""

    OPEN = "open"
    """Nothing: it says nothing of anybody's requests."""
    TENANT = "tenant"
    """Any tenant, or the operator: it keeps nothing, and shows the model only."""
    MEDIA = "media"
    """As ``TENANT``, with the tenant written into names of images and other media in the body."""
    SALTED = "salted"
    """Any tenant, with the tenant written into the cache salt, and into names as for ``MEDIA``."""
    OWNED = "owned"
    """The tenant that made what the path names."""
    OPERATOR = "operator"
    """The operator: it changes the server for all, shows all tenants' requests, or keeps no tenants apart."""


CREATE_RESPONSE = "/v1/responses"
RESPONSE = re.compile(r"/v1/responses/(?P<id>[^/]+)(?P<action>/cancel)?")
"""Paths of one stored response."""

ROUTES: dict[Access, tuple[str, ...]] = {
    Access.OPEN: (
        "GET /health",
        "GET /ping",
        "POST /ping",
        "GET /load",
        "GET /version",
        "GET /docs",
        "GET /docs/oauth2-redirect",
        "GET /redoc",
        "GET /openapi.json",
        "GET /static/{file}",
    ),
    Access.TENANT: (
        "GET /v1/models",
        f"GET {INFO_PATH}",
        f"GET {TOKENIZER_PATH}",
        "GET /tokenizer_info",
        "POST /detokenize",
    ),
    Access.MEDIA: ("POST /tokenize",),
    Access.SALTED: ("POST /v1/completions", "POST /v1/chat/completions", f"POST {CREATE_RESPONSE}"),
    Access.OWNED: ("GET /v1/responses/{response_id}", "POST /v1/responses/{response_id}/cancel"),
    Access.OPERATOR: (
        # shows all tenants' requests, or the server's settings
        "GET /metrics",
        "GET /server_info",
        "GET /kv_event_sources",
        # changes the server for all
        "POST /v1/load_lora_adapter",
        "POST /v1/unload_lora_adapter",
        "POST /adapters",
        "DELETE /adapters/{adapter_name}",
        "POST /sleep",
        "POST /wake_up",
        "GET /is_sleeping",
        "POST /release_kv_cache_memory",
        "POST /pause",
        "POST /resume",
        "GET /is_paused",
        "POST /abort_requests",
        "POST /inference/v1/abort_requests",
        "POST /reset_prefix_cache",
        "POST /reset_mm_cache",
        "POST /reset_encoder_cache",
        "POST /collective_rpc",
        "POST /start_profile",
        "POST /stop_profile",
        "POST /scale_elastic_ep",
        "POST /is_scaling_elastic_ep",
        "POST /fault_tolerance/apply",
        "GET /fault_tolerance/status",
        "POST /init_weight_transfer_engine",
        "POST /shutdown_weight_transfer_engine",
        "POST /start_weight_update",
        "POST /start_draft_weight_update",
        "POST /update_weights",
        "POST /finish_weight_update",
        "POST /update_weight_version",
        "POST /weight_checker",
        "GET /weight_info",
        "GET /get_world_size",
        # requests whose tenants the middleware does not keep apart
        "POST /v1/chat/completions/batch",
        "POST /v1/chat/completions/render",
        "POST /v1/chat/completions/derender",
        "POST /v1/completions/render",
        "POST /v1/completions/derender",
        "POST /v1/responses/render",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /v1/messages/render",
        "POST /v1/systemone",
        "POST /cohere/v2/chat",
        "POST /cohere/v2/chat/render",
        "POST /inference/v1/generate",
        "POST /invocations",
        "POST /generative_scoring",
        "POST /v1/audio/transcriptions",
        "POST /v1/audio/translations",
        "WEBSOCKET /v1/realtime",
        "POST /v1/embeddings",
        "POST /v2/embed",
        "POST /pooling",
        "POST /classify",
        "POST /score",
        "POST /v1/score",
        "POST /rerank",
        "POST /v1/rerank",
        "POST /v2/rerank",
    ),
}


def access_to(method: str, path: str) -> Access:
    """What a request's route needs.

    Args:
        method: of HTTP, or ``WEBSOCKET``.
        path: within the application.
    """
    asked = f"{'GET' if method == 'HEAD' else method} {path}"
    exact = _EXACT.get(asked)
    if exact is not None:
        return exact
    return next((access for pattern, access in _PATTERNS if pattern.fullmatch(asked)), Access.OPERATOR)


_EXACT = {name: access for access, names in ROUTES.items() for name in names if "{" not in name}
_PATTERNS = [
    (re.compile(re.sub(r"\\\{.*?\\\}", "[^/]+", re.escape(name))), access)
    for access, names in ROUTES.items()
    for name in names
    if "{" in name
]
