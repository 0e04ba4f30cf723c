"""Two hundred requests at once whose contents look alike: no answer holds what another's content says.

In this process only: served tests run a random model, whose answers say nothing.
"""

from __future__ import annotations

import asyncio
import random
import re
from itertools import product

import pytest

from kvcomm_integrations.wire import Mode
from tests.engine.helpers import END, Answer, Client

pytestmark = [pytest.mark.engine, pytest.mark.reliability]

PEOPLE = 100
FIRST = ("Alaric", "Beatrix", "Cosmo", "Delphine", "Ephraim", "Florian", "Gisela", "Horatio", "Ingrid", "Jocasta")
LAST = ("Quimby", "Rackham", "Sorrel", "Tiptree", "Umfrey", "Vexley", "Wadlow", "Yardley", "Zellweg", "Oakapple")
AGENTS = {
    "reader": "You read a record and repeat it.",
    "clerk": "You are a clerk. You answer questions about one record in a single short sentence.",
}
TOKENS = 10


def record(number: int, name: str) -> tuple[str, set[str]]:
    """A record like all others, and what is in no other one: the family's numbers."""
    rnd = random.Random(number)
    room, bill, year = 1000 + number, rnd.randrange(10_000, 99_999), 40_000 + 17 * number
    text = f"Guest {name} stays in room {room}, has paid {bill} dollars, and holds the card number {year}."
    return text, {str(room), str(bill), str(year)}


async def test_answers_hold_nothing_of_another_content(client: Client, session: str) -> None:
    names = [f"{first} {last}" for first, last in product(FIRST, LAST)]
    records = [record(number, name) for number, name in enumerate(names)]
    assert len(records) == PEOPLE

    def request(agent: str, number: int, mode: Mode, salt: str | None = None):
        content = client.encode(records[number][0])
        head = f"<|im_start|>system\n{AGENTS[agent]}<|im_end|>\n<|im_start|>user\n"
        prompt = client.prompt(head, ("record", content), "\nSay it again." + END)
        return client.request(prompt, agent=agent, session=session, tokens=TOKENS, mode=mode, salt=salt, respond=False)

    async def run(mode: Mode, salt: str | None) -> list[Answer]:
        order = [(agent, number) for number in range(PEOPLE) for agent in AGENTS]
        runs = (client.arun(request(agent, number, mode, salt)) for agent, number in order)
        return list(await asyncio.wait_for(asyncio.gather(*runs), 700))

    answers = await run(Mode.AUTO, None)
    loaded = sum(answer.report.loaded > 0 for answer in answers)
    assert loaded >= PEOPLE * 3 // 4
    suspects, telling = [], 0
    for position, answer in enumerate(answers):
        number = position // len(AGENTS)
        own = set(re.findall(r"\d+|[A-Z]\w+", records[number][0]))
        telling += bool(set(names[number].split()) & set(re.findall(r"\w+", answer.text)))
        foreign = set().union(*(numbers for _, numbers in records)) | set(FIRST) | set(LAST)
        said = {word for word in re.findall(r"\d+|[A-Z]\w+", answer.text) if word in foreign - own}
        if said:
            suspects.append((list(AGENTS)[position % len(AGENTS)], number, said))
    assert telling > PEOPLE  # the answers do speak of the records
    dense = [(await client.arun(request(agent, n, Mode.DENSE, f"{session} dense"))).text for agent, n, _ in suspects]
    for (agent, number, said), truth in zip(suspects, dense, strict=True):
        assert said <= set(re.findall(r"\d+|[A-Z]\w+", truth)), f"{agent} {number} said {said}, densely: {truth}"
    print(f"\n{len(answers)} requests at once, {loaded} with loaded contents, {telling} answers name their own guest,")
    print(f"{len(suspects)} name another as the dense answer does, 0 name another where it does not")
