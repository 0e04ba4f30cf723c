"""The CORS headers of the server's own settings, for answers that do not come from vLLM.

vLLM adds the middleware of ``--middleware`` outside its CORS middleware, so what the former answers does not pass the
latter. Preflight requests (``OPTIONS``) need none of this: they are passed on, and vLLM's CORS middleware answers.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope


def as_vllm_allows(scope: Scope, answer: ASGIApp) -> ASGIApp:
    """An answer to a request, with the CORS headers that vLLM's answers to it have."""
    for entry in getattr(scope["app"], "user_middleware", ()):
        if entry.cls is CORSMiddleware:
            return CORSMiddleware(answer, *entry.args, **entry.kwargs)
    return answer
