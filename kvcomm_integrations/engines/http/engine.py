"""The HTTP engine: vLLM's OpenAI-compatible server behind the interface of every engine."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import threading
import uuid
from collections.abc import AsyncGenerator

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.http.handshake import Server, served_model, shake_hands
from kvcomm_integrations.engines.http.remote_tokenizer import fetch_tokenizer, local_tokenizer
from kvcomm_integrations.engines.http.streaming import completion_body, read_deltas
from kvcomm_integrations.engines.http.transport import Transport, server_url
from kvcomm_integrations.engines.interface import Delta, Engine, GenerationRequest, check_prompt
from kvcomm_integrations.engines.loop import LoopThread
from kvcomm_integrations.errors import EngineClosedError
from kvcomm_integrations.forks import abandon, watch
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import SESSION_HEADER


class HttpEngine(Engine):
    """A vLLM server, reached through one pool of connections in a thread of its own.

    Nothing is sent before first use. The server may have the kvcomm connector (then prompts are reused as in this
    process) or not (then it is an ordinary vLLM server, and one warning says so). A forked child opens connections of
    its own.

    Args:
        config: ``base_url`` and ``model`` at least.
        tokenizer: the model's, if it is loaded already.

    Raises:
        ConfigurationError: the address cannot be used.
    """

    def __init__(self, config: EngineConfig, tokenizer: ChatTokenizer | None = None) -> None:
        server_url(config.base_url)
        self.config = config
        self._lock = threading.RLock()
        self._connected: tuple[LoopThread, Transport] | None = None
        self._tokenizer = tokenizer
        self._server: Server | None = None
        self._context: int | None = None
        self._closed = False
        watch(self)

    def after_fork(self) -> None:
        """In a forked child: keep what is known of the server, leave loop and connections to the parent."""
        self._lock = threading.RLock()
        if self._connected is not None:
            loop, transport = self._connected
            transport.abandon()
            abandon(loop)
            self._connected = None

    @property
    def closed(self) -> bool:
        """``close`` has been called; the engine cannot be used again."""
        return self._closed

    @property
    def tokenizer(self) -> ChatTokenizer:
        """See ``Engine.tokenizer``; asks the server where there is none on this machine."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = local_tokenizer(self.config)
            if self._tokenizer is None:
                loop, transport = self._connection()
                self._tokenizer = loop.run(fetch_tokenizer(transport, self.config.model))
            return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """See ``Engine.max_model_len``; the server's, or less if the configuration says so."""
        return self.server.max_model_len

    @property
    def server(self) -> Server:
        """What the handshake found out; it takes place on first use.

        Raises:
            EngineError: the server cannot be reached or does not fit; the next use tries again.
        """
        with self._lock:
            if self._server is None:
                tokenizer = self.tokenizer
                loop, transport = self._connection()
                self._server = loop.run(shake_hands(transport, self.config, tokenizer))
            return self._server

    def context_length(self, *, ask: bool = True) -> int | None:
        """See ``Engine.context_length``. Asks for the list of models only; the handshake comes with first use."""
        if self._server is not None:
            return self._server.max_model_len
        own = self.config.max_model_len
        if self._context is None and ask:
            loop, transport = self._connection()
            _, limit = served_model(loop.run(transport.fetch("/v1/models")), self.config)
            self._context = min(limit or own or 0, own or limit or 0)
        return self._context or own

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """See ``Engine.generate``; closing the connection makes the server abort."""
        if self._server is None:
            await asyncio.to_thread(lambda: self.server)
        loop, transport = self._connection()
        async with contextlib.aclosing(loop.stream(lambda: self._generate(transport, request))) as deltas:
            async for delta in deltas:
                yield delta

    def close(self) -> None:
        """See ``Engine.close``. The server goes on."""
        with self._lock:
            self._closed = True
            connected, self._connected = self._connected, None
        if connected is not None:
            loop, transport = connected
            loop.run(transport.aclose())
            atexit.unregister(self.close)
            loop.stop()

    def _connection(self) -> tuple[LoopThread, Transport]:
        with self._lock:
            if self._closed:
                raise EngineClosedError(
                    f"the connection to {self.config.base_url} has been closed; make a new chat model"
                )
            if self._connected is None:
                transport = Transport(self.config)
                self._connected = LoopThread("kvcomm-http"), transport
                atexit.register(self.close)
            return self._connected

    async def _generate(self, transport: Transport, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        server, tokenizer = self._server, self._tokenizer
        assert server is not None and tokenizer is not None
        check_prompt(request.prompt, server.max_model_len, server.model)
        request_id = request.request_id or f"kvcomm-{uuid.uuid4().hex}"
        body = completion_body(request, server, request_id)
        headers = {SESSION_HEADER: session_key(request.params.tenant, request.params.session)}
        async with transport.lines("/v1/completions", body, headers) as lines:
            async for delta in read_deltas(lines, request, lambda token: tokenizer.decode([token], False)):
                yield delta


def session_key(tenant: str, session: str) -> str:
    """Hash of tenant and session: fits into a header whatever their names, and tells a router nothing."""
    return hashlib.blake2b(f"{len(tenant)}:{tenant}{session}".encode(), digest_size=16).hexdigest()
