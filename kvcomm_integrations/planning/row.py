"""Digests of a row of tokens: what tells that two contents stood one after the other in the same earlier prompt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from kvcomm_integrations.wire import Segment


class Row:
    """Digests of a prompt, or of a prompt and its answer, up to chosen positions.

    Args:
        ids: the row's token ids.
        positions: where digests will be asked for; others are answered with an empty string.
    """

    def __init__(self, ids: Sequence[int], positions: Iterable[int]) -> None:
        packed = memoryview(array("q", ids).tobytes())
        digest = hashlib.blake2b(digest_size=16)
        self._digests: dict[int, str] = {}
        at = 0
        for position in sorted({p for p in positions if 0 <= p <= len(ids)}):
            digest.update(packed[8 * at : 8 * position])
            at = position
            self._digests[position] = digest.copy().hexdigest()

    @classmethod
    def of_prompt(cls, ids: Sequence[int], segments: Sequence[Segment]) -> Row:
        """The row of a prompt, with digests at the edges of its segments and at its end."""
        return cls(ids, [len(ids), *(edge for segment in segments for edge in (segment.start, segment.end))])

    def at(self, position: int) -> str:
        """The digest of the tokens before ``position``; empty if it was not asked for in time."""
        return self._digests.get(position, "")
