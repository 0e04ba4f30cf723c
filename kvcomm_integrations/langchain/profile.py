"""What a model can do, told by its files alone: LangChain asks before any engine or tokenizer is loaded."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from langchain_core.language_models.model_profile import ModelProfile

from kvcomm_integrations.chat.detect import tool_format_of_template
from kvcomm_integrations.chat.tool_format import ToolFormat
from kvcomm_integrations.errors import UnsupportedModelError


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
    if limit := context or _context_of(model):
        profile["max_input_tokens"] = limit
        profile["max_output_tokens"] = min(max_tokens or limit, limit)
    return profile


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
