"""A report on the requests of a run: as HTML for people, as JSON lines for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.report.figures import by_agent
from kvcomm_integrations.report.page import agent_table, page
from kvcomm_integrations.wire import first_problem


class RunReport:
    """What happened to the latest requests of an engine.

    Args:
        records: finished requests, the oldest first.
        title: heading of the page.
    """

    def __init__(self, records: Iterable[RunRecord], title: str = "KV reuse report") -> None:
        self.records = tuple(records)
        self.title = title

    @property
    def last(self) -> RunRecord | None:
        """The request that ended last; ``None`` if there is none."""
        return self.records[-1] if self.records else None

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict per request; ``segments`` alone is a list. ``pandas.DataFrame(report.rows())`` is a table."""
        return [record.model_dump(mode="json") for record in self.records]

    def segment_rows(self) -> list[dict[str, Any]]:
        """One flat dict per segment of every request, with the request's ``number``, ``agent`` and ``session``."""
        return [
            {"number": record.number, "agent": record.agent, "session": record.session, **part.model_dump(mode="json")}
            for record in self.records
            for part in record.segments
        ]

    def agents(self) -> list[dict[str, Any]]:
        """One flat dict per agent: medians of tokens and of milliseconds to the first token, with reuse and dense."""
        return [
            {
                "agent": agent.name,
                "requests": agent.requests,
                **{f"{kind}_tokens": median for kind, median in agent.tokens.items()},
                "ttft_ms": agent.reuse_ms,
                "dense_ttft_ms": agent.dense_ms,
                "speedup": agent.speedup,
            }
            for agent in by_agent(self.records)
        ]

    def html(self) -> str:
        """The report as one HTML page that needs nothing else."""
        return page(self.records, self.title)

    def to_html(self, path: str | Path) -> Path:
        """Write the page to a file.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        return _write(Path(path), self.html())

    def to_jsonl(self, path: str | Path) -> Path:
        """Write one JSON object per request and line.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        return _write(Path(path), "".join(json.dumps(row) + "\n" for row in self.rows()))

    @classmethod
    def read(cls, path: str | Path) -> RunReport:
        """Read what ``to_jsonl`` wrote, or a JSON list of the same objects.

        Raises:
            ConfigurationError: the file cannot be read, or holds something else.
        """
        path = Path(path)
        try:
            content = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigurationError(f"{path} cannot be read: {err}") from err
        return cls(_parse(path, content), title=f"KV reuse report: {path.stem}")

    def __len__(self) -> int:
        return len(self.records)

    def _repr_html_(self) -> str:
        """What a notebook shows: the table of agents."""
        return agent_table(self.records)

    def __repr__(self) -> str:
        return f"RunReport({len(self.records)} requests)"


def _parse(path: Path, content: str) -> list[RunRecord]:
    whole = content.lstrip().startswith("[")
    rows: dict[int, Any] = {}
    for number, text in enumerate([content] if whole else content.splitlines(), 1):
        if text.strip():
            try:
                rows[number] = json.loads(text)
            except ValueError as err:
                where = "valid JSON" if whole else f"JSON lines: line {number}"
                raise ConfigurationError(f"{path} is not {where}: {err}") from err
    entries = enumerate(rows[1], 1) if whole else rows.items()
    return [_record(path, number, row) for number, row in entries]


def _record(path: Path, number: int, row: Any) -> RunRecord:
    if not isinstance(row, dict) or "agent" not in row or "segments" not in row:
        raise ConfigurationError(
            f"{path} holds no run: entry {number} has no 'agent' and 'segments', as model.report().to_jsonl(...) writes"
        )
    try:
        return RunRecord.model_validate(row)
    except ValidationError as err:
        raise ConfigurationError(f"{path} holds no run: entry {number}, {first_problem(err, 'request')}") from err


def read_runs(paths: Sequence[Path]) -> RunReport:
    """One report on the runs of several files."""
    reports = [RunReport.read(path) for path in paths]
    every = (record for report in reports for record in report.records)
    return reports[0] if len(reports) == 1 else RunReport(every)


def _write(path: Path, content: str) -> Path:
    try:
        path.write_text(content, encoding="utf-8", errors="replace")
    except OSError as err:
        raise ConfigurationError(f"cannot write {path}: {err.strerror or err}") from err
    return path
