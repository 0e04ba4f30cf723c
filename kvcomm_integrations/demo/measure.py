"""Runs the demo's team on every question, densely and with reuse in turn, and keeps what each agent's call cost."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm_integrations.bench.harness import progress
from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.demo.graph import team
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.report.figures import AgentFigures, by_agent
from kvcomm_integrations.report.run_report import RunReport
from kvcomm_integrations.report.words import milliseconds
from kvcomm_integrations.wire import Mode


@dataclass(frozen=True)
class Comparison:
    """Everything the demo measured."""

    runs: RunReport
    """Every request, the warm-up's too."""
    identical: dict[str, float]
    """By agent: share of the questions answered with exactly the same text both ways."""
    config: dict[str, Any]

    def agents(self) -> list[AgentFigures]:
        """Medians of each agent's calls, in the order in which they speak."""
        return by_agent(self.runs.records)

    def learning(self, agent: str) -> int:
        """Calls with reuse that ran densely all the same: to learn, to audit, or because it was not worth it."""
        calls = (record for record in self.runs.records if record.agent == agent and record.asked is Mode.AUTO)
        return sum(record.loaded == 0 for record in calls)


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
    teacher = ChatKVComm(mode=Mode.OBSERVE, tenant="reuse", **shared)
    ways = {
        "dense": ChatKVComm(mode=Mode.DENSE, tenant="dense", **shared),
        "reuse": ChatKVComm(mode=Mode.AUTO, tenant="reuse", **shared),
    }
    records: list[RunRecord] = []
    same = dict.fromkeys(names, 0)
    with progress(total=agents * (len(warm_up) + 2 * len(questions))) as step:

        def ask(chat: ChatKVComm, question: str, what: str) -> dict[str, str]:
            """Each agent's answer to a question, in a session of its own."""
            answers = {}
            thread: Any = {"configurable": {"thread_id": uuid.uuid4().hex}}
            for update in team(chat, names).stream({"messages": [("user", question)]}, thread, stream_mode="updates"):
                for name, state in update.items():
                    answers[name] = state["messages"][-1].text
                    records.append(chat.report().records[-1])
                    step(f"{what}: {name} {milliseconds(records[-1].ttft_ms)}", done=1)
            return answers

        for number, question in enumerate(warm_up, 1):
            ask(teacher, question, f"warm-up {number} of {len(warm_up)}")
        for number, question in enumerate(questions, 1):
            what = f"question {number} of {len(questions)}"
            dense, reuse = (ask(chat, question, f"{what}, {way}") for way, chat in ways.items())
            for name in names:
                same[name] += dense[name] == reuse[name]
    config = {
        "model": model,
        "questions": len(questions),
        "warm_up": len(warm_up),
        "max_tokens": max_tokens,
        "seed": seed,
        "reuse": ReuseConfig().model_dump(mode="json"),
    }
    identical = {name: count / len(questions) for name, count in same.items()}
    return Comparison(RunReport(records), identical, config)
