"""Whose request it is, as the server's operator says: by API key, or by a header that a trusted proxy sets.

What a request's body says of its tenant only divides the server's tenant further; it never reaches another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.ids import DEFAULT_TENANT
from kvcomm_integrations.serve.names import HEADER_VARIABLE, KEY_VARIABLE, KEYS_VARIABLE
from kvcomm_integrations.serve.operator_key import bearer

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class RefusedError(Exception):
    """A request that is not served; its text is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Tenants:
    """Where tenants come from. With neither keys nor header, all requests are the same tenant's."""

    keys: Mapping[bytes, str] = field(default_factory=dict)
    """Hash of an API key to tenant."""
    header: str = ""
    """Header that holds the tenant's name."""

    @property
    def source(self) -> str:
        """``keys``, ``header``, or empty."""
        return "keys" if self.keys else "header" if self.header else ""

    @classmethod
    def from_environment(cls) -> Tenants:
        """As ``KVCOMM_TENANT_KEYS`` or ``KVCOMM_TENANT_HEADER`` say.

        Raises:
            ConfigurationError: both are set, or the file cannot be used.
        """
        path, name = os.environ.get(KEYS_VARIABLE, ""), os.environ.get(HEADER_VARIABLE, "")
        if path and name:
            raise ConfigurationError(
                f"tenants come either from keys ({path!r}) or from a header ({name!r}), not from both; drop one"
            )
        keys = read_keys(Path(path)) if path else {}
        return cls(keys={_hash(key): tenant for key, tenant in keys.items()}, header=name)

    def of(self, headers: Mapping[str, str]) -> str | None:
        """The tenant of a request with these headers; ``None`` where the server does not distinguish tenants.

        Raises:
            RefusedError: the request shows no tenant, or an unknown one.
        """
        if self.keys:
            tenant = self.keys.get(_hash(bearer(headers)))
            if tenant is None:
                raise RefusedError(401, "this server needs an API key that it knows: Authorization: Bearer <key>")
            return tenant
        name = headers.get(self.header, "") if self.header else None
        if name is not None and not _NAME.fullmatch(name):
            raise RefusedError(401, f"this server needs a tenant's name in the header {self.header}")
        return name


def read_keys(path: Path) -> dict[str, str]:
    """API key to tenant, from a JSON object of keys and tenants.

    Raises:
        ConfigurationError: the file cannot be read, a name or key cannot be used, or a key is the operator's as well.
            Shows no key.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the file of tenant keys {str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ConfigurationError(f'{str(path)!r} must hold a JSON object {{"<API key>": "<tenant>", ...}}')
    for number, (key, tenant) in enumerate(found.items(), 1):
        where = f"{str(path)!r}, entry {number}"
        if not key.strip() or not isinstance(tenant, str) or not _NAME.fullmatch(tenant):
            rule = "must be 1 to 64 letters, digits or _.@- and its key not empty"
            raise ConfigurationError(f"{where}: the tenant {tenant!r} {rule}")
        if key == os.environ.get(KEY_VARIABLE):
            raise ConfigurationError(f"{where}: the key is the operator's ({KEY_VARIABLE}) as well; use another")
    return found


def divided(tenant: str, said: str) -> str:
    """The server's tenant, divided by what the body says; server-side names hold no slash, so none can be imitated."""
    if said == DEFAULT_TENANT:
        return tenant
    return f"{tenant}/{hashlib.blake2b(said.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def salt_of(tenant: str, salt: str) -> str:
    """The prefix-cache salt of a tenant's request that brings a salt of its own, or an empty one."""
    return hashlib.blake2b(json.dumps([tenant, salt]).encode(), digest_size=16, person=b"kvcomm-served").hexdigest()


def response_id(tenant: str, said: str) -> str:
    """The id under which vLLM keeps a response that its tenant calls ``said``.

    It begins with the tenant's mark, so no two tenants' ids are equal, whatever they choose, and no list of owners is
    kept. The mark is no secret: a request reaches only ids that begin with its own tenant's.

    Args:
        tenant: the server's tenant, not divided by what a body says: later requests have no body.
        said: the client's name for the response, or the id that an earlier answer gave.
    """
    mark = f"resp_{hashlib.blake2b(tenant.encode(), digest_size=16, person=b'kvcomm-response').hexdigest()}_"
    return said if said.startswith(mark) else mark + said


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
