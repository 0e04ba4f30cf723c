"""What reuse would do with a prompt, decided as the engine decides it, from references held in plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.planning.gate import GateDecision, decide
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.reuse.edge import Edge, Readiness
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.references import Reference
from kvcomm_integrations.wire import Segment, SegmentKind

Content = tuple[int, ...]


@dataclass
class Memory:
    """References by content and what is known of edges.

    Args:
        shared: of placeholders, by their tokens; the producer's for responses, the first consumer's otherwise.
        chain: of placeholders, the latest consumer's, for policies that want it; all consumers run dense here.
        fixed: of template text, by agent and tokens; the agent's own first run.
        examples: lessons by edge.
    """

    shared: dict[Content, Reference] = field(default_factory=dict)
    chain: dict[Content, Reference] = field(default_factory=dict)
    fixed: dict[tuple[str, Content], Reference] = field(default_factory=dict)
    examples: dict[Edge, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A segment that has a reference: its first ``tokens`` tokens could be loaded from it."""

    segment: Segment
    reference: Reference
    edge: Edge
    tokens: int


@dataclass(frozen=True)
class Load:
    """Tokens ``[start, end)`` come from token ``offset`` on of a reference."""

    piece: Piece
    start: int
    end: int

    @property
    def offset(self) -> int:
        """First token taken of the reference."""
        return self.start - self.piece.segment.start


@dataclass(frozen=True)
class Plan:
    """Tokens up to ``exact`` are the agent's own beginning, then come loads and gaps up to ``end``."""

    exact: int
    loads: tuple[Load, ...]
    gaps: tuple[tuple[int, int], ...]
    end: int


def covered(prompt: SegmentedPrompt) -> list[Segment]:
    """The prompt's segments with the template text between them."""
    segments: list[Segment] = []
    position = 0
    for segment in prompt.segments:
        if segment.start > position:
            segments.append(Segment(kind=SegmentKind.FIXED, start=position, end=segment.start))
        segments.append(segment)
        position = segment.end
    if position < len(prompt.token_ids):
        segments.append(Segment(kind=SegmentKind.FIXED, start=position, end=len(prompt.token_ids)))
    return segments


def pieces(prompt: SegmentedPrompt, agent: str, memory: Memory, policy: Policy) -> list[Piece]:
    """Everything of a prompt after its beginning that the policy has a reference for.

    That includes template text where the policy does not repair it.
    """
    shared = memory.shared | memory.chain if policy.traits.chains else memory.shared
    found = []
    for number, segment in enumerate(covered(prompt)[1:], 1):
        content = tuple(prompt.token_ids[segment.start : segment.end])
        if segment.kind is SegmentKind.PLACEHOLDER:
            reference, name = shared.get(content), segment.name
        else:
            reference, name = (None if policy.traits.repairs else memory.fixed.get((agent, content))), f"fixed:{number}"
        if reference is not None:
            tokens = min(reference.tokens, segment.end - segment.start)
            found.append(Piece(segment, reference, Edge(reference.source, agent, name), tokens))
    return found


def make_plan(prompt: SegmentedPrompt, agent: str, memory: Memory, policy: Policy, config: ReuseConfig) -> Plan | None:
    """The plan of one policy, or ``None``: it loads no shared content, or its own gate asks for a dense run.

    The prompt's last token is computed in any case; so is everything after the last loaded one.
    """
    loads = []
    for piece in pieces(prompt, agent, memory, policy):
        decision = _decide(piece, policy, memory.examples, config)
        if decision.unpredictable:
            return None
        start = piece.segment.start + (decision.repair_depth if policy.traits.repairs else 0)
        end = min(piece.segment.start + piece.tokens, len(prompt.token_ids) - 1)
        if decision.load and end > start:
            loads.append(Load(piece, start, end))
    if all(load.piece.segment.kind is SegmentKind.FIXED for load in loads):
        return None
    position = exact = covered(prompt)[0].end
    gaps = []
    for load in loads:
        if load.start > position:
            gaps.append((position, load.start))
        position = load.end
    return Plan(exact, tuple(loads), tuple(gaps), position)


def _decide(piece: Piece, policy: Policy, examples: Mapping[Edge, int], config: ReuseConfig) -> GateDecision:
    if piece.segment.kind is SegmentKind.FIXED:
        return GateDecision(True, 0, "template text")
    known = policy.ready(piece.edge, piece.reference.kv)
    # A policy that learns nothing repairs as deep as one that has seen the edge's examples.
    seen = known.examples if policy.traits.learns else examples.get(piece.edge, 0)
    tokens = piece.segment.end - piece.segment.start
    return decide(Readiness(seen, known.ready, known.leverage), config, tokens=tokens, gates=policy.traits.gates)
