"""Messages in, segmented prompt out: the one entry point of this layer.

The steps: clean the messages, find shared contents in them (``layouts``), render (``rendering``), encode text and
contents apart (``fixed_text``), number the segments. Whatever cannot be located or spelled exactly stays fixed text:
there may be fewer placeholders, never a wrong prompt.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcomm_integrations.config import Tokenization
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.arranging import arrange
from kvcomm_integrations.prompts.cache import BoundedCache
from kvcomm_integrations.prompts.chat_message import (
    ChatMessage,
    Turn,
    clean_text,
    deep_map,
    tool_names,
    with_parsed_arguments,
)
from kvcomm_integrations.prompts.codec import Ids, Span
from kvcomm_integrations.prompts.content import Content
from kvcomm_integrations.prompts.content_registry import ContentRegistry
from kvcomm_integrations.prompts.fixed_text import Run, encode_run
from kvcomm_integrations.prompts.layouts import LayoutFinder
from kvcomm_integrations.prompts.matching import Match
from kvcomm_integrations.prompts.rendering import TemplateRefusal, locate
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.prompts.shielding import Shield
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import MAX_NAME, MAX_SEGMENTS, Segment, SegmentKind

_CACHE_CHARACTERS = 16 << 20


@dataclass(frozen=True)
class BuiltPrompt:
    """A segmented prompt and the contents that stand in it."""

    prompt: SegmentedPrompt
    contents: tuple[Content, ...]
    """One per placeholder segment, in order. A segment's name may carry ``#2``, its content's never does."""

    @property
    def placeholders(self) -> tuple[Segment, ...]:
        """The placeholder segments, in order."""
        return tuple(s for s in self.prompt.segments if s.kind is SegmentKind.PLACEHOLDER)


class _Piece(NamedTuple):
    """Consecutive tokens of the prompt; ``content`` is ``None`` for fixed text."""

    ids: Ids
    content: Content | None = None


class PromptBuilder:
    """Builds segmented prompts for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        registry: ContentRegistry,
        *,
        tokenization: Tokenization = Tokenization.SEGMENTED,
        min_segment_tokens: int = 8,
    ) -> None:
        """Args:
        tokenizer: the model's.
        registry: where shared contents are found and newly seen ones are put.
        tokenization: ``segmented`` gives a content the same ids in every prompt; ``canonical`` leaves the prompt's
            ids as the model's ordinary tokenisation has them.
        min_segment_tokens: shorter contents are no placeholders, tokens.
        """
        self._tokenizer = tokenizer
        self._registry = registry
        self._tokenization = Tokenization(tokenization)
        self._min_tokens = min_segment_tokens
        self._layouts = LayoutFinder(registry, tokenizer.count, min_segment_tokens)
        self._runs: BoundedCache[Run] = BoundedCache(_CACHE_CHARACTERS)
        self._content_ids: BoundedCache[Ids | None] = BoundedCache(_CACHE_CHARACTERS)

    def build(
        self,
        messages: Sequence[ChatMessage],
        *,
        session: str,
        agent: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        placeholders: Mapping[str, str] | None = None,
    ) -> BuiltPrompt:
        """The prompt for these messages, divided into segments. New contents in them become known to the session.

        Args:
            messages: the conversation as this agent sees it.
            session: whose contents may be found.
            agent: whose prompt this is; unnamed assistant messages are its own.
            tools: tool definitions in OpenAI form, for the template.
            template_kwargs: passed to the chat template (``enable_thinking=False``, ...).
            placeholders: placeholder name to text, for contents the caller knows to be shared.

        Raises:
            ConfigurationError: no messages, an invalid placeholder name, or a template that refuses the messages.
        """
        messages = [message.cleaned() for message in messages]
        for name in placeholders or ():
            if not name or len(name) > MAX_NAME:
                raise ConfigurationError(f"placeholder name {name!r} must have 1 to {MAX_NAME} characters")
        explicit = [self._registry.register(session, name, text) for name, text in (placeholders or {}).items()]
        text, data, places = self._render(messages, session, agent, tools, dict(template_kwargs or {}), explicit)
        if self._tokenization is Tokenization.CANONICAL:
            pieces = self._canonical_pieces(text, data, places)
        else:
            pieces = self._segmented_pieces(text, data, self._widened(text, places))
        return self._number(text, pieces)

    # --- text ------------------------------------------------------------------------------------------------------

    def _render(
        self,
        messages: Sequence[ChatMessage],
        session: str,
        agent: str,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: dict[str, Any],
        explicit: Sequence[Content],
    ) -> tuple[str, tuple[Span, ...], list[Match]]:
        """The prompt's text, the control tokens in it that are data, and the places of contents."""
        tools = deep_map([dict(tool) for tool in tools], clean_text) if tools else None
        template_kwargs.setdefault("add_generation_prompt", not template_kwargs.get("continue_final_message"))
        prepared = [with_parsed_arguments(message.to_dict()) for message in messages]
        shield = Shield.for_data(self._tokenizer.codec.control_pattern, [*prepared, tools, template_kwargs])

        def covered(value: Any) -> Any:
            return shield.cover(value) if shield else value

        def render(dicts: Sequence[Mapping[str, Any]]) -> str:
            return self._tokenizer.render(dicts, tools=covered(tools), **covered(template_kwargs))

        turns, rendered = arrange(messages, lambda dicts: render([covered(with_parsed_arguments(d)) for d in dicts]))
        dicts = [covered(with_parsed_arguments(turn.to_dict())) for turn in turns]

        def render_contents(contents: Sequence[str]) -> str:
            try:
                return render([{**d, "content": content} for d, content in zip(dicts, contents, strict=True)])
            except ConfigurationError as err:
                raise TemplateRefusal from err

        layouts = self._turn_layouts(turns, session, agent, explicit)
        spans = [[(start, end) for start, end, _ in layout] for layout in layouts]
        located = locate(rendered, [d["content"] for d in dicts], spans, render_contents)
        places = [Match(at.start, at.end, layouts[at.message][at.span].content) for at in located]
        text, data = shield.uncover(rendered) if shield else (rendered, ())
        return text, data, places

    def _turn_layouts(
        self, turns: Sequence[Turn], session: str, agent: str, explicit: Sequence[Content]
    ) -> list[list[Match]]:
        """Per turn, where contents stand in its text, characters."""
        names = tool_names(message for turn in turns for message in turn.messages)
        return [
            [
                Match(start + offset, end + offset, content)
                for message, offset in zip(turn.messages, turn.offsets, strict=True)
                for start, end, content in self._layouts.find(message, session, agent, names, explicit)
            ]
            for turn in turns
        ]

    @staticmethod
    def _widened(text: str, places: Sequence[Match]) -> list[Match]:
        """Places of generated contents, with the whitespace and thinking around them where all of it is there."""
        widened: list[Match] = []
        for i, place in enumerate(places):
            first, last = place.content.core_span
            whole = Match(place.start - first, place.end + len(place.content.text) - last, place.content)
            free_from = widened[-1].end if widened else 0
            free_to = places[i + 1].start if i + 1 < len(places) else len(text)
            fits = free_from <= whole.start and whole.end <= free_to
            there = fits and text[whole.start : whole.end] == place.content.text
            widened.append(whole if place.content.token_ids and there else place)
        return widened

    # --- tokens ----------------------------------------------------------------------------------------------------

    def _segmented_pieces(self, text: str, data: Sequence[Span], places: Sequence[Match]) -> list[_Piece]:
        """Contents as their own ids, and the fixed text between them."""
        pieces: list[_Piece] = []
        at = 0
        for place in places:
            ids = self._ids_of(place.content, text[place.start : place.end])
            if ids is not None:
                pieces += [_Piece(self._run(text, at, place.start, data).ids), _Piece(ids, place.content)]
                at = place.end
        return [*pieces, _Piece(self._run(text, at, len(text), data).ids)]

    def _canonical_pieces(self, text: str, data: Sequence[Span], places: Sequence[Match]) -> list[_Piece]:
        """The ordinary ids of the whole text, divided where tokens lie wholly within a content."""
        run = self._run(text, 0, len(text), data, offsets=True)
        if run.offsets is None:
            return [_Piece(run.ids)]
        starts = [start for start, _ in run.offsets]
        ends = [end for _, end in run.offsets]
        pieces: list[_Piece] = []
        at = 0
        for place in places:
            first = max(at, bisect_left(starts, place.start))
            last = bisect_right(ends, place.end)
            if first < last:
                pieces += [_Piece(run.ids[at:first]), _Piece(run.ids[first:last], place.content)]
                at = last
        return [*pieces, _Piece(run.ids[at:])]

    def _run(self, text: str, start: int, end: int, data: Sequence[Span], *, offsets: bool = False) -> Run:
        part = text[start:end]
        inside = tuple((max(s, start) - start, min(e, end) - start) for s, e in data if s < end and start < e)
        return self._runs.get(
            (part, inside, start == 0, offsets),
            len(part),
            lambda: encode_run(self._tokenizer.codec, part, data=inside, at_start=start == 0, offsets=offsets),
        )

    def _ids_of(self, content: Content, piece: str) -> Ids | None:
        """Ids for a content written as ``piece``; ``None`` if no ids spell it exactly."""
        return self._content_ids.get((content.id, piece), len(piece), lambda: self._spell(content, piece))

    def _spell(self, content: Content, piece: str) -> Ids | None:
        tokenizer = self._tokenizer
        if content.token_ids and tokenizer.spells(content.token_ids, content.text):
            if piece == content.text:
                return content.token_ids
            if piece == content.core:
                part = tokenizer.slice(content.token_ids, content.text, *content.core_span)
                if part:
                    return part
        ids = tokenizer.encode_plain(piece)
        return ids if ids and tokenizer.spells(ids, piece) else None

    # --- segments --------------------------------------------------------------------------------------------------

    def _number(self, text: str, pieces: Iterable[_Piece]) -> BuiltPrompt:
        """Segments that cover every token once, in order, with names that are unique within the prompt."""
        pieces = [piece for piece in pieces if piece.ids]
        too_short = self._least_length(pieces)
        ids: list[int] = []
        segments: list[Segment] = []
        contents: list[Content] = []
        seen: Counter[str] = Counter()
        fixed_from = 0
        for piece in pieces:
            start = len(ids)
            ids += piece.ids
            if piece.content is None or len(piece.ids) < too_short:
                continue
            if fixed_from < start:
                segments.append(Segment(kind=SegmentKind.FIXED, start=fixed_from, end=start))
            name = piece.content.name[: MAX_NAME - 8]
            seen[name] += 1
            numbered = name if seen[name] == 1 else f"{name}#{seen[name]}"
            segments.append(Segment(kind=SegmentKind.PLACEHOLDER, name=numbered, start=start, end=len(ids)))
            contents.append(piece.content)
            fixed_from = len(ids)
        if fixed_from < len(ids):
            segments.append(Segment(kind=SegmentKind.FIXED, start=fixed_from, end=len(ids)))
        return BuiltPrompt(SegmentedPrompt(tuple(ids), tuple(segments), text), tuple(contents))

    def _least_length(self, pieces: Sequence[_Piece]) -> int:
        """Tokens a placeholder needs: ``min_segment_tokens``, or more where there were too many segments otherwise."""
        most = (MAX_SEGMENTS - 1) // 2
        lengths = sorted((len(piece.ids) for piece in pieces if piece.content is not None), reverse=True)
        return max(self._min_tokens, lengths[most] + 1 if len(lengths) > most else 0)
