"""What vLLM hands out, in this package's types: its outputs as deltas, its scheduler's statistics as a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcomm_integrations.engines.interface import Delta, TokenLogprob
from kvcomm_integrations.wire import RequestReport

if TYPE_CHECKING:
    from vllm import RequestOutput


def delta_of(output: RequestOutput, prompt_tokens: int, completion_before: int, ttft_ms: float) -> Delta:
    """One of vLLM's outputs as a delta.

    Args:
        output: What vLLM hands out, with ``output_kind`` DELTA.
        prompt_tokens: Length of the prompt.
        completion_before: Tokens of the answer that came before.
        ttft_ms: What the first token took, milliseconds.
    """
    part = output.outputs[0]
    ids = tuple(part.token_ids)
    last = output.finished
    return Delta(
        text=part.text,
        token_ids=ids,
        logprobs=_logprobs(part.logprobs, ids),
        finish_reason=part.finish_reason if last else None,
        stop_reason=part.stop_reason if last else None,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_before + len(ids),
        cached_tokens=output.num_cached_tokens or 0,
        ttft_ms=ttft_ms if last else None,
        queue_ms=_queue_ms(output.metrics) if last else None,
        report=RequestReport.from_transfer_params(output.kv_transfer_params) if last else None,
    )


def _queue_ms(metrics: Any) -> float | None:
    """Milliseconds from arrival in the scheduler to the first step, by vLLM's own clock."""
    queued, scheduled = getattr(metrics, "queued_ts", 0.0), getattr(metrics, "scheduled_ts", 0.0)
    return max(0.0, (scheduled - queued) * 1e3) if queued and scheduled else None


def _logprobs(steps: Any, ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    result = []
    for token, choices in zip(ids, steps or (), strict=False):
        top = tuple(
            (candidate, entry.decoded_token or "", entry.logprob)
            for candidate, entry in sorted(choices.items(), key=lambda item: -item[1].logprob)
        )
        own = choices[token]
        result.append(TokenLogprob(token, own.decoded_token or "", own.logprob, top))
    return tuple(result)


@dataclass(frozen=True)
class SchedulerSnapshot:
    """vLLM's own counters after its latest step."""

    usage: float = 0.0
    """Share of the paged cache's blocks held by requests."""
    running: int = 0
    waiting: int = 0


class StatsKeeper:
    """Takes in vLLM's statistics step by step and keeps the latest.

    Attributes:
        latest: The snapshot after the latest step; all zero before the first.
    """

    def __init__(self) -> None:
        self.latest = SchedulerSnapshot()

    def note(self, stats: Any) -> None:
        """Take in vLLM's ``SchedulerStats``."""
        self.latest = SchedulerSnapshot(stats.kv_cache_usage, stats.num_running_reqs, stats.num_waiting_reqs)
