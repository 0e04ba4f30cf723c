"""Who a chat request is from, as both framework adapters name it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm_integrations.wire import MAX_NAME

DEFAULT_AGENT = "default"
DEFAULT_SESSION = "default"
_MAX_AGENT = MAX_NAME - len("agent::response")
"""Characters: the agent's name is part of its response's name."""


@dataclass(frozen=True)
class Caller:
    """The agent that answers and the session whose contents it may reuse. Of names that are too long the end is kept,
    where nested agents differ."""

    agent: str
    session: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "agent", self.agent[-_MAX_AGENT:])
        object.__setattr__(self, "session", self.session[-MAX_NAME:])
