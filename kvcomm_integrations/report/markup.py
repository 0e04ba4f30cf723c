"""Renders the templates of this package. Every value is escaped, so no name or text can become part of a page."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvcomm_integrations.report import drawing, figures, words
from kvcomm_integrations.wire import TREATMENTS, Health


def render(template: str, **values: Any) -> str:
    """A template of this package with these values in it."""
    return _environment().get_template(template).render(**values)


@cache
def asset(name: str) -> Markup:
    """A file that goes into a page as it is: the style sheet or the script."""
    return Markup((files(__package__) / "templates" / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvcomm_integrations.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        cache_size=-1,  # a plain dict: the cache with a limit has a lock, which a forked child could find taken
    )
    filters = (
        drawing.abridged, drawing.agent_graph, drawing.agent_rows, drawing.prompt_bars, drawing.session_rows,
        drawing.short, figures.treated, words.fixed, words.milliseconds, words.moment, words.segment_title, words.share,
    )  # fmt: skip
    environment.filters |= {function.__name__: function for function in filters}
    environment.tests |= {"dense": figures.is_dense, "numeric": _numeric}
    environment.globals |= {"TREATMENTS": list(TREATMENTS), "HEALTH": list(Health)}
    return environment


def _visible(value: Any) -> Any:
    return value if hasattr(value, "__html__") else words.visible(str(value))


def _numeric(value: object) -> bool:
    return isinstance(value, (int, float)) or str(value)[:1].isdigit()
