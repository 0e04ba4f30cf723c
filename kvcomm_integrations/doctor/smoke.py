"""Two agents on the real engine: does the second one load what the first one computed?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import ValidationError

from kvcomm_integrations.bench.plain import describe, machine
from kvcomm_integrations.chat.request_log import RunRecord
from kvcomm_integrations.chat.runtime import ChatRuntime
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.doctor.finding import Finding, State, bad, good, skipped, weak
from kvcomm_integrations.doctor.measurements import SelfTest, measure
from kvcomm_integrations.doctor.model import SHARED
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import SamplingOptions
from kvcomm_integrations.engines.vllm_args import (
    BINDING_VARIABLE,
    RESERVED_VARIABLE,
    cpu_environment,
    physical_cores,
)
from kvcomm_integrations.errors import KVCommError
from kvcomm_integrations.prompts.chat_message import ChatMessage

TOKENS = 8
"""Length of the agents' answers."""
QUESTION = (
    f"{SHARED} Hay costs four dollars a bale, and the dealer takes a fifth off for more than 300 at once. How much "
    "does the farmer spend on hay in a week, how much would it be if five cows were sold, and would there still be a "
    "discount then? A lorry carries forty bales and costs twelve dollars an hour; the way to the dealer and back takes "
    "two hours. What does it cost to bring the hay of four weeks to the farm, and how many journeys are that?"
)
"""Long enough that repairing around it is clearly less than computing it."""


def smoke(model: str, test: SelfTest | None = None) -> Iterator[Finding]:
    """Start an engine, let three agents read the same question, and say what became of it. Takes about half a minute.

    Args:
        model: folder or hub id.
        test: start the engine as the user would, and measure this too.
    """
    try:
        engine = InProcessEngine(_config(model, test))
    except ValidationError as err:
        first = err.errors()[0]
        yield bad("Engine", f"{'.'.join(map(str, first['loc']))}: {first['msg']}", "change the option")
        return
    try:
        runtime = ChatRuntime(engine)
        for agent in ("planner", "solver", "critic"):
            _ask(runtime, agent)
        stats = engine.call_workers("kvcomm_stats")
        yield good("Engine", "started, and answered three agents")
        how = describe(engine)
        yield good("Runs with", in_force(how | {"attention": stats[0].get("attention")}))
        states = set()
        for finding in judge(stats, engine.repair_refusal, runtime.runs.records()):
            states.add(finding.state)
            yield finding
        if test is not None and State.BAD in states:
            yield skipped("Measurements", "not made: see what is bad above")
        elif test is not None:
            test.figures |= {"machine": machine(), "engine": how, "workers": stats}
            yield from measure(engine, test, how["dtype"])
    except KVCommError as err:
        yield bad("Engine", str(err), "the message above, and vLLM's log before it, say why")
    finally:
        engine.close()


def _config(model: str, test: SelfTest | None) -> EngineConfig:
    if test is None:
        reuse = ReuseConfig(policy="aligned", idle_budget=0, only_if_faster=False)
        return EngineConfig(model=model, max_model_len=1024, max_num_seqs=4, reuse=reuse)
    reuse = ReuseConfig(idle_budget=0, only_if_faster=False)
    return EngineConfig(model=model, reuse=reuse, **test.settings)


def in_force(how: dict[str, Any]) -> str:
    """What vLLM has decided, in words.

    Args:
        how: see ``bench.plain.describe``; ``attention`` is the backend's name, if it is known.
    """
    runner = "second" if how["runner"] == 2 else "first"
    compiled, graphs = (how[name] if how[name] != "none" else "off" for name in ("compilation", "graphs"))
    attention = how.get("attention") or "not known"
    said = (
        f"{runner}-generation model runner, compilation {compiled}, graphs {graphs}, attention {attention}, "
        f"{how['dtype']}, blocks of {how['block_size']}"
    )
    return said if torch.cuda.is_available() else f"{said}, {_cores()}"


def _cores() -> str:
    """The cores that vLLM's worker on a CPU computes on."""
    if (chosen := os.environ.get(BINDING_VARIABLE, "auto")) != "auto":
        return f"cores {chosen}"
    kept = os.environ.get(RESERVED_VARIABLE) or cpu_environment(1).get(RESERVED_VARIABLE)
    return f"{physical_cores()} cores" + (f" less {kept} for vLLM's scheduler" if kept else "")


def _ask(runtime: ChatRuntime, agent: str) -> None:
    messages = [ChatMessage("system", f"You are the {agent} of a team."), ChatMessage("user", QUESTION)]
    sampling = SamplingOptions(max_tokens=TOKENS, temperature=0)
    list(runtime.stream_sync(runtime.prepare(messages, agent=agent, session="doctor", sampling=sampling)))


def judge(stats: list[dict[str, Any]], repair_refusal: str | None, records: list[RunRecord]) -> Iterator[Finding]:
    """What the workers' statistics and the agents' requests say.

    Args:
        stats: of each worker.
        repair_refusal: why the repair pass cannot run, if so.
        records: the agents' requests, in order.
    """
    disabled = next((worker["disabled"] for worker in stats if worker.get("disabled")), "")
    layouts = {str(worker.get("layout", "")) for worker in stats}
    if disabled or not all(layouts):
        yield bad(
            "Cache layout",
            disabled or "the workers have not recognised the cache's layout",
            "reuse is off for this model on this machine; requests are served densely",
        )
        return
    yield good("Cache layout", f"{', '.join(sorted(layouts))}, read back what the engine wrote")
    if all(worker.get("verified") for worker in stats):
        yield good("Rotary positions", "keys of the same token agree at different positions")
    else:
        yield bad("Rotary positions", "the self-check has not passed", "report the model's rope_scaling")
    if repair_refusal:
        yield weak("Repair pass", repair_refusal, "reuse stops at the first text nobody has seen; the rest is computed")
    else:
        yield good("Repair pass", "available")
    best = max(records[1:], key=lambda record: record.loaded, default=None)
    if best is not None and best.loaded:
        yield good("Reuse", f"the {best.agent} loaded {best.loaded} of {best.prompt_tokens} prompt tokens")
    else:
        reason = next((record.reason for record in reversed(records) if record.reason), "no reason was given")
        yield bad("Reuse", f"no agent loaded anything: {reason}", "see docs/troubleshooting.md")
