"""Tenants learn nothing of one another, and nothing of what was said is in logs or reports."""

from __future__ import annotations

import json
import logging
import random
import re
from typing import Any

import pytest
import torch

from kvcomm_integrations.config import Isolation
from kvcomm_integrations.connector.metadata import WorkerReport
from tests.connector.standins import BYTES_PER_TOKEN, Engine, make_half, make_request, segment
from tests.connector.test_worker import _fill, _harvest, _worker

OTHERS = [
    {"tenant": "attacker", "session": "s"},
    {"tenant": "victim", "session": "s", "salt": "other"},
    {"tenant": 'victim", "s', "session": "s"},
    {"tenant": "victim", "session": "other"},
]


def ask(
    engine: Engine, contents: list[list[int]], answer: list[int], who: dict[str, str], request_id: str | None = None
) -> dict[str, Any]:
    params = {name: value for name, value in who.items() if name != "salt"}
    prompt, segments = list(range(1000, 1020)), []
    for number, content in enumerate(contents):
        segments.append(segment("placeholder", len(prompt), len(prompt) + len(content), f"c{number}"))
        prompt += [*content, 2000 + number]
    request = make_request(
        prompt,
        {"agent": "a", "segments": segments, "response_name": "r", **params},
        salt=who.get("salt"),
        request_id=request_id,
    )
    report = engine.run(request, answer)[1]
    for timing in ("plan_ms", "load_ms", "repair_ms"):
        del report[timing]
    return report


def texts(seed: int) -> list[list[int]]:
    rnd = random.Random(seed)
    return [[rnd.randrange(900) for _ in range(rnd.randrange(10, 40))] for _ in range(6)]


@pytest.mark.parametrize("who", OTHERS)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_counters_do_not_depend_on_what_others_have_sent(who: dict[str, str], share: float) -> None:
    """An attacker who guesses a victim's contents sees the same reports as where there is no victim."""

    def attack(victim: bool) -> list[dict[str, Any]]:
        budget = 2000 * BYTES_PER_TOKEN
        half = make_half(policy="ridge", learn_rate=0.5, store_bytes=budget, tenant_share=share)
        engine = Engine(half)
        rnd = random.Random(1)
        guesses = texts(2)
        reports = []
        for number in range(30):
            chosen = rnd.sample(guesses, 2)
            if victim:
                ask(engine, chosen, chosen[0], {"tenant": "victim", "session": "s"})
            reports.append(ask(engine, chosen, [number, *range(20)], who, f"attack {number}"))
        return reports

    same_tenant = who["tenant"] == "victim" and "salt" not in who
    with_victim, alone = attack(True), attack(False)
    if same_tenant:  # sessions of one tenant share beginnings and corrections, not contents
        assert [r["loaded"] for r in with_victim][:3] == [r["loaded"] for r in alone][:3]
    else:
        assert with_victim == alone


def test_a_share_protects_from_being_pushed_out() -> None:
    def loaded(noise: bool) -> list[int]:
        half = make_half(policy="ridge", store_bytes=400 * BYTES_PER_TOKEN, tenant_share=0.5)
        engine = Engine(half)
        counts = []
        for number in range(20):
            if noise:
                ask(engine, texts(100 + number)[:2], [1], {"tenant": "noisy", "session": str(number)})
            counts.append(ask(engine, texts(7)[:2], [1], {"tenant": "quiet", "session": "s"})["loaded"])
        return counts

    assert loaded(noise=True) == loaded(noise=False)


def test_keys_of_contents_and_corrections_name_the_tenant() -> None:
    half = make_half(policy="ridge", isolation=Isolation.SESSION)
    engine = Engine(half)
    ask(engine, texts(1), [1, 2, 3, 4, 5, 6, 7, 8, 9], {"tenant": "ten ant", "session": "ses sion", "salt": "pepper"})
    scopes = {entry.key.scope for entry in half.index.entries()}
    assert scopes
    assert all('"pepper"' in scope and '"ten ant"' in scope for scope in scopes)
    contents = [entry for entry in half.index.entries() if not entry.reserved.exact]
    assert all('"ses sion"' in entry.key.scope for entry in contents)
    tracked = make_request([1, 2], {"tenant": "ten ant", "agent": "b"}, salt="pepper")
    half.on_new_request(tracked)
    prompt = half._live[tracked.request_id].prompt
    edge = half.planner.edge(prompt, prompt.segments[0], contents[0])
    assert json.loads(edge.scope) == ["pepper", "ten ant"]


def test_sharing_with_everybody_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    half = make_half(isolation=Isolation.GLOBAL)
    engine = Engine(half)
    for _ in range(3):
        ask(engine, texts(1), [1], {"tenant": "t", "session": "s"})
    assert sum("CVE-2025-46570" in record.message for record in caplog.records) == 1


SECRET = [7654321 + i for i in range(40)]


def secrets_in(text: str) -> list[str]:
    return [number for number in re.findall(r"\d+", text) if int(number) in SECRET]


def test_nothing_of_a_prompt_is_logged_or_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    half = make_half(policy="ridge", learn_rate=0.3, audit_rate=0.3)
    engine = Engine(half)
    who = {"tenant": "t", "session": "s"}
    reports = [ask(engine, [SECRET, SECRET[:20]], SECRET, who) for _ in range(6)]
    half.update_connector_output(WorkerReport(failed={1: "no room"}, faults={"learn": 3}))
    broken = make_request([*SECRET, 1], {"segments": [segment("placeholder", 0, 999, "x")]})
    reports.append(engine.run(broken, [1])[1])
    half.index.find = lambda *args: 1 / 0  # type: ignore[assignment,method-assign]
    reports.append(ask(engine, [SECRET], SECRET, {"tenant": "u", "session": "s"}))
    assert "planning failed" in reports[-1]["reason"]
    worker = _worker()
    _fill(worker, (0, 1, 2), 40, seed=3)
    _harvest(worker, 7, (0, 1, 2), 0, 40)
    worker.store.get(7).keys[:] = torch.nan
    assert caplog.records
    assert not secrets_in(caplog.text)
    assert not secrets_in(json.dumps(reports))
