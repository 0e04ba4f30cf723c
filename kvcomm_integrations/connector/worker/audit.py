"""The audit: what would reuse have done with a request that was computed densely?

Runs on the finished request's own blocks, before vLLM gets them back: their KV is saved, overwritten as reuse would
have written it, the answer's first positions are computed again over it, and the KV is put back. The request itself is
over by then, so nobody waits for it; the comparison is over the full vocabulary.

An audit can be carried on in pieces, between which whoever asks something is served: it is abandoned then, which puts
the KV back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvcomm_integrations.connector.worker.forward import logits_of
from kvcomm_integrations.connector.worker.paged_cache import PagedCache
from kvcomm_integrations.connector.worker.repair import Gap, repair
from kvcomm_integrations.planning.jobs import AuditJob, AuditResult, AuditVariant, LoadSpan
from kvcomm_integrations.reuse.kv import KV

COPIED = 16
"""Tokens that are read, estimated or written in the time in which one is computed; fewer than any machine's so far."""
Estimate = Callable[[str, LoadSpan], KV]
"""Policy name and span to the KV that reuse would write."""
Select = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""Policy name, estimated and true keys of layer 1 to the tokens that the policy recomputes; ``None``: none."""


def audit(
    runner: Any,
    cache: PagedCache,
    job: AuditJob,
    estimate: Estimate,
    select: Select = lambda name, mine, true: None,
    budget: Callable[[], int] = lambda: 1 << 30,
) -> Generator[list[AuditResult], None, None]:
    """Compare the dense run with every variant, in pieces; the paged cache is as it was found once this has ended or
    has been closed. All ranks must go on together, and must hold every reference that the job names.

    Args:
        runner: the worker's model runner.
        cache: the worker's paged cache.
        job: the finished request.
        estimate: what reuse would write.
        select: the tokens that a policy computes in place of loading them.
        budget: tokens that the next piece may compute.

    Yields:
        nothing after every piece but the last, then one result per variant; nothing at all on ranks that do not hold
        logits.
    """
    end = len(job.token_ids)
    compared = end - job.prompt_tokens + 1
    saved: list[tuple[int, KV]] = []
    try:
        for start, stop in _windows(job.exact, end, budget):
            saved.append((start, cache.read(job.blocks, start, stop)))
            yield []
        true_keys = torch.cat([kv.keys[1] for _, kv in saved], dim=1)  # (kv_heads, tokens, head_dim)
        dense = _last_logits(runner, cache, job, [(job.prompt_tokens - 1, end)], compared)
        results = []
        for variant in job.variants:
            chosen: list[tuple[int, int]] = []
            for span in (part for whole in variant.spans for part in _parts(whole, budget)):
                kv = estimate(variant.policy, span)
                cache.write(job.blocks, span.start, kv)
                true = true_keys[:, span.start - job.exact : span.end - job.exact]
                tokens = None if span.exact else select(variant.policy, kv.keys[1], true)
                if tokens is not None:
                    chosen += [(span.start + t, span.start + t + 1) for t in tokens.tolist()]
                yield []
            gaps = _joined([*variant.gaps, *chosen, (variant.end, end)])
            reuse = None
            for lot in _pieces(gaps, budget, compared):
                reuse = _last_logits(runner, cache, job, lot, compared)
                yield []
            if dense is not None and reuse is not None:
                results.append(_result(job, variant, len(chosen), dense, reuse))
        yield results
    finally:
        for start, kv in saved:
            cache.write(job.blocks, start, kv)


def _windows(start: int, end: int, budget: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """Tokens ``[start, end)`` in windows that are copied in the time that the budget's tokens are computed in."""
    while start < end:
        stop = min(end, start + COPIED * max(1, budget()))
        yield start, stop
        start = stop


def _parts(span: LoadSpan, budget: Callable[[], int]) -> Iterator[LoadSpan]:
    """A span in such windows."""
    for start, end in _windows(span.start, span.end, budget):
        yield replace(span, offset=span.offset + start - span.start, start=start, end=end)


def _pieces(gaps: Sequence[tuple[int, int]], budget: Callable[[], int], last: int) -> Iterator[list[tuple[int, int]]]:
    """The gaps in order, in lots of as many tokens as may be computed at a time; the last ``last`` tokens together."""
    *before, (start, end) = gaps
    lot: list[tuple[int, int]] = []
    room = max(1, budget())
    for position, stop in [*before, (start, end - last)]:
        while position < stop:
            if room <= 0:
                yield lot
                lot, room = [], max(1, budget())
            cut = min(stop, position + room)
            lot.append((position, cut))
            room -= cut - position
            position = cut
    yield _joined([*lot, (end - last, end)])


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same tokens with neighbouring spans made one, in order."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _last_logits(
    runner: Any, cache: PagedCache, job: AuditJob, spans: list[tuple[int, int]], count: int
) -> torch.Tensor | None:
    """Logits ``(count, vocabulary)`` of the last ``count`` tokens after computing ``spans`` over the known KV."""
    gaps = [Gap(job.blocks, start, job.token_ids[start:end]) for start, end in spans]
    return logits_of(runner, repair(runner, cache, gaps)[-count:])


def _result(
    job: AuditJob, variant: AuditVariant, recomputed: int, dense: torch.Tensor, reuse: torch.Tensor
) -> AuditResult:
    true = torch.log_softmax(dense.double(), -1)
    guess = torch.log_softmax(reuse.double(), -1)
    kl = (true.exp() * (true - guess)).sum(-1).clamp_min(0)
    same = dense.argmax(-1) == reuse.argmax(-1)
    copied = sum(span.end - span.start for span in variant.spans if span.exact)
    loaded = sum(span.end - span.start for span in variant.spans if not span.exact) - recomputed
    return AuditResult(
        req_id=job.req_id,
        policy=variant.policy,
        edges=tuple(dict.fromkeys(span.edge for span in variant.spans if not span.exact)),
        kl=tuple(kl.tolist()),
        agreement=tuple(bool(x) for x in same.tolist()),
        prompt_tokens=job.prompt_tokens,
        exact=job.exact + copied,
        loaded=loaded,
        repaired=variant.end - job.exact - copied - loaded,
    )
