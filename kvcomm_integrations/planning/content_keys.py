"""Under which keys contents are held: every key names tenant and session, as far as the isolation asks for it."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

from kvcomm_integrations.config import Isolation
from kvcomm_integrations.wire import KVCommParams

FIRST_DENSE = "\0first dense"
"""In place of a consumer's name: the first who ran dense, where the very first did not."""


class ContentKey(NamedTuple):
    """Who may share a content, and the hash of its tokens; for chain references, also who consumed it."""

    scope: str
    content: str
    consumer: str = ""


@lru_cache(maxsize=4096)
def joined(*parts: str) -> str:
    """One string for names that clients choose, such that different names never give the same string."""
    return json.dumps(parts)


def content_scope(cache_salt: str | None, params: KVCommParams, isolation: Isolation) -> str:
    """Who may load the contents of a request."""
    if isolation is Isolation.GLOBAL:
        return ""
    if isolation is Isolation.TENANT:
        return joined(cache_salt or "", params.tenant)
    return joined(cache_salt or "", params.tenant, params.session)


def tenant_scope(cache_salt: str | None, params: KVCommParams) -> str:
    """Who shares exact beginnings and learned corrections: a tenant, whatever the isolation of contents."""
    return joined(cache_salt or "", params.tenant)


def names_session(scope: str, tenant: str, session: str) -> bool:
    """Whether a scope is that of a session, whatever its salt. No other kind of scope begins with a bracket."""
    return scope.startswith("[") and json.loads(scope)[1:] == [tenant, session]
