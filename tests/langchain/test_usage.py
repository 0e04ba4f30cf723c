"""What a message says of its cost: parts that add up, little enough to be kept, and nothing that did not happen."""

from __future__ import annotations

import json

from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from lc_helpers import details, fake

from kvcomm_integrations.wire import TREATMENTS

QUESTION = "Which river runs through Paris, and where does it reach the sea? Explain step by step, please. " * 3


def test_details_are_disjoint_parts_of_the_input(make):
    """Readers subtract each detail from ``input_tokens``: parts that are counted twice leave nothing, or less."""
    model = make("ok", session="s")
    model.bind(kvcomm={"agent": "one"}).invoke([("system", "You are brief."), ("user", QUESTION)])
    for _ in range(2):
        answer = model.bind(kvcomm={"agent": "two"}).invoke([("system", "You argue with care."), ("user", QUESTION)])
        usage = answer.usage_metadata
        assert list(usage["input_token_details"]) == ["cache_read"]
        assert 0 < usage["input_token_details"]["cache_read"] < usage["input_tokens"]
        counts = answer.response_metadata["kvcomm"]
        assert sum(counts[name] for name in TREATMENTS) == usage["input_tokens"]
        assert counts["exact"] + counts["carried"] + counts["loaded"] == usage["input_token_details"]["cache_read"]
        assert counts["agent"] == "two"


def test_a_message_says_as_much_of_a_long_prompt_as_of_a_short_one(make):
    """Messages are kept by checkpoints: what grows with the prompt makes a thread grow with the square of its turns."""
    model, sizes = make("The Seine reaches the sea at Le Havre. " * 4), []
    history = [HumanMessage(QUESTION)]
    for turn in range(12):
        answer = model.invoke(history)
        sizes.append(len(json.dumps(answer.response_metadata)))
        history += [answer, HumanMessage(f"{turn}: and then? {QUESTION}")]
    assert len(model.last_report.segments) > 12
    assert max(sizes) < 600 and sizes[-1] - sizes[0] < 60


def test_the_full_report_is_found_by_the_requests_number(make):
    model = make("ok")
    numbers = [model.invoke(text).response_metadata["kvcomm"]["request"] for text in ("one", "two")]
    records = {record.number: record for record in model.report().records}
    assert [records[number].prompt_tokens for number in numbers] == [
        len(request.prompt.token_ids) for request in fake(model).requests
    ]


async def test_an_answer_from_langchains_cache_tells_of_no_reuse(make):
    model = make("ok", cache=InMemoryCache())
    first = model.invoke(QUESTION)
    assert details(first)["computed"] > 0 and model.last_report is not None
    for again in (model.invoke(QUESTION), await model.ainvoke(QUESTION)):
        ours = again.response_metadata["kvcomm"]
        assert ours == {"segment_id": first.response_metadata["kvcomm"]["segment_id"], "cached": True}
        assert model.last_report is None
    assert len(fake(model).requests) == 1 and details(first)["computed"] > 0


def test_nothing_bound_does_not_disturb_langchains_cache(make):
    model = make("ok", cache=InMemoryCache())
    assert model.bind(kvcomm=None).invoke("q").content == model.invoke("q", kvcomm=None).content == "ok"
    assert len(fake(model).requests) == 1
    model.bind(kvcomm={"agent": "other", "session": "s"}).invoke("q")
    assert len(fake(model).requests) == 1
    model.bind(kvcomm={"tenant": "acme"}).invoke("q")
    assert len(fake(model).requests) == 2
