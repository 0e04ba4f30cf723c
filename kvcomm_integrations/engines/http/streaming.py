"""One request as ``/v1/completions`` takes it, and its stream of events as deltas.

That endpoint takes token ids and hands out text, token ids and log-probabilities as the engine makes them. Tools and
reasoning are read on this side by the same code as for the engine in this process, so the chat endpoint, which would
parse them a second time, has nothing to add.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from kvcomm_integrations.engines.http.handshake import Server
from kvcomm_integrations.engines.interface import Delta, GenerationRequest, TokenLogprob
from kvcomm_integrations.errors import ServerError
from kvcomm_integrations.wire import TREATMENTS, RequestReport

_SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logprobs",
)  # fmt: skip
_FAILED = 500
"""Status of an answer that broke off: the server's fault, and it may do better the next time."""


def completion_body(request: GenerationRequest, server: Server, request_id: str) -> dict[str, Any]:
    """The JSON body for a request. What ``sampling`` leaves open is the server's default.

    The salt travels as a hash: servers refuse long ones and some characters.
    """
    options = request.sampling
    room = server.max_model_len - len(request.prompt.token_ids)
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": list(request.prompt.token_ids),
        "request_id": request_id,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": room if options.max_tokens is None else min(options.max_tokens, room),
        "min_tokens": options.min_tokens,
        "ignore_eos": options.ignore_eos,
        "skip_special_tokens": options.skip_special_tokens,
    }
    salt = request.cache_salt
    wanted = {name: getattr(options, name) for name in _SAME_NAMES} | {
        "return_tokens_as_token_ids": None if options.logprobs is None else True,
        "stop": list(options.stop) or None,
        "stop_token_ids": list(options.stop_token_ids) or None,
        "logit_bias": {str(token): bias for token, bias in (options.logit_bias or {}).items()} or None,
        "structured_outputs": options.structured_output,
        "vllm_xargs": options.extra_args or None,
        "cache_salt": hashlib.blake2b(salt.encode(), digest_size=16).hexdigest() if salt else None,
        "kv_transfer_params": request.params.to_transfer_params() if server.connector else None,
    }
    return body | {name: value for name, value in wanted.items() if value is not None}


async def read_deltas(
    lines: AsyncIterator[str], request: GenerationRequest, decode: Callable[[int], str]
) -> AsyncIterator[Delta]:
    """Deltas from server-sent events. The last one is held back until usage and report are in.

    Args:
        lines: the events, line by line.
        request: what is being answered.
        decode: text of one token, for log-probabilities.

    Raises:
        ServerError: the stream holds an error or ends too early.
    """
    started = time.monotonic()
    ttft: float | None = None
    completion = 0
    last: Delta | None = None
    usage: dict[str, Any] = {}
    report: RequestReport | None = None
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        event = _event(data, completion)
        usage = event.get("usage") or usage
        report = RequestReport.from_transfer_params(event.get("kv_transfer_params")) or report
        for choice in event.get("choices", ()):
            ttft = ttft if ttft is not None else (time.monotonic() - started) * 1e3
            delta = _delta(choice, decode)
            completion += len(delta.token_ids)
            if delta.finish_reason is not None:
                last = delta
            else:
                yield delta
    if last is None or last.finish_reason == "abort":
        raise ServerError(
            f"the server ended the answer after {completion} tokens without finishing it; it may be shutting down, see "
            "its log",
            _FAILED,
        )
    details = usage.get("prompt_tokens_details") or {}
    reused = sum(getattr(report, kind) for kind in TREATMENTS[:-1]) if report is not None else 0
    yield replace(
        last,
        prompt_tokens=len(request.prompt.token_ids),
        completion_tokens=completion,
        cached_tokens=details.get("cached_tokens") or reused,
        ttft_ms=ttft,
        report=report,
    )


def _event(data: str, completion: int) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise ServerError(f"the server sent an event that is not JSON: {data[:200]!r}", _FAILED) from error
    if "error" in event:
        said = event["error"]
        message = said.get("message", said) if isinstance(said, dict) else said
        code = said.get("code") if isinstance(said, dict) else None
        status = code if isinstance(code, int) else _FAILED
        raise ServerError(f"the server failed after {completion} tokens of the answer: {message}", status)
    return event


def _delta(choice: dict[str, Any], decode: Callable[[int], str]) -> Delta:
    return Delta(
        text=choice.get("text") or "",
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=_logprobs(choice.get("logprobs"), decode),
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
    )


def _logprobs(given: dict[str, Any] | None, decode: Callable[[int], str]) -> tuple[TokenLogprob, ...]:
    if not given:
        return ()
    found = []
    for token, logprob, top in zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True):
        number = _number(token)
        choices = sorted(((_number(name), value) for name, value in (top or {}).items()), key=lambda item: -item[1])
        alternatives = tuple((other, decode(other), value) for other, value in choices)
        found.append(TokenLogprob(number, decode(number), logprob, alternatives))
    return tuple(found)


def _number(token: str) -> int:
    return int(token.removeprefix("token_id:"))
