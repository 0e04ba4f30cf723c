"""What a session's agents share: contents by id and by text.

Bounded in every direction, and never shared between sessions: give each tenant its own session keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import RLock

from kvcomm_integrations.forks import watch
from kvcomm_integrations.ids import content_id
from kvcomm_integrations.prompts.chat_message import clean_text, response_name
from kvcomm_integrations.prompts.content import Content, Origin
from kvcomm_integrations.prompts.matching import ContentIndex, Match, Part, index_bytes

__all__ = ["Content", "ContentRegistry", "Origin", "content_id", "response_name"]


@dataclass
class _Session:
    by_id: OrderedDict[str, Content] = field(default_factory=OrderedDict)
    """Least recently used first."""
    by_core: dict[str, list[Content]] = field(default_factory=dict)
    index: ContentIndex = field(default_factory=ContentIndex)
    layouts: OrderedDict[Hashable, tuple[tuple[int, int, str], ...]] = field(default_factory=OrderedDict)
    """How messages were divided: spans and ids of contents."""
    bytes: int = 0

    def touch(self, identity: str) -> Content:
        """The content of an id that is held; from now on the most recently used one."""
        self.by_id.move_to_end(identity)
        return self.by_id[identity]


class ContentRegistry:
    """The shared contents of each session. Thread-safe."""

    def __init__(
        self,
        *,
        max_sessions: int = 1024,
        max_contents: int = 512,
        max_session_bytes: int = 16 << 20,
        max_bytes: int = 256 << 20,
    ) -> None:
        """Args:
        max_sessions: sessions held; the least recently used is dropped whole.
        max_contents: contents held per session; the least recently used goes first.
        max_session_bytes: text, ids and index of one session, bytes.
        max_bytes: the same over all sessions, bytes; the least recently used sessions are dropped whole.
        """
        self._max_sessions = max_sessions
        self._max_contents = max_contents
        self._max_session_bytes = max_session_bytes
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._lock = RLock()
        watch(self)

    def after_fork(self) -> None:
        """In a forked child: a free lock, and nothing that a thread of the parent was in the middle of changing."""
        if not self._lock.acquire(blocking=False):
            self._sessions.clear()
        self._lock = RLock()

    # --- putting in ------------------------------------------------------------------------------------------------

    def register(
        self,
        session: str,
        name: str,
        text: str,
        token_ids: Sequence[int] | None = None,
        *,
        origin: Origin = Origin.REGISTERED,
    ) -> Content:
        """Make a content known to a session, or refresh it.

        Args:
            session: who may find it.
            name: placeholder name.
            text: what it says.
            token_ids: the ids it was generated as; used in prompts as long as they really spell ``text``.
            origin: how it became known.
        """
        text = clean_text(text)
        ids = tuple(token_ids or ())
        content = Content(content_id(ids, name, text, "" if ids else "text"), name, text, ids, origin)
        with self._lock:
            state = self._open(session)
            if content.id in state.by_id:
                return state.touch(content.id)
            size = _size(content)
            if not content.core or size > self._max_session_bytes:
                return content
            state.by_id[content.id] = content
            if origin is not Origin.SOURCE:
                state.by_core.setdefault(content.core, []).append(content)
            state.index.add(content, whole=origin is not Origin.SOURCE, parts=origin is not Origin.PART)
            state.bytes += size
            while len(state.by_id) > self._max_contents or state.bytes > self._max_session_bytes:
                self._forget(state, next(iter(state.by_id.values())))
            self._shrink(keep=session)
            return content

    def register_response(self, session: str, agent: str, text: str, token_ids: Sequence[int]) -> Content:
        """Make an agent's answer known.

        Args:
            session: who may find it.
            agent: who gave it; its placeholder name is ``agent:<agent>:response``.
            text: the answer as other agents will get to see it.
            token_ids: the generated ids without the stop token. They need not be the tokenisation of the text, but
                are only used where they decode to it.
        """
        return self.register(session, response_name(agent), text, token_ids, origin=Origin.GENERATED)

    # --- looking up ------------------------------------------------------------------------------------------------

    def lookup(self, session: str, segment_id: str) -> Content | None:
        """The content of that id; ``None`` if this session does not hold it."""
        with self._lock:
            state = self._peek(session)
            return state.touch(segment_id) if segment_id in state.by_id else None

    def find_text(self, session: str, core: str, name: str | None = None) -> Content | None:
        """The content that says exactly ``core``: preferably the one of that name, else the newest."""
        with self._lock:
            state = self._peek(session)
            found = state.by_core.get(core)
            return state.touch(next((c for c in reversed(found) if c.name == name), found[-1]).id) if found else None

    def search(self, session: str, text: str, start: int, end: int, accept: Callable[[Content], bool]) -> list[Match]:
        """Known contents within ``text[start:end]``, longest first, non-overlapping, in text order."""
        with self._lock:
            state = self._peek(session)
            matches = state.index.find(text, start, end, accept)
            for match in matches:
                state.touch(match.content.id)
            return matches

    def search_parts(self, session: str, text: str, start: int, end: int) -> list[Part]:
        """Lines within ``text[start:end]`` that an earlier message of the session has too."""
        with self._lock:
            return self._peek(session).index.find_parts(text, start, end)

    def contents(self, session: str) -> tuple[Content, ...]:
        """All contents of a session, least recently used first."""
        with self._lock:
            return tuple(self._sessions.get(session, _Session()).by_id.values())

    # --- layouts: how a message was divided the first time ------------------------------------------------------------

    def layout(self, session: str, key: Hashable) -> tuple[Match, ...] | None:
        """How a message was divided before; ``None`` if it is new or one of its contents is gone."""
        with self._lock:
            state = self._peek(session)
            spans = state.layouts.get(key)
            if spans is None:
                return None
            if any(identity not in state.by_id for _, _, identity in spans):
                del state.layouts[key]
                return None
            state.layouts.move_to_end(key)
            return tuple(Match(start, end, state.touch(identity)) for start, end, identity in spans)

    def remember_layout(self, session: str, key: Hashable, layout: Sequence[Match]) -> None:
        """Divide that message the same way when it comes again: same tokens, so that the exact prefix cache hits."""
        with self._lock:
            state = self._open(session)
            state.layouts[key] = tuple((start, end, content.id) for start, end, content in layout)
            while len(state.layouts) > 4 * self._max_contents:
                state.layouts.popitem(last=False)

    # --- letting go ------------------------------------------------------------------------------------------------

    def release(self, session: str) -> None:
        """Forget a session; nothing happens if it is not known."""
        with self._lock:
            self._sessions.pop(session, None)

    @property
    def bytes(self) -> int:
        """About how much all sessions hold, bytes."""
        with self._lock:
            return sum(state.bytes for state in self._sessions.values())

    def __len__(self) -> int:
        """Number of sessions held."""
        return len(self._sessions)

    def _peek(self, session: str) -> _Session:
        """The session, most recently used from now on; an empty one that is not kept if it is not known."""
        if session not in self._sessions:
            return _Session()
        self._sessions.move_to_end(session)
        return self._sessions[session]

    def _open(self, session: str) -> _Session:
        if session not in self._sessions:
            self._sessions[session] = _Session()
            self._shrink(keep=session)
        return self._peek(session)

    def _forget(self, state: _Session, content: Content) -> None:
        del state.by_id[content.id]
        others = [held for held in state.by_core.pop(content.core, ()) if held is not content]
        if others:
            state.by_core[content.core] = others
        state.index.remove(content)
        state.bytes -= _size(content)

    def _shrink(self, keep: str) -> None:
        while len(self._sessions) > self._max_sessions or self.bytes > self._max_bytes:
            oldest = next(iter(self._sessions))
            if oldest == keep:
                break
            del self._sessions[oldest]


def _size(content: Content) -> int:
    text = 2 * len(content.text.encode("utf-8"))  # the core is a second copy where it differs from the text
    return text + 8 * len(content.token_ids) + index_bytes(content.core, parts=content.origin is not Origin.PART)
