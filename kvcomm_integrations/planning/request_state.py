"""What the scheduler half remembers of the workers, and of one request while it lives. State only."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from kvcomm_integrations.connector.block_hashes import HashGuard
from kvcomm_integrations.connector.compat import Request
from kvcomm_integrations.connector.metadata import LoadResult
from kvcomm_integrations.planning.contiguous import Row
from kvcomm_integrations.planning.plan import Candidate, Plan, describe
from kvcomm_integrations.planning.reference_index import Entry
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.wire import KVCommParams, Mode, RequestReport


@dataclass
class WorkersState:
    """What the workers have reported of themselves."""

    disabled: str
    """Why nothing is reused at all; empty if it is."""
    repair_refusal: str | None
    """Why there is no repair pass; ``None`` where it runs."""
    verified: bool = False
    """The rotation has been checked on real keys."""
    weights: int = 0
    """How often the model's weights have been replaced since the start."""


@dataclass(frozen=True)
class TrainingExample:
    """An edge could learn from tokens ``start`` on of the prompt, which are ``offset`` on of the reference."""

    policy: str
    edge: Edge
    ref_id: int
    offset: int
    start: int
    tokens: int


@dataclass
class RequestState:
    """One live request.

    ``plan`` is what was promised to vLLM; it counts as carried out only once ``result`` says so.
    """

    request: Request
    params: KVCommParams
    scope: str
    policy: str
    guard: HashGuard
    discovered: bool = False
    """It brought no parameters; its segments were found in its tokens."""
    refusal: str = ""
    """Why this request runs densely whatever its contents; empty if it need not."""
    candidates: list[Candidate] = field(default_factory=list)
    plan: Plan | None = None
    exact: int = 0
    plan_ms: float = 0.0
    reason: str = ""
    admitted: bool = False
    blocks: tuple[int, ...] = ()
    result: LoadResult | None = None
    harvests: list[tuple[Entry, int, int]] = field(default_factory=list)
    """Promised references with their spans, to be copied in the step after the prompt is complete: harvesting then
    does not delay the first token."""
    audits: list[tuple[str, Plan, list[Candidate]]] = field(default_factory=list)
    """Policies with the plans they would have made, to be compared once the request is over."""
    dense_instead: str | None = None
    """Why it runs densely though it could reuse; ``None`` until that has been decided."""
    observes: list[TrainingExample] = field(default_factory=list)
    """What can be learned once the prompt is complete."""
    outdated: bool = False
    """Some of its KV was computed with weights that the model does not have any more."""
    preemptions: int = 0
    """Preemptions noticed so far."""
    prompt_done: bool = False
    first_wait: float | None = None
    """Monotonic time of the first step spent waiting for another request's prefill."""

    @cached_property
    def row(self) -> Row:
        """Digests of the prompt at the edges of its segments."""
        return Row.of_prompt(self.request.prompt_token_ids or (), self.params.segments)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.request.num_prompt_tokens)

    def report(self) -> RequestReport:
        """What happened so far, counting only what was materialised."""
        done = self.plan is not None and self.result is not None and not self.result.fault
        plan = self.plan if self.plan is not None else Plan(self.exact, self.exact)
        segments = describe(plan, self.prompt_tokens, self.candidates, materialised=done)
        reason = self.reason
        if self.plan is not None and self.result is not None and self.result.fault:
            reason = f"computed densely after a fault: {self.result.fault}"
        exact = min(plan.exact, self.prompt_tokens) + (plan.copied if done else 0)
        loaded = plan.loaded if done else 0
        repaired = plan.repaired if done else 0
        return RequestReport(
            agent=self.params.agent,
            session=self.params.session,
            mode=Mode.AUTO if done else (self.params.mode if self.params.mode is not Mode.AUTO else Mode.DENSE),
            policy=self.policy if done else "",
            prompt_tokens=self.prompt_tokens,
            exact=exact,
            loaded=loaded,
            repaired=repaired,
            computed=self.prompt_tokens - exact - loaded - repaired,
            plan_ms=round(self.plan_ms, 3),
            load_ms=round(self.result.load_ms, 3) if self.result else 0.0,
            repair_ms=round(self.result.repair_ms, 3) if self.result else 0.0,
            reason=reason,
            segments=segments,
        )
