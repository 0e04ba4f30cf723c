"""Shadow requests: requests of our own that compute again, exactly, what was estimated, while nobody asks anything.

One begins once nothing has been asked for a while. It is computed in slices of a bounded time, and ends at once when a
user's request arrives; what it has computed by then stays in the prefix cache. What is to be learned from it is ordered
afterwards, one job a step.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.metadata import StepMetadata
from kvcomm_integrations.planning.jobs import AuditJob, HarvestJob, ObserveJob
from kvcomm_integrations.planning.shadow_queue import ShadowQueue, ShadowTask
from kvcomm_integrations.reuse.traits import policy_traits
from kvcomm_integrations.wire import Mode

logger = logging.getLogger(__name__)

PREFIX = "kvcomm-shadow-"
"""Names of shadow requests begin so; the rest is drawn, so that no user's request has the same."""
LEAST_TOKENS, MOST_TOKENS = 8, 1 << 14
"""Tokens of a slice. Where a step of one token takes longer than the bound already, less than the least would only take
more of such steps."""
LEARNED = 16
"""Tokens that are learned from, or harvested, in the time in which one is computed; fewer than any machine's so far."""
MARGIN = 0.8
"""Share of the bound that a slice is planned to take."""


class CoreAccess(Protocol):
    """What shadow requests need of the engine; see `workarounds.EngineCoreAccess`."""

    @property
    def steps_ahead(self) -> int:
        """Steps that may be under way at a time."""

    @property
    def open(self) -> bool:
        """The engine takes requests."""

    def submit(self, request_id: str, token_ids: list[int], salt: str | None, params: dict[str, object]) -> None:
        """Have a prompt computed; from any thread."""

    def end(self, request_id: str) -> None:
        """End a request at once."""

    def limit_steps(self, tokens: int | None) -> None:
        """Let a step compute at most so many tokens; ``None``: as many as it would."""


@dataclass
class FollowUp:
    """What is still to be done with the blocks of a shadow request that has been computed, one job a step."""

    req_id: str
    task: ShadowTask
    audits: deque[AuditJob] = field(default_factory=deque)
    observes: deque[ObserveJob] = field(default_factory=deque)
    harvests: deque[HarvestJob] = field(default_factory=deque)
    auditing: str = ""
    """The audited request, while its audit has been begun and not reported."""
    learning: bool = False
    """Something has been learned: a second time it must not be."""

    def next_part(self, most: int) -> ObserveJob:
        """The next example, or as much of it as ``most`` tokens if its policy can learn part by part."""
        self.learning = True
        job = self.observes.popleft()
        traits = policy_traits(job.policy)
        if job.tokens <= most or traits is None or not traits.parts:
            return job
        later = replace(job, offset=job.offset + most, start=job.start + most, first=job.first + most)
        self.observes.appendleft(replace(later, tokens=job.tokens - most))
        return replace(job, tokens=most)


class Shadows:
    """The shadow requests of one engine; all calls but the timer's come from the thread that schedules.

    Args:
        config: our settings.
        withdraw: gives up a reference that was reserved and will not be harvested.
        clock: monotonic time, seconds.
    """

    def __init__(
        self, config: ReuseConfig, withdraw: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.queue = ShadowQueue(config.idle_budget)
        self.core: CoreAccess | None = None
        self._config = config
        self._clock = clock
        self._withdraw = withdraw
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._resting = False
        """Nothing of a user's waits or runs."""
        self._name = ""
        self._task: ShadowTask | None = None
        self._arrived = False
        self._dropped = False
        """What has been begun is not to be tried again."""
        self._tokens = float(LEAST_TOKENS)
        self._step_began: float | None = None
        """When the latest step of ours began; ``None`` outside of them."""
        self._follow_up: FollowUp | None = None
        self._abandon: list[str] = []

    @property
    def wanted(self) -> bool:
        """Whether requests are to be computed again at all."""
        return self._config.enabled and self._config.idle_budget > 0 and self.core is not None

    @property
    def busy(self) -> bool:
        """A shadow request is being computed, or what follows from one is being done."""
        return self._arrived or self._follow_up is not None

    def cannot_run(self) -> None:
        """Say once that this engine has none, if they are wanted."""
        if self._config.enabled and self._config.idle_budget:
            logger.warning(
                "No shadow requests: they need one engine process without data or pipeline parallelism, and chunked "
                "prefill. To learn all the same, set learn_rate and audit_rate; idle_budget=0 silences this."
            )

    def task_of(self, request_id: str) -> ShadowTask | None:
        """The task that a request of ours computes; ``None`` for users' requests."""
        return self._task if request_id == self._name else None

    # ---- when ------------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Nothing of a user's waits or runs any more."""
        with self._lock:
            self._resting = True
            self._begin_in(self._config.idle_after_ms / 1e3)

    def give_way(self) -> None:
        """A user's request has arrived: what runs ends, and is tried again another time."""
        with self._lock:
            self._resting = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            follow_up = self._follow_up
            if follow_up is not None:
                task = self._stop(follow_up)
                if not follow_up.learning:
                    self.queue.add(task)
            if self._arrived and self.core is not None:
                self.core.end(self._name)

    def arrives(self) -> None:
        """Our request has reached the scheduler; if a user's has, too, it ends at once."""
        assert self.core is not None
        with self._lock:
            self._arrived = True
            if self._resting and not self._dropped:
                self.core.limit_steps(self.slice_tokens)
            else:
                self.core.end(self._name)

    def ended(self, follow_up: FollowUp | None) -> None:
        """Our request is over.

        Args:
            follow_up: what is to be done now that it has been computed; ``None`` if it was not.
        """
        with self._lock:
            task, self._task = self._task, None
            self._name, self._arrived = "", False
            if self.core is not None:
                self.core.limit_steps(None)
            if follow_up is None and task is not None and not self._dropped:
                self.queue.add(task)
            self._follow_up = follow_up
            if follow_up is None and self._resting:
                self._begin_in(self._config.idle_after_ms / 1e3)

    def forget_session(self, tenant: str, session: str) -> None:
        """Nothing of a session is computed any more, nor kept of what is being computed."""
        with self._lock:
            self.queue.forget_session(tenant, session)
            self._drop(lambda task: (task.prompt.params.tenant, task.prompt.params.session) == (tenant, session))

    def clear(self) -> None:
        """Give up everything, as when the model's weights have changed."""
        with self._lock:
            self.queue.clear()
            self._drop(lambda task: True)

    def _drop(self, meant: Callable[[ShadowTask], bool]) -> None:
        """Give up what has been begun, if it is meant."""
        if self._follow_up is not None and meant(self._follow_up.task):
            self._stop(self._follow_up)
        if self._task is not None and meant(self._task):
            self._dropped = True
            if self._arrived and self.core is not None:
                self.core.end(self._name)

    def _stop(self, follow_up: FollowUp) -> ShadowTask:
        """Nothing further is done with the blocks of a request of ours; returns its task."""
        self._follow_up = None
        self._abandon.append(follow_up.req_id)
        for harvest in follow_up.harvests:
            self._withdraw(harvest.ref_id)
        return follow_up.task

    def _begin_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.wanted and self._task is None and len(self.queue):
            self._timer = threading.Timer(seconds, self._begin)
            self._timer.daemon = True
            self._timer.start()

    def _begin(self) -> None:
        with self._lock:
            if self._task is not None or self._follow_up is not None or not self._resting or self.core is None:
                return
            task = self.queue.take() if self.core.open else None
            if task is None:
                return
            params = task.prompt.params.model_copy(
                update={"mode": Mode.OBSERVE, "audit": (), "response_name": None, "release": False}
            )
            self._task, self._name, self._dropped = task, f"{PREFIX}{uuid.uuid4().hex}", False
            self.core.submit(self._name, task.token_ids, task.salt, params.to_transfer_params())

    # ---- how much --------------------------------------------------------------------------------------------------

    @property
    def slice_ms(self) -> float:
        """Milliseconds that a step of ours may take."""
        return MARGIN * self._config.idle_slice_ms / (1 if self.core is None else self.core.steps_ahead)

    @property
    def slice_tokens(self) -> int:
        """Tokens that are expected to take as long as that, by how long our own steps have taken."""
        return int(self._tokens)

    def _time_step(self) -> None:
        """A step begins; if the one before it was ours, this one is made as much longer or shorter as that demands."""
        now, before, self._step_began = self._clock(), self._step_began, None
        if self._arrived:
            self._step_began = now
            if before is not None:
                fitting = self.slice_ms / max(1e3 * (now - before), 1e-3)
                self._tokens = max(LEAST_TOKENS, min(MOST_TOKENS, self._tokens * min(1.25, max(0.5, fitting))))

    # ---- orders ----------------------------------------------------------------------------------------------------

    def order(self, meta: StepMetadata) -> None:
        """Add to a step's orders: the next job of a shadow request's, or that what was begun is undone."""
        with self._lock:
            self._time_step()
            if self._arrived and self.core is not None and self._resting:
                self.core.limit_steps(self.slice_tokens)
            if self._abandon:
                meta.abandon_audit = True
                meta.releases.extend(self._abandon)
                self._abandon.clear()
            follow_up = self._follow_up
            if follow_up is None:
                return
            meta.audit_tokens = self.slice_tokens
            if follow_up.auditing:
                return
            if follow_up.audits:
                meta.sliced_audit = follow_up.audits.popleft()
                follow_up.auditing = meta.sliced_audit.req_id
            elif follow_up.observes:
                meta.observes.append(follow_up.next_part(LEARNED * self.slice_tokens))
            elif follow_up.harvests:
                job = follow_up.harvests.popleft()
                if job.end - job.start <= LEARNED * self.slice_tokens:
                    meta.harvests.append(job)
                else:  # it would take too long, and users' requests will do it
                    self._withdraw(job.ref_id)
            else:
                meta.releases.append(follow_up.req_id)
                self._follow_up = None
                if self._resting:
                    self._begin_in(0.0)

    def audited(self, req_id: str) -> None:
        """The workers have finished the audit of a request, or could not; they may say so more than once."""
        if self._follow_up is not None and self._follow_up.auditing == req_id:
            self._follow_up.auditing = ""
