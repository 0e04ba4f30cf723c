"""What is remembered of one request while it lives. State only; the scheduler changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcomm_integrations.planning.entries import Holdings
from kvcomm_integrations.planning.jobs import LoadResult
from kvcomm_integrations.planning.plan import Plan, Planned, describe
from kvcomm_integrations.planning.reservations import Contribution
from kvcomm_integrations.planning.resolved_prompt import ResolvedPrompt
from kvcomm_integrations.wire import Mode, RequestReport


@dataclass
class RequestState:
    """One live request.

    ``plan`` is what vLLM was told; it counts as carried out only once ``result`` says so.
    """

    prompt: ResolvedPrompt
    planned: Planned
    """What its policy would do with the prompt."""
    refusal: str = ""
    """Why it runs densely whatever its contents; empty if it need not."""
    discovered: bool = False
    """It brought no parameters; its segments were found in its tokens."""
    held: Holdings = ()
    """What the index held for its segments when it was planned last."""
    plan: Plan | None = None
    exact: int = 0
    """Tokens the prefix cache provides, those of the agent's own past included."""
    carried: int = 0
    """The last of them, which come from there."""
    carried_estimate: int = 0
    """Of those, tokens whose KV was once loaded."""
    settled: int = 0
    """Of the exact ones, tokens that were computed again while nobody waited."""
    alone: bool = False
    """It does not take over the agent's own past."""
    delayed_ms: float = 0.0
    """How long it waited while a shadow request was being computed."""
    plan_ms: float = 0.0
    reason: str = ""
    """Why the request as a whole runs densely."""
    dense_instead: str | None = None
    """Why it runs densely though it could reuse; ``None`` until that has been decided."""
    admitted: bool = False
    approximate: bool = False
    """Some of its KV is an estimate, so its blocks are hidden from the exact prefix cache."""
    blocks: tuple[int, ...] = ()
    result: LoadResult | None = None
    contribution: Contribution = field(default_factory=Contribution)
    """What it will leave behind once its prompt is computed."""
    outdated: bool = False
    """Some of its KV was computed with weights that the model does not have any more."""
    preemptions: int = 0
    """Preemptions noticed so far."""
    prompt_done: bool = False
    first_wait: float | None = None
    """Monotonic time of the first step spent waiting for another request's prefill."""

    def report(self) -> RequestReport:
        """What happened so far, counting only what was materialised."""
        prompt, params = self.prompt, self.prompt.params
        done = self.plan is not None and self.result is not None and not self.result.fault
        plan = self.plan if self.plan is not None else Plan(self.exact, self.exact)
        reason, price = self.reason, self.planned.price
        if self.plan is not None and self.result is not None and self.result.fault:
            reason = f"computed densely after a fault: {self.result.fault}"
        exact = min(plan.exact, prompt.length) - self.carried + (plan.copied if done else 0)
        reused = done or self.carried
        loaded, repaired = (plan.loaded, plan.repaired) if done else (0, 0)
        return RequestReport(
            agent=params.agent,
            session=params.session,
            mode=Mode.AUTO if reused else (params.mode if params.mode is not Mode.AUTO else Mode.DENSE),
            policy=prompt.policy if reused else "",
            prompt_tokens=prompt.length,
            exact=exact,
            settled=min(self.settled, exact),
            carried=self.carried,
            carried_estimate=self.carried_estimate,
            loaded=loaded,
            repaired=repaired,
            computed=prompt.length - exact - self.carried - loaded - repaired,
            delayed_ms=round(self.delayed_ms, 3),
            plan_ms=round(self.plan_ms, 3),
            load_ms=round(self.result.load_ms, 3) if self.result else 0.0,
            repair_ms=round(self.result.repair_ms, 3) if self.result else 0.0,
            expected_ms=round(price.planned, 3) if price else 0.0,
            dense_ms=round(price.dense, 3) if price else 0.0,
            reason=reason,
            segments=describe(plan, prompt.length, self.planned.candidates, materialised=done, carried=self.carried),
        )
