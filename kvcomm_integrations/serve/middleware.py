"""What every request of a served engine passes through, ahead of vLLM's own handlers.

Give it to vLLM with ``--middleware kvcomm_integrations.serve.middleware.KVCommMiddleware`` (``kvcomm serve`` does). It
takes tenants from the server's side, adds reports to streams that ask for them, and tells clients what the server is.
Requests of plain OpenAI clients go through unchanged, but for the cache salt of their tenant where there are tenants.
"""

from __future__ import annotations

import json
from typing import Any

from kvcomm_integrations.ids import DEFAULT_TENANT
from kvcomm_integrations.serve.asgi import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    route,
    send_error,
    send_json,
    with_body,
)
from kvcomm_integrations.serve.describe import describe, tokenizer_files
from kvcomm_integrations.serve.live_page import LiveRoute
from kvcomm_integrations.serve.reports import reporting, watch
from kvcomm_integrations.serve.state_routes import StateRoutes
from kvcomm_integrations.serve.tenants import Tenants, UnknownTenantError, divided, salt_of
from kvcomm_integrations.wire import INFO_PATH, TOKENIZER_PATH, WIRE_KEY

SALTED_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Endpoints whose body takes a cache salt: what tenants may use."""
HARMLESS_PATHS = ("/tokenize", "/detokenize")
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""What vLLM guards with its own API keys."""


class KVCommMiddleware:
    """ASGI middleware; reads its settings from the environment (see ``tenants``).

    Args:
        app: the application behind it.

    Raises:
        ConfigurationError: the settings in the environment cannot be used.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._tenants = Tenants.from_environment()
        self._state = StateRoutes.from_environment()
        self._live = LiveRoute.from_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "websocket" and self._tenants.source:
            await send({"type": "websocket.close", "code": 1008, "reason": "not available where there are tenants"})
            return
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        if self._state.wants(scope):
            await self._state.answer(scope["app"].state.engine_client, scope, receive, send)
            return
        if self._live.wants(scope):
            await self._live.answer(scope, receive, send)
            return
        try:
            tenant = self._tenant(scope)
        except UnknownTenantError as error:
            await send_error(send, 401, str(error))
            return
        path, client = route(scope), scope["app"].state.engine_client
        if scope["method"] == "GET" and path in (INFO_PATH, TOKENIZER_PATH):
            await self._tell(path, client, scope, receive, send)
        elif scope["method"] == "POST" and path in SALTED_PATHS:
            watch(client, self._live)
            await self._pass_on(tenant, scope, receive, send)
        elif scope["method"] == "POST" and tenant is not None and path not in HARMLESS_PATHS:
            await send_error(send, 403, f"{path} keeps no tenants apart, so this server does not offer it")
        else:
            await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        """The request's tenant, asked for only where it matters: health checks and metrics need none."""
        guarded = route(scope).startswith(GUARDED)
        needed = scope["method"] == "POST" or (guarded and self._tenants.source == "keys")
        return self._tenants.of(scope) if needed else None

    async def _tell(self, path: str, client: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in place of vLLM's list of models, so that whoever may not see that list sees nothing here."""

        status = 0

        async def pass_refusals(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status != 200:
                await send(message)

        await self._app({**scope, "path": scope.get("root_path", "") + "/v1/models"}, receive, pass_refusals)
        if status == 200:
            content = await (describe(client, self._tenants) if path == INFO_PATH else tokenizer_files(client))
            await send_json(send, 200, content)

    async def _pass_on(self, tenant: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(receive)
        if tenant is None and f'"{WIRE_KEY}"'.encode() not in raw:
            await self._app(*with_body(scope, receive, raw), send)
            return
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if not isinstance(body, dict) or not header(scope, "content-type").startswith("application/json"):
            await send_error(send, 400, "the body must be a JSON object, sent as application/json")
            return
        params = _ours(body)
        if tenant is not None:
            _settle_tenant(body, params, tenant)
            raw = json.dumps(body).encode()
        if params is not None and body.get("stream"):
            send = reporting(send)
        await self._app(*with_body(scope, receive, raw), send)


def _ours(body: dict[str, Any]) -> dict[str, Any] | None:
    """Our parameters in a request's body, if they are there and an object."""
    transfer = body.get("kv_transfer_params")
    params = transfer.get(WIRE_KEY) if isinstance(transfer, dict) else None
    return params if isinstance(params, dict) else None


def _settle_tenant(body: dict[str, Any], params: dict[str, Any] | None, tenant: str) -> None:
    """Write the server's tenant over whatever the body says, keeping only how the body divides it."""
    if params is not None:
        params["tenant"] = divided(tenant, str(params.get("tenant", DEFAULT_TENANT)))
        tenant = params["tenant"]
    body["cache_salt"] = salt_of(tenant, str(body.get("cache_salt") or ""))
