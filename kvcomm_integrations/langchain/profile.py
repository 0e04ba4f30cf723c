"""What a model can do, told by its files and by a server. LangChain asks before anything is loaded."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from langchain_core.language_models.model_profile import ModelProfile

from kvcomm_integrations.chat.detect import tool_format_of_template
from kvcomm_integrations.chat.tool_format import ToolFormat
from kvcomm_integrations.engines.interface import Engine
from kvcomm_integrations.errors import KVCommError, UnsupportedModelError

logger = logging.getLogger(__name__)


class ProfileReader:
    """A model's profile, put together when it is asked for.

    On an event loop files are read in a thread, and a server that has not been asked yet is asked behind the scenes;
    until it answers, the profile holds what the files say.
    """

    def __init__(self) -> None:
        self._files: ModelProfile | None = None
        self._asked = False

    def profile(self, read: Callable[[], ModelProfile], engine: Engine) -> ModelProfile:
        """The profile as it stands.

        Args:
            read: makes the profile of the model's files.
            engine: the model's; its context length wins over the files'.
        """
        looping = _on_a_loop()
        if self._files is None:
            self._files = _in_thread(read) if looping else read()
        if looping and not self._asked and engine.config.base_url is not None:
            self._asked = True
            threading.Thread(target=_length, args=(engine, True), daemon=True).start()
        limit = _length(engine, ask=not looping)
        return self._files if limit is None else limited(self._files, limit)


def limited(profile: ModelProfile, limit: int) -> ModelProfile:
    """A profile of a model whose prompt and answer may have so many tokens together."""
    answer = min(profile.get("max_output_tokens") or limit, limit)
    return ModelProfile(**{**profile, "max_input_tokens": limit, "max_output_tokens": answer})


def _length(engine: Engine, ask: bool) -> int | None:
    try:
        return engine.context_length(ask=ask)
    except KVCommError as error:
        logger.info("The profile of %r holds what its files say: %s", engine.config.model, error)
        return engine.config.max_model_len


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(read: Callable[[], ModelProfile]) -> ModelProfile:
    """What ``read`` gives, from another thread: file systems may be slow. Errors are raised here."""
    found: list[ModelProfile | Exception] = []
    busy = threading.Lock()

    def work() -> None:
        try:
            found.append(read())
        except Exception as error:  # noqa: BLE001 - raised below
            found.append(error)
        finally:
            busy.release()

    busy.acquire()
    threading.Thread(target=work, daemon=True).start()
    with busy:
        [result] = found
    if isinstance(result, Exception):
        raise result
    return result


def model_profile(
    model: str, *, tool_format: ToolFormat | None, context: int | None, max_tokens: int | None
) -> ModelProfile:
    """A profile in LangChain's form.

    Args:
        model: folder or hub id.
        tool_format: how the model writes tool calls; ``None``: told by its chat template, if that is on disk.
        context: longest prompt plus answer, tokens; ``None``: the model's own, if its configuration is on disk.
        max_tokens: longest answer, tokens.
    """
    tool_format = tool_format or _tool_format_of(model)
    profile = ModelProfile(
        name=model,
        text_inputs=True,
        image_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        pdf_inputs=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        tool_calling=True,
        tool_choice=True,
        # ``create_agent`` sends tools and a response format together where this is true.
        structured_output=tool_format is not None and tool_format.calls_beside_answer,
    )
    if max_tokens:
        profile["max_output_tokens"] = max_tokens
    limit = context or _context_of(model)
    return limited(profile, limit) if limit else profile


def _tool_format_of(model: str) -> ToolFormat | None:
    template = _text_of(model, "chat_template.jinja")
    if template is None:
        found = _json_of(model, "tokenizer_config.json").get("chat_template")
        template = json.dumps(found, ensure_ascii=False) if isinstance(found, list) else found
    if not isinstance(template, str):
        return None
    with suppress(UnsupportedModelError):
        return tool_format_of_template(template, model)
    return None


def _context_of(model: str) -> int | None:
    found = _json_of(model, "config.json")
    length = found.get("max_position_embeddings") or found.get("text_config", {}).get("max_position_embeddings")
    return int(length) if length else None


def _json_of(model: str, name: str) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(_text_of(model, name) or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _text_of(model: str, name: str) -> str | None:
    """A file of a model, from its folder or from the hub's cache; ``None`` if it is not on this machine."""
    with suppress(ImportError, ValueError, OSError, TypeError):  # TypeError: the hub's cache does not have the file
        if Path(model).is_dir():
            return (Path(model) / name).read_text(encoding="utf-8")
        from huggingface_hub import try_to_load_from_cache

        return Path(try_to_load_from_cache(model, name)).read_text(encoding="utf-8")  # type: ignore[arg-type]
    return None
