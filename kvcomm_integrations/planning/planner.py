"""The one place where it is decided what a prompt may load and how deep that is repaired. Changes nothing.

A resolved prompt is looked up in the index; for each segment there is then a candidate, with the gate's word on it; the
candidates become a plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvcomm_integrations.config import Gate, ReuseConfig
from kvcomm_integrations.planning.content_keys import FIRST_DENSE, ContentKey
from kvcomm_integrations.planning.contiguous import join
from kvcomm_integrations.planning.edge_table import EdgeTable
from kvcomm_integrations.planning.entries import Entry, Held, Holdings
from kvcomm_integrations.planning.gate import GateDecision
from kvcomm_integrations.planning.plan import Candidate, Limits, Planned, make_plan
from kvcomm_integrations.planning.rates import Rates
from kvcomm_integrations.planning.reference_index import ReferenceIndex
from kvcomm_integrations.planning.resolved_prompt import Part, ResolvedPrompt, ResolvedSegment
from kvcomm_integrations.planning.workers_state import WorkersState
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.traits import PolicyTraits, policy_traits
from kvcomm_integrations.wire import Mode, SegmentKind


@dataclass(frozen=True)
class Chosen:
    """A reference for a content, the content's first token in it, and why it was chosen."""

    entry: Entry
    offset: int
    why: str


class Planner:
    """Plans prompts over what is held and known.

    Args:
        config: our settings.
        index: references.
        edges: what is known of each edge.
        workers: what the workers have reported of themselves.
    """

    def __init__(self, config: ReuseConfig, index: ReferenceIndex, edges: EdgeTable, workers: WorkersState) -> None:
        self.config = config
        self.index = index
        self.edges = edges
        self.workers = workers
        self.rates = Rates()

    def refusal(self, prompt: ResolvedPrompt) -> str:
        """Why a request runs densely whatever is held; empty if it need not."""
        if self.workers.disabled:
            return self.workers.disabled
        for policy in (prompt.params.policy, *prompt.params.audit):
            if policy is not None and policy_traits(policy) is None:
                return f"policy {policy!r} does not exist"
            if policy is not None and ":" in policy and policy not in (self.config.policy, *self.config.variants):
                return f"policy {policy!r} is not among the variants this engine was configured with"
        if prompt.traits is not None and prompt.traits.needs_truth and prompt.params.mode is Mode.AUTO:
            return (
                f"policy {prompt.policy!r} runs densely: it chooses what to recompute by the true keys of layer 1, "
                "which only an audit has; choose another policy, or compare it with kvcomm bench fidelity"
            )
        return ""

    def look_up(self, prompt: ResolvedPrompt) -> Holdings:
        """What the index holds for each segment at this moment."""
        return tuple(
            Held(*self.index.find(segment.key, prompt.ids(segment.segment)))
            if segment.part is Part.CONTENT
            else Held(self.index.lookup(segment.key) if segment.part is not Part.SHORT else None)
            for segment in prompt.segments
        )

    def plan(self, prompt: ResolvedPrompt, held: Holdings, exact: int, policy: str) -> Planned:
        """What a policy would do with a prompt.

        Args:
            prompt: the prompt.
            held: of `look_up`.
            exact: tokens that the prefix cache provides.
            policy: by name.
        """
        candidates = tuple(self._candidates(prompt, held, policy))
        for candidate in candidates:
            if candidate.unpredictable:
                return Planned(policy, candidates, reason=f"{candidate.segment.name}: {candidate.reason}")
        repairs = self.workers.repair_refusal is None
        limits = Limits(repairs, self.config.max_repair_share, self.config.max_repair_tokens)
        plan = make_plan(prompt.length, exact, candidates, limits)
        if isinstance(plan, str):
            return Planned(policy, candidates, reason=plan)
        price = self.rates.price(plan)
        if self.config.only_if_faster and price is not None and price.planned > price.dense:
            self.rates.declined()
            text = f"computing takes {price.dense:.1f} ms, loading {price.planned:.1f} ms"
            return Planned(policy, candidates, reason=text, price=price)
        return Planned(policy, candidates, plan, price=price)

    def dense(self, prompt: ResolvedPrompt) -> Planned:
        """The plan of a request that runs densely: nothing is loaded."""
        nowhere = Edge("", prompt.agent, "", prompt.tenant)
        return Planned(prompt.policy, tuple(Candidate(segment.segment, nowhere) for segment in prompt.segments))

    def audits(
        self, prompt: ResolvedPrompt, held: Holdings, exact: int, policies: Iterable[str]
    ) -> tuple[Planned, ...]:
        """The plan of each policy for a prompt that is computed densely, to be compared with it afterwards."""
        if self.workers.repair_refusal is not None:
            return ()
        planned = [self.plan(prompt, held, exact, policy) for policy in policies]
        return tuple(p for p in planned if p.plan is not None and p.plan.first_approximate is not None)

    def dense_instead(self, prompt: ResolvedPrompt, planned: Planned) -> str:
        """Why a request that could reuse runs densely all the same: to audit its edges, or to teach young ones."""
        if planned.plan is None or planned.plan.first_approximate is None:
            return ""
        draw = random.Random(prompt.request_id)  # one generator for all would tell tenants of one another
        if draw.random() < self.config.audit_rate:
            return "audit"
        learns = self.teaches(planned, prompt.traits)
        return "learning" if learns and draw.random() < self.config.learn_rate else ""

    def teaches(self, planned: Planned, traits: PolicyTraits | None) -> bool:
        """Whether an edge that a plan loads over is young, so that a dense run would teach it what it lacks."""
        if planned.plan is None or traits is None or not traits.learns:
            return False
        if traits.gates and self.config.gate is Gate.ENTROPY:
            return False
        loaded = [planned.candidates[span.candidate] for span in planned.plan.spans if not span.exact]
        if not self.loads_fixed(planned.policy):
            loaded = [candidate for candidate in loaded if candidate.segment.kind is SegmentKind.PLACEHOLDER]
        return min((candidate.examples for candidate in loaded), default=0) < self.config.mature_examples

    def loads_fixed(self, policy: str) -> bool:
        """Without the repair pass, template text is loaded from the agent's own earlier runs."""
        traits = policy_traits(policy)
        return self.workers.repair_refusal is not None or (traits is not None and not traits.repairs)

    def chains(self, policy: str) -> bool:
        """Whether references along the chain of agents are wanted."""
        traits = policy_traits(policy)
        return self.config.chain if self.config.chain is not None else traits is not None and traits.chains

    def choose(self, prompt: ResolvedPrompt, segment: ResolvedSegment, held: Held, policy: str) -> Chosen | None:
        """The reference to use for a content, if one is ready.

        The producer's for answers, otherwise the first dense consumer's, or the first one's until there is one. Where
        chains are wanted, that of the agent that consumed the content just before, but only if that one ran dense:
        errors would add up otherwise.
        """
        entry = held.ready
        if entry is None:
            return None
        produced, key = entry.reserved.produced, segment.key
        first = Chosen(entry, held.offset, "producer" if produced else "first consumer, reused itself in part")
        if not produced:
            dense = entry if entry.reserved.dense else self._ready(key._replace(consumer=FIRST_DENSE))
            if dense is not None:
                first = Chosen(dense, held.offset if dense is entry else 0, "first dense consumer")
        if not self.chains(policy) or entry.last_consumer in ("", prompt.agent):
            return first
        if not entry.last_dense:
            return Chosen(first.entry, first.offset, f"{first.why}; the previous consumer was reused itself")
        link = self._ready(key._replace(consumer=entry.last_consumer))
        if link is not None:
            return Chosen(link, 0, "chain: previous consumer ran dense")
        if first.why == "first dense consumer" and first.entry.source == entry.last_consumer:
            return Chosen(first.entry, first.offset, "chain: previous consumer ran dense")
        return Chosen(first.entry, first.offset, f"{first.why}; the previous consumer's reference is not held")

    def edge(self, prompt: ResolvedPrompt, segment: ResolvedSegment, entry: Entry) -> Edge:
        """The edge that a reference takes to a segment of a prompt."""
        return Edge(entry.source, prompt.agent, segment.name, prompt.tenant)

    def _ready(self, key: ContentKey) -> Entry | None:
        entry = self.index.lookup(key)
        return entry if entry is not None and entry.ready else None

    def _candidates(self, prompt: ResolvedPrompt, held: Holdings, policy: str) -> Sequence[Candidate]:
        """The segments of a prompt, with what may be loaded for each."""
        found = [
            self._content(prompt, segment, here, policy)
            if segment.segment.kind is SegmentKind.PLACEHOLDER
            else self._fixed(prompt, segment, here, policy)
            for segment, here in zip(prompt.segments, held, strict=True)
        ]
        if not self.config.join_runs or self.loads_fixed(policy):
            return found
        return join(
            found,
            prompt.token_ids,
            prompt.scope,
            self.index.lookup,
            lambda candidate, tokens: self._decide(candidate.edge, candidate.entry, policy, tokens).repair_depth,
        )

    def _fixed(self, prompt: ResolvedPrompt, segment: ResolvedSegment, held: Held, policy: str) -> Candidate:
        """Template text: copied exactly at the prompt's beginning, elsewhere repaired, or loaded if nothing repairs."""
        entry = held.ready
        nowhere = Edge("", prompt.agent, segment.name, prompt.tenant)
        if entry is None or (segment.part is Part.TEMPLATE and not self.loads_fixed(policy)):
            return Candidate(segment.segment, nowhere)
        edge = self.edge(prompt, segment, entry)
        if segment.part is Part.BEGINNING:
            return Candidate(segment.segment, edge, entry, reason="exact copy")
        examples = self.edges.examples(policy, edge)
        return Candidate(segment.segment, edge, entry, reason="mean of earlier runs", examples=examples)

    def _content(self, prompt: ResolvedPrompt, segment: ResolvedSegment, held: Held, policy: str) -> Candidate:
        nowhere = Edge("", prompt.agent, segment.name, prompt.tenant)
        if segment.part is Part.SHORT:
            return Candidate(segment.segment, nowhere, reason=f"shorter than {self.config.min_segment_tokens} tokens")
        chosen = self.choose(prompt, segment, held, policy)
        if chosen is None:
            return Candidate(segment.segment, nowhere, reason="not seen before")
        if not self.workers.verified:
            return Candidate(segment.segment, nowhere, reason="the rotation self-check has not run yet")
        entry, edge = chosen.entry, self.edge(prompt, segment, chosen.entry)
        decision = self._decide(edge, entry, policy, segment.tokens)
        examples = self.edges.examples(policy, edge)
        judged = self._judged_by(policy)
        known = self.edges.report(judged, edge, chosen.why)
        refused = Candidate(segment.segment, edge, reason=decision.reason, examples=examples, known=known)
        if not decision.load:
            return replace(refused, unpredictable=decision.unpredictable)
        traits = policy_traits(policy)
        depth = decision.repair_depth if traits is not None and traits.repairs else 0
        if depth and self.workers.repair_refusal is not None:
            # What cannot be repaired would end the plan. The correction alone is good enough once it is mature.
            if self.edges.examples(judged, edge) < self.config.mature_examples:
                why = f"no repair pass, and {examples} of {self.config.mature_examples} examples"
                return replace(refused, reason=why)
            depth = 0
        leverage = entry.leverage.get((policy, edge))
        confidence = None if leverage is None else max(0.0, min(1.0, 1.0 - leverage))
        return Candidate(
            segment.segment, edge, entry, depth, decision.reason, confidence, examples, chosen.offset, known
        )

    def _decide(self, edge: Edge, entry: Entry | None, policy: str, tokens: int) -> GateDecision:
        """What the gate says of a content that is part of ``tokens`` tokens to be loaded in one go."""
        assert entry is not None
        return self.edges.decide(self._judged_by(policy), edge, entry, tokens)

    def _judged_by(self, policy: str) -> str:
        """Whose examples decide: a policy that learns nothing repairs as deep as the engine's own would."""
        traits = policy_traits(policy)
        return policy if traits is not None and traits.learns else self.config.policy
