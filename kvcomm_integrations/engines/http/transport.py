"""Requests to a server, and plain errors for whatever goes wrong with them. Knows nothing of prompts or answers."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from kvcomm_integrations import forks
from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.errors import ConfigurationError, ServerError, ServerTimeoutError, ServerUnreachableError

NOT_SENT_AGAIN = (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""Transport errors after which trying again makes no sense: the server is there but slow, or the address is wrong."""


class NotFoundError(ServerError):
    """The server has no such path or model."""

    def __init__(self, message: str) -> None:
        super().__init__(message, int(httpx.codes.NOT_FOUND))


class Transport:
    """A pool of connections to one server. Belongs to one event loop.

    Args:
        config: address, key, timeouts and TLS.

    Raises:
        ConfigurationError: the address or the CA file cannot be used.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.base_url = server_url(config.base_url)
        http = config.http
        self._http = http
        self._sockets: dict[int, Any] = {}
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {config.api_key.get_secret_value()}"} if config.api_key else {},
            timeout=httpx.Timeout(http.read_timeout, connect=http.connect_timeout),
            limits=httpx.Limits(max_connections=http.max_connections, max_keepalive_connections=http.max_connections),
            verify=_tls(http.verify, http.ca_file),
        )

    async def fetch(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON at a path, or the JSON answer to a JSON body."""
        async with self._open(path, body, {}) as response:
            return _json(await response.aread(), path)

    @asynccontextmanager
    async def lines(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a streamed answer to a JSON body. Leaving early closes the connection, which aborts."""
        async with self._open(path, body, headers) as response:
            yield self._lines(response)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    def abandon(self) -> None:
        """In a forked child: leave the connections to the parent, without a word to the server."""
        forks.abandon(self)
        forks.let_go([found for socket in self._sockets.values() if (found := socket.fileno()) >= 0])

    @asynccontextmanager
    async def _open(
        self, path: str, body: dict[str, Any] | None, headers: dict[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """A response whose status is good and whose body has not been read. Sends again after connection errors."""
        method, url = "GET" if body is None else "POST", self.base_url + path
        for attempt in range(self._http.retries + 1):
            request = self._client.build_request(method, url, json=body, headers=headers)
            try:
                response = await self._client.send(request, stream=True)
                self._note_socket(response)
                break
            except NOT_SENT_AGAIN as error:
                raise self._silent(error, url) from error
            except httpx.TransportError as error:
                if attempt == self._http.retries:
                    raise ServerUnreachableError(
                        f"no answer from {url} after {attempt + 1} tries ({_words(error)}): is the server running, and "
                        f"is base_url right? Start one with: kvcomm serve MODEL --port {_port(url)}"
                    ) from error
                await asyncio.sleep(self._http.backoff * 2**attempt)
        try:
            if response.status_code != httpx.codes.OK:
                raise self._refused(response, await response.aread())
            yield response
        except httpx.TransportError as error:
            raise self._broken(error, url) from error
        finally:
            await response.aclose()

    def _note_socket(self, response: httpx.Response) -> None:
        stream = response.extensions.get("network_stream")
        socket = stream.get_extra_info("socket") if stream is not None else None
        if socket is not None:
            self._sockets[socket.fileno()] = socket

    async def _lines(self, response: httpx.Response) -> AsyncIterator[str]:
        try:
            async for line in response.aiter_lines():
                yield line
        except httpx.TransportError as error:
            raise self._broken(error, str(response.url)) from error

    def _silent(self, error: httpx.TransportError, url: str) -> ServerError:
        if isinstance(error, httpx.PoolTimeout):
            return ServerTimeoutError(
                f"all {self._http.max_connections} connections to {url} are in use; raise http.max_connections"
            )
        if isinstance(error, httpx.UnsupportedProtocol):
            return ServerError(f"base_url {self.base_url!r} cannot be used: {error}")
        return ServerTimeoutError(
            f"{url} said nothing for http.read_timeout={self._http.read_timeout} s; the server may be overloaded: "
            "raise read_timeout or send fewer requests at once"
        )

    def _broken(self, error: httpx.TransportError, url: str) -> ServerError:
        if isinstance(error, httpx.ReadTimeout):
            return self._silent(error, url)
        return ServerUnreachableError(
            f"the connection to {url} broke off in the middle of an answer ({_words(error)}); the server may have "
            "died, see its log"
        )

    def _refused(self, response: httpx.Response, content: bytes) -> ServerError:
        status, url, said = response.status_code, str(response.url), _said(content)
        if status == httpx.codes.UNAUTHORIZED or status == httpx.codes.FORBIDDEN:
            return ServerError(
                f"{url} refuses the API key ({status}: {said}); set api_key or the environment variable KVCOMM_API_KEY "
                "to a key the server knows",
                status,
            )
        if status == httpx.codes.NOT_FOUND:
            return NotFoundError(f"{url} answers 404 ({said}); base_url should be the address of a vLLM server's /v1")
        if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            return ServerError(f"the server at {url} failed with status {status} ({said}); see its log", status)
        return ServerError(f"{url} refuses the request with status {status}: {said}", status)


def server_url(base_url: str | None) -> str:
    """A server's address without the ``/v1`` at its end.

    Raises:
        ConfigurationError: not an http or https address.
    """
    try:
        url = httpx.URL(base_url or "")
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"base_url {base_url!r} is not an address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError(f"base_url {base_url!r} must look like http://host:8000/v1")
    return str(url).rstrip("/").removesuffix("/v1")


def _tls(verify: bool, ca_file: str | None) -> ssl.SSLContext | bool:
    if not verify or ca_file is None:
        return verify
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"http.ca_file {ca_file!r} cannot be read as PEM certificates: {error}") from error


def _json(content: bytes, path: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ServerError(f"{path} answers something that is not JSON; is this a vLLM server?") from error


def _said(content: bytes) -> str:
    """The server's own words, out of any of the forms errors come in."""
    text = content.decode("utf-8", "replace").strip()
    try:
        found: Any = json.loads(text)
    except ValueError:
        return text[:500] or "no message"
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:500]


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _port(url: str) -> int:
    parsed = httpx.URL(url)
    return parsed.port or (443 if parsed.scheme == "https" else 80)
