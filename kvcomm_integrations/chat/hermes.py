"""The default tool format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` and ``<think>...</think>``.

This is the form Hermes, Qwen and most ChatML models were trained on. Pure text; needs no vLLM.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvcomm_integrations.chat.chunks import AnswerChunk, CallChunk, ReasoningChunk, TextChunk
from kvcomm_integrations.chat.template_probe import template_abilities
from kvcomm_integrations.chat.tool_format import AnswerParser, ToolFormat, ToolUse
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.arranging import calls_as_text
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_ANY_NAME = re.compile(r"""(['"])name\1\s*:\s*['"]([\w.-]+)['"]""")
_OPENS_JSON = ("{", "[")

_INSTRUCTION = """You may call the functions listed here, one JSON object per line:
<tools>
{tools}
</tools>
To call a function, answer with one block per call:
<tool_call>
{{"name": "<function>", "arguments": {{<arguments as JSON>}}}}
</tool_call>"""


class HermesFormat(ToolFormat):
    """Tool calls as JSON between ``<tool_call>`` tags, thinking between ``<think>`` tags."""

    @property
    def calls_beside_answer(self) -> bool:
        """See ``ToolFormat``."""
        return True

    def encode(
        self, tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], use: ToolUse
    ) -> tuple[list[ChatMessage], list[dict[str, Any]] | None]:
        """See ``ToolFormat.encode``."""
        shown = list(messages)
        if any(message.tool_calls for message in shown) and not template_abilities(tokenizer).tool_calls:
            shown = [calls_as_text(message) for message in shown]
        if not use.tools:
            return shown, None
        if template_abilities(tokenizer).tools:
            return shown, list(use.tools)
        return _with_instruction(shown, use.tools), None

    def adjust(
        self, tokenizer: ChatTokenizer, use: ToolUse, sampling: SamplingOptions, prompt: SegmentedPrompt
    ) -> SamplingOptions:
        """See ``ToolFormat.adjust``."""
        tags = [THINK_OPEN, THINK_CLOSE, *((CALL_OPEN, CALL_CLOSE) if use.tools else ())]
        hidden = any(tag in tokenizer.codec.control for tag in tags)
        constraint = self.constraint(use, sampling.structured_output)
        return replace(
            sampling,
            structured_output=after_thinking(constraint, tokenizer, prompt.text),
            skip_special_tokens=sampling.skip_special_tokens and not hidden,
        )

    def constraint(self, use: ToolUse, answer: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """A structural tag that forces names and arguments in the model's own form; ``None``: anything goes."""
        if not use.tools:
            return answer
        use.check_output(answer)
        if answer is None and not (use.required or use.strict):
            return None
        tags = [_tag(tool["function"]) for tool in use.callable_tools]
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not use.parallel or use.named is not None,
        }
        if use.required:
            return structural(calls)
        if answer is not None:
            return structural({"type": "or", "elements": [calls, answer_format(answer)]})
        return structural({"type": "triggered_tags", "triggers": [CALL_OPEN], "tags": tags})

    def parser(
        self, tokenizer: ChatTokenizer, use: ToolUse, prompt: SegmentedPrompt, *, constrained: bool
    ) -> HermesParser:
        """See ``ToolFormat.parser``."""
        thinking = _ending(prompt.text).endswith(THINK_OPEN)
        return HermesParser(calls=bool(use.tools), parallel=use.parallel, thinking=thinking, constrained=constrained)


def _ending(prompt: str) -> str:
    return prompt[-64:].rstrip()


def after_thinking(constraint: dict[str, Any] | None, tokenizer: ChatTokenizer, prompt: str) -> dict[str, Any] | None:
    """The constraint, with a thinking block before it: one that the prompt has opened, or one that may come.

    It stays as it is for a model that does not think, after a prompt that has closed the block already (thinking was
    switched off), and if it leaves room for text anyway.
    """
    opened = _ending(prompt).endswith(THINK_OPEN)
    thinks = opened or THINK_CLOSE in str(tokenizer.hf.chat_template)
    if constraint is None or not thinks or _ending(prompt).endswith(THINK_CLOSE):
        return constraint
    if "structural_tag" in constraint:
        form = json.loads(constraint["structural_tag"])["format"]
        if form["type"] not in ("tags_with_separator", "or"):
            return constraint
    else:
        form = answer_format(constraint)
    block = {"type": "tag", "begin": "" if opened else THINK_OPEN, "content": {"type": "any_text"}, "end": THINK_CLOSE}
    space = {"type": "regex", "pattern": r"[ \n]{0,4}"}
    thought = {"type": "sequence", "elements": [block, space, form]}
    return structural(thought if opened else {"type": "or", "elements": [thought, form]})


def structural(form: dict[str, Any]) -> dict[str, Any]:
    """A structured-output constraint of one of xgrammar's formats."""
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def answer_format(answer: dict[str, Any]) -> dict[str, Any]:
    """A structured-output constraint as part of a structural tag."""
    if "json" in answer:
        schema = answer["json"]
        return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}
    if answer.get("json_object"):
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if "regex" in answer:
        return {"type": "regex", "pattern": answer["regex"]}
    if "grammar" in answer:
        return {"type": "grammar", "grammar": answer["grammar"]}
    if "choice" in answer:
        return {"type": "or", "elements": [{"type": "const_string", "value": str(c)} for c in answer["choice"]]}
    raise ConfigurationError(
        f"structured output {', '.join(sorted(answer))} cannot be combined with tools; use 'json' or leave tools out"
    )


def _tag(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    begin = f'{CALL_OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": f"}}\n{CALL_CLOSE}"}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_instruction(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTION.format(tools=lines)
    if messages and (first := messages[0]).role == "system":
        return [replace(first, content=f"{first.content}\n\n{text}" if first.content else text), *messages[1:]]
    return [ChatMessage(role="system", content=text), *messages]


class HermesParser(AnswerParser):
    """A small state machine over the text: maybe thinking, then text and calls in any order.

    Text that may turn out to be the start of a tag is held back until that is decided.

    Args:
        calls: Look for tool calls.
        parallel: Report more than the first call.
        thinking: The prompt has opened a thinking block already.
        constrained: The answer follows a JSON constraint.
    """

    def __init__(
        self, *, calls: bool = True, parallel: bool = True, thinking: bool = False, constrained: bool = False
    ) -> None:
        self._calls = calls
        self._parallel = parallel
        self._thinking_given = thinking
        self._constrained = constrained
        self._buffer = ""
        self._state = self._start
        self._index = 0
        self._call = _Call(0)
        self._closed: dict[int, bool | None] = {}
        self._trim = False
        self._said_text = False
        self._space = ""

    def feed(self, text: str, token_ids: Sequence[int] = (), *, last: bool = False) -> list[AnswerChunk]:
        """See ``AnswerParser.feed``."""
        self._buffer += text
        chunks: list[AnswerChunk] = []
        while self._state(chunks, last):
            pass
        return chunks

    def closed(self, index: int) -> bool | None:
        """See ``AnswerParser.closed``."""
        return self._closed.get(index, False)

    # Each state consumes what it can from the buffer and returns True when another state should go on.

    def _start(self, chunks: list[AnswerChunk], final: bool) -> bool:
        body = self._buffer.lstrip()
        if body.startswith(THINK_OPEN):
            self._buffer = body[len(THINK_OPEN) :]
            self._state, self._trim = self._think, True
            return True
        tags = (THINK_OPEN, CALL_OPEN) if self._thinking_given else (THINK_OPEN,)
        if not final and any(tag.startswith(body) for tag in tags):
            return False
        opens_answer = body.startswith(CALL_OPEN) or (self._constrained and body.startswith(_OPENS_JSON))
        self._state = self._think if self._thinking_given and not opens_answer else self._text
        self._trim = self._thinking_given
        return True

    def _think(self, chunks: list[AnswerChunk], final: bool) -> bool:
        before, closed, after = self._buffer.partition(THINK_CLOSE)
        if closed:
            self._emit_reasoning(chunks, before.rstrip())
            self._buffer, self._state, self._trim = after, self._text, True
            return True
        settled = (before if final else _settled(before, THINK_CLOSE)).rstrip()
        self._emit_reasoning(chunks, settled)
        self._buffer = before[len(settled) :]
        return False

    def _emit_reasoning(self, chunks: list[AnswerChunk], text: str) -> None:
        if text := self._trimmed(text):
            chunks.append(ReasoningChunk(text))

    def _trimmed(self, text: str) -> str:
        """Without the white space it begins with, where that follows a tag."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text

    def _text(self, chunks: list[AnswerChunk], final: bool) -> bool:
        before, opened, after = self._buffer.partition(CALL_OPEN) if self._calls else (self._buffer, "", "")
        if opened:
            self._emit_text(chunks, before, before_call=True)
            self._buffer, self._state, self._call = after, self._in_call, _Call(self._index)
            return True
        settled = before if final or not self._calls else _settled(before, CALL_OPEN)
        self._emit_text(chunks, settled)
        self._buffer = before[len(settled) :]
        if final and self._space and not self._index:
            chunks.append(TextChunk(self._space))
            self._space = ""
        return False

    def _emit_text(self, chunks: list[AnswerChunk], text: str, *, before_call: bool = False) -> None:
        """White space is held back until text follows it: between calls, and before the first, it means nothing."""
        text = self._space + self._trimmed(text)
        body = text.rstrip() if self._calls else text
        self._space = "" if before_call else text[len(body) :]
        if self._index and not self._said_text:
            body = body.lstrip()
        if body:
            self._said_text = True
            chunks.append(TextChunk(body))

    def _in_call(self, chunks: list[AnswerChunk], final: bool) -> bool:
        call = self._call
        consumed, fragments = call.feed(self._buffer, final=final)
        if self._parallel or self._index == 0:
            chunks.extend(fragments)
        self._buffer = self._buffer[consumed:]
        if call.named:
            self._closed[self._index] = call.ended
        if not call.closed:
            return False
        self._index += call.named
        self._said_text = False
        self._state = self._text
        return True


class _Call:
    """One ``<tool_call>`` body: streams name and arguments as soon as both keys have been seen in that order."""

    def __init__(self, index: int) -> None:
        self.closed = self.named = self.tagged = False
        self._index = index
        self._scan = _JsonEnd()

    @property
    def ended(self) -> bool | None:
        """Its closing tag has come; ``None``: only its arguments are whole, which some other end may have cut off."""
        return True if self.tagged else None if self._scan.done else False

    def feed(self, text: str, *, final: bool) -> tuple[int, list[AnswerChunk]]:
        """Characters consumed, and the fragments they gave."""
        chunks: list[AnswerChunk] = []
        at = 0
        if not self.named:
            match = _NAME.match(text)
            if match is None or (match.end() == len(text) and not final):
                return self._whole(text) if final or CALL_CLOSE in text else (0, chunks)
            self.named, at = True, match.end()
            chunks.append(CallChunk(self._index, id=new_call_id(), name=json.loads(match.group(1))))
        if not self._scan.done and (size := self._scan.advance(text[at:])):
            chunks.append(CallChunk(self._index, arguments=text[at : at + size]))
            at += size
        end = text.find(CALL_CLOSE, at) if self._scan.done else -1
        if end < 0:
            self.closed = final
            return (len(text) if final and self._scan.done else at), chunks
        self.closed = self.tagged = True
        return end + len(CALL_CLOSE), chunks

    def _whole(self, text: str) -> tuple[int, list[AnswerChunk]]:
        """Keys in another order, or no call of a function: decide once the whole body is there.

        What is no such call becomes one without a name, or with arguments that are no JSON object: visible, never run.
        """
        body, closed, _ = text.partition(CALL_CLOSE)
        self.closed = self._scan.done = True
        self.tagged, consumed = bool(closed), len(body) + len(closed)
        if not closed and not body.lstrip().startswith(_OPENS_JSON):
            return consumed, [TextChunk(CALL_OPEN + body)]  # the tag is only spoken of
        self.named = True
        name, arguments = _name_and_arguments(body)
        return consumed, [CallChunk(self._index, id=new_call_id(), name=name, arguments=arguments)]


def _name_and_arguments(body: str) -> tuple[str, str]:
    try:
        call = json.loads(body, strict=False)
    except ValueError:
        call = None
    if not isinstance(call, dict):
        found = _ANY_NAME.search(body)
        return (found.group(2) if found else ""), body.strip()
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return "", body.strip()
    return name, _as_text(call.get("arguments", call.get("parameters", {})))


class _JsonEnd:
    """Finds where one JSON value ends in text that arrives chunk by chunk.

    A value that is never closed (a broken call) ends at the closing tag.
    """

    def __init__(self) -> None:
        self.done = self._in_string = self._escaped = False
        self._depth = 0

    def advance(self, text: str) -> int:
        """How many characters of ``text`` still belong to the value."""
        for i, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:  # below: a bracket that closes what is around the value
                    self.done = True
                    return i + 1 + self._depth
            elif char == "<" and CALL_CLOSE.startswith(text[i : i + len(CALL_CLOSE)]):
                self.done = text.startswith(CALL_CLOSE, i)
                return i
        return len(text)


def _settled(text: str, tag: str) -> str:
    """``text`` without the end of it that may be the start of ``tag``."""
    starts = (size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size]))
    return text[: len(text) - next(starts, 0)]


def new_call_id() -> str:
    """A fresh tool-call id; random, so that calls of different answers never collide."""
    return f"call_{uuid.uuid4().hex[:24]}"
