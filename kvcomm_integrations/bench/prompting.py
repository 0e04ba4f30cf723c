"""Prompts of fully connected agents by token ids, for benchmarks that need every token under control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.engines.base import GenerationRequest, SamplingOptions
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.wire import Mode, Segment, SegmentKind

AGENTS = tuple(ROLES)


@dataclass(frozen=True)
class Turn:
    """What an agent said, as token ids without the stop token."""

    agent: str
    content: tuple[int, ...]


class Asker:
    """Asks the agents of one engine, with prompts made from the model's own chat template.

    Args:
        engine: the engine to measure.
        max_tokens: length of an answer, tokens.
    """

    def __init__(self, engine: InProcessEngine, max_tokens: int) -> None:
        self.engine = engine
        self.max_tokens = max_tokens
        self._turns: dict[str, list[Turn]] = {}
        marks = [{"role": "system", "content": "<1>"}, {"role": "user", "content": "<2>"}]
        text = engine.tokenizer.render(marks)
        self._head, rest = text.split("<1>")
        self._middle, self._tail = rest.split("<2>")

    def prompt(self, agent: str, content: str, turns: Sequence[Turn]) -> SegmentedPrompt:
        """One agent's prompt: its role, the question, and what the others said."""
        ids: list[int] = []
        segments: list[Segment] = []

        def text(part: str, special: bool) -> None:
            ids.extend(self.engine.tokenizer.encode(part, allow_special=special))

        def placeholder(name: str, part: Sequence[int]) -> None:
            if part:
                segments.append(
                    Segment(kind=SegmentKind.PLACEHOLDER, name=name, start=len(ids), end=len(ids) + len(part))
                )
                ids.extend(part)

        text(self._head + ROLES[agent] + self._middle, True)
        placeholder("user_question", self.engine.tokenizer.encode(content, allow_special=False))
        for turn in turns:
            text(f"\n\nThe {turn.agent} says:\n", True)
            placeholder(f"agent:{turn.agent}:response", turn.content)
        text(self._tail, True)
        return SegmentedPrompt(tuple(ids), tuple(segments))

    def ask(
        self,
        agent: str,
        content: str,
        turns: Sequence[Turn],
        *,
        session: str,
        policies: Sequence[str],
        teach: bool,
        tokens: int,
    ) -> Turn:
        """A dense answer, audited under every policy over ``tokens`` positions once it is over."""
        prompt = self.prompt(agent, content, turns)
        params = prompt.params(
            agent=agent, session=session, response_name=f"agent:{agent}:response", mode=Mode.OBSERVE
        ).model_copy(update={"audit": tuple(policies), "audit_tokens": tokens - 1, "teach": teach})
        sampling = SamplingOptions(max_tokens=self.max_tokens, temperature=0, ignore_eos=True)
        deltas = list(self.engine.generate_sync(GenerationRequest(prompt, params, sampling)))
        turn = Turn(agent, tuple(token for delta in deltas for token in delta.token_ids))
        self._turns.setdefault(session, []).append(turn)
        return turn

    def time(self, agent: str, content: str, turns: Sequence[Turn], *, session: str, mode: Mode, policy: str) -> float:
        """Milliseconds to the first token of one request."""
        prompt = self.prompt(agent, content, turns)
        params = prompt.params(agent=agent, session=session, mode=mode, policy=policy)
        request = GenerationRequest(prompt, params, SamplingOptions(max_tokens=1, temperature=0))
        last = list(self.engine.generate_sync(request))[-1]
        return last.ttft_ms or 0.0

    def audits(self) -> list[dict[str, Any]]:
        """Audits done since the last call; waits for those of requests that are over."""
        self.engine.drain()
        return [audit for rank in self.engine.call_workers("kvcomm_take_audits") for audit in rank]

    def remembered(self, session: str) -> list[Turn]:
        """What was said in a session, in order."""
        return self._turns[session]
