"""Both chat models report on every request of their engine, whoever made it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from autogen_core.models import UserMessage

from kvcomm_integrations.autogen import KVCommChatCompletionClient
from kvcomm_integrations.engines.fake import FakeEngine
from kvcomm_integrations.langchain import ChatKVComm

QUESTION = (
    "How many bales of hay do twelve cows and fifteen sheep eat in a week, if a cow eats three a day, a sheep a third "
    "of that, and every Sunday all of them get half of what they eat on any other day of the week? Say how many bales "
    "the farmer has to buy for the four months from November to February if a tenth of the hay is spoiled by rain, and "
    "what they cost at seven pounds a bale."
)


def test_one_engine_one_report(demo_model: Path, tmp_path: Path) -> None:
    engine = FakeEngine(str(demo_model), "Four.")
    model = ChatKVComm(model="fake", engine=engine, session="s")
    client = KVCommChatCompletionClient(model="fake", engine=engine, session="s", agent="critic")
    assert model.last_report is None and len(model.report()) == 0
    model.bind(kvcomm={"agent": "solver"}).invoke([("system", "Solve it."), ("user", QUESTION)])
    asyncio.run(client.create([UserMessage(content=QUESTION, source="user")]))
    for report in (model.report(), client.report()):
        assert [row["agent"] for row in report.rows()] == ["solver", "critic"]
    assert client.last_report is not None
    last = client.report().last
    assert last is not None and last.loaded == client.last_report.loaded > 0
    page = client.report().to_html(tmp_path / "report.html").read_text()
    assert "critic, request 2" in page and QUESTION not in page
    with model.live() as server:
        assert "2 finished" in httpx.get(server.url).text
