"""What every request of a served engine passes through, ahead of vLLM's own handlers.

Give it to vLLM with ``--middleware kvcomm_integrations.serve.middleware.KVCommMiddleware`` (``kvcomm serve`` does). It
takes tenants from the server's side, adds reports to streams that ask for them, and tells clients what the server is.
Requests of plain OpenAI clients go through unchanged. Where there are tenants, what vLLM keeps of them (prefix cache,
responses, media) is filed under their tenant.
"""

from __future__ import annotations

import json
import uuid
from functools import partial
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
    with_route,
)
from kvcomm_integrations.serve.cors import as_vllm_allows
from kvcomm_integrations.serve.describe import describe, tokenizer_files
from kvcomm_integrations.serve.live_page import LiveRoute
from kvcomm_integrations.serve.operator_key import KEY_VARIABLE, OperatorKey
from kvcomm_integrations.serve.reports import reporting, watch
from kvcomm_integrations.serve.routes import CREATE_RESPONSE, RESPONSE, Access, access_to
from kvcomm_integrations.serve.state_routes import StateRoutes
from kvcomm_integrations.serve.tenants import Tenants, UnknownTenantError, divided, response_id, salt_of
from kvcomm_integrations.wire import INFO_PATH, TOKENIZER_PATH, WIRE_KEY


class ForbiddenRouteError(Exception):
    """A tenant's request for a route that is not for tenants; its text is for the client."""


class BodyError(Exception):
    """A body that cannot be served; its text is for the client."""


class KVCommMiddleware:
    """ASGI middleware; reads its settings from the environment (see ``tenants`` and ``operator_key``).

    Args:
        app: the application behind it.

    Raises:
        ConfigurationError: the settings in the environment cannot be used.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._tenants = Tenants.from_environment()
        self._operator = OperatorKey.from_environment()
        self._state = StateRoutes.from_environment()
        self._live = LiveRoute.from_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "websocket" and self._tenants.source and not self._operator.shown(scope):
            await send({"type": "websocket.close", "code": 1008, "reason": "not available where there are tenants"})
            return
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        if self._state.wants(scope):
            order = partial(self._state.answer, scope["app"].state.engine_client)
            await as_vllm_allows(scope, order)(scope, receive, send)
            return
        if self._live.wants(scope):  # without CORS headers: other sites' pages must not read it in a browser
            await self._live.answer(scope, receive, send)
            return
        path = route(scope)
        access = access_to(scope["method"], path)
        try:
            tenant = self._admit(scope, access)
        except UnknownTenantError as error:
            await _refuse(scope, receive, send, 401, str(error))
            return
        except ForbiddenRouteError as error:
            await _refuse(scope, receive, send, 403, str(error))
            return
        if scope["method"] == "GET" and path in (INFO_PATH, TOKENIZER_PATH):
            await self._tell(path, scope, receive, send)
        elif access is Access.SALTED:
            watch(scope["app"].state.engine_client, self._live)
            await self._pass_on(tenant, access, scope, receive, send)
        elif access is Access.MEDIA and tenant is not None:
            await self._pass_on(tenant, access, scope, receive, send)
        elif access is Access.OWNED and tenant is not None:
            await self._app(_own_response(scope, tenant), receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, access: Access) -> str | None:
        """The request's tenant; ``None`` where there are none, or where the request needs none.

        Raises:
            UnknownTenantError: the request shows no tenant.
            ForbiddenRouteError: the request is for the operator.
        """
        if not self._tenants.source or access is Access.OPEN:
            return None
        if access not in (Access.SALTED, Access.OWNED) and self._operator.shown(scope):
            return None
        if access is Access.OPERATOR:
            self._tenants.of(scope)  # strangers do not learn which routes there are
            raise ForbiddenRouteError(
                f"{scope['method']} {route(scope)} is not for tenants: it takes the operator's key ({KEY_VARIABLE} of "
                "the server)"
            )
        if access is Access.TENANT and scope["method"] != "POST" and self._tenants.source == "header":
            return None  # what the proxy asks for itself
        return self._tenants.of(scope)

    async def _tell(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in place of vLLM's list of models, so that whoever may not see that list sees nothing here."""

        status = 0

        async def pass_refusals(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status != 200:
                await send(message)

        await self._app(with_route(scope, "/v1/models"), receive, pass_refusals)
        if status == 200:
            client = scope["app"].state.engine_client
            content = await (describe(client, self._tenants) if path == INFO_PATH else tokenizer_files(client))

            async def answer(scope: Scope, receive: Receive, send: Send) -> None:
                await send_json(send, 200, content)

            await as_vllm_allows(scope, answer)(scope, receive, send)

    async def _pass_on(self, tenant: str | None, access: Access, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(receive)
        if tenant is None and f'"{WIRE_KEY}"'.encode() not in raw:
            await self._app(*with_body(scope, receive, raw), send)
            return
        try:
            body = _read_object(scope, raw)
            params = _ours(body)
            if tenant is not None:
                if route(scope) == CREATE_RESPONSE:
                    _own_responses(body, tenant)
                if access is Access.SALTED:
                    tenant = _settle_tenant(body, params, tenant)
                _own_media(body, tenant)
                raw = json.dumps(body).encode()
        except BodyError as error:
            await _refuse(scope, receive, send, 400, str(error))
            return
        if params is not None and body.get("stream"):
            send = reporting(send)
        await self._app(*with_body(scope, receive, raw), send)


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, message: str) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, status, message)

    await as_vllm_allows(scope, answer)(scope, receive, send)


def _read_object(scope: Scope, raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not header(scope, "content-type").startswith("application/json"):
        raise BodyError("the body must be a JSON object, sent as application/json")
    return body


def _ours(body: dict[str, Any]) -> dict[str, Any] | None:
    """Our parameters in a request's body, if they are there and an object."""
    transfer = body.get("kv_transfer_params")
    params = transfer.get(WIRE_KEY) if isinstance(transfer, dict) else None
    return params if isinstance(params, dict) else None


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
            raise BodyError(f"{name} must be a string")


def _own_response(scope: Scope, tenant: str) -> Scope:
    """A request for one stored response, as one for the tenant's own response of that name."""
    asked = RESPONSE.fullmatch(route(scope))
    assert asked is not None, "what Access.OWNED is for"
    return with_route(scope, f"{CREATE_RESPONSE}/{response_id(tenant, asked['id'])}{asked['action'] or ''}")


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
