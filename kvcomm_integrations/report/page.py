"""The page around the panels. Static pages hold no script; nothing is ever fetched from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.report.drawing import definitions
from kvcomm_integrations.report.markup import Markup, join, tag
from kvcomm_integrations.report.panels import panels
from kvcomm_integrations.report.words import moment

SECTIONS = {
    "savings": "Savings",
    "agents": "Agents",
    "timeline": "Timeline",
    "prompts": "Prompt maps",
    "edges": "Edges",
    "audits": "Audits",
}


def page(records: Sequence[RunRecord], title: str) -> str:
    """A whole page for a finished run."""
    return _document(title, _subtitle(records), panels(records))


def live_page(records: Sequence[RunRecord], title: str, running: int) -> str:
    """The same with a script that fetches the panels anew every two seconds from ``<this page>/panels``."""
    controls = tag(
        "p",
        tag("button", "Pause", type="button", id="pause", aria_pressed="false"),
        " ",
        tag("span", state_line(records, running), id="state", role="status"),
    )
    return _document(title, _subtitle(records), panels(records), controls=controls, script=_asset("live.js"))


def state_line(records: Sequence[RunRecord], running: int) -> str:
    """How many requests run and have finished, in words."""
    return f"{running} running, {len(records)} finished"


def _document(title: str, subtitle: str, body: Markup, controls: Markup | None = None, script: str = "") -> str:
    links = [tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name in SECTIONS.items()]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=content_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(_asset("style.css"))),
    )
    content = tag(
        "body",
        tag("a", "Skip to the panels", href="#panels", class_="skip"),
        definitions(),
        tag("header", tag("h1", title), tag("p", subtitle), controls),
        tag("nav", tag("ul", links), aria_label="Panels"),
        tag("main", body, id="panels", tabindex=-1),
        tag("script", Markup(script)) if script else None,
    )
    return "<!doctype html>\n" + tag("html", join(head, content), lang="en") + "\n"


def content_policy(script: str = "") -> str:
    """A content security policy that allows the page's own style and script, and nothing else."""
    style_hash, script_hash = _hash(_asset("style.css")), _hash(script)
    allowed = f"; script-src '{script_hash}'; connect-src 'self'" if script else ""
    return f"default-src 'none'; style-src '{style_hash}'; img-src data:; base-uri 'none'; form-action 'none'{allowed}"


def _subtitle(records: Sequence[RunRecord]) -> str:
    if not records:
        return "No requests yet."
    models = ", ".join(dict.fromkeys(record.model.rstrip("/").rpartition("/")[2] for record in records)) or "unknown"
    began, ended = min(r.started for r in records), max(r.started for r in records)
    return f"Model {models}. {len(records)} requests from {moment(began)} to {moment(ended)}."


@cache
def _asset(name: str) -> str:
    return (files("kvcomm_integrations.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
