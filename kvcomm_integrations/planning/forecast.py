"""What an engine would do with one prompt after another, planned by its own planner but without the engine.

Every prompt counts as computed at once, nothing is evicted, and no edge has examples unless they are noted: every
content is repaired as deep as on first use. A real engine repairs less as it learns, and runs some prompts densely in
order to learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.planning.edge_table import EdgeTable
from kvcomm_integrations.planning.jobs import LoadResult
from kvcomm_integrations.planning.planner import Planner
from kvcomm_integrations.planning.reference_index import ReferenceIndex
from kvcomm_integrations.planning.request_state import RequestState
from kvcomm_integrations.planning.reservations import Reservations
from kvcomm_integrations.planning.resolved_prompt import resolve
from kvcomm_integrations.planning.row import Row
from kvcomm_integrations.planning.workers_state import WorkersState
from kvcomm_integrations.wire import KVCommParams, Mode, RequestReport


@dataclass(frozen=True)
class ForecastRequest:
    """A request that nobody runs."""

    request_id: str
    prompt_token_ids: Sequence[int]
    num_prompt_tokens: int
    cache_salt: str | None


class PlanForecast:
    """Plans prompts in the order they are given.

    Args:
        config: our settings; its budgets are not kept to.
        block_size: tokens per block of the exact prefix cache.
    """

    def __init__(self, config: ReuseConfig | None = None, *, block_size: int = 16) -> None:
        self.config = config or ReuseConfig()
        self.index = ReferenceIndex(budget=1 << 62, bytes_per_token=1, ranks=1)
        self.edges = EdgeTable(self.config)
        disabled = "" if self.config.enabled else "reuse is switched off"
        no_repair = None if self.config.repair else "it is switched off"
        self.planner = Planner(self.config, self.index, self.edges, WorkersState(disabled, no_repair, verified=True))
        self.reservations = Reservations(self.planner)
        self._block_size = block_size
        self._cached: set[tuple[str | None, str]] = set()
        """Blocks of the exact prefix cache: cache salt, and digest of all tokens up to the block's end."""
        self._count = 0

    def next(
        self,
        params: KVCommParams,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        answer: Sequence[int] = (),
    ) -> RequestReport:
        """What would become of this prompt; from then on it counts as seen, and so does its answer.

        Args:
            params: what the request says of itself.
            token_ids: the prompt.
            cache_salt: whose exact prefix cache it may hit.
            answer: the answer's tokens, without the one that ended it.
        """
        self._count += 1
        request = ForecastRequest(f"forecast {self._count}", token_ids, len(token_ids), cache_salt)
        prompt = resolve(request, params, self.config)
        state = RequestState(prompt, self.planner.dense(prompt), self.planner.refusal(prompt))
        state.reason = state.refusal
        state.exact = self._exact(cache_salt, token_ids)
        if not state.refusal:
            state.held = self.planner.look_up(prompt)
            if params.mode is Mode.AUTO:
                state.planned = self.planner.plan(prompt, state.held, state.exact, prompt.policy)
                state.plan, state.reason = state.planned.plan, state.planned.reason
            if state.plan is not None:
                state.result = LoadResult(0.0, 0.0)
                state.approximate = state.plan.first_approximate is not None
            self._keep(state, answer)
        border = state.plan.first_approximate if state.plan is not None else None
        self._cache(cache_salt, (*token_ids, *answer)[:border])
        if params.release and self.config.isolation is Isolation.SESSION:
            self.index.withdraw_scope(prompt.scope)
        return state.report()

    def _keep(self, state: RequestState, answer: Sequence[int]) -> None:
        """Hold what the prompt and its answer leave behind."""
        how = {"approximate": state.approximate}
        left = self.reservations.reserve_prompt(state.prompt, state.held, **how)
        answered = self.reservations.reserve_answer(state.prompt, answer, len(answer), **how)
        for harvest in filter(None, (*left.harvests, answered)):
            self.index.acknowledge(harvest.entry.ref_id, 1)

    def _exact(self, salt: str | None, ids: Sequence[int]) -> int:
        """Tokens in the prefix cache: whole blocks, and never the last token."""
        ends = range(self._block_size, len(ids), self._block_size)
        row = Row(ids, ends)
        return max((end for end in ends if (salt, row.at(end)) in self._cached), default=0)

    def _cache(self, salt: str | None, ids: Sequence[int]) -> None:
        ends = range(self._block_size, len(ids) + 1, self._block_size)
        row = Row(ids, ends)
        self._cached.update((salt, row.at(end)) for end in ends)
