"""Who is calling, and in which session: read from LangGraph's run context.

A model object shared by several graph nodes still knows which agent it answers for, because LangGraph keeps the running
node's metadata in a context variable that follows sync, async, batch and thread calls.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from langchain_core.runnables import RunnableConfig

from kvcomm_integrations.chat.caller import DEFAULT_AGENT, DEFAULT_SESSION, Caller

SESSION_KEY = "kvcomm_session"
AGENT_KEY = "kvcomm_agent"
CONFIG_KEYWORD = "kvcomm_config"
"""Keyword under which ``call_config`` passes its findings on."""
_MODEL_NODES = ("model", "agent")
"""Names that prebuilt agents give to their model-calling node; they say nothing about which agent it is."""
_MAX_RUNS = 4096
_UUID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)


def identify(config: RunnableConfig, given: Mapping[str, str], agent: str | None, session: str | None) -> Caller:
    """The agent and the session of a call.

    Args:
        config: The running config, from ``ensure_config()``.
        given: What ``call_config`` found in a config handed to the model itself.
        agent: Explicit agent (a field or a bound keyword); wins over everything.
        session: Explicit session; wins over everything.
    """
    agent = agent or given.get("agent") or agent_key(config)
    return Caller(agent, session or given.get("session") or session_key(config))


def call_config(config: RunnableConfig | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs``, with the identity that a config handed to the model itself spells out.

    Such a config is in no context variable, so it would not reach the methods that generate.
    """
    told = {"agent": _configured_agent(config), "session": _configured_session(config)} if config else {}
    found = {key: value for key, value in told.items() if value}
    return {**kwargs, CONFIG_KEYWORD: found} if found else dict(kwargs)


def _configured_agent(config: RunnableConfig) -> str | None:
    configured = (config.get("configurable") or {}).get(AGENT_KEY)
    configured = configured or (config.get("metadata") or {}).get("lc_agent_name")
    return str(configured) if configured else None


def _configured_session(config: RunnableConfig) -> str | None:
    configurable: Mapping[str, Any] = config.get("configurable") or {}
    if configurable.get(SESSION_KEY):
        return str(configurable[SESSION_KEY])
    thread = configurable.get("thread_id")
    return f"thread:{thread}" if thread else None


def agent_key(config: RunnableConfig) -> str:
    """The agent's name: configured, else given by ``create_agent``, else the path of subgraphs, else the node."""
    metadata = config.get("metadata") or {}
    if configured := _configured_agent(config):
        return configured
    names = _namespace_names(str(metadata.get("langgraph_checkpoint_ns") or ""))
    if len(names) > 1 and names[-1] in _MODEL_NODES:
        names.pop()
    return "/".join(names) or str(metadata.get("langgraph_node") or "") or DEFAULT_AGENT


def _namespace_names(namespace: str) -> list[str]:
    """``team:<uuid>|writer:<uuid>`` -> ``[team, writer]``; call counters (``|1``) are dropped."""
    names = []
    for part in namespace.split("|"):
        name, _, task = part.rpartition(":")
        name = name if name and _UUID.fullmatch(task) else part
        if name and not name.isdigit():
            names.append(name)
    return names


def session_key(config: RunnableConfig) -> str:
    """The session: configured, else the thread, else the graph run, else one shared default."""
    return _configured_session(config) or _current_run() or DEFAULT_SESSION


def _current_run() -> str | None:
    """A name for the graph run in progress; ``None`` outside LangGraph."""
    runtime_module = sys.modules.get("langgraph.runtime")
    if runtime_module is None:  # no graph can be running
        return None
    try:
        runtime = runtime_module.get_runtime()
    except RuntimeError:  # called outside a graph
        return None
    control, info = getattr(runtime, "control", None), getattr(runtime, "execution_info", None)
    if control is None:
        return None
    name = f"run:{getattr(info, 'run_id', None) or uuid.uuid4().hex}"
    _, name = _runs.setdefault(id(control), (control, name))  # one step, so that threads agree without a lock
    with suppress(KeyError):
        _runs.move_to_end(id(control))
        while len(_runs) > _MAX_RUNS:
            _runs.popitem(last=False)
    return name


_runs: OrderedDict[int, tuple[object, str]] = OrderedDict()
"""Runs by the id of their control object: one per run, shared by subgraphs, which get no run id of their own.

The object is kept alive while it is named, so that its id cannot be taken by another run.
"""
