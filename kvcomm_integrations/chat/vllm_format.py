"""A tool format over vLLM's own tool and reasoning parsers, for families that do not write like Hermes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvcomm_integrations.chat.chunks import AnswerChunk, CallChunk, ReasoningChunk, TextChunk
from kvcomm_integrations.chat.hermes import HermesFormat, after_thinking, answer_format, new_call_id, structural
from kvcomm_integrations.chat.tool_format import AnswerParser, ToolFormat, ToolUse
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.engines.vllm_args import require_vllm
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer


def _parser(tool_parser: str | None, reasoning_parser: str | None, tokenizer: ChatTokenizer, tools: Any) -> Any:
    require_vllm()
    from kvcomm_integrations.connector.compat import parser_class

    try:
        made = parser_class(tool_parser, reasoning_parser)
    except (TypeError, KeyError, ImportError) as error:
        raise ConfigurationError(
            f"vLLM has no parsers tool_parser={tool_parser!r}, reasoning_parser={reasoning_parser!r}: {error}"
        ) from error
    try:
        return made(tokenizer.hf, tools)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"tool_parser={tool_parser!r}, reasoning_parser={reasoning_parser!r} cannot be used with the tokenizer of "
            f"{tokenizer.source!r}: {error}"
        ) from error


def _request(use: ToolUse, structured_output: dict[str, Any] | None = None) -> Any:
    """The chat request vLLM's parsers want to see; only what they read of it is filled in."""
    from vllm.sampling_params import StructuredOutputsParams

    from kvcomm_integrations.connector.compat import chat_completion_request

    fields: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}
    if use.tools:
        choice: Any = "required" if use.required else "auto"
        if use.named:
            choice = {"type": "function", "function": {"name": use.named}}
        strict = {"strict": True} if use.strict else {}  # without it vLLM leaves arguments unconstrained
        tools = [{**tool, "function": {**tool["function"], **strict}} for tool in use.tools]
        fields |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": use.parallel}
    if structured_output is not None:
        fields["structured_outputs"] = StructuredOutputsParams(**structured_output)
    return chat_completion_request(fields)


_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Constraints by the names that vLLM's parameters and ``SamplingOptions`` have in common."""

_TAGS = {
    **dict.fromkeys(("glm45", "glm47", "qwen3_coder", "qwen3_xml"), "tool_call"),
    "minimax_m2": "minimax:tool_call",
    "seed_oss": "seed:tool_call",
}
"""Name of the tag around a call, by parser, for the families whose arguments are not JSON."""


_LIST = re.compile(r"\[TOOL_CALLS\]\s*\[\s*(?={)")
"""Calls as older Mistral models write them, in a JSON list; vLLM reads it only with Mistral's own tokenizer."""
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*({.*)', re.DOTALL)
_FORMED = frozenset({"llama3_json", "qwen3_coder", "glm45", "minimax_m2", "kimi_k2", "hermes"})
"""Parsers with which vLLM constrains calls in the family's own language, checked with vLLM 0.32."""
_BARE = frozenset({"llama3_json", "llama4_json"})
"""Parsers of families whose calls are JSON without any mark: an answer that is JSON with a name may be no call."""


class VllmAnswerParser(AnswerParser):
    """One answer, read by vLLM's streaming parsers.

    Args:
        tool_parser: vLLM's name of a tool parser, or ``None``.
        reasoning_parser: vLLM's name of a reasoning parser, or ``None``.
        tokenizer: The model's.
        use: The tools of the request.
        prompt: The prompt; reasoning parsers look whether it has opened a thinking block.
    """

    def __init__(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tokenizer: ChatTokenizer,
        use: ToolUse,
        prompt: SegmentedPrompt,
    ) -> None:
        self._request = _request(use if tool_parser else ToolUse())
        self._make = partial(_parser, tool_parser, reasoning_parser, tokenizer, self._request.tools)
        self._make_reader = partial(_parser, None, reasoning_parser, tokenizer, None) if reasoning_parser else None
        self._parser = self._make()
        self._prompt_ids = list(prompt.token_ids)
        self._parallel = use.parallel
        self._tools = {tool["function"]["name"] for tool in use.tools} if tool_parser in _BARE else None
        self._list = _LIST if tool_parser == "mistral" and use.tools else None
        self._is_answer = False
        """It looks like a call, but of no tool of the request."""
        self._named: set[int] = set()
        self._arguments: dict[int, str] = {}
        self._last_index = 0
        self._tag = _TAGS.get(tool_parser or "")
        self._whole = ""
        self._said = False
        self._text = self._thought = ""

    def feed(self, text: str, token_ids: Sequence[int] = (), *, last: bool = False) -> list[AnswerChunk]:
        """See ``AnswerParser.feed``."""
        self._whole += text
        message = self._parser.parse_delta(
            text, list(token_ids), self._request, prompt_token_ids=self._prompt_ids, finished=last
        )
        chunks: list[AnswerChunk] = []
        if message is not None and message.reasoning:
            chunks.append(ReasoningChunk(message.reasoning))
            self._thought += message.reasoning
        if message is not None and message.content:
            chunks.append(TextChunk(message.content))
            self._text += message.content
        called = message.tool_calls if message is not None else ()
        self._is_answer = self._is_answer or any(self._is_foreign(call) for call in called)
        listed = self._list.search(self._whole) if self._list is not None else None
        for call in () if self._is_answer or listed else called:
            self._last_index = max(self._last_index, call.index)
            if self._parallel or call.index == 0:
                chunks.append(self._piece(call))
        self._said = self._said or any(not isinstance(chunk, ReasoningChunk) for chunk in chunks)
        if last and self._is_answer:
            chunks.append(TextChunk(self._read().removeprefix(self._text)))
        elif last and listed:
            chunks += self._listed(self._whole[listed.end() :])
        elif last and not self._said and self._whole.strip():
            chunks += self._calls_of_whole() or self._unread()
        for chunk in chunks:
            if isinstance(chunk, CallChunk):
                self._arguments[chunk.index] = self._arguments.get(chunk.index, "") + chunk.arguments
        return chunks

    def closed(self, index: int) -> bool | None:
        """See ``AnswerParser.closed``. Told by the text: vLLM's parsers close what was left open.

        Calls come one after the other, so only the last one can have been cut off.
        """
        if index < self._last_index:
            return True
        if self._tag is not None:
            return True if self._whole.rfind(f"</{self._tag}>") > self._whole.rfind(f"<{self._tag}>") else None
        return _holds(self._whole, self._arguments.get(index, ""))

    def _is_foreign(self, call: Any) -> bool:
        name = call.function.name if call.function else None
        return self._tools is not None and name is not None and name not in self._tools

    def _listed(self, text: str) -> list[AnswerChunk]:
        """The calls of a JSON list, from after its bracket; one that is cut off comes as far as it was written."""
        found: list[AnswerChunk] = []
        decoder = json.JSONDecoder(strict=False)
        while (at := text.find("{")) >= 0 and (self._parallel or not found):
            try:
                call, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError:
                name, begun = _NAME.search(text, at), _ARGUMENTS.search(text, at)
                call = {"name": name and name[1], "arguments": begun[1] if begun else ""}
                end = len(text)
            if not call.get("name"):
                break
            given = call.get("arguments") or {}
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            made = str(call.get("id") or new_call_id())
            found.append(CallChunk(len(found), id=made, name=str(call["name"]), arguments=arguments))
            text = text[end:]
        self._last_index = max(len(found) - 1, 0)
        return found

    def _calls_of_whole(self) -> list[AnswerChunk]:
        """Calls that streaming has missed: some parsers do where one delta holds the whole call."""
        _, _, calls = self._make().parse(self._whole, self._request, enable_auto_tools=True)
        calls = [call for call in calls or () if self._tools is None or call.name in self._tools]
        self._last_index = max(len(calls or ()) - 1, 0)
        found = [
            CallChunk(index, id=call.id or new_call_id(), name=call.name, arguments=call.arguments)
            for index, call in enumerate(calls or ())
        ]
        return list(found if self._parallel else found[:1])

    def _read(self) -> str:
        """The whole answer without its thinking."""
        if self._make_reader is None:
            return self._whole
        _, text, _ = self._make_reader().parse(self._whole, _request(ToolUse()))
        return text or ""

    def _unread(self) -> list[AnswerChunk]:
        """The answer as text, without the thinking: what no parser has made anything of, a call cut off in its name."""
        text = self._read()
        thinking_only = not self._request.tools or (self._thought and self._thought.strip() in text)
        return [TextChunk(text)] if text.strip() and not thinking_only else []

    def _piece(self, call: Any) -> CallChunk:
        """Some parsers repeat id and name, or leave the id out: the first fragment has both, later ones neither."""
        function = call.function
        arguments = (function.arguments if function else None) or ""
        name = function.name if function else None
        if name is None or call.index in self._named:
            return CallChunk(call.index, arguments=arguments)
        self._named.add(call.index)
        return CallChunk(call.index, id=call.id or new_call_id(), name=name, arguments=arguments)


def _holds(text: str, arguments: str) -> bool | None:
    """Whether the last JSON object in a text is whole and is, or holds, these arguments.

    ``False`` if the text ends inside an object and the arguments are in none that is whole; ``None`` if it cannot be
    told, as where a brace does not begin JSON.
    """
    try:
        wanted = json.loads(arguments or "{}", strict=False)
    except ValueError:
        return False
    decoder, at = json.JSONDecoder(strict=False), text.find("{")
    found = last = open_at_end = doubtful = False
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            end, last, doubtful = at + 1, False, True
            open_at_end = open_at_end or "Unterminated string" in error.msg or error.pos >= len(text.rstrip())
        else:
            last = value == wanted or wanted in value.values()
            found = found or last
        at = text.find("{", end)
    if last and not doubtful:
        return True
    return False if open_at_end and not found else None


@dataclass(frozen=True)
class VllmFormat(ToolFormat):
    """Reads answers with vLLM's parsers and constrains them as vLLM's server would.

    Args:
        tool_parser: A name that ``--tool-call-parser`` takes; ``None``: no calls are read.
        reasoning_parser: A name that ``--reasoning-parser`` takes; ``None``: thinking stays in the text.
    """

    tool_parser: str | None
    reasoning_parser: str | None

    @property
    def calls_beside_answer(self) -> bool:
        """See ``ToolFormat``: where vLLM can say what a call looks like in the family's own language."""
        return self.tool_parser in _FORMED

    def encode(
        self, tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], use: ToolUse
    ) -> tuple[list[ChatMessage], list[dict[str, Any]] | None]:
        """Everything goes to the template: a family with a parser of its own has a template that shows tools."""
        return list(messages), list(use.tools) or None

    def adjust(
        self, tokenizer: ChatTokenizer, use: ToolUse, sampling: SamplingOptions, prompt: SegmentedPrompt
    ) -> SamplingOptions:
        """See ``ToolFormat.adjust``."""
        if not use.tools or self.tool_parser is None:
            if self.reasoning_parser is None:
                return sampling
            return replace(
                sampling, structured_output=after_thinking(sampling.structured_output, tokenizer, prompt.text)
            )
        answer = sampling.structured_output
        use.check_output(answer)
        request = _request(use if answer is None else replace(use, required=True, strict=True))
        request = _parser(self.tool_parser, self.reasoning_parser, tokenizer, request.tools).adjust_request(request)
        wanted = request.extract_structured_outputs()
        output = {form: value for form in _FORMS if (value := getattr(wanted, form, None))} or None
        if answer is not None:
            output = self._call_or(answer, output or {})
            if self.reasoning_parser is not None:  # else nothing would take the thinking out of the answer
                output = after_thinking(output, tokenizer, prompt.text)
        return replace(
            sampling,
            structured_output=output,
            skip_special_tokens=sampling.skip_special_tokens and bool(request.skip_special_tokens),
        )

    def _call_or(self, answer: dict[str, Any], calls: dict[str, Any]) -> dict[str, Any]:
        """What lets the model call a tool or follow the answer's constraint.

        Args:
            answer: the answer's constraint.
            calls: what vLLM would have a forced call follow.

        Raises:
            ConfigurationError: vLLM has no form of a call in this family's own language.
        """
        if "structural_tag" not in calls:
            raise ConfigurationError(
                f"tools and a structured output cannot be combined with tool_parser={self.tool_parser!r}: the output's "
                "constraint would forbid every call; drop one of them, or use method='function_calling'"
            )
        form = json.loads(calls["structural_tag"])["format"]
        if form["type"] == "triggered_tags":
            form = {"type": "tags_with_separator", "tags": form["tags"], "separator": "\n", "at_least_one": True}
            form["stop_after_first"] = True
        return structural({"type": "or", "elements": [form, answer_format(answer)]})

    def parser(
        self, tokenizer: ChatTokenizer, use: ToolUse, prompt: SegmentedPrompt, *, constrained: bool
    ) -> AnswerParser:
        """See ``ToolFormat.parser``."""
        tool_parser = self.tool_parser if use.tools else None
        if tool_parser is None and self.reasoning_parser is None:
            return HermesFormat().parser(tokenizer, ToolUse(), prompt, constrained=constrained)

        return VllmAnswerParser(tool_parser, self.reasoning_parser, tokenizer, use, prompt)
