"""Runs the demo's team on every question, densely and with reuse in turn, and keeps what each agent's call cost."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvcomm_integrations.bench.harness import progress
from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.demo.graph import team
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.report.run_report import RunReport
from kvcomm_integrations.wire import Mode, RequestReport


@dataclass(frozen=True)
class Call:
    """One agent's answer to one question."""

    text: str
    ttft_ms: float
    report: RequestReport


@dataclass
class AgentCalls:
    """All measured calls of one agent, by question, without and with reuse."""

    name: str
    dense: list[Call] = field(default_factory=list)
    reuse: list[Call] = field(default_factory=list)

    @property
    def ttft_dense_ms(self) -> float:
        """Median time to the first token without reuse, milliseconds."""
        return median(call.ttft_ms for call in self.dense)

    @property
    def ttft_reuse_ms(self) -> float:
        """Median time to the first token with reuse, milliseconds."""
        return median(call.ttft_ms for call in self.reuse)

    @property
    def speedup(self) -> float:
        """Ratio of the two medians."""
        return self.ttft_dense_ms / self.ttft_reuse_ms

    @property
    def identical(self) -> float:
        """Share of questions answered with exactly the same text both ways."""
        pairs = zip(self.dense, self.reuse, strict=True)
        return sum(d.text == r.text for d, r in pairs) / len(self.dense)

    def tokens(self, kind: str) -> float:
        """Median over the reuse calls of ``prompt_tokens``, ``exact``, ``loaded``, ``repaired`` or ``computed``."""
        return float(median(getattr(call.report, kind) for call in self.reuse))

    @property
    def learning(self) -> int:
        """Reuse calls that ran densely all the same: to learn, to audit, or because reuse was not worth it."""
        return sum(call.report.loaded == 0 for call in self.reuse)


@dataclass
class Comparison:
    """Everything the demo measured."""

    agents: list[AgentCalls]
    config: dict[str, Any]
    runs: RunReport
    """Every request, the warm-up's too."""


def compare(
    model: str, warm_up: Sequence[str], questions: Sequence[str], agents: int, max_tokens: int, seed: int
) -> Comparison:
    """Ask every question twice of the same team: densely with prefix caching, and with reuse.

    The two ways share one engine but not the prefix cache (they are different tenants), and take turns, so that noise
    of the machine meets both. The warm-up questions are answered once, densely, by the reusing tenant: they teach its
    edges and are not measured.

    Raises:
        ConfigurationError: more agents than there are roles.
    """
    if agents > len(ROLES):
        raise ConfigurationError(f"the demo has {len(ROLES)} roles; {agents} agents are too many")
    names = list(ROLES)[:agents]
    shared: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": max_tokens, "seed": seed}
    model_of_all = ChatKVComm(mode=Mode.OBSERVE, tenant="reuse", **shared)
    teacher = team(model_of_all, names)
    ways = {
        "dense": team(ChatKVComm(mode=Mode.DENSE, tenant="dense", **shared), names),
        "reuse": team(ChatKVComm(mode=Mode.AUTO, tenant="reuse", **shared), names),
    }
    calls = {name: AgentCalls(name) for name in names}
    with progress(total=agents * (len(warm_up) + 2 * len(questions))) as step:
        for number, question in enumerate(warm_up, 1):
            for name, _ in _run(teacher, question):
                step(f"warm-up {number} of {len(warm_up)}: {name}", done=1)
        for number, question in enumerate(questions, 1):
            for way, graph in ways.items():
                for name, call in _run(graph, question):
                    step(f"question {number} of {len(questions)}, {way}: {name} {call.ttft_ms:.0f} ms", done=1)
                    getattr(calls[name], way).append(call)
    config = {
        "model": model,
        "questions": len(questions),
        "warm_up": len(warm_up),
        "max_tokens": max_tokens,
        "seed": seed,
        "reuse": ReuseConfig().model_dump(mode="json"),
    }
    return Comparison(list(calls.values()), config, model_of_all.report())


def _run(graph: Any, question: str) -> Iterator[tuple[str, Call]]:
    """The calls of one pass over the graph, as they end."""
    session = {"configurable": {"thread_id": uuid.uuid4().hex}}
    for update in graph.stream({"messages": [("user", question)]}, session, stream_mode="updates"):
        for name, state in update.items():
            message = state["messages"][-1]
            ours = message.response_metadata["kvcomm"]
            yield name, Call(message.text, ours["ttft_ms"], RequestReport.model_validate(ours["report"]))
