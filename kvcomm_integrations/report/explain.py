"""``kvcomm explain``: shows a prompt's segments, and what becomes of each, before a run or after it.

The forecast uses the engine's own planning, without an engine: it needs a tokenizer, and neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from kvcomm_integrations.chat.detect import tool_format_for
from kvcomm_integrations.chat.tool_format import tool_use
from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.planning.forecast import PlanForecast
from kvcomm_integrations.prompts.builder import PromptBuilder
from kvcomm_integrations.prompts.chat_message import clean_text
from kvcomm_integrations.prompts.content_registry import ContentRegistry, response_name
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.report.chat_file import Chat, read_chat, read_report
from kvcomm_integrations.report.words import STYLES, visible
from kvcomm_integrations.wire import SHOWN_ORDER, EdgeReport, RequestReport, SegmentKind, SegmentReport

LEGEND = {
    "exact": "from the prefix cache, or a copy of the beginning of an earlier prompt",
    "carried": "taken over from the agent's own last turn, estimates included",
    "loaded": "from another agent's cache, corrected",
    "repaired": "computed by the repair pass, over what was loaded",
    "computed": "by vLLM's own forward pass",
}
_SESSION = "explained"


# --- forecasting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """What becomes of a prompt's tokens, and the tokens themselves if they are known."""

    report: RequestReport
    token_ids: tuple[int, ...] = ()


class Forecast:
    """Says what an engine would do with one prompt after another of a session; see `PlanForecast`.

    Args:
        tokenizer: the model's.
        config: limits of the repair pass and least lengths.
        block_size: tokens per block of the exact prefix cache.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, config: ReuseConfig | None = None, block_size: int = 16) -> None:
        self._tokenizer = tokenizer
        self._format = tool_format_for(tokenizer)
        self._registry = ContentRegistry()
        self._plans = PlanForecast(config, block_size=block_size)
        least = self._plans.config.min_segment_tokens
        self._builder = PromptBuilder(tokenizer, self._registry, min_segment_tokens=least)

    def next(self, chat: Chat) -> Explanation:
        """What would become of this prompt; from then on it counts as seen."""
        shown, tools = self._format.encode(self._tokenizer, chat.messages, tool_use(chat.tools or None))
        prompt = self._builder.build(shown, session=_SESSION, agent=chat.agent, tools=tools).prompt
        text = clean_text(chat.answer or "")
        answer = self._tokenizer.encode_plain(text) if text else ()
        params = prompt.params(agent=chat.agent, session=_SESSION, response_name=response_name(chat.agent))
        report = self._plans.next(params, prompt.token_ids, answer=answer)
        if answer:
            self._registry.register_response(_SESSION, chat.agent, text, answer)
        known = report.model_copy(update={"segments": tuple(map(_with_reason, report.segments))})
        return Explanation(known, tuple(prompt.token_ids))


def _with_reason(report: SegmentReport) -> SegmentReport:
    """The report, saying so where a content is known but was left out of the plan."""
    if report.edge is None or report.loaded or report.exact:
        return report
    return report.model_copy(update={"reason": "known, but too much around it would have to be repaired"})


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
    summary = Text(f"Prompt of {visible(report.agent)}: {report.prompt_tokens} tokens = ", style="bold")
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
    console.print(Text(f"  Of a placeholder's tokens, in this order: {', '.join(SHOWN_ORDER)}."))
    if planned:
        console.print(Text("  A forecast for edges without examples; an engine that has learned repairs less."))


def _parts(tokenizer: ChatTokenizer, ids: Sequence[int], segment: SegmentReport) -> Iterator[tuple[str, str]]:
    """The segment's text, cut where what becomes of its tokens changes."""
    inside = ids[segment.start : segment.end]
    whole = tokenizer.decode(inside, skip_special=False)
    tokens = at = 0
    for kind in SHOWN_ORDER:
        if count := getattr(segment, kind):
            tokens += count
            read = tokenizer.decode(inside[:tokens], skip_special=False).rstrip("\ufffd")
            end = len(whole) if tokens == len(inside) else len(read)
            yield kind, whole[at:end]
            at = max(at, end)


def _heading(segment: SegmentReport) -> Text:
    fixed = segment.kind is SegmentKind.FIXED
    heading = Text("── ", style="dim") + Text(
        "fixed text" if fixed else visible(segment.name), style="dim" if fixed else "bold magenta"
    )
    heading.append(f" · {segment.end - segment.start} tokens · ")
    counts = {kind: _count(kind, n) for kind in STYLES if (n := getattr(segment, kind))}
    if segment.source and "loaded" in counts:
        counts["loaded"].append(f" from {visible(segment.source)}")
    heading.append_text(Text(", ").join(counts.values()))
    if segment.confidence is not None:
        heading.append(f" · confidence {segment.confidence:.2f}")
    if segment.reason:
        heading.append(f" · {visible(segment.reason)}", style="italic")
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
    return visible(" · ".join([*told, f"{edge.health}: {edge.why}"]))


def _body(segment: SegmentReport, parts: Iterable[tuple[str, str]]) -> Text:
    extra = " dim" if segment.kind is SegmentKind.FIXED else ""
    body = Text()
    for kind, text in parts:
        body.append(visible(text), style=STYLES[kind] + extra)
    return body


def _count(kind: str, count: int) -> Text:
    return Text(f"{count} {kind}", style=STYLES[kind])


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
