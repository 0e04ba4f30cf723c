"""What a worker has learned: policies, their budget, and how new each held content is to what they know.

It sees neither the paged cache nor orders: it is given references and the truth, and keeps what follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.connector.worker.background import Background
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies import create_policy
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.references import Reference, ReferenceStore
from kvcomm_integrations.reuse.traits import policy_traits


class LeverageTable:
    """Leverages by reference, policy and edge. Entries of an edge go when it learns.

    Args:
        device: where policies keep what they have learned.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._known: dict[int, dict[tuple[str, Edge], float | None]] = {}
        self._generation = 0

    def of(self, name: str, policy: Policy, edge: Edge, reference: Reference) -> float | None:
        """Leverage of a whole reference on an edge; ``None`` where the policy has none.

        Args:
            name: name under which the policy runs.
            policy: asked where the answer is not known.
            edge: the edge.
            reference: the content.
        """
        known = self._known.setdefault(reference.ref_id, {})
        if (name, edge) in known:
            return known[(name, edge)]
        generation = self._generation
        content = KV(reference.keys.to(self._device), reference.values.to(self._device))
        leverage = policy.ready(edge, content).leverage if policy.ready(edge).examples else None
        if generation == self._generation:  # the edge may have learned in the meantime, in another thread
            known[(name, edge)] = leverage
        return leverage

    def learned(self, name: str, edge: Edge) -> None:
        """An edge knows more, or less, than before."""
        self._generation += 1
        for known in list(self._known.values()):
            known.pop((name, edge), None)

    def clear(self) -> None:
        """Forget all, as is due when what edges have learned is replaced."""
        self._generation += 1
        self._known.clear()

    def drop(self, ref_id: int) -> None:
        """Forget a reference; unknown ones are ignored."""
        self._known.pop(ref_id, None)


class Learner:
    """Policies by name, made on first use.

    Args:
        config: our settings.
        store: the worker's references.
    """

    def __init__(self, config: ReuseConfig, store: ReferenceStore) -> None:
        self.config = config
        self.policies: dict[str, Policy] = {}
        self.background = Background()
        self.leverages = LeverageTable()
        self.changed = False
        """Something was learned or forgotten since somebody has set this to false."""
        self._store = store
        self._examples: dict[tuple[str, Edge], int] = {}
        self._leverage: dict[tuple[str, Edge, int], float] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all that was learned."""
        return sum(policy.state_bytes() for policy in self.policies.values())

    def use(self, device: torch.device) -> None:
        """Where the paged cache is, and with it what policies learn."""
        self.leverages = LeverageTable(device)

    def policy(self, name: str) -> Policy:
        """The policy of this name."""
        if name not in self.policies:
            options = dict(self.config.policy_options) if name == self.config.policy else {}
            traits = policy_traits(name)
            if traits is not None and traits.learns:
                options.setdefault("max_bytes", self.config.state_bytes)
            self.policies[name] = create_policy(name, **options)
        return self.policies[name]

    def learn(self, name: str, edge: Edge, reference: Reference, part: slice, truth: KV, first: int = 0) -> None:
        """Take an example of an edge, or a later part of one.

        Args:
            name: the policy that learns.
            edge: the edge.
            reference: what a load would start from.
            part: its tokens that the truth is of.
            truth: dense KV, keys without rotation.
            first: position of its first token within the content.
        """
        policy = self.policy(name)
        keys, values = (half[:, :, part].to(truth.keys.device) for half in reference.kv)
        before = policy.edges()
        self.changed = True
        if first:
            policy.observe_further(edge, KV(keys, values), truth, first)
        else:
            policy.observe(edge, KV(keys, values), truth)
        self._examples[(name, edge)] = policy.ready(edge).examples
        self._note_forgotten(name, before)
        self.leverages.learned(name, edge)
        if policy.traits.gates:  # what has just become an anchor is predictable from now on
            self._note_leverage(name, policy, edge, reference)
        self._keep_to_budget()
        self.background.submit((name, edge), partial(self.prepare, name, policy, edge))

    def forget(self, name: str, edge: Edge) -> None:
        """Forget what an edge has learned."""
        policy = self.policy(name)
        before = policy.edges()
        self.changed = True
        policy.forget(edge)
        self.leverages.learned(name, edge)
        self._note_forgotten(name, before)

    def forget_all(self) -> None:
        """Forget everything."""
        for name in list(self.policies):
            with self.relearning(name) as policy:
                for edge in policy.edges():
                    policy.forget(edge)
        self.leverages.clear()

    @contextmanager
    def relearning(self, name: str) -> Iterator[Policy]:
        """A policy whose state is replaced inside the block; what it knows afterwards is reported in the next step."""
        policy = self.policy(name)
        before = policy.edges()
        yield policy
        self.changed = True
        self.leverages.clear()
        self._note_forgotten(name, before)
        for edge in policy.edges():
            self._examples[(name, edge)] = policy.ready(edge).examples
            self.background.submit((name, edge), partial(self.prepare, name, policy, edge))
        for reference in map(self._store.get, self._store):
            if not reference.rotated:
                self._rate(name, reference)

    def rate(self, reference: Reference) -> None:
        """How new a content is to every edge it may travel: computed now, so that the gate only looks it up."""
        for name in self.policies:
            self._rate(name, reference)

    def prepare(self, name: str, policy: Policy, edge: Edge) -> None:
        """Compute what the next load over an edge needs; runs in the background."""
        policy.prepare(edge)
        for reference in self._store.snapshot():
            if reference.source == edge.source and reference.name == edge.name:
                self.leverages.of(name, policy, edge, reference)
                if reference.ref_id not in self._store:  # dropped in the meantime: nobody would drop this again
                    self.leverages.drop(reference.ref_id)

    def tell(self, report: WorkerReport) -> None:
        """Put what has happened since the last call into a report."""
        report.examples, self._examples = self._examples, {}
        report.leverage, self._leverage = self._leverage, {}

    def _rate(self, name: str, reference: Reference) -> None:
        policy = self.policies[name]
        for edge in policy.edges():
            if edge.source == reference.source and edge.name == reference.name:
                self._note_leverage(name, policy, edge, reference)

    def _note_leverage(self, name: str, policy: Policy, edge: Edge, reference: Reference) -> None:
        leverage = self.leverages.of(name, policy, edge, reference)
        if leverage is not None:
            self._leverage[(name, edge, reference.ref_id)] = leverage

    def _note_forgotten(self, name: str, before: Iterable[Edge]) -> None:
        """Report edges that a policy does not know any more (its budget is bounded) as having no examples."""
        for edge in set(before).difference(self.policies[name].edges()):
            self._examples[(name, edge)] = 0

    def _keep_to_budget(self) -> None:
        """All policies together keep to ``state_bytes``; the largest forgets what it has not used for longest."""
        while self.nbytes > self.config.state_bytes:
            name, policy = max(self.policies.items(), key=lambda item: item[1].state_bytes())
            before = policy.edges()
            if len(before) <= 1:
                return
            policy.forget(before[0])
            self._note_forgotten(name, before)
