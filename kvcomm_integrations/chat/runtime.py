"""The chat runtime both framework adapters stand on: messages in, typed chunks of an answer out.

One runtime per engine holds the registry of shared contents, so every model object on one engine knows what the others
have said. Knows engines, prompts and tool formats; no framework, no tensors.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvcomm_integrations.chat.chunks import Chunk
from kvcomm_integrations.chat.collector import AnswerCollector, PreparedChat
from kvcomm_integrations.chat.detect import tool_format_for
from kvcomm_integrations.chat.request_log import RequestLog
from kvcomm_integrations.chat.tool_format import ToolFormat, tool_use
from kvcomm_integrations.chat.tracing import chat_span
from kvcomm_integrations.config import Isolation
from kvcomm_integrations.engines.interface import Engine, GenerationRequest, SamplingOptions, check_prompt
from kvcomm_integrations.engines.loop import sync_loop
from kvcomm_integrations.errors import ConfigurationError, EngineError
from kvcomm_integrations.forks import watch
from kvcomm_integrations.ids import DEFAULT_TENANT, tenant_salt
from kvcomm_integrations.prompts.arranging import arrange
from kvcomm_integrations.prompts.builder import PromptBuilder
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.content_registry import ContentRegistry, response_name
from kvcomm_integrations.wire import Mode

_FIRST_PAUSE = 0.25
"""Seconds before the first retry; doubles with each further one."""


class ChatRuntime:
    """Turns chats into segmented requests and streams of deltas into chunks.

    Safe to use from any thread and any event loop. Prefer ``runtime_for(engine)`` over the constructor, so that all
    users of one engine share one registry.

    Args:
        engine: The engine that runs the model.
        tool_format: How the model writes tool calls and reasoning; ``None`` chooses one for the model.
        registry: Shared contents of all sessions; ``None`` makes a new one.
    """

    def __init__(
        self, engine: Engine, *, tool_format: ToolFormat | None = None, registry: ContentRegistry | None = None
    ) -> None:
        self.engine = engine
        self.registry = ContentRegistry() if registry is None else registry
        """The shared contents of all sessions on this engine."""
        self.runs = RequestLog(engine.config.model, decode=lambda ids: engine.tokenizer.decode(ids, skip_special=False))
        """The latest requests of this engine."""
        self._tool_format = tool_format
        self._builder: PromptBuilder | None = None
        self._lock = threading.Lock()
        watch(self)

    def after_fork(self) -> None:
        """In a forked child: a lock that no thread of the parent holds."""
        self._lock = threading.Lock()

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls and reasoning, told by its chat template."""
        if self._tool_format is None:
            self._tool_format = tool_format_for(self.engine.tokenizer)
        return self._tool_format

    @property
    def builder(self) -> PromptBuilder:
        """The prompt builder; made on first use, because that reads the tokenizer's files."""
        with self._lock:
            if self._builder is None:
                config = self.engine.config
                self._builder = PromptBuilder(
                    self.engine.tokenizer,
                    self.registry,
                    tokenization=config.tokenization,
                    min_segment_tokens=config.reuse.min_segment_tokens,
                )
            return self._builder

    def release_session(self, session: str, tenant: str = DEFAULT_TENANT) -> None:
        """A session is over: forget its contents here, and their caches in the engine."""
        self.registry.release(registry_session(tenant, session))
        if self._builder is not None:  # else the engine may not even have been started
            self.engine.release_session(session, tenant=tenant)

    async def arelease_session(self, session: str, tenant: str = DEFAULT_TENANT) -> None:
        """``release_session`` on an event loop."""
        await asyncio.to_thread(self.release_session, session, tenant)

    def prepare(
        self,
        messages: Sequence[ChatMessage],
        *,
        agent: str = "default",
        session: str = "default",
        tenant: str = DEFAULT_TENANT,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        strict: bool | None = None,
        tool_format: ToolFormat | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        mode: Mode = Mode.AUTO,
        policy: str | None = None,
        sampling: SamplingOptions | None = None,
    ) -> PreparedChat:
        """Render, segment and check one request. May start the engine, so keep it off event loops (``aprepare``).

        Args:
            messages: The conversation; its last message is what is answered.
            agent: Who is answering; names the response ``agent:<agent>:response``.
            session: Whose shared contents may be reused.
            tenant: Whose exact prefix cache may be hit.
            tools: Definitions in OpenAI form.
            tool_choice: Any form that ``tool_format.tool_use`` takes.
            parallel_tool_calls: Allow more than one call in one answer.
            strict: Force tool arguments to follow their schema.
            tool_format: How the model writes tool calls and reasoning; ``None``: the runtime's.
            template_kwargs: More variables for the chat template (``enable_thinking``, ...).
            mode: How the request is treated by reuse.
            policy: Correction policy for this request; ``None``: the engine's.
            sampling: How tokens are drawn.

        Raises:
            ConfigurationError: no messages, or tools and choices that do not fit.
            ContextOverflowError: the prompt leaves no room for an answer.
        """
        started = time.perf_counter()
        if not messages:
            raise ConfigurationError("a chat needs at least one message; got none")
        use = tool_use(tools, tool_choice, parallel=parallel_tool_calls, strict=strict)
        tool_format, tokenizer = tool_format or self.tool_format, self.engine.tokenizer
        shown, shown_tools = tool_format.encode(tokenizer, messages, use)
        prompt = self.builder.build(
            shown,
            session=registry_session(tenant, session),
            agent=agent,
            tools=shown_tools,
            template_kwargs=dict(template_kwargs or {}),
        ).prompt
        sampling = sampling or SamplingOptions()
        constrained = sampling.structured_output is not None
        sampling = tool_format.adjust(tokenizer, use, sampling, prompt)
        check_prompt(prompt, self.engine.max_model_len, self.engine.config.model)
        params = prompt.params(
            agent=agent,
            session=session,
            tenant=tenant,
            response_name=response_name(agent),
            mode=mode,
            policy=policy,
        )
        salt = None if self.engine.config.reuse.isolation is Isolation.GLOBAL else tenant_salt(tenant)
        request = GenerationRequest(prompt=prompt, params=params, sampling=sampling, cache_salt=salt)
        prepare_ms = (time.perf_counter() - started) * 1e3
        return PreparedChat(request, tools=use, tool_format=tool_format, constrained=constrained, prepare_ms=prepare_ms)

    async def aprepare(self, messages: Sequence[ChatMessage], **kwargs: Any) -> PreparedChat:
        """``prepare`` in a thread: an event loop must not wait for a tokenizer or a starting engine."""
        return await asyncio.to_thread(self.prepare, messages, **kwargs)

    async def stream(
        self, chat: PreparedChat, *, timeout: float | None = None, retries: int = 0
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the answer; the last chunk is a ``FinalChunk``.

        The response is registered as a shared content just before that chunk. A stream that is closed early, cancelled
        or failing registers nothing.

        Args:
            chat: From ``prepare``.
            timeout: Seconds the whole answer may take, counted from here: starting the engine is not part of it.
            retries: How often to try again after an engine error that came before the first chunk.

        Raises:
            TimeoutError: the answer took longer than ``timeout``.
            EngineError: the engine failed and no retry was left.
        """
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        begun = False
        with chat_span(self.engine.config, chat.request) as note:
            for attempt in range(retries + 1):
                try:
                    async with aclosing(self._stream_once(chat, deadline, timeout)) as chunks:
                        async for chunk in chunks:
                            begun = True
                            note(chunk)
                            yield chunk
                    return
                except EngineError as err:
                    if begun or attempt == retries or not err.worth_retrying:
                        raise
                    await asyncio.sleep(_FIRST_PAUSE * 2**attempt)

    async def _stream_once(
        self, chat: PreparedChat, deadline: float | None, timeout: float | None
    ) -> AsyncGenerator[Chunk, None]:
        session = registry_session(chat.request.params.tenant, chat.request.params.session)
        answer = AnswerCollector(self.engine.tokenizer, self.registry, session, chat)
        recording = self.runs.begin(chat.request, prepare_ms=chat.prepare_ms)
        try:
            async with aclosing(self.engine.generate(chat.request)) as deltas:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline):
                            delta = await anext(deltas)
                    except StopAsyncIteration:
                        break
                    except TimeoutError as err:
                        if timeout is None:
                            raise
                        raise TimeoutError(
                            f"no complete answer within timeout={timeout} s; raise timeout or lower max_tokens"
                        ) from err
                    recording.delta(delta)
                    for chunk in answer.feed(delta):
                        yield chunk
            last = replace(answer.last(), number=recording.number)
            recording.done(last)
        except BaseException as err:
            recording.failed(err)
            raise
        yield last

    def stream_sync(
        self, chat: PreparedChat, *, timeout: float | None = None, retries: int = 0
    ) -> Generator[Chunk, None, None]:
        """``stream`` for callers without an event loop: it runs on a loop that all of them share."""
        return sync_loop().stream_sync(lambda: self.stream(chat, timeout=timeout, retries=retries))

    def count_tokens(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Prompt tokens of a conversation, chat template and tools included."""
        if not messages:
            return 0
        tokenizer = self.engine.tokenizer
        shown, shown_tools = self.tool_format.encode(tokenizer, messages, tool_use(tools))
        _, text = arrange(
            shown, lambda dicts: tokenizer.render(dicts, tools=shown_tools, **dict(template_kwargs or {}))
        )
        return len(tokenizer.encode(text, allow_special=True))


def registry_session(tenant: str, session: str) -> str:
    """The key of a session in the content registry: sessions of two tenants may have the same name."""
    return session if tenant == DEFAULT_TENANT else f"{tenant}\0{session}"


_RUNTIME = "_chat_runtime"


def runtime_for(engine: Engine) -> ChatRuntime:
    """The one runtime of an engine, living as long as it does: its users share the registry of what has been said."""
    attributes = vars(engine)
    runtime = attributes.get(_RUNTIME) or attributes.setdefault(_RUNTIME, ChatRuntime(engine))
    assert isinstance(runtime, ChatRuntime)
    return runtime


__all__ = ["DEFAULT_TENANT", "ChatRuntime", "PreparedChat", "runtime_for", "tenant_salt"]
