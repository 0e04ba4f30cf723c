"""The key of a server's operator: who may do what no tenant may."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.serve.asgi import Scope, header

KEY_VARIABLE = "KVCOMM_ADMIN_KEY"
"""Environment variable with the operator's key, which is none of the tenants'."""
SHORTEST_KEY = 16


@dataclass(frozen=True)
class OperatorKey:
    """What an operator's request shows as ``Authorization: Bearer <key>``. Empty: there is no operator."""

    key: str = ""

    @classmethod
    def from_environment(cls) -> OperatorKey:
        """As ``KVCOMM_ADMIN_KEY`` says.

        Raises:
            ConfigurationError: the key is short. Does not show it.
        """
        key = os.environ.get(KEY_VARIABLE, "")
        if key and len(key) < SHORTEST_KEY:
            raise ConfigurationError(f"{KEY_VARIABLE} must hold a key of at least {SHORTEST_KEY} characters")
        return cls(key)

    def shown(self, scope: Scope) -> bool:
        """Whether a request shows the key."""
        scheme, _, key = header(scope, "authorization").partition(" ")
        return bool(self.key) and scheme.lower() == "bearer" and hmac.compare_digest(key.encode(), self.key.encode())
