"""Content ids and tenant salts: the same input gives the same id in every process and on every machine."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

DEFAULT_TENANT = "default"
"""Tenant of requests that name none."""


def content_id(token_ids: Sequence[int], *keys: str) -> str:
    """Hash of token ids and of whatever else must keep contents apart. Equal in every process and on every machine.

    Args:
        token_ids: the content's tokens.
        keys: further distinctions (model, LoRA adapter, tenant, name), order matters.
    """
    digest = hashlib.blake2b(digest_size=16)
    for key in keys:
        raw = key.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    digest.update(b"\0ids\0")
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    digest.update(packed.tobytes())
    return digest.hexdigest()


def tenant_salt(tenant: str) -> str | None:
    """The prefix-cache salt of a tenant: a hash, because vLLM forbids some characters; none for the default tenant."""
    if tenant == DEFAULT_TENANT:
        return None
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"kvcomm-tenant").hexdigest()
