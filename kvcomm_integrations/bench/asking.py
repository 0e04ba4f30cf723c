"""Asks agents on a real engine: dense answers that are audited, and timed requests. For the fidelity benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcomm_integrations.bench.prompting import TeamPrompts, Turn
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import GenerationRequest, SamplingOptions
from kvcomm_integrations.wire import Mode


class Asker:
    """Asks the agents of one engine.

    Args:
        engine: the engine to measure.
        max_tokens: length of an answer, tokens.
    """

    def __init__(self, engine: InProcessEngine, max_tokens: int) -> None:
        self.engine = engine
        self.max_tokens = max_tokens
        self._turns: dict[str, list[Turn]] = {}
        self._prompts = TeamPrompts(engine.tokenizer)

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
        prompt = self._prompts.write(agent, content, turns)
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
        prompt = self._prompts.write(agent, content, turns)
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
