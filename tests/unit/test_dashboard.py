"""The dashboard asks for series that exist, by labels they have, and leaves none out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcomm_integrations.connector.metrics import ALL

DASHBOARD = json.loads((Path(__file__).parents[2] / "dashboards" / "grafana.json").read_text(encoding="utf-8"))
EXPORTED = {name: series for series in ALL for name in series.exported}
COMMON = {"model_name", "engine", "le"}


def queries() -> list[str]:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return asked + [
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    ]


def names(query: str) -> set[str]:
    return set(re.findall(r"[a-zA-Z_]+:[a-zA-Z0-9_]+", query))


def test_every_series_asked_for_is_exported() -> None:
    for query in queries():
        assert names(query), query
        assert names(query) <= EXPORTED.keys()


def test_every_series_is_shown() -> None:
    shown = set().union(*map(names, queries()))
    for series in ALL:
        assert shown & set(series.exported), f"{series.name} is on no panel"


@pytest.mark.parametrize("query", queries())
def test_labels_exist(query: str) -> None:
    known = COMMON.union(*(EXPORTED[name].labels for name in names(query)))
    grouped = re.findall(r"by \(([^)]*)\)", query)
    selected = re.findall(r"(\w+)\s*=~?\s*\"", query)
    used = {label.strip() for group in grouped for label in group.split(",")} | set(selected)
    assert used <= known
    assert query.count("(") == query.count(")")


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            kept = {label.strip() for group in grouped for label in group.split(",")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
