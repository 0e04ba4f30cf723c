"""The client's settings: what a component config holds, and what one call may set. Secrets are never written."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, SecretStr, field_serializer

from kvcomm_integrations.chat.model_settings import CallArguments, ModelSettings, SamplingArguments
from kvcomm_integrations.chat.model_settings import engine_config_of as _engine_config_of
from kvcomm_integrations.config import EngineConfig, Settings, Tokenization, api_key_from_environment
from kvcomm_integrations.wire import Mode


class CreateArguments(CallArguments):
    """Everything ``extra_create_args`` may hold. ``json_output`` wins over ``response_format``."""

    stream_options: dict[str, Any] | None = None
    """Taken for compatibility and not needed: streams always end with the usage."""


class KVCommClientConfig(ModelSettings, SamplingArguments):
    """What ``KVCommChatCompletionClient`` is made of, and what its component config holds.

    The server's key is not part of what is written: it is read from ``KVCOMM_API_KEY`` again when a config is loaded.
    """

    model_config = ConfigDict(frozen=True)

    api_key: SecretStr | None = Field(default_factory=api_key_from_environment, exclude=True, repr=False)
    """The server's key; read from ``KVCOMM_API_KEY`` if not given, and never written."""
    model_info: dict[str, Any] | None = None
    """Overrides of what the client says about its model (``ModelInfo``), field by field."""
    add_name_prefixes: bool = False
    """Put ``<name> said:`` before what users and other agents have said. Most chat templates show no names."""

    @field_serializer("mode", "tokenization")
    def _plain_choice(self, value: Mode | Tokenization | None) -> str | None:
        return None if value is None else value.value

    @field_serializer("reuse", "http")
    def _plain_settings(self, value: Settings) -> dict[str, Any]:
        return value.model_dump(mode="json", exclude_defaults=True)

    def engine_config(self) -> EngineConfig:
        """The settings that identify the client's engine."""
        return _engine_config_of(self)
