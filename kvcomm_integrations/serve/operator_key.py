"""The key of a server's operator: who may do what no tenant may."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.serve.names import KEY_VARIABLE

SHORTEST_KEY = 16


def bearer(headers: Mapping[str, str]) -> str:
    """The key that a request shows as ``Authorization: Bearer <key>``; empty if it shows none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else ""


@dataclass(frozen=True)
class OperatorKey:
    """What an operator's request shows. Empty: there is no operator."""

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

    def shown(self, headers: Mapping[str, str]) -> bool:
        """Whether a request shows the key."""
        return bool(self.key) and hmac.compare_digest(bearer(headers).encode(), self.key.encode())
