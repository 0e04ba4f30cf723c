"""The pages: of a finished run, without script, and live. Nothing is ever fetched from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.report.figures import by_agent, edges, is_dense, sessions, totals
from kvcomm_integrations.report.markup import asset, render

SECTIONS = {
    "savings": "Savings",
    "agents": "Agents",
    "timeline": "Timeline",
    "prompts": "Prompt maps",
    "edges": "Edges",
    "audits": "Audits",
}
SESSIONS_SHOWN = 12
PROMPTS_SHOWN = 60
"""Latest sessions and prompts that are drawn; the rest is in the JSON lines."""


def page(records: Sequence[RunRecord], title: str) -> str:
    """A whole page for a finished run."""
    return render("page.html", **_values(records), **_frame(title))


def live_page(records: Sequence[RunRecord], title: str, running: int) -> str:
    """The same with a script that fetches the panels anew every two seconds from ``<this page>/panels``."""
    return render("page.html", running=running, **_values(records), **_frame(title, asset("live.js")))


def live_panels(records: Sequence[RunRecord], running: int) -> str:
    """What the live page's script fetches: how many requests run, and the panels."""
    return render("live_panels.html", running=running, **_values(records))


def agent_table(records: Sequence[RunRecord]) -> str:
    """Medians of each agent, as a table."""
    return render("agent_table.html", agents=by_agent(records))


def _frame(title: str, script: str = "") -> dict[str, Any]:
    """What stands around the panels. The content security policy allows the page's own style and script only."""
    style = asset("style.css")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    if script:
        policy += f"; script-src '{_hash(script)}'; connect-src 'self'"
    return {"title": title, "sections": SECTIONS, "policy": policy, "style": style, "script": script}


def _values(records: Sequence[RunRecord]) -> dict[str, Any]:
    """What the panels show."""
    return {
        "records": records,
        "requests": [record for record in records if not is_dense(record)],
        "models": list(dict.fromkeys(record.model.rstrip("/").rpartition("/")[2] for record in records)),
        "sums": totals(records),
        "agents": by_agent(records),
        "sessions": sessions(records),
        "edges": edges(records),
        "sessions_shown": SESSIONS_SHOWN,
        "prompts_shown": PROMPTS_SHOWN,
    }


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
