"""A segmented prompt: token ids, and the spans they divide into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcomm_integrations.wire import KVCommParams, Segment


@dataclass(frozen=True)
class SegmentedPrompt:
    """Token ids of a whole prompt and the segments that cover every token exactly once, in order."""

    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    text: str = ""
    """The rendered prompt, for display."""

    def params(self, **fields: Any) -> KVCommParams:
        """The wire parameters for this prompt; ``fields`` are the others of ``KVCommParams``: ``agent``, ``mode``..."""
        return KVCommParams(segments=self.segments, **fields)
