"""Requests with another path or body, and answers that do not come from vLLM.

On plain ASGI where Starlette has nothing for it: a request with another body, whose answer is not buffered.
"""

from __future__ import annotations

from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcomm_integrations.serve.tenants import RefusedError


async def answer(request: Request, send: Send, response: ASGIApp) -> None:
    """Send an answer that does not come from vLLM, with the CORS headers that vLLM's answers to the request have.

    vLLM adds the middleware of ``--middleware`` outside its CORS middleware, so our answers do not pass the latter.
    Preflight requests (``OPTIONS``) need none of this: they are passed on, and vLLM's CORS middleware answers.
    """
    for entry in getattr(request.app, "user_middleware", ()):
        if entry.cls is CORSMiddleware:
            response = CORSMiddleware(response, *entry.args, **entry.kwargs)
    await response(request.scope, request.receive, send)


def refusal(status: int, message: str) -> JSONResponse:
    """An error in OpenAI's form."""
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


async def read_body(request: Request) -> bytes:
    """The whole body of a request.

    Raises:
        RefusedError: the client left before it had sent it.
    """
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise RefusedError(400, "the body broke off") from error


def route(scope: Scope) -> str:
    """A request's path within the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def with_route(scope: Scope, path: str) -> Scope:
    """The request with another path within the application."""
    root = scope["path"].removesuffix(route(scope))
    return {**scope, "path": root + path, "raw_path": quote(root + path).encode()}


def with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """The request with another body; whatever comes after the body (a disconnect) is still received."""
    headers = MutableHeaders(raw=list(scope["headers"]))
    headers["content-length"] = str(len(body))
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return pending.pop() if pending else await receive()

    return {**scope, "headers": headers.raw}, receive_body
