"""Shadow requests on the real engine: a pause makes estimates exact, and whoever asks is served as without them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.wire import Mode, RequestReport
from tests.engine.helpers import END, QUESTIONS, Answer, Client, Part, system

pytestmark = pytest.mark.engine
REUSE = ReuseConfig(only_if_faster=False, idle_after_ms=50.0, idle_slice_ms=200.0, min_segment_tokens=1)
TURN = "<|im_end|>\n<|im_start|>user\n"


@pytest.fixture(scope="module")
def client(demo_model: Path) -> Iterator[Client]:
    engine = InProcessEngine(
        EngineConfig(dtype="float32", model=str(demo_model), max_model_len=2048, block_size=32, reuse=REUSE)
    )
    yield Client(engine)
    engine.close()


class Talk:
    """A solver behind a planner, both over one question that nobody has asked before."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name
        self.question = client.encode(f"{name}: " + " ".join(QUESTIONS))
        planner = client.prompt(system("planner"), ("user_question", self.question), END)
        client.ask(planner, agent="planner", session=name, tokens=4)
        self.parts: list[Part] = [system("solver"), ("user_question", self.question), END]

    def turn(self, **options: Any) -> Answer:
        prompt = self.client.prompt(*self.parts)
        return self.client.ask(prompt, agent="solver", session=self.name, tokens=8, **options)

    def go_on(self, answer: Answer) -> None:
        more = self.client.encode("And how much is that in a year of 360 days? Explain it in one sentence, please.")
        self.parts += [("agent:solver:response", answer.content), TURN, ("more", more), END]


def audits(client: Client) -> int:
    """Audits that shadow requests have made since it was asked last; one ends each of them that had loaded."""
    return len(client.engine.call_workers("kvcomm_take_audits")[0])


def pause(client: Client) -> None:
    """Ask nothing until a shadow request has come to its end."""
    until = time.monotonic() + 60
    while not audits(client):
        assert time.monotonic() < until, "no shadow request came to its end"
        time.sleep(0.1)
    time.sleep(0.3)  # what follows from the audit


def settled(report: RequestReport) -> bool:
    return report.exact - 64 <= report.settled <= report.exact > report.prompt_tokens // 2 and report.carried == 0


def test_after_a_pause_the_next_turn_is_exact_and_its_answer_is_plain_vllms(client: Client) -> None:
    talk = Talk(client, "pause")
    audits(client)
    first = talk.turn()
    assert first.report.loaded > 100
    pause(client)
    talk.go_on(first)
    second = talk.turn()
    assert settled(second.report), second.report
    assert second.report.loaded == second.report.repaired == 0
    plain = talk.turn(mode=Mode.DENSE, salt="nobody else's")
    assert plain.report.exact == 0 and plain.ids == second.ids


def test_edges_learn_although_no_request_of_a_users_runs_densely(client: Client) -> None:
    examples = []
    for number in range(4):
        talk = Talk(client, f"learn {number}")
        audits(client)
        report = talk.turn().report
        assert report.mode is Mode.AUTO and report.loaded > 0
        examples.append(max(part.examples for part in report.segments))
        pause(client)
    assert examples == sorted(examples) and examples[-1] >= examples[0] + 3


def test_who_asks_at_once_and_again_is_served_as_if_there_were_none(client: Client) -> None:
    """Requests come at every moment of shadow requests; afterwards dense answers are those of plain vLLM."""
    for number in range(6):
        talk = Talk(client, f"busy {number}")
        answers = [talk.turn()]
        for rest in (0.0, 0.06, 0.1, 0.2, 0.4):
            time.sleep(rest + 0.013 * number)
            talk.go_on(answers[-1])
            answers.append(talk.turn())
        dense = talk.turn(mode=Mode.DENSE)
        plain = talk.turn(mode=Mode.DENSE, salt=f"nobody else's {number}")
        assert plain.report.exact == 0 and plain.ids == dense.ids
    engine = client.engine
    assert isinstance(engine, InProcessEngine)
    engine.release_session("busy 5")
    time.sleep(1)
    engine.drain(timeout=60)
