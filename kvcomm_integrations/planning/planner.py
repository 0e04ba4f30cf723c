"""Deciding what one prompt may load: segments become candidates, candidates become a plan. Changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable

from kvcomm_integrations.config import Gate, ReuseConfig
from kvcomm_integrations.connector.compat import Request
from kvcomm_integrations.planning.content_keys import Contents
from kvcomm_integrations.planning.contiguous import join
from kvcomm_integrations.planning.edge_table import EdgeTable
from kvcomm_integrations.planning.gate import GateDecision
from kvcomm_integrations.planning.plan import Candidate, Limits, Plan, cover, make_plan, unpredictable
from kvcomm_integrations.planning.reference_index import EntryState, ReferenceIndex
from kvcomm_integrations.planning.request_state import RequestState, WorkersState
from kvcomm_integrations.reuse.traits import policy_traits
from kvcomm_integrations.wire import KVCommParams, Mode, Segment, SegmentKind


class Planner:
    """What may be loaded, and what the gate makes of it.

    Args:
        config: our settings.
        index: references.
        edges: what is known of each edge.
        contents: keys of a request's segments.
        workers: what the workers have reported of themselves.
    """

    def __init__(
        self, config: ReuseConfig, index: ReferenceIndex, edges: EdgeTable, contents: Contents, workers: WorkersState
    ) -> None:
        self.config = config
        self.index = index
        self.edges = edges
        self.contents = contents
        self.workers = workers

    def refusal(self, request: Request, params: KVCommParams) -> str:
        """Why a request runs densely whatever it holds; empty if it need not."""
        if self.workers.disabled:
            return self.workers.disabled
        if request.lora_request is not None:
            return "LoRA requests are served densely"
        if request.mm_features or request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "multimodal and embedding prompts are served densely"
        if request.resumable:
            return "streaming-input requests are served densely"
        if request.skip_reading_prefix_cache:
            return "the request asked to skip cached KV (prompt logprobs do)"
        for policy in (params.policy, *params.audit):
            if policy is not None and policy_traits(policy) is None:
                return f"policy {policy!r} does not exist"
            if policy is not None and ":" in policy and policy not in (self.config.policy, *self.config.variants):
                return f"policy {policy!r} is not among the variants this engine was configured with"
        traits = policy_traits(params.policy or self.config.policy)
        if traits is not None and traits.needs_truth and params.mode is Mode.AUTO:
            name = params.policy or self.config.policy
            return (
                f"policy {name!r} runs densely: it chooses what to recompute by the true keys of layer 1, which only "
                "an audit has; choose another policy, or compare it with kvcomm bench fidelity"
            )
        return ""

    def candidates(self, tracked: RequestState, policy: str) -> list[Candidate]:
        """The segments of a prompt, covering it, with what may be loaded for each under a policy."""
        beginning = self.contents.beginning(tracked)
        names = dict(self.contents.later_fixed(tracked)) if self.loads_fixed(policy) else {}
        found = [
            self._beginning_candidate(tracked, segment)
            if segment == beginning
            else self._fixed_candidate(tracked, segment, policy, names.get(segment))
            if segment.kind is SegmentKind.FIXED
            else self._candidate(tracked, segment, policy)
            for segment in cover(tracked.params.segments, tracked.prompt_tokens)
        ]
        if not self.config.join_runs or self.loads_fixed(policy):
            return found
        return join(
            found,
            tracked.request.prompt_token_ids or (),
            tracked.scope,
            self.index.lookup,
            lambda candidate, tokens: self._decision(tracked, candidate, policy, tokens).repair_depth,
        )

    def _decision(self, tracked: RequestState, candidate: Candidate, policy: str, tokens: int) -> GateDecision:
        """What the gate says of a content that is part of ``tokens`` tokens to be loaded in one go."""
        entry = candidate.entry
        assert entry is not None
        edge = self.contents.edge(tracked, entry, candidate.segment.name)
        return self.edges.decide(self._judge(policy), edge, entry, tokens)

    def _judge(self, policy: str) -> str:
        """Whose examples decide: a policy that learns nothing repairs as deep as the engine's own would."""
        traits = policy_traits(policy)
        return policy if traits is not None and traits.learns else self.config.policy

    def _candidate(self, tracked: RequestState, segment: Segment, policy: str) -> Candidate:
        tokens = segment.end - segment.start
        if tokens < self.config.min_segment_tokens:
            return Candidate(segment, reason=f"shorter than {self.config.min_segment_tokens} tokens")
        found = self.contents.reference(tracked, segment, policy)
        if found is None:
            return Candidate(segment, reason="not seen before")
        entry, offset, why = found
        if not self.workers.verified:
            return Candidate(segment, reason="the rotation self-check has not run yet")
        edge = self.contents.edge(tracked, entry, segment.name)
        traits = policy_traits(policy)
        decision = self._decision(tracked, Candidate(segment, entry), policy, tokens)
        examples = self.edges.examples(policy, edge)
        known = self.edges.report(self._judge(policy), edge, why)
        if not decision.load:
            return Candidate(
                segment, reason=decision.reason, examples=examples, edge=known, unpredictable=decision.unpredictable
            )
        depth = decision.repair_depth if traits is not None and traits.repairs else 0
        if depth and self.workers.repair_refusal is not None:
            # What cannot be repaired would end the plan. The correction alone is good enough once it is mature.
            if self.edges.examples(self._judge(policy), edge) < self.config.mature_examples:
                why = f"no repair pass, and {examples} of {self.config.mature_examples} examples"
                return Candidate(segment, reason=why, examples=examples, edge=known)
            depth = 0
        leverage = entry.leverage.get((policy, edge))
        confidence = None if leverage is None else max(0.0, min(1.0, 1.0 - leverage))
        return Candidate(segment, entry, depth, decision.reason, confidence, examples, offset, known)

    def _beginning_candidate(self, tracked: RequestState, segment: Segment) -> Candidate:
        """Template text at the prompt's beginning is copied exactly."""
        entry = self.index.lookup(self.contents.beginning_key(tracked, segment))
        ready = entry is not None and entry.state is EntryState.READY
        return Candidate(segment, entry, reason="exact copy") if ready else Candidate(segment)

    def _fixed_candidate(self, tracked: RequestState, segment: Segment, policy: str, name: str | None) -> Candidate:
        """Template text elsewhere is repaired, or loaded where nothing repairs: then it has a name."""
        entry = self.index.lookup(self.contents.fixed_key(tracked, segment)) if name is not None else None
        if name is None or entry is None or entry.state is not EntryState.READY:
            return Candidate(segment)
        examples = self.edges.examples(policy, self.contents.edge(tracked, entry, name))
        return Candidate(segment, entry, reason="mean of earlier runs", examples=examples)

    def loads_fixed(self, policy: str) -> bool:
        """Without the repair pass, template text is loaded from the agent's own earlier runs."""
        traits = policy_traits(policy)
        return self.workers.repair_refusal is not None or (traits is not None and not traits.repairs)

    def dense_instead(self, tracked: RequestState, plan: Plan) -> str:
        """Why a request that could reuse runs densely all the same: to audit its edges, or to teach young ones."""
        traits = policy_traits(tracked.policy)
        if plan.first_approximate is None:
            return ""
        draw = random.Random(tracked.request.request_id)  # one generator for all would tell tenants of one another
        if draw.random() < self.config.audit_rate:
            return "audit"
        if traits is None or not traits.learns or (traits.gates and self.config.gate is Gate.ENTROPY):
            return ""
        loaded = [tracked.candidates[span.candidate] for span in plan.spans if not span.exact]
        placeholders = [candidate for candidate in loaded if candidate.segment.kind is SegmentKind.PLACEHOLDER]
        examples = [candidate.examples for candidate in (loaded if self.loads_fixed(tracked.policy) else placeholders)]
        if min(examples, default=0) < self.config.mature_examples and draw.random() < self.config.learn_rate:
            return "learning"
        return ""

    def audits(
        self, tracked: RequestState, exact: int, policies: Iterable[str]
    ) -> list[tuple[str, Plan, list[Candidate]]]:
        """The plan of each policy for a prompt that is computed densely, to be compared with it afterwards."""
        audits: list[tuple[str, Plan, list[Candidate]]] = []
        if self.workers.repair_refusal is not None:
            return audits
        for policy in policies:
            candidates = self.candidates(tracked, policy)
            if unpredictable(candidates):
                continue
            plan = make_plan(tracked.prompt_tokens, exact, candidates, self.limits())
            if isinstance(plan, Plan) and plan.first_approximate is not None:
                audits.append((policy, plan, candidates))
        return audits

    def limits(self) -> Limits:
        """Bounds of the repair pass, as far as there is one."""
        return Limits(self.workers.repair_refusal is None, self.config.max_repair_share, self.config.max_repair_tokens)
