"""Random lives of many requests, with a stand-in for vLLM's scheduler and a worker that checks every order it gets.

The stand-in keeps, for every token of every request, whether its KV is exact or an estimate, so that it knows what may
be in the exact prefix cache, what a reference really holds, and what a report may claim. Of every block that holds an
estimate, or was computed over one, it knows the lineage that has made it: nobody else may find it (invariants 2 and 5).
"""

from __future__ import annotations

import logging
import pickle
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from kvcomm_integrations.config import Isolation
from kvcomm_integrations.connector.metadata import StepMetadata, WorkerReport
from kvcomm_integrations.planning.entries import EntryState
from kvcomm_integrations.planning.jobs import AuditResult, LoadJob, LoadResult, LoadSpan
from kvcomm_integrations.planning.reference_index import ACKNOWLEDGE_STEPS
from kvcomm_integrations.wire import TREATMENTS, WIRE_KEY, RequestReport
from tests.connector.standins import BLOCK, BYTES_PER_TOKEN, exact_hashes, make_half, make_request, segment

SCENARIOS = 300
ADAPTER = LoRARequest("adapter", 1, "adapter")
Names = tuple[str, str, str]
"""Salt, tenant and session."""
Lineage = tuple[str, str, str, str]
"""Tenant, session, agent and policy."""
Parts = list[tuple[str, list[int]]]
"""Segments of a prompt by name; template text has none."""
TALKS = 6
"""Conversations that may be gone on with, of those that came last."""
LONGEST = 350
"""Tokens of a conversation that is still gone on with."""
NAMES: list[Names] = [
    ("", "t", "s"),
    ("", "t", "r"),
    ("", "t|s", "x"),
    ("", "t", "s|x"),
    ("salt", "t", "s"),
    ("", "u", "s"),
]


@dataclass
class Live:
    """A request and what is known of its KV."""

    request: Request
    names: Names
    stop_after: int
    blocks: tuple[int, ...] = ()
    exact: list[bool] = field(default_factory=list)
    """Per computed token, whether its KV is exact."""
    fresh_hit: bool = False
    """Its exact hit holds a block that is written in this very step."""
    loaded: int = 0
    """Tokens really loaded since it was admitted last."""
    may_harvest: bool = False
    lora: bool = False
    unreported: bool = False
    """The worker's word on its load was lost."""
    hidden: bool = False
    """It was admitted with a plan that holds estimates."""
    weights: int = 0
    """Changes of weights before it was admitted."""
    lineage: Lineage | None = None
    era: int = 0
    """How often its lineage had been forgotten when it arrived."""
    mode: str = ""
    release: bool = False
    agent: int = 0
    parts: Parts = field(default_factory=list)
    carried: int = 0
    """Tokens of its prompt that it has found of its lineage's past, since it was admitted last."""
    hit: int = 0
    """Tokens that it has found in the prefix cache, likewise."""

    plain: list[bytes] = field(default_factory=list)

    @property
    def plain_hashes(self) -> list[bytes]:
        """The chain that a plain request with its tokens would have."""
        if len(self.plain) != self.request.num_tokens // BLOCK:
            self.plain = exact_hashes(self.request)
        return self.plain

    @property
    def ids(self) -> list[int]:
        return list(self.request.all_token_ids)


@dataclass
class Cached:
    """A block in the prefix cache."""

    prefix: tuple[int, ...]
    salt: str
    lora: bool
    flags: list[bool]
    """Per token of the block, whether its KV is exact."""
    owner: str
    weights: int
    lineage: Lineage | None
    era: int
    hidden: bool
    """It is filed under a hash that only its lineage can compute."""
    written: bool = False


@dataclass
class Held:
    """A reference in the worker's store."""

    ids: list[int]
    names: Names
    agent: str
    fixed: bool
    exact: bool


@dataclass
class Talk:
    """A conversation, up to an answer of its agent."""

    names: Names
    agent: int
    parts: Parts
    hidden: bool = False
    """Something of it was an estimate."""


class World:
    """Everything around the scheduler half."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.numbers = count()
        self.random = rnd = Random(seed)
        self.isolation = rnd.choice([Isolation.SESSION, Isolation.SESSION, Isolation.TENANT, Isolation.GLOBAL])
        self.ranks = rnd.choice([1, 1, 2])
        self.budget = rnd.choice([60, 200, 1000, 10_000]) * BYTES_PER_TOKEN
        self.half = make_half(
            ranks=self.ranks,
            repair=rnd.random() < 0.75,
            isolation=self.isolation,
            store_bytes=self.budget,
            policy=rnd.choice(["ridge", "ridge", "aligned", "full_share"]),
            audit_rate=rnd.choice([0.0, 0.3]),
            learn_rate=rnd.choice([0.0, 0.5]),
            max_repair_tokens=rnd.choice([4096, 60]),
            tenant_share=rnd.choice([1.0, 1.0, 0.5]),
            chain=rnd.choice([None, None, True]),
            session_ttl_s=rnd.choice([1e9, 1e9, 15.0]),
            max_faults=rnd.choice([0, 2, 5]),
            fault_pause_s=10.0,
        )
        self.half.index.clock = self.half.breaker._clock = lambda: float(self.now)
        self.injected: Counter[str] = Counter()
        """What has gone wrong on purpose."""
        self.audits = 0
        self.talks: list[Talk] = []
        self.eras: Counter[Lineage] = Counter()
        """How often each lineage has been forgotten."""
        self.statistics: Counter[str] = Counter()
        self.half.cached_blocks = self.cached
        self.half.block_ids = lambda req_id: self.lives[req_id].blocks
        self.trouble = rnd.choice([0.0, 0.05, 0.2])
        """Chance of preemption, failed allocation, failed harvest, fault, lost answer, abort."""
        self.lag = rnd.choice([0, 1, 3])
        self.lives: dict[str, Live] = {}
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []
        self.delayed: dict[str, Live] = {}
        self.owner: dict[int, Live] = {}
        self.next_block = 1
        self.cache: dict[bytes, Cached] = {}
        self.store: dict[int, Held] = {}
        self.acknowledged: set[int] = set()
        self.reports: deque[tuple[int, WorkerReport]] = deque()
        self.now = 0
        self.weights = 0
        """How often the model's weights have been replaced."""
        self.loads = 0
        self.contents = [[rnd.randrange(900) for _ in range(rnd.randrange(2, 70))] for _ in range(5)]
        self.systems = [[1000 * (a + 1) + i for i in range(rnd.randrange(2, 45))] for a in range(3)]
        self.answers: dict[Names, list[list[int]]] = {}

    # ---- requests ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        rnd = self.random
        talk = self.talk()
        names, agent, parts = talk.names, talk.agent, list(talk.parts)
        salt, tenant, session = names
        for number in range(rnd.randrange(1, 4)):
            said = self.answers.get(names, [])
            content = list(rnd.choice(said) if said and rnd.random() < 0.5 else rnd.choice(self.contents))
            if rnd.random() < 0.4:
                content = content[rnd.randrange(3) : len(content) - rnd.randrange(3)] or content
            parts += [(f"p{number}", content), ("", [3000 + number] * rnd.randrange(9))]
        if rnd.random() < 0.8:
            parts.append(("", [4000 + i for i in range(rnd.randrange(1, 30))]))
        prompt, segments = [], []
        for name, ids in parts:
            if name:
                segments.append(segment("placeholder", len(prompt), len(prompt) + len(ids), name))
            prompt += ids
        params: Any = {
            "agent": f"a{agent}",
            "tenant": tenant,
            "session": session,
            "segments": segments,
            "mode": rnd.choices(["auto", "observe", "dense"], [8, 1, 1])[0],
        }
        if rnd.random() < 0.05:
            params["release"] = True
        if rnd.random() < 0.05:
            params["policy"] = "aligned"
        lora = rnd.random() < 0.05
        if rnd.random() < 0.7:
            params["response_name"] = f"agent:a{agent}:response"
        if params["mode"] == "observe" and rnd.random() < 0.5:
            params["audit"] = ["ridge", "aligned"]
        if rnd.random() < 0.1:
            params = rnd.choice([None, None, {"version": 7}, [], {**params, "policy": "unknown"}])
        live = Live(
            make_request(
                prompt,
                params,
                salt=salt or None,
                lora=ADAPTER if lora else None,
                request_id=f"{self.seed}-{next(self.numbers)}",
            ),
            names,
            rnd.choice([1, rnd.randrange(1, 10), rnd.randrange(9, 20)]),
            lora=lora,
            agent=agent,
            parts=parts,
        )
        if isinstance(params, dict) and "mode" in params:
            policy = params.get("policy", self.half.config.policy)
            live.mode, live.release = params["mode"], "release" in params
            live.lineage = (tenant, session, f"a{agent}", policy)
            live.era = self.eras[live.lineage]
        live.may_harvest = not lora and isinstance(params, dict) and "mode" in params and params["mode"] != "dense"
        self.lives[live.request.request_id] = live
        self.half.on_new_request(live.request)
        self.waiting.append(live)

    def talk(self) -> Talk:
        """What a prompt begins with: a conversation as it was, forked or edited, or a new one."""
        rnd = self.random
        if not self.talks or rnd.random() < 0.4:
            agent = rnd.randrange(3)
            return Talk(rnd.choice(NAMES[: rnd.choice([1, len(NAMES)])]), agent, [("", self.systems[agent])])
        hidden = [talk for talk in self.talks if talk.hidden]
        talk, change = rnd.choice(hidden if hidden and rnd.random() < 0.8 else self.talks), rnd.random()
        if change < 0.1:  # back in time
            return Talk(talk.names, talk.agent, talk.parts[: rnd.randrange(1, len(talk.parts) + 1)])
        if change < 0.2:  # another history
            parts = [(name, list(ids)) for name, ids in talk.parts]
            edited = rnd.choice([ids for _, ids in parts if ids])
            edited[rnd.randrange(len(edited))] += 1
            return Talk(talk.names, talk.agent, parts)
        if change < 0.3:  # the same words in another session or to another agent
            return Talk(rnd.choice(NAMES), rnd.choice([talk.agent, rnd.randrange(3)]), talk.parts)
        return talk

    def cached(self, hashes: Sequence[Any]) -> int:
        """As vLLM's prefix cache answers it."""
        held = (self.cache.get(bytes(value)) for value in hashes)
        missing = (n for n, found in enumerate(held) if found is None or found.weights != self.weights)
        return next(missing, len(hashes))

    def forget(self, *names: str) -> None:
        """Lineages that begin with these names were forgotten; with none, all."""
        for lineage in self.eras:
            self.eras[lineage] += lineage[: len(names)] == names

    def free(self, live: Live) -> None:
        for block in live.blocks:
            del self.owner[block]
        live.blocks = ()

    def hit(self, live: Live) -> int:
        """Tokens of the longest cached beginning; checks that nobody gets another's estimates."""
        count, live.fresh_hit, live.exact, live.carried = 0, False, [], 0
        request = live.request
        for number, value in enumerate(request.block_hashes):
            end = (number + 1) * BLOCK
            cached = self.cache.get(bytes(value))
            if cached is None or end > request.num_tokens - 1 or cached.weights != self.weights:
                break  # whoever replaces weights empties the prefix cache
            assert cached.prefix == tuple(request.all_token_ids[:end])
            assert (cached.salt, cached.lora) == (live.names[0], live.lora)
            assert all(cached.flags) or cached.hidden, "an estimate was found in the exact prefix cache"
            assert not cached.hidden or cached.lineage == live.lineage is not None, "another's estimate was found"
            assert cached.hidden or not live.carried, "what is exact has estimates before it"
            live.carried += BLOCK * cached.hidden
            live.fresh_hit |= not cached.written
            live.exact += cached.flags
            count = end
        live.hit = count
        return count

    def file(self, live: Live, upto: int) -> None:
        """vLLM files full blocks when it allocates them, before they are computed."""
        exact = live.plain_hashes
        for number in range(upto // BLOCK):
            end = (number + 1) * BLOCK
            value = bytes(live.request.block_hashes[number])
            flags = live.exact[end - BLOCK : end]
            written = end <= live.request.num_computed_tokens  # loads and repair come before, or are one batch
            found = self.cache.get(value)
            if found is None or found.weights != live.weights:
                self.cache[value] = Cached(
                    tuple(live.request.all_token_ids[:end]),
                    live.names[0],
                    live.lora,
                    flags,
                    live.request.request_id,
                    live.weights,
                    live.lineage,
                    live.era,
                    value != exact[number],
                    written,
                )
            else:
                assert found.prefix == tuple(live.request.all_token_ids[:end])
                assert found.flags == flags or (found.hidden and found.lineage == live.lineage)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self, *, calm: bool = False) -> None:
        rnd, half = self.random, self.half
        self.now += 1
        while self.reports and (calm or self.reports[0][0] <= self.now):
            report = self.reports.popleft()[1]
            self.acknowledged |= {ref for ref, ranks in report.stored.items() if ranks == self.ranks}
            weights = half.workers.weights
            half.update_connector_output(report)
            for req_id, result in report.loads.items():
                lineage = self.lives[req_id].lineage if req_id in self.lives else None
                if result.fault and lineage is not None:
                    self.forget(*lineage)
            if half.workers.weights != weights:
                self.forget()
        trouble = 0.0 if calm else self.trouble
        scheduled: dict[str, int] = {}
        for live in list(self.running):
            if rnd.random() < trouble / 2:
                self.injected["preemption"] += 1
                self.preempt(live)
                continue
            self.schedule(live, scheduled)
        planned: dict[str, int] = {}
        for live in list(self.waiting):
            if len(self.running) >= 5 or (not calm and rnd.random() < 0.2):
                break
            hit, off = self.hit(live), half.breaker.refusal()
            external = half.get_num_new_matched_tokens(live.request, hit)
            assert not external or not (off or live.lora)
            if external is None:
                continue
            assert external >= 0 and (external == 0 or hit + external < live.request.num_prompt_tokens)
            self.check_past(live, hit)
            self.check_hidden(live, hit, external)
            if rnd.random() < trouble:
                self.injected["failed allocation"] += 1
                if rnd.random() < 0.5:
                    continue  # no blocks
                half.get_num_new_matched_tokens(live.request, hit)  # asked once more, then no blocks
                break
            if external and rnd.random() < trouble / 4:
                external = 0
            self.waiting.remove(live)
            self.admit(live, hit, external, scheduled)
            if external:
                planned[live.request.request_id] = hit + external
        meta = half.build_connector_meta(SimpleNamespace(num_scheduled_tokens=scheduled))  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(meta)) == meta  # every rank gets the same orders
        for req_id, tokens in scheduled.items():
            self.lives[req_id].request.num_computed_tokens += tokens
        assert {job.req_id for job in meta.loads} == set(planned)
        assert half.index.used <= self.budget
        for tenant in {entry.reserved.tenant for entry in half.index.entries()}:
            assert half.index.tenant_bytes(tenant) <= half.index.quota
        for live in self.lives.values():
            tracked = self.half._live.get(live.request.request_id)
            waits = live in self.waiting and tracked is not None and tracked.guard.inherited
            assert live.hidden or waits or live.request.block_hashes == live.plain_hashes
        self.work(meta, planned, trouble)
        self.sample(scheduled)
        if rnd.random() < trouble:
            self.abort()
        if rnd.random() < trouble / 5:
            self.injected["reset"] += 1
            half.reset_cache()
            self.forget()
        if rnd.random() < trouble / 8:
            self.injected["new weights"] += 1
            self.weights += 1
            self.store.clear()
        if rnd.random() < trouble / 5:
            _, tenant, session = rnd.choice(NAMES)
            half.release_session(tenant, session)
            self.forget(tenant, session)
        if rnd.random() < 0.1:
            for value in rnd.sample(list(self.cache), len(self.cache) // 2):
                del self.cache[value]

    def schedule(self, live: Live, scheduled: dict[str, int]) -> None:
        request = live.request
        tokens = request.num_tokens - request.num_computed_tokens
        if tokens > 1:
            tokens = min(tokens, self.random.choice([8, 50, 400]))
        live.exact += [all(live.exact)] * tokens
        scheduled[request.request_id] = tokens
        self.file(live, request.num_computed_tokens + tokens)

    def preempt(self, live: Live) -> None:
        self.free(live)
        live.request.num_preemptions += 1
        live.request.num_computed_tokens = 0
        live.request.status = RequestStatus.PREEMPTED
        live.loaded, live.exact = 0, []
        self.running.remove(live)
        self.waiting.appendleft(live)

    def check_hidden(self, live: Live, hit: int, external: int) -> None:
        tracked = self.half._live.get(live.request.request_id)
        hashes, exact = [bytes(h) for h in live.request.block_hashes], live.plain_hashes
        plan = tracked.plan if tracked is not None else None
        border = None
        if external:
            assert plan is not None and (plan.exact, plan.external) == (hit, external)
            if plan.first_approximate is not None:
                border = plan.first_approximate // BLOCK
        if live.carried:
            border = (hit - live.carried) // BLOCK
        if border is not None:
            assert hashes[:border] == exact[:border]
            assert not set(hashes[border:]) & set(exact)
        elif not live.request.num_preemptions:
            assert hashes == exact  # whoever plans nothing approximate takes part in the exact prefix cache

    def check_past(self, live: Live, hit: int) -> None:
        """What was found of the agent's own past may be used by this request."""
        if not live.carried:
            return
        tracked = self.half._live[live.request.request_id]
        assert live.mode == "auto" and not live.lora
        if not live.request.num_preemptions:
            assert not tracked.refusal and not tracked.dense_instead, "an audit, or a lesson, over estimates"
        assert live.lineage is not None
        for value in live.request.block_hashes[(hit - live.carried) // BLOCK : hit // BLOCK]:
            assert self.cache[bytes(value)].era == self.eras[live.lineage], "what was forgotten has been found"

    def admit(self, live: Live, hit: int, external: int, scheduled: dict[str, int]) -> None:
        request = live.request
        need = -(-(request.num_prompt_tokens + 50) // BLOCK)
        live.blocks = tuple(range(self.next_block, self.next_block + need))
        self.next_block += need
        self.owner.update(dict.fromkeys(live.blocks, live))
        self.half.update_state_after_alloc(request, live.blocks, external)
        tracked = self.half._live.get(request.request_id)
        plan = tracked.plan if tracked is not None else None
        if external:
            assert plan is not None
            live.hidden |= plan.first_approximate is not None
            self.statistics["loads after a past"] += live.carried > 0
            border = plan.end if plan.first_approximate is None else plan.first_approximate
            live.exact += [all(live.exact)] * (border - hit) + [False] * (plan.end - border)
        else:
            assert plan is None
        live.hidden |= live.carried > 0
        self.statistics["carried"] += live.carried
        self.statistics["requests with a past"] += live.carried > 0
        live.weights = self.weights
        request.num_computed_tokens = hit + external
        request.status = RequestStatus.RUNNING
        self.running.append(live)
        self.schedule(live, scheduled)

    # ---- the worker -------------------------------------------------------------------------------------------------

    def work(self, meta: StepMetadata, planned: dict[str, int], trouble: float) -> None:
        rnd, report = self.random, WorkerReport()
        outdated = meta.weights != self.weights  # the real worker learns and keeps nothing then, and says why
        if outdated:
            report.weights = self.weights
            meta.audits, meta.observes, meta.harvests = [], [], []
        for job in meta.loads:
            fault = "fault" if rnd.random() < trouble else ""
            self.injected["load"] += bool(fault)
            if outdated and not all(span.ref_id in self.store for span in job.spans):
                fault = "it is gone"
            else:
                self.load(job, planned[job.req_id])
            if not fault:
                self.lives[job.req_id].loaded = sum(s.end - s.start for s in job.spans if not s.exact)
                self.loads += 1
            report.loads[job.req_id] = LoadResult(1.0, 1.0, fault)
        for cached in self.cache.values():
            cached.written = True
        for audit in meta.audits:
            live = self.of(audit.blocks)
            assert live.weights == self.weights
            assert audit.token_ids == tuple(live.ids[: len(audit.token_ids)]) and all(live.exact)
            assert len(audit.token_ids) <= live.request.num_tokens - 1
            self.audits += 1
            if rnd.random() < 4 * trouble:
                self.injected["audit"] += 1
                report.faults["audit"] = 1
                continue
            for variant in audit.variants:
                for span in variant.spans:
                    self.check_span(live, span)
                edges = tuple(span.edge for span in variant.spans if not span.exact)
                if edges:
                    kl = rnd.choice([0.01, 5.0])
                    report.audits.append(AuditResult("r", variant.policy, edges, (kl,), (True,), 1, 0, 1, 0))
        for lesson in meta.observes:
            live, held = self.of(lesson.blocks), self.store[lesson.ref_id]
            end = lesson.start + lesson.tokens
            assert live.may_harvest and live.weights == self.weights and all(live.exact) and end <= len(live.exact)
            assert held.ids[lesson.offset : lesson.offset + lesson.tokens] == live.ids[lesson.start : end]
            self.check_names(held, live, lesson.edge.target)
            if rnd.random() < 4 * trouble:
                self.injected["learning"] += 1
                report.faults["learn"] = 1
            else:
                report.examples[(lesson.policy, lesson.edge)] = rnd.randrange(9)
        for ref_id in meta.drops:
            self.store.pop(ref_id, None)
        for harvest in meta.harvests:
            live = self.of(harvest.blocks)
            assert (
                live.may_harvest
                and live.weights == self.weights
                and 0 <= harvest.start < harvest.end <= len(live.exact)
            )
            assert harvest.end <= max(live.request.num_computed_tokens, live.request.num_prompt_tokens)
            assert not harvest.exact or (harvest.start == 0 and all(live.exact[: harvest.end]))
            assert not harvest.dense or all(live.exact[: harvest.end])
            assert harvest.ref_id not in self.store
            if rnd.random() < trouble:
                self.injected["harvest"] += 1
                report.failed[harvest.ref_id] = "no room"
                if self.ranks == 1 or rnd.random() < 0.5:
                    continue
                report.stored[harvest.ref_id] = self.ranks - 1  # the others could
            else:
                report.stored[harvest.ref_id] = self.ranks
            fixed = harvest.name.startswith("fixed:")
            ids = live.ids[harvest.start : harvest.end]
            self.store[harvest.ref_id] = Held(ids, live.names, harvest.source, fixed, harvest.exact)
            report.leverage.update(
                {("ridge", edge, harvest.ref_id): 1.5 for _, edge in report.examples if rnd.random() < 0.5}
            )
        if report != WorkerReport():
            report.weights = self.weights
        assert sum(len(held.ids) for held in self.store.values()) * BYTES_PER_TOKEN <= self.budget
        for req_id in meta.releases:
            self.free(self.delayed.pop(req_id))  # exactly once, and only what was kept
        if rnd.random() < trouble / 4:
            self.injected["lost answer"] += 1
            for req_id in report.loads:
                self.lives[req_id].unreported = True
        else:
            self.reports.append((self.now + rnd.randint(0, self.lag), report))

    def of(self, blocks: tuple[int, ...]) -> Live:
        """The request that still owns these blocks."""
        (live,) = {id(self.owner[block]): self.owner[block] for block in blocks}.values()
        assert blocks == live.blocks
        return live

    def load(self, job: LoadJob, end: int) -> None:
        live = self.lives[job.req_id]
        assert job.blocks == live.blocks and job.end == end
        assert job.token_ids == tuple(live.ids[job.exact : job.end])
        assert not (job.gaps and live.fresh_hit), "repair would attend over KV that is not written yet"
        for span in job.spans:
            assert span.ref_id in self.store and span.ref_id in self.acknowledged
            self.check_span(live, span)
        parts = sorted([*job.gaps, *((span.start, span.end) for span in job.spans)])
        assert parts[0][0] == job.exact and parts[-1][1] == job.end
        assert all(a[1] == b[0] for a, b in pairwise(parts))

    def check_span(self, live: Live, span: LoadSpan) -> None:
        held = self.store.get(span.ref_id)
        if held is None:
            return  # an audit's reference may be gone by now
        assert held.ids[span.offset : span.offset + span.end - span.start] == live.ids[span.start : span.end]
        assert held.exact == span.exact and (not span.exact or span.offset == span.start)
        self.check_names(held, live, span.edge.target)

    def check_names(self, held: Held, live: Live, agent: str) -> None:
        if held.fixed:
            assert (held.names[:2], held.agent) == (live.names[:2], agent)
        elif self.isolation is not Isolation.GLOBAL:
            assert held.names[:2] == live.names[:2]
            assert held.exact or self.isolation is Isolation.TENANT or held.names == live.names

    # ---- the end of requests ----------------------------------------------------------------------------------------

    def sample(self, scheduled: dict[str, int]) -> None:
        for req_id in scheduled:
            live = self.lives.get(req_id)
            if live is None or live.request.num_computed_tokens < live.request.num_tokens:
                continue
            live.request.append_output_token_ids([self.random.randrange(900)])
            if live.request.num_output_tokens >= live.stop_after:
                ended = [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED]
                status = self.random.choice(ended)
                content = list(live.request.output_token_ids)
                content = content[:-1] if status is RequestStatus.FINISHED_STOPPED else content
                if content:
                    self.answers.setdefault(live.names, []).append(content)
                    self.go_on(live, content)
                self.running.remove(live)
                self.end(live, status)

    def go_on(self, live: Live, content: list[int]) -> None:
        """The conversation may be gone on with from this answer."""
        if live.request.num_tokens < LONGEST:
            answer = (f"agent:a{live.agent}:response", content)
            parts = [*live.parts, answer, ("", [2000] * self.random.randrange(4))]
            self.talks.append(Talk(live.names, live.agent, parts, live.hidden))
            del self.talks[:-TALKS]

    def abort(self) -> None:
        victims = [*self.running, *self.waiting]
        if victims:
            self.injected["abort"] += 1
            live = self.random.choice(victims)
            (self.running if live in self.running else self.waiting).remove(live)
            assert not self.end(live, RequestStatus.FINISHED_ABORTED)

    def end(self, live: Live, status: RequestStatus) -> bool:
        live.request.status = status
        kept, out = self.half.request_finished(live.request, list(live.blocks))
        del self.lives[live.request.request_id]
        assert live.request.request_id not in self.half._live
        if kept:
            assert live.may_harvest
            self.delayed[live.request.request_id] = live
        else:
            self.free(live)
        if live.release and self.isolation is Isolation.SESSION:
            self.forget(*live.names[1:])
        if out is not None:
            self.check_report(live, RequestReport.model_validate(out[WIRE_KEY]))
        return kept

    def check_report(self, live: Live, report: RequestReport) -> None:
        prompt = live.request.num_prompt_tokens
        counts = {treatment: getattr(report, treatment) for treatment in TREATMENTS}
        assert report.prompt_tokens == prompt == sum(counts.values())
        assert min(counts.values()) >= 0
        assert 0 <= report.carried_estimate <= report.carried
        assert report.loaded <= live.loaded  # only what was materialised; fewer where the answer is still on its way
        on_its_way = any(live.request.request_id in job.loads for _, job in self.reports)
        assert on_its_way or live.unreported or report.loaded == live.loaded
        if live.request.num_computed_tokens:
            assert report.exact <= sum(live.exact[:prompt])
            assert report.carried == max(0, min(live.hit, prompt) - (live.hit - live.carried))
        for part in report.segments:
            assert sum(getattr(part, treatment) for treatment in TREATMENTS) == part.end - part.start
        for treatment, tokens in counts.items():
            assert tokens == sum(getattr(part, treatment) for part in report.segments)

    def drain(self) -> None:
        for _ in range(2000):
            if not (self.waiting or self.running):
                break
            self.step(calm=True)
        assert not self.waiting and not self.running, "requests hang"
        for _ in range(ACKNOWLEDGE_STEPS + 3):
            self.step(calm=True)
        half = self.half
        assert not (half._live or half._others or half._planned or half._finished)
        assert not (self.lives or self.delayed or self.owner), "blocks leak"
        assert half.index.used == sum(e.nbytes for e in half.index.entries())
        assert set(half.index.scopes) == {e.key.scope for e in half.index.entries()} and not half.index._due
        assert all(entry.state is EntryState.READY for entry in half.index.entries()), "a promise was never kept"
        assert set(self.store) == {entry.ref_id for entry in half.index.entries()}, "the worker holds other references"


def live_through(seed: int) -> World:
    """One scenario; returns the world after it."""
    world = World(seed)
    for _ in range(world.random.randrange(10, 60)):
        for _ in range(world.random.choice([0, 0, 0, 1, 1, 2])):
            world.arrive()
        world.step()
    world.drain()
    return world


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Refusals and faults are part of the game."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(6))
def test_nothing_goes_wrong_whatever_happens(part: int) -> None:
    loads, past = 0, Counter[str]()
    for seed in range(part * SCENARIOS // 6, (part + 1) * SCENARIOS // 6):
        try:
            world = live_through(seed)
            loads, past = loads + world.loads, past + world.statistics
        except BaseException as error:
            error.add_note(f"scenario {seed}")
            raise
    assert loads > 25  # the scenarios do exercise what they are for
    assert past["requests with a past"] > 15
    assert past["loads after a past"] > 5


@pytest.mark.reliability
def test_ten_thousand_steps_and_five_hundred_faults(capsys: pytest.CaptureFixture[str]) -> None:
    """As above with other seeds; prints the count of what happened."""
    steps = loads = audits = scenarios = 0
    injected: Counter[str] = Counter()
    while steps < 10_000 or injected.total() < 500:
        world = live_through(100_000 + scenarios)
        scenarios += 1
        steps, loads, audits = steps + world.now, loads + world.loads, audits + world.audits
        injected += world.injected
    with capsys.disabled():
        print(f"\n{scenarios} scenarios, {steps} steps, {loads} loads, {audits} audits, {injected.total()} faults:")
        print(", ".join(f"{count} x {name}" for name, count in injected.most_common()))
        print("0 violations, 0 blocks leaked, 0 promises left, 0 references lost")
