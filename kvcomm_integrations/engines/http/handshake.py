"""Finding out, once, what the server is and whether it fits this client. Sends nothing that a user would notice."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.http.transport import NotFoundError, Transport
from kvcomm_integrations.errors import ConfigurationError, ServerError
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import INFO_PATH, WIRE_KEY, WIRE_VERSION, KVCommParams, Mode, ServerInfo

logger = logging.getLogger(__name__)

PROBE = "KV caches, 1234567 × 0.5 — naïve Größe; 東京は雨です。\n\tdef f(x): return {'a': [x]}"
"""Text whose tokens tell tokenizers apart: words, digits, accents, other scripts, whitespace, code."""


@dataclass(frozen=True)
class Server:
    """What is known of a server after the handshake."""

    model: str
    """The name under which it serves the model."""
    max_model_len: int
    """Longest prompt plus answer, tokens."""
    connector: bool
    """Its engine runs with our connector."""


async def shake_hands(transport: Transport, config: EngineConfig, tokenizer: ChatTokenizer) -> Server:
    """Compare model, wire version, tokenizer and context length with what this client expects.

    Raises:
        ServerError: the server cannot be reached or does not fit; names both values.
    """
    model, limit = served_model(await transport.fetch("/v1/models"), config)
    info = await _info(transport)
    await _compare_tokenizers(transport, model, tokenizer)
    if limit is None:
        raise ServerError(f"{transport.base_url} does not say how long a prompt of {model!r} may be")
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigurationError(
            f"max_model_len={config.max_model_len} is more than the {limit} of the server at {transport.base_url}; "
            "lower it or leave it out"
        )
    connector = info.connector if info is not None else await _answers_as_ours(transport, model, tokenizer)
    if not connector:
        logger.warning(
            "The server at %s runs without the kvcomm connector: it is used as any vLLM server, and nothing is reused "
            "beyond its prefix cache. Start it with: kvcomm serve %s",
            transport.base_url,
            model,
        )
    elif info is None:
        logger.warning(
            "The server at %s sends no reports with streamed answers. Start it with kvcomm serve, or add --middleware "
            "kvcomm_integrations.serve.middleware.KVCommMiddleware",
            transport.base_url,
        )
    elif info.refusal:
        logger.warning("The server at %s reuses nothing: %s", transport.base_url, info.refusal)
    return Server(model, min(limit, config.max_model_len or limit), connector)


def served_model(listing: Any, config: EngineConfig) -> tuple[str, int | None]:
    """The served name of the configured model and its context length, from ``/v1/models``.

    A model may be asked for by its served name or by the folder or hub id it was loaded from.

    Raises:
        ServerError: the server serves other models; names them.
    """
    models = listing.get("data", []) if isinstance(listing, dict) else []
    for key in ("id", "root"):
        for model in models:
            if str(model.get(key, "")).rstrip("/") == config.model.rstrip("/"):
                return str(model["id"]), model.get("max_model_len")
    names = ", ".join(repr(model.get("id")) for model in models) or "nothing"
    raise NotFoundError(
        f"the server at {config.base_url} serves {names}, not {config.model!r}; use one of its names as model (and "
        "tokenizer=... if the tokenizer is elsewhere)"
    )


async def _info(transport: Transport) -> ServerInfo | None:
    try:
        info = ServerInfo.model_validate(await transport.fetch(INFO_PATH))
    except NotFoundError:
        return None
    if info.wire != WIRE_VERSION:
        from kvcomm_integrations._version import __version__

        raise ServerError(
            f"the server at {transport.base_url} runs kvcomm-integrations {info.version} (wire version {info.wire}), "
            f"this client {__version__} (wire version {WIRE_VERSION}); install the same version on both sides"
        )
    return info


async def _compare_tokenizers(transport: Transport, model: str, tokenizer: ChatTokenizer) -> None:
    body = {"model": model, "prompt": PROBE, "add_special_tokens": False}
    try:
        theirs = (await transport.fetch("/tokenize", body))["tokens"]
    except NotFoundError:  # a router passes on the OpenAI paths only
        logger.info("%s has no /tokenize: the tokenizers could not be compared", transport.base_url)
        return
    ours = tokenizer.encode(PROBE, allow_special=False)
    if theirs != ours:
        at = next(
            (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours))
        )
        raise ServerError(
            f"the tokenizer of the server at {transport.base_url} is not {tokenizer.source!r}: for the same text it "
            f"gives {theirs[at : at + 5]} where this client gives {ours[at : at + 5]} (from token {at} on); set "
            "tokenizer to the folder or hub id of the served model's tokenizer"
        )


async def _answers_as_ours(transport: Transport, model: str, tokenizer: ChatTokenizer) -> bool:
    """Whether one computed token comes back with a report: our connector without our middleware."""
    body = {
        "model": model,
        "prompt": tokenizer.encode("Hello", allow_special=False),
        "max_tokens": 1,
        "kv_transfer_params": KVCommParams(mode=Mode.DENSE).to_transfer_params(),
    }
    answer = await transport.fetch("/v1/completions", body)
    return WIRE_KEY in (answer.get("kv_transfer_params") or {})
