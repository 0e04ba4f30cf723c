"""Which agent and which session a call belongs to, found from AutoGen's runtime.

A client shared by all agents of a team still knows for whom it answers: AutoGen keeps the id of the agent whose handler
is running in a context variable. Inside a team its type is ``<agent>_<team>`` and its key ``<team>``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field

from autogen_core import AgentId, MessageHandlerContext
from autogen_core.models import AssistantMessage, LLMMessage, SystemMessage

from kvcomm_integrations.chat.caller import DEFAULT_AGENT, DEFAULT_SESSION, Caller

_MAX_AGENTS = 4096
_MAX_INNER = 16
"""System messages of one running agent that are told apart; an agent with more of them writes them afresh each time."""

_scope: ContextVar[str | None] = ContextVar("kvcomm_session", default=None)


@contextmanager
def session_scope(session: str) -> Iterator[None]:
    """Give everything that runs inside this block one session, whatever teams and agents it consists of.

    A team is a session of its own, and so is a team inside a team; agents that run outside any team share the session
    ``"default"``. Put this block around a run where that is not what you want: one user's request, one ticket.

    ```python
    with session_scope("ticket-17"):
        await team.run(task="...")
    ```
    """
    token = _scope.set(session)
    try:
        yield
    finally:
        _scope.reset(token)


def identify(messages: Sequence[LLMMessage], *, agent: str | None = None, session: str | None = None) -> Caller:
    """The agent and the session of a call. To be called in the caller's own context.

    Args:
        messages: What the agent sends; tells agents apart that run in another one's handler, such as an ``AgentTool``.
        agent: Explicit agent; wins over everything.
        session: Explicit session; wins over everything.
    """
    running = _running()
    found_session = session or _scope.get() or (running.key if running else None) or DEFAULT_SESSION
    if agent is None:
        agent = _names.name(running, _system_hash(messages)) if running else _standalone(messages)
    return Caller(agent, found_session)


def note_calls(names: Sequence[str]) -> None:
    """Remember which tools the running agent has called: an agent run by one of them reports the same id."""
    running = _running()
    if running is not None:
        _names.note_calls(running, names)


def _running() -> AgentId | None:
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:  # no message handler is running: an agent used by itself
        return None


def agent_name(running: AgentId) -> str:
    """``writer_<team>/<team>`` -> ``writer``; an agent outside a team is named by its type."""
    return running.type.removesuffix(f"_{running.key}") or running.type


def _system_hash(messages: Sequence[LLMMessage]) -> str:
    """Hash of the system message an agent's prompt begins with; empty if it begins with none."""
    first = messages[0] if messages else None
    if not isinstance(first, SystemMessage):
        return ""
    return hashlib.blake2b(first.content.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def _standalone(messages: Sequence[LLMMessage]) -> str:
    """An agent outside any runtime: named by its own earlier answers, else by its system message."""
    for message in reversed(messages):
        if isinstance(message, AssistantMessage) and message.source:
            return message.source
    digest = _system_hash(messages)
    return f"agent-{digest}" if digest else DEFAULT_AGENT


@dataclass
class _Seen:
    """What is known of one running agent."""

    names: dict[str, str] = field(default_factory=dict)
    """Hash of the system message to the name of the agent it belongs to; the first is the running agent's own."""
    calls: tuple[str, ...] = ()
    """Tools of its latest answer."""


class _AgentNames:
    """Names agents by the id they run under and the system message they begin with. Bounded.

    An agent runs on one event loop, and every step on the dicts is one operation, so there is no lock.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    def name(self, running: AgentId, digest: str) -> str:
        """The running agent's own name, or ``<name>/<tool>`` for an agent that one of its tools runs."""
        own, seen = agent_name(running), self._get(running)
        if digest in seen.names or len(seen.names) >= _MAX_INNER:
            return seen.names.get(digest, own)
        inner = seen.calls[0] if len(seen.calls) == 1 else digest or "inner"
        return seen.names.setdefault(digest, f"{own}/{inner}" if seen.names else own)

    def note_calls(self, running: AgentId, names: Sequence[str]) -> None:
        """Remember the tools of the running agent's latest answer."""
        self._get(running).calls = tuple(names)

    def _get(self, running: AgentId) -> _Seen:
        key = (running.type, running.key)
        seen = self._seen.setdefault(key, _Seen())
        with suppress(KeyError):  # another loop's agents have pushed it out
            self._seen.move_to_end(key)
            while len(self._seen) > self._size:
                self._seen.popitem(last=False)
        return seen


_names = _AgentNames(_MAX_AGENTS)
