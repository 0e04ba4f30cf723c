"""What every request of a served engine passes through, ahead of vLLM's own handlers.

Give it to vLLM with ``--middleware kvcomm_integrations.serve.middleware.KVCommMiddleware`` (``kvcomm serve`` does). It
takes tenants from the server's side, adds reports to streams that ask for them, and tells clients what the server is.
Requests of plain OpenAI clients go through unchanged. Where there are tenants, what vLLM keeps of them (prefix cache,
responses, media) is filed under their tenant.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from kvcomm_integrations.ids import DEFAULT_TENANT
from kvcomm_integrations.serve.asgi import answer, read_body, refusal, route, with_body, with_route
from kvcomm_integrations.serve.describe import describe, tokenizer_files
from kvcomm_integrations.serve.live_page import LiveRoute
from kvcomm_integrations.serve.names import KEY_VARIABLE, STATE_PATH
from kvcomm_integrations.serve.operator_key import OperatorKey
from kvcomm_integrations.serve.reports import reporting, watch
from kvcomm_integrations.serve.routes import CREATE_RESPONSE, Access, access_to
from kvcomm_integrations.serve.state_routes import StateRoutes
from kvcomm_integrations.serve.tenants import RefusedError, Tenants, divided, response_id, salt_of
from kvcomm_integrations.wire import INFO_PATH, TOKENIZER_PATH, WIRE_KEY


class KVCommMiddleware:
    """ASGI middleware; reads its settings from the environment (see ``names``).

    Args:
        app: the application behind it.

    Raises:
        ConfigurationError: the settings in the environment cannot be used.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tenants = Tenants.from_environment()
        self._operator = OperatorKey.from_environment()
        self._state = StateRoutes(self._operator)
        self._live = LiveRoute()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "websocket" and self._tenants.source and not self._operator.shown(Headers(scope=scope)):
            await WebSocketClose(1008, "not available where there are tenants")(scope, receive, send)
        elif scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
        elif self._live.wants(scope):  # without CORS headers: other sites' pages must not read it in a browser
            await self._live.answer(scope, receive, send)
        else:
            try:
                await self._handle(Request(scope, receive), send)
            except RefusedError as error:
                await answer(Request(scope, receive), send, refusal(error.status, str(error)))

    async def _handle(self, request: Request, send: Send) -> None:
        """Answer one request, or have vLLM answer it.

        Raises:
            RefusedError: the request is not served.
        """
        scope, path = request.scope, route(request.scope)
        if self._state.folder and path.startswith(STATE_PATH):
            await answer(request, send, await self._state.answer(request))
            return
        access = access_to(request.method, path)
        tenant = self._admit(request, access)
        if request.method == "GET" and path in (INFO_PATH, TOKENIZER_PATH):
            await self._tell(request, send)
            return
        if access is Access.SALTED:
            watch(request.app.state.engine_client, self._live)
        if access is Access.SALTED or (access is Access.MEDIA and tenant is not None):
            await self._pass_on(tenant, access, request, send)
            return
        if access is Access.OWNED and tenant is not None:
            scope = _own_response(scope, tenant)
        await self._app(scope, request.receive, send)

    def _admit(self, request: Request, access: Access) -> str | None:
        """The request's tenant; ``None`` where there are none, or where the request needs none.

        Raises:
            RefusedError: the request shows no tenant (401), or is for the operator (403).
        """
        if not self._tenants.source or access is Access.OPEN:
            return None
        if access not in (Access.SALTED, Access.OWNED) and self._operator.shown(request.headers):
            return None
        if access is Access.TENANT and request.method != "POST" and self._tenants.source == "header":
            return None  # what the proxy asks for itself
        tenant = self._tenants.of(request.headers)
        if access is Access.OPERATOR:  # said to tenants only: strangers do not learn which routes there are
            needed = f"it takes the operator's key ({KEY_VARIABLE} of the server)"
            raise RefusedError(403, f"{request.method} {route(request.scope)} is not for tenants: {needed}")
        return tenant

    async def _tell(self, request: Request, send: Send) -> None:
        """Answer a client to which vLLM would show its list of models; pass vLLM's refusal on to any other."""
        status = 0

        async def pass_refusals(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status != 200:
                await send(message)

        await self._app(with_route(request.scope, "/v1/models"), request.receive, pass_refusals)
        if status == 200:
            client = request.app.state.engine_client
            info = route(request.scope) == INFO_PATH
            content = describe(client, self._tenants) if info else run_in_threadpool(tokenizer_files, client)
            await answer(request, send, JSONResponse(await content))

    async def _pass_on(self, tenant: str | None, access: Access, request: Request, send: Send) -> None:
        """Have vLLM answer a request, a tenant's with its body rewritten; add a report to streams that ask for one."""
        raw = await read_body(request)
        if tenant is not None or f'"{WIRE_KEY}"'.encode() in raw:
            body, params = _read_object(request, raw)
            if params is not None and body.get("stream"):
                send = reporting(send)
            if tenant is not None:
                if route(request.scope) == CREATE_RESPONSE:
                    _own_responses(body, tenant)
                if access is Access.SALTED:
                    tenant = _settle_tenant(body, params, tenant)
                _own_media(body, tenant)
                raw = json.dumps(body).encode()
        await self._app(*with_body(request.scope, request.receive, raw), send)


def _read_object(request: Request, raw: bytes) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A request's body, and our parameters in it, if they are there and an object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not request.headers.get("content-type", "").startswith("application/json"):
        raise RefusedError(400, "the body must be a JSON object, sent as application/json")
    transfer = body.get("kv_transfer_params")
    params = transfer.get(WIRE_KEY) if isinstance(transfer, dict) else None
    return body, params if isinstance(params, dict) else None


def _settle_tenant(body: dict[str, Any], params: dict[str, Any] | None, tenant: str) -> str:
    """Write the server's tenant over whatever the body says, but for how the body divides it. Returns the result."""
    if params is not None:
        params["tenant"] = divided(tenant, str(params.get("tenant", DEFAULT_TENANT)))
        tenant = params["tenant"]
    body["cache_salt"] = salt_of(tenant, str(body.get("cache_salt") or ""))
    return tenant


def _own_responses(body: dict[str, Any], tenant: str) -> None:
    """Make the ids in a new response's body its tenant's: its own id, and the one that it continues."""
    body.setdefault("request_id", uuid.uuid4().hex)
    for name in ("request_id", "previous_response_id"):
        if isinstance(body.get(name), str):
            body[name] = response_id(tenant, body[name])
        elif body.get(name) is not None or name == "request_id":
            raise RefusedError(400, f"{name} must be a string")


def _own_response(scope: Scope, tenant: str) -> Scope:
    """A request for one stored response, as one for the tenant's own response of that name."""
    said, slash, action = route(scope).removeprefix(f"{CREATE_RESPONSE}/").partition("/")
    return with_route(scope, f"{CREATE_RESPONSE}/{response_id(tenant, said)}{slash}{action}")


def _own_media(body: dict[str, Any], tenant: str) -> None:
    """Make the names of images and other media in messages their tenant's.

    vLLM keeps media under the names that clients give them (``uuid``), and a request may name one without sending it.
    """
    for field in ("messages", "input"):
        items = body.get(field)
        for item in items if isinstance(items, list) else ():
            for parts in item.values() if isinstance(item, dict) else ():
                for part in parts if isinstance(parts, list) else ():
                    if isinstance(part, dict) and part.get("uuid") is not None:
                        part["uuid"] = salt_of(tenant, str(part["uuid"]))
