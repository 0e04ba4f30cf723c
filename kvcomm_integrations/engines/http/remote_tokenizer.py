"""The tokenizer for a served model: from this machine where it is here, otherwise from the server."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.http.transport import NotFoundError, Transport
from kvcomm_integrations.errors import ConfigurationError, ServerError
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import TOKENIZER_PATH


def local_tokenizer(config: EngineConfig) -> ChatTokenizer | None:
    """The tokenizer named by the configuration, or in the model's folder on this machine; ``None``: ask the server."""
    if config.tokenizer is not None:
        return ChatTokenizer.from_pretrained(config.tokenizer)
    return ChatTokenizer.from_pretrained(config.model) if Path(config.model).is_dir() else None


async def fetch_tokenizer(transport: Transport, model: str) -> ChatTokenizer:
    """The tokenizer a server hands out, or the one the hub has under the model's name.

    Raises:
        ConfigurationError: neither is to be had.
    """
    try:
        files = await transport.fetch(TOKENIZER_PATH)
    except NotFoundError:
        try:
            return ChatTokenizer.from_pretrained(model)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"there is no tokenizer for {model!r} here, and the server at {transport.base_url} hands out none; set "
                f"tokenizer to its folder or hub id ({error})"
            ) from error
    with tempfile.TemporaryDirectory(prefix="kvcomm-tokenizer-") as folder:
        for name, text in _checked(files, transport.base_url).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        tokenizer = ChatTokenizer.from_pretrained(folder)
    tokenizer.source = model
    return tokenizer


def _checked(files: Any, base_url: str) -> dict[str, str]:
    """Names and texts, refused if a name could lead out of the folder."""
    if not isinstance(files, dict) or any(Path(name).name != name or name in ("", ".", "..") for name in files):
        raise ServerError(f"the server at {base_url} hands out tokenizer files with unusable names")
    return {str(name): str(text) for name, text in files.items()}
