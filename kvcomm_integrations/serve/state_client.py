"""``kvcomm state save|load|clear``: orders to a running server."""

from __future__ import annotations

import argparse
import os
from typing import Any

import httpx

from kvcomm_integrations.errors import ConfigurationError, EngineError, StateFileError
from kvcomm_integrations.serve.names import KEY_VARIABLE, STATE_PATH

TIMEOUT_S = 600.0
"""Longest wait for a large state to be written or read, seconds."""


def save(args: argparse.Namespace) -> int:
    """Have the server write what it has learned to a file in its folder."""
    return _with_file(args, "save", {})


def load(args: argparse.Namespace) -> int:
    """Have the server learn what a file in its folder holds."""
    return _with_file(args, "load", {"merge": args.merge})


def clear(args: argparse.Namespace) -> int:
    """Have the server forget what it has learned."""
    print(f"{order(args.server, 'clear', {'tenant': args.tenant})['edges']} edges forgotten")
    return 0


def _with_file(args: argparse.Namespace, action: str, more: dict[str, Any]) -> int:
    done = order(args.server, action, {"name": args.name, "tenant": args.tenant, **more})
    print(f"{args.name}: {done['edges']} edges, {done['examples']} examples")
    return 0


def order(server: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one order.

    Args:
        server: address of the server, with or without ``/v1``.
        action: ``save``, ``load`` or ``clear``.
        body: fields of ``StateOrder``.

    Raises:
        ConfigurationError: the environment holds no key.
        EngineError: the server does not answer, or offers no such route.
        StateFileError: the server refuses the file.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ConfigurationError(f"set {KEY_VARIABLE} to the server's operator key")
    url = server.rstrip("/").removesuffix("/v1") + STATE_PATH + action
    try:
        answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"no answer from {url}: {error}") from error
    if answer.status_code == 200:
        done: dict[str, Any] = answer.json()
        return done
    said = _said(answer)
    if answer.status_code == 400:
        raise StateFileError(said)
    hint = "; is KVCOMM_STATE_DIR set on the server?" if answer.status_code == 404 else ""
    raise EngineError(f"{url} answered {answer.status_code}: {said}{hint}")


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
