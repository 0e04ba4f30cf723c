"""The report's panels: each a section with a heading, a picture where one helps, and a table that says the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcomm_integrations.chat.request_log import PHASES, RunRecord
from kvcomm_integrations.report.drawing import agent_bars, agent_graph, prompt_map, timeline
from kvcomm_integrations.report.figures import KINDS, SessionRuns, by_agent, edges, is_dense, sessions, totals
from kvcomm_integrations.report.markup import Markup, join, tag
from kvcomm_integrations.report.words import milliseconds, moment, share
from kvcomm_integrations.wire import Mode

MEANINGS = {
    "exact": "from the prefix cache, or a copy of the beginning of an earlier prompt",
    "loaded": "from another agent's cache, corrected for the new context",
    "repaired": "computed by the repair pass, over what was loaded",
    "computed": "by vLLM's own forward pass",
}
PHASE_MEANINGS = {
    "queue": "waiting for the engine",
    "plan": "deciding what to load",
    "load": "writing corrected KV into the cache",
    "repair": "the repair pass",
    "compute": "vLLM's own prefill, up to the first token",
    "decode": "the rest of the answer",
}
SESSIONS_SHOWN = 12
PROMPTS_SHOWN = 60
"""Latest sessions and prompts that are drawn; the rest is in the JSON lines."""


def panels(records: Sequence[RunRecord]) -> Markup:
    """All panels, in reading order."""
    if not records:
        return tag("p", "No request has finished yet.", class_="empty")
    return join(
        _savings(records), _agents(records), _timelines(records), _prompts(records), _edges(records), _audits(records)
    )


def _savings(records: Sequence[RunRecord]) -> Markup:
    sums = totals(records)
    speedups = [agent.speedup for agent in by_agent(records) if agent.speedup is not None]
    tiles = [
        ("requests", f"{sums.requests}"),
        ("prompt tokens", f"{sums.prompt}"),
        ("not computed", f"{sums.skipped} ({share(sums.skipped, sums.prompt)})"),
        ("loaded from other agents", f"{sums.tokens['loaded']} ({share(sums.tokens['loaded'], sums.prompt)})"),
    ]
    if speedups:
        tiles.append(("first token, best agent", f"{max(speedups):.2f} times sooner"))
    if sums.errors:
        tiles.append(("ended with an error", f"{sums.errors}"))
    rows = [(kind, sums.tokens[kind], share(sums.tokens[kind], sums.prompt), MEANINGS[kind]) for kind in KINDS]
    return _section(
        "savings",
        "What was saved",
        tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in tiles], class_="tiles"),
        _table(
            "Prompt tokens by what became of them", ("", "tokens", "share", "where they came from"), rows, swatch="kind"
        ),
    )


def agent_table(records: Sequence[RunRecord]) -> Markup:
    """Medians of each agent, as a table."""
    head = ("agent", "requests", "prompt", *KINDS, "first token", "dense", "speed-up")
    rows = [
        (
            agent.name,
            agent.reuse.count if agent.reuse else 0,
            *(f"{agent.tokens[kind]:.0f}" for kind in ("prompt", *KINDS)),
            milliseconds(agent.reuse.ttft_ms) if agent.reuse else "–",
            milliseconds(agent.dense.ttft_ms) if agent.dense else "–",
            f"{agent.speedup:.2f}" if agent.speedup else "–",
        )
        for agent in by_agent(records)
    ]
    return _table("Medians by agent", head, rows)


def _agents(records: Sequence[RunRecord]) -> Markup:
    agents = by_agent(records)
    note = (
        "Medians. Dense: the same agents' requests that asked for a run without reuse."
        if any(agent.dense for agent in agents)
        else "Medians. No request asked for a dense run, so there is nothing to compare with."
    )
    return _section(
        "agents",
        "Time to the first token, by agent",
        tag("p", note),
        agent_bars(agents),
        _legend("phase", {phase: PHASE_MEANINGS[phase] for phase in PHASES[:-1]}),
        agent_table(records),
    )


def _timelines(records: Sequence[RunRecord]) -> Markup:
    groups = sessions(records)
    shown = groups[-SESSIONS_SHOWN:]
    hidden = len(groups) - len(shown)
    return _section(
        "timeline",
        "Timeline of each session",
        tag("p", f"The latest {len(shown)} of {len(groups)} sessions.") if hidden else None,
        _legend("phase", PHASE_MEANINGS),
        [_session(runs, opened=runs is shown[-1]) for runs in shown],
    )


def _session(runs: SessionRuns, *, opened: bool) -> Markup:
    way = "dense" if runs.alone_and_dense else "with reuse, beside the same densely" if runs.dense else "with reuse"
    owner = "" if runs.tenant == "default" else f" of {runs.tenant}"
    rows = [
        (
            record.agent,
            record.number,
            "dense" if is_dense(record) else "with reuse",
            moment(record.started),
            *(milliseconds(spent) for spent in record.phases.values()),
        )
        for record in (*runs.records, *runs.dense)
    ]
    return tag(
        "details",
        tag("summary", f"Session {runs.session}{owner}, {way}: {len(runs.records)} requests"),
        timeline(runs.records, runs.dense),
        _table("Each request, by phase", ("agent", "request", "way", "started", *PHASES), rows),
        id=f"session-{runs.records[0].number}",
        open=opened,
    )


def _prompts(records: Sequence[RunRecord]) -> Markup:
    shown = [record for record in records if not is_dense(record)][-PROMPTS_SHOWN:]
    longest = max((record.prompt_tokens for record in shown), default=1)
    parts = [_prompt(record, longest) for record in reversed(shown)]
    return _section(
        "prompts",
        "Prompt maps",
        tag(
            "p",
            "The latest requests first. A bar is a prompt, its first token on the left; the thin line above it marks "
            "shared contents. Open one for its segments.",
        ),
        _legend("kind", MEANINGS),
        parts or tag("p", "Every request asked to run densely."),
    )


def _prompt(record: RunRecord, longest: int) -> Markup:
    counts = ", ".join(f"{count} {kind}" for kind in KINDS if (count := getattr(record, kind)))
    head = ("segment", "tokens", *KINDS, "source", "confidence", "why")
    rows = [
        (
            part.name or "template text",
            part.end - part.start,
            *(getattr(part, kind) for kind in KINDS),
            part.source or "–",
            "–" if part.confidence is None else f"{part.confidence:.2f}",
            part.reason,
        )
        for part in record.segments
    ]
    texts = zip(record.segments, record.texts or (), strict=False)
    facts = [f"{record.prompt_tokens} tokens: {counts}"]
    if record.reason:
        facts.append(f"nothing loaded ({record.reason})" if not record.loaded else record.reason)
    if record.error:
        facts.append(f"ended with {record.error}")
    return tag(
        "details",
        tag(
            "summary",
            tag("span", f"{record.agent}, request {record.number} – {'; '.join(facts)}"),
            prompt_map(record, longest),
        ),
        _table(f"Segments of request {record.number}", head, rows),
        [
            tag("details", tag("summary", f"Text of {part.name or 'template text'}"), tag("pre", words))
            for part, words in texts
        ],
        tag("details", tag("summary", "Answer"), tag("pre", record.answer)) if record.answer else None,
        id=f"request-{record.number}",
        class_="prompt",
    )


def _edges(records: Sequence[RunRecord]) -> Markup:
    found = edges(records)
    if not found:
        return _section("edges", "Who used whose cache", tag("p", "Nothing has been taken over from an agent yet."))
    head = (
        "from",
        "to",
        "content",
        "state",
        "requests",
        "loaded",
        "repaired",
        "examples",
        "confidence",
        "divergence",
        "why",
    )
    rows = [
        (
            edge.source,
            edge.target,
            edge.name,
            edge.health,
            edge.requests,
            edge.loaded,
            edge.repaired,
            edge.examples,
            "–" if edge.confidence is None else f"{edge.confidence:.2f}",
            "not audited" if edge.divergence is None else f"{edge.divergence:.3f} nats",
            edge.why,
        )
        for edge in found
    ]
    return _section(
        "edges",
        "Who used whose cache",
        tag(
            "p",
            "An arrow leads from the agent whose cache was used to the agent that used it; the thicker, the more "
            "tokens. Dashed: repaired deeper. Dotted: closed, nothing is loaded.",
        ),
        agent_graph(found),
        _table("Edges", head, rows),
    )


def _audits(records: Sequence[RunRecord]) -> Markup:
    sums = totals(records)
    told = [edge for edge in edges(records) if edge.divergence is not None]
    closed = [edge for edge in told if edge.health == "closed"]
    words = (
        f"{sums.audits} of {sums.requests} requests ran densely as audits, {sums.lessons} to teach corrections. "
        + (
            f"{len(told)} edges have been audited, {len(closed)} of them are closed."
            if told
            else "No edge shows an audit yet."
        )
    )
    rows = [
        (
            record.number,
            record.agent,
            record.session,
            record.reason or ("asked to be observed" if record.asked is Mode.OBSERVE else "–"),
            record.prompt_tokens,
        )
        for record in records
        if not is_dense(record) and not record.loaded
    ]
    head = ("request", "agent", "session", "why", "prompt tokens")
    table = _table("Requests that loaded nothing, and why", head, rows) if rows else None
    return _section("audits", "Audits and dense runs", tag("p", words), table)


def _section(anchor: str, heading: str, *children: object) -> Markup:
    return tag(
        "section", tag("h2", heading, id=f"{anchor}-heading"), *children, id=anchor, aria_labelledby=f"{anchor}-heading"
    )


def _legend(prefix: str, meanings: dict[str, str]) -> Markup:
    entries = [tag("li", _swatch(prefix, kind), tag("b", kind), f" {meaning}") for kind, meaning in meanings.items()]
    return tag("ul", entries, class_="legend")


def _swatch(prefix: str, kind: str) -> Markup:
    square = tag("rect", width=16, height=16, class_=f"{prefix}-{kind}")
    return tag("svg", square, width=16, height=16, aria_hidden="true")


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], *, swatch: str = "") -> Markup:
    body = []
    for row in rows:
        first, *rest = row
        mark = join(_swatch(swatch, str(first)), " ") if swatch else None
        cells = [tag("td", value, class_="number" if _numeric(value) else None) for value in rest]
        body.append(tag("tr", tag("th", mark, first, scope="row"), cells))
    heads = tag("tr", [tag("th", name, scope="col") for name in head])
    table = tag("table", tag("caption", caption), tag("thead", heads), tag("tbody", body))
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _numeric(value: object) -> bool:
    return isinstance(value, (int, float)) or str(value)[:1].isdigit()
