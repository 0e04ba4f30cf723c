"""``kvcomm explain``: shows a prompt's segments, and what becomes of each, before a run or after it.

The forecast uses the engine's own planning, without an engine: it needs a tokenizer, and neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from rich.console import Console
from rich.text import Text

from kvcomm_integrations.chat.detect import tool_format_for
from kvcomm_integrations.chat.tool_format import tool_use
from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.planning.contiguous import Row, join, seam_key, seams_of
from kvcomm_integrations.planning.ngram_index import NgramIndex
from kvcomm_integrations.planning.plan import Candidate, Limits, Plan, cover, describe, make_plan
from kvcomm_integrations.planning.reference_index import ContentKey, Entry, EntryState
from kvcomm_integrations.prompts.builder import PromptBuilder
from kvcomm_integrations.prompts.chat_message import ChatMessage, clean_text
from kvcomm_integrations.prompts.content_registry import ContentRegistry
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import EdgeReport, RequestReport, Segment, SegmentKind, SegmentReport

STYLES = {"exact": "green", "loaded": "cyan", "repaired": "yellow", "computed": "red"}
"""What can become of a token, and its colour."""
LEGEND = {
    "exact": "from the prefix cache, or a copy of the beginning of an earlier prompt",
    "loaded": "from another agent's cache, corrected",
    "repaired": "computed by the repair pass, over what was loaded",
    "computed": "by vLLM's own forward pass",
}
_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "developer": "system", "function": "tool"}
_SESSION = "explained"
_PICTURES = 0x2400
"""Start of Unicode's pictures of control characters."""


# --- reading ---------------------------------------------------------------------------------------------------------


class _Message(BaseModel):
    """One message of a file, in OpenAI's form or as LangChain dumps it."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _either_form(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("data"), dict):
            value = {"type": value.get("type"), **value["data"]}
        role = value.get("role", value.get("type"))
        return {**{k: v for k, v in value.items() if v is not None}, "role": _ROLES.get(str(role), role)}

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"{role!r} is unknown; use system, user, assistant or tool")
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_blocks(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return "".join(part if isinstance(part, str) else _block_text(part) for part in content)

    @field_validator("tool_calls")
    @classmethod
    def _named_calls(cls, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for call in calls:
            function = call.get("function", call)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"tool call {call!r} has no name")
        return calls

    def to_chat_message(self) -> ChatMessage:
        """The form prompts are built from."""
        calls = tuple(call if "function" in call else _openai_call(call) for call in self.tool_calls)
        return ChatMessage(self.role, self.content, self.name, calls, self.tool_call_id)


def _block_text(block: Any) -> str:
    if not isinstance(block, dict):
        raise ValueError(f"content block {block!r} is neither text nor an object")
    return str(block.get("text") or "")


def _openai_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call.get("name", ""), "arguments": call.get("args", {})}
    return {"id": call.get("id") or "", "type": "function", "function": function}


class _File(BaseModel):
    """A prompt as a file says it: ``{"messages": [...]}``, or the bare list."""

    messages: list[_Message] = Field(min_length=1)
    agent: str | None = None
    tools: list[dict[str, Any]] | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Chat:
    """One prompt of one agent."""

    agent: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    answer: str | None = None
    """What the agent answered, if that is known."""


def read_chat(path: Path, agent: str | None = None) -> Chat:
    """Read a prompt from JSON: a list of messages, or an object with ``messages`` and maybe ``agent, tools, answer``.

    Args:
        path: the file.
        agent: whose prompt it is; ``None``: the file's ``agent``, else the file's name without suffix.

    Raises:
        ConfigurationError: the file cannot be read or holds something else.
    """
    data = _read_json(path)
    try:
        file = _File.model_validate({"messages": data} if isinstance(data, list) else data)
    except ValidationError as err:
        raise ConfigurationError(f"{path} holds no messages: {_first(err)}") from err
    messages = tuple(message.to_chat_message() for message in file.messages)
    return Chat(agent or file.agent or path.stem, messages, tuple(file.tools or ()), file.answer)


def read_report(path: Path) -> RequestReport:
    """Read a finished run's report from JSON, by itself or inside a message's ``response_metadata``.

    Raises:
        ConfigurationError: the file cannot be read or holds no report.
    """
    data = _read_json(path)
    for key in ("response_metadata", "kvcomm", "report"):
        if isinstance(data, dict) and isinstance(data.get(key), dict):
            data = data[key]
    if not isinstance(data, dict) or "segments" not in data:
        raise ConfigurationError(
            f"{path} holds no report: an object with 'segments' is needed, as in model.last_report"
        )
    try:
        return RequestReport.model_validate(data)
    except ValidationError as err:
        raise ConfigurationError(f"{path} holds no report: {_first(err)}") from err


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as err:
        raise ConfigurationError(
            f"{path} is not valid JSON at line {err.lineno}, column {err.colno}: {err.msg}"
        ) from err
    except (OSError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigurationError(f"{path} cannot be read: {err}") from err


def _first(err: ValidationError) -> str:
    first = err.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'file'}: {first['msg']}"


# --- forecasting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """What becomes of a prompt's tokens, and the tokens themselves if they are known."""

    report: RequestReport
    token_ids: tuple[int, ...] = ()


class Forecast:
    """Says what an engine would do with one prompt after another of a session.

    It assumes that earlier prompts are complete, that nothing has been evicted, and that no edge has examples: every
    content is repaired as deep as on first use. A real engine repairs less as it learns, and runs some prompts densely
    in order to learn.

    Args:
        tokenizer: the model's.
        config: limits of the repair pass and least lengths.
        block_size: tokens per block of the exact prefix cache.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, config: ReuseConfig | None = None, block_size: int = 16) -> None:
        self._tokenizer = tokenizer
        self._config = config or ReuseConfig()
        self._block_size = block_size
        self._codec = tool_format_for(tokenizer)
        self._registry = ContentRegistry()
        self._builder = PromptBuilder(tokenizer, self._registry, min_segment_tokens=self._config.min_segment_tokens)
        self._exact: list[tuple[int, ...]] = []
        self._held: dict[tuple[int, ...], Entry] = {}
        self._beginnings: dict[tuple[int, ...], Entry] = {}
        self._parts = NgramIndex()
        self._whole: list[Entry] = []
        self._seams: dict[ContentKey, Entry] = {}

    def next(self, chat: Chat) -> Explanation:
        """What would become of this prompt; from then on it counts as seen."""
        shown, tools = self._codec.encode(self._tokenizer, chat.messages, tool_use(chat.tools or None))
        prompt = self._builder.build(shown, session=_SESSION, agent=chat.agent, tools=tools).prompt
        ids = prompt.token_ids
        segments = cover(prompt.segments, len(ids))
        candidates = [self._candidate(ids, segment, segment is segments[0]) for segment in segments]
        if self._config.join_runs and self._config.repair:
            candidates = join(candidates, ids, "", self._seams.get, lambda _, tokens: self._depth(tokens))
        exact = self._exact_tokens(ids)
        limits = Limits(self._config.repair, self._config.max_repair_share, self._config.max_repair_tokens)
        planned = make_plan(len(ids), exact, candidates, limits)
        plan = Plan(exact, exact) if isinstance(planned, str) else planned
        reports = tuple(
            _with_reason(report, candidate)
            for report, candidate in zip(
                describe(plan, len(ids), candidates, materialised=True), candidates, strict=True
            )
        )
        self._learn(chat, ids, segments, plan)
        report = RequestReport(
            agent=chat.agent,
            policy=self._config.policy,
            prompt_tokens=len(ids),
            **{kind: sum(getattr(part, kind) for part in reports) for kind in STYLES},
            reason=planned if isinstance(planned, str) else "",
            segments=reports,
        )
        return Explanation(report, ids)

    def _candidate(self, ids: tuple[int, ...], segment: Segment, first: bool) -> Candidate:
        part = ids[segment.start : segment.end]
        if segment.kind is SegmentKind.FIXED:
            entry = self._beginnings.get(part) if first else None
            return Candidate(segment, entry, reason="exact copy" if entry else "")
        entry, offset = self._held.get(part), 0
        if entry is None and (run := self._parts.find("", part)):
            entry, offset = self._whole[run.ref_id], run.offset
        if entry is None:
            return Candidate(segment, reason="not seen before")
        return Candidate(segment, entry, self._depth(len(part)), "edge without examples", offset=offset)

    def _depth(self, tokens: int) -> int:
        """First tokens repaired of a content on first use."""
        return min(self._config.repair_depth, tokens // 2)

    def _exact_tokens(self, ids: tuple[int, ...]) -> int:
        """Tokens in the prefix cache: whole blocks, and never the last token."""
        common = max((_common(ids[:-1], other) for other in self._exact), default=0)
        return common // self._block_size * self._block_size

    def _learn(self, chat: Chat, ids: tuple[int, ...], segments: Sequence[Segment], plan: Plan) -> None:
        row = Row.of_prompt(ids, segments)
        for segment in segments:
            part = ids[segment.start : segment.end]
            if segment.kind is SegmentKind.PLACEHOLDER:
                edges = row.at(segment.start), row.at(segment.end)
                self._hold(part, _entry(part, chat.agent, edges))
            elif segment is segments[0] and self._config.min_segment_tokens <= len(part) < len(ids):
                self._beginnings.setdefault(part, _entry(part, chat.agent, exact=True))
        text = clean_text(chat.answer or "")
        answer = self._tokenizer.encode_plain(text) if text else ()
        if answer:
            self._registry.register_response(_SESSION, chat.agent, text, answer)
            whole = (*ids, *answer)
            edges = row.at(len(ids)), Row(whole, [len(whole)]).at(len(whole))
            self._hold(answer, _entry(answer, chat.agent, edges))
        self._exact.append((*ids, *answer)[: plan.first_approximate])
        contents = [segment for segment in segments if segment.kind is SegmentKind.PLACEHOLDER]
        for start, end in seams_of(row, contents, lambda s: self._held.get(ids[s.start : s.end]), len(ids)):
            seam = _entry(ids[start:end], chat.agent, (row.at(start), row.at(end)))
            self._seams.setdefault(seam_key("", row.at(end), ids[start:end]), seam)

    def _hold(self, ids: tuple[int, ...], entry: Entry) -> None:
        """A reference that is held from now on, whole and in part, unless there is one already."""
        if ids not in self._held:
            self._held[ids] = entry
            self._parts.add(len(self._whole), "", ids)
            self._whole.append(entry)


def _entry(ids: tuple[int, ...], agent: str, edges: tuple[str, str] = ("", ""), *, exact: bool = False) -> Entry:
    """A reference that is held. ``edges``: digests of its row before and after it."""
    before, after = edges
    return Entry(
        0, ContentKey("", ""), len(ids), 0, "", agent, True, "", EntryState.READY,
        exact=exact, length=len(ids), before=before, after=after,
    )  # fmt: skip


def _with_reason(report: SegmentReport, candidate: Candidate) -> SegmentReport:
    """The report, saying so where a content is known but was left out of the plan."""
    if candidate.entry is None or report.loaded or report.exact:
        return report
    return report.model_copy(update={"reason": "known, but too much around it would have to be repaired"})


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# --- showing ---------------------------------------------------------------------------------------------------------


def show(
    explanation: Explanation, console: Console, tokenizer: ChatTokenizer | None = None, *, planned: bool = True
) -> None:
    """Print an explanation: a summary, each segment with what becomes of it, and a legend.

    Args:
        explanation: what to print.
        console: where to.
        tokenizer: to show the text; ``None`` leaves it out.
        planned: it is a forecast, not the report of a finished run.
    """
    report = explanation.report
    summary = Text(f"Prompt of {_visible(report.agent)}: {report.prompt_tokens} tokens = ", style="bold")
    console.print(summary + Text(" + ").join(_count(kind, getattr(report, kind)) for kind in STYLES))
    if report.reason:
        console.print(Text(f"Nothing is loaded: {report.reason}" if not report.loaded else report.reason))
    for segment in report.segments:
        console.print()
        console.print(_heading(segment))
        if tokenizer is not None and explanation.token_ids:
            console.print(_body(segment, _parts(tokenizer, explanation.token_ids, segment)))
    console.print()
    for kind, meaning in LEGEND.items():
        console.print(Text(f"{kind:>9}", style=STYLES[kind]) + Text(f"  {meaning}"))
    console.print(Text("  Of a placeholder's tokens, the first are exact, then repaired, then loaded, then computed."))
    if planned:
        console.print(Text("  A forecast for edges without examples; an engine that has learned repairs less."))


def _parts(tokenizer: ChatTokenizer, ids: Sequence[int], segment: SegmentReport) -> Iterator[tuple[str, str]]:
    """The segment's text, cut where what becomes of its tokens changes."""
    inside = ids[segment.start : segment.end]
    whole = tokenizer.decode(inside, skip_special=False)
    tokens = at = 0
    for kind in ("exact", "repaired", "loaded", "computed"):
        if count := getattr(segment, kind):
            tokens += count
            read = tokenizer.decode(inside[:tokens], skip_special=False).rstrip("\ufffd")
            end = len(whole) if tokens == len(inside) else len(read)
            yield kind, whole[at:end]
            at = max(at, end)


def _heading(segment: SegmentReport) -> Text:
    fixed = segment.kind is SegmentKind.FIXED
    heading = Text("── ", style="dim") + Text(
        "fixed text" if fixed else _visible(segment.name), style="dim" if fixed else "bold magenta"
    )
    heading.append(f" · {segment.end - segment.start} tokens · ")
    counts = {kind: _count(kind, n) for kind in STYLES if (n := getattr(segment, kind))}
    if segment.source and "loaded" in counts:
        counts["loaded"].append(f" from {_visible(segment.source)}")
    heading.append_text(Text(", ").join(counts.values()))
    if segment.confidence is not None:
        heading.append(f" · confidence {segment.confidence:.2f}")
    if segment.reason:
        heading.append(f" · {_visible(segment.reason)}", style="italic")
    if segment.edge is not None:
        heading.append(f"\n   {_edge(segment.edge, segment.examples)}", style="dim")
    return heading


def _edge(edge: EdgeReport, examples: int) -> str:
    """One line of what is known of an edge."""
    told = [f"{edge.source} → {edge.target} ({edge.reference})", f"{examples} examples"]
    if edge.divergence is not None:
        told.append(f"last audit {edge.divergence:.3g} nats")
    if edge.divergence_low is not None and edge.divergence_high is not None:
        told.append(f"mean of {edge.audits} audits {edge.divergence_low:.3g} to {edge.divergence_high:.3g}")
    return _visible(" · ".join([*told, f"{edge.health}: {edge.why}"]))


def _body(segment: SegmentReport, parts: Iterable[tuple[str, str]]) -> Text:
    extra = " dim" if segment.kind is SegmentKind.FIXED else ""
    body = Text()
    for kind, text in parts:
        body.append(_visible(text), style=STYLES[kind] + extra)
    return body


def _count(kind: str, count: int) -> Text:
    return Text(f"{count} {kind}", style=STYLES[kind])


def _visible(text: str) -> str:
    """``text`` with control characters as pictures: a terminal must not obey what a message says."""
    return clean_text("".join(_picture(c) for c in text))


def _picture(character: str) -> str:
    if character < " " and character not in "\n\t":
        return chr(_PICTURES + ord(character))
    return "\ufffd" if "\x7f" <= character <= "\x9f" else character


# --- kvcomm explain --------------------------------------------------------------------------------------------------


def run_explain(args: argparse.Namespace) -> int:
    """Run ``kvcomm explain``.

    Raises:
        ConfigurationError: a file cannot be read, or report and messages do not belong together.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    report = read_report(args.report) if args.report else None
    if args.messages is None:
        if report is None:
            raise ConfigurationError("nothing to explain; give a file with messages, or --report with a run's report")
        show(Explanation(report), console, planned=False)
        return 0
    chat = read_chat(args.messages, args.agent)
    earlier = [read_chat(path) for path in args.seen]
    tokenizer = ChatTokenizer.from_pretrained(args.model)
    forecast = Forecast(tokenizer, block_size=args.block_size)
    for seen in earlier:
        forecast.next(seen)
    explanation = forecast.next(chat)
    if report is not None:
        explanation = beside(report, explanation)
    show(explanation, console, tokenizer, planned=report is None)
    return 0


def beside(report: RequestReport, explanation: Explanation) -> Explanation:
    """A finished run's report, beside the tokens of its prompt.

    Raises:
        ConfigurationError: the prompt's segments are not the report's.
    """
    told, ours = report.segments, explanation.report.segments
    if [(s.start, s.end) for s in told] != [(s.start, s.end) for s in ours]:
        raise ConfigurationError(
            f"the report's {report.prompt_tokens} tokens in {len(told)} segments are not the messages' "
            f"{explanation.report.prompt_tokens} in {len(ours)}; give the same model and, with --seen, the prompts "
            "that ran before, or leave the messages out"
        )
    return Explanation(report, explanation.token_ids)
