"""A segmented prompt: token ids plus the spans they divide into. Pure data; no tokenizer, no template, no framework."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm_integrations.wire import KVCommParams, Mode, Segment


@dataclass(frozen=True)
class SegmentedPrompt:
    """Token ids of a whole prompt and the segments that cover every token exactly once, in order."""

    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    text: str = ""
    """The rendered prompt, for display."""

    def params(
        self,
        *,
        agent: str = "default",
        session: str = "default",
        tenant: str = "default",
        response_name: str | None = None,
        mode: Mode = Mode.AUTO,
        policy: str | None = None,
    ) -> KVCommParams:
        """The wire parameters for this prompt."""
        return KVCommParams(
            agent=agent,
            session=session,
            tenant=tenant,
            segments=self.segments,
            response_name=response_name,
            mode=mode,
            policy=policy,
        )
