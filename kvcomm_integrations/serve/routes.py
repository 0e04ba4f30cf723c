"""Who may use which of a server's routes where there are tenants: a list of what is allowed, by method and path.

What it does not name is the operator's, as is a new route of a newer vLLM or of a plugin. ``docs/security.md`` lists
every route of vLLM's server; tests compare that list with this one and with the server that vLLM builds.
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
    """The operator: it changes the server for all, shows all tenants' requests, or does not separate tenants."""


CREATE_RESPONSE = "/v1/responses"

ROUTES: dict[Access, tuple[str, ...]] = {
    Access.OPEN: (
        "GET /health", "GET /ping", "POST /ping", "GET /load", "GET /version",
        "GET /docs", "GET /docs/oauth2-redirect", "GET /redoc", "GET /openapi.json", "GET /static/{file}",
    ),
    Access.TENANT: (
        "GET /v1/models", f"GET {INFO_PATH}", f"GET {TOKENIZER_PATH}", "GET /tokenizer_info", "POST /detokenize",
    ),
    Access.MEDIA: ("POST /tokenize",),
    Access.SALTED: ("POST /v1/completions", "POST /v1/chat/completions", f"POST {CREATE_RESPONSE}"),
    Access.OWNED: ("GET /v1/responses/{response_id}", "POST /v1/responses/{response_id}/cancel"),
}  # fmt: skip

_PATTERNS = [
    (re.compile(re.sub(r"\\\{.*?\\\}", "[^/]+", re.escape(name))), access)
    for access, names in ROUTES.items()
    for name in names
]


def access_to(method: str, path: str) -> Access:
    """What a request's route needs.

    Args:
        method: of HTTP, or ``WEBSOCKET``.
        path: within the application.
    """
    asked = f"{'GET' if method == 'HEAD' else method} {path}"
    return next((access for pattern, access in _PATTERNS if pattern.fullmatch(asked)), Access.OPERATOR)
