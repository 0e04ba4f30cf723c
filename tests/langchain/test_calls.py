"""invoke, ainvoke, stream, astream, batch: text, usage, report, options, limits."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from lc_helpers import details, fake, who

from kvcomm_integrations.errors import ConfigurationError, ContextOverflowError, EngineClosedError, EngineError
from kvcomm_integrations.wire import TREATMENTS, Mode

ANSWER = "The Seine runs through Paris, past the Louvre and on to the sea at Le Havre."
ACCENTS = "Zoë säß im Café – 東京 🗼 für €5."


def total(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    result = chunks[0]
    for chunk in chunks[1:]:
        result += chunk
    return result


async def test_all_ways_of_calling_give_the_same_answer(make):
    model = make(ANSWER)
    results = [
        model.invoke("q"),
        await model.ainvoke("q"),
        total(list(model.stream("q"))),
        total([chunk async for chunk in model.astream("q")]),
        *model.batch(["q", "q"]),
        *await model.abatch(["q", "q"]),
        make(ANSWER, streaming=True).invoke("q"),
    ]
    assert {result.content for result in results} == {ANSWER}
    assert {result.usage_metadata["output_tokens"] for result in results} == {
        results[0].usage_metadata["output_tokens"]
    }
    for result in results:
        metadata = result.response_metadata
        assert metadata["finish_reason"] == "stop"
        assert metadata["model_name"] == "fake"
        assert metadata["model_provider"] == "kvcomm"
        assert metadata["kvcomm"]["segment_id"]
        usage = result.usage_metadata
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens"] == sum(metadata["kvcomm"][name] for name in TREATMENTS)


def test_streaming_comes_in_pieces_with_metadata_on_the_last_one_only(make):
    chunks = list(make(ANSWER).stream("q"))
    assert len([chunk for chunk in chunks if chunk.content]) > 5
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [bool(chunk.response_metadata.get("model_name")) for chunk in chunks].count(True) == 1
    assert chunks[-1].chunk_position == "last"


def test_characters_of_several_tokens_are_never_cut(make):
    for size in (1, 2, 3, 5):
        chunks = list(make(ACCENTS, engine={"delta_tokens": size}).stream("q"))
        assert "".join(chunk.text for chunk in chunks) == ACCENTS
        assert not any("\ufffd" in chunk.text for chunk in chunks)


def test_usage_counts_what_was_reused_and_survives_merging(make):
    model = make(ANSWER)
    model.invoke("q " * 50)
    again = model.invoke("q " * 50)
    assert details(again)["cache_read"] == details(again)["exact"] > 0
    streamed = total(list(model.stream("q " * 50)))
    assert details(streamed) == details(again)
    assert model.last_report.exact == details(again)["exact"]


def test_a_second_agent_loads_what_the_first_has_seen(make):
    model = make(ANSWER, session="s")
    question = "Which river runs through Paris, and where does it reach the sea? Explain step by step, please. " * 2
    one = model.bind(kvcomm={"agent": "one"}).invoke([SystemMessage("You are brief."), HumanMessage(question)])
    two = model.bind(kvcomm={"agent": "two"}).invoke(
        [SystemMessage("You are a geographer and argue with care."), HumanMessage(question), one]
    )
    assert details(one)["loaded"] == 0
    assert details(two)["loaded"] > 0
    assert details(two)["cache_read"] == details(two)["exact"] + details(two)["loaded"]
    names = {segment.name: segment for segment in model.last_report.segments}
    assert names["user_question"].source == "one"
    assert names["user_question"].loaded > 0
    json.dumps(two.response_metadata)


def test_response_is_a_named_segment_with_its_generated_ids(make):
    model = make(ANSWER, session="s")
    first = model.bind(kvcomm={"agent": "one"}).invoke("q")
    model.bind(kvcomm={"agent": "two"}).invoke([HumanMessage("q"), first.model_copy(update={"name": "one"})])
    request = fake(model).requests[-1]
    segment = next(s for s in request.prompt.segments if s.name == "agent:one:response")
    ids = request.prompt.token_ids[segment.start : segment.end]
    assert model.engine.tokenizer.decode(ids) == ANSWER
    assert request.params.response_name == "agent:two:response"


def test_an_early_closed_stream_registers_nothing_and_aborts(make):
    model = make(ANSWER, session="s")
    stream = model.stream("q")
    next(stream)
    stream.close()
    assert len(fake(model).aborted) == 1
    assert not [c for c in model.runtime.registry.contents("s") if c.name.startswith("agent:")]


async def test_an_early_closed_async_stream_registers_nothing_and_aborts(make):
    model = make(ANSWER, session="s")
    stream = model.astream("q")
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0)
    assert len(fake(model).aborted) == 1
    assert not [c for c in model.runtime.registry.contents("s") if c.name.startswith("agent:")]


async def test_cancelling_aborts(make):
    model = make(ANSWER, engine={"latency": 30})
    task = asyncio.create_task(model.ainvoke("q"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(fake(model).aborted) == 1


def test_sampling_fields_reach_the_engine_and_a_call_overrides_them(make):
    model = make("ok", temperature=0.5, max_tokens=7, top_p=0.9, top_k=5, seed=1, stop=["END"], min_p=0.1)
    model.invoke("q")
    model.invoke("q", temperature=0.0, seed=2, stop=["X"], max_tokens=3)
    one, two = (request.sampling for request in fake(model).requests)
    assert (one.temperature, one.max_tokens, one.top_p, one.top_k, one.seed, one.stop, one.min_p) == (
        0.5, 7, 0.9, 5, 1, ("END",), 0.1,
    )  # fmt: skip
    assert (two.temperature, two.seed, two.stop, two.max_tokens, two.top_p) == (0.0, 2, ("X",), 3, 0.9)


def test_stop_strings_end_the_answer_and_are_not_part_of_it(make):
    result = make("one two END three").invoke("q", stop=["END"])
    assert result.content == "one two "
    assert result.response_metadata["finish_reason"] == "stop"
    assert result.response_metadata["stop_reason"] == "END"


def test_max_tokens_gives_finish_reason_length(make):
    result = make(ANSWER, max_tokens=4).invoke("q")
    assert result.response_metadata["finish_reason"] == "length"
    assert result.usage_metadata["output_tokens"] == 4


def test_logprobs(make):
    result = make("abc", logprobs=True).invoke("q")
    content = result.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content if entry["token"] != "<|im_end|>").startswith("abc")
    assert content[0]["logprob"] < 0 and len(content[0]["top_logprobs"]) == 1
    assert "logprobs" not in make("abc").invoke("q").response_metadata
    assert fake(model := make("abc")).requests == [] and model.invoke("q", logprobs=True, top_logprobs=3)
    assert fake(model).requests[0].sampling.logprobs == 3


def test_context_overflow_names_tokens_and_limit(make):
    model = make("ok", engine={"max_model_len": 64})
    with pytest.raises(ContextOverflowError, match=r"prompt has \d+ tokens.*64"):
        model.invoke("word " * 200)
    assert fake(model).requests == []


@pytest.mark.parametrize("sync", [True, False])
async def test_timeout(make, sync):
    model = make(ANSWER, timeout=0.2, engine={"latency": 30})
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"timeout=0\.2"):
        await (asyncio.to_thread(model.invoke, "q") if sync else model.ainvoke("q"))
    assert time.monotonic() - start < 5
    assert len(fake(model).aborted) == 1


def test_a_timeout_that_is_not_reached_changes_nothing(make):
    assert make(ANSWER, timeout=30).invoke("q").content == ANSWER


@pytest.mark.parametrize("sync", [True, False])
async def test_engine_errors_before_the_first_token_are_retried(make, sync):
    model = make([EngineError("busy"), ANSWER])
    result = model.invoke("q") if sync else await model.ainvoke("q")
    assert result.content == ANSWER
    with pytest.raises(EngineError, match="busy"):
        make([EngineError("busy"), ANSWER], max_retries=0).invoke("q")


def test_a_closed_engine_is_not_retried(make):
    model = make(ANSWER)
    fake(model).close()
    with pytest.raises(EngineClosedError):
        model.invoke("q")


def test_unknown_keywords_are_refused(make):
    with pytest.raises(ConfigurationError, match="temprature"):
        make().invoke("q", temprature=1)
    with pytest.raises(ConfigurationError, match="agnet"):
        make().invoke("q", kvcomm={"agnet": "x"})
    with pytest.raises(ValueError, match="temprature"):
        make(temprature=1)
    with pytest.raises(ConfigurationError, match="other"):
        make().invoke("q", model="other")


def test_values_are_checked_before_the_engine_sees_them(make):
    model = make()
    with pytest.raises(ConfigurationError, match="temperature='hot'"):
        model.invoke("q", temperature="hot")
    with pytest.raises(ConfigurationError, match=r"kvcomm.agnet is unknown; known are agent, session, tenant"):
        model.invoke("q", kvcomm={"agnet": "x"})
    with pytest.raises(ConfigurationError, match="sometimes"):
        model.invoke("q", kvcomm={"mode": "sometimes"})
    with pytest.raises(ValueError, match="temperature"):
        make(temperature=-1)
    assert fake(model).requests == []


def test_none_takes_back_what_the_model_says_and_otherwise_means_not_given(make):
    model = make("ok", temperature=0.5)
    model.invoke("q", temperature=None, parallel_tool_calls=None, min_tokens=None, kvcomm=None)
    assert fake(model).requests[0].sampling.temperature is None
    assert fake(model).requests[0].sampling.min_tokens == 0


def test_mode_policy_and_tenant_reach_the_engine(make):
    model = make("ok", mode="observe", policy="kvcomm", tenant="a/b@c")
    model.invoke("q")
    model.invoke("q", kvcomm={"mode": "dense", "tenant": "other"})
    one, two = fake(model).requests
    assert (one.params.mode, one.params.policy, one.params.tenant) == (Mode.OBSERVE, "kvcomm", "a/b@c")
    assert one.cache_salt and len(one.cache_salt) <= 128 and not set(one.cache_salt) & set("@/\\\0")
    assert two.params.mode is Mode.DENSE and two.cache_salt not in (None, one.cache_salt)
    plain = make("ok")
    plain.invoke("q")
    assert fake(plain).requests[0].cache_salt is None


def test_tenants_share_nothing(make):
    model = make(ANSWER, session="s")
    question = [SystemMessage("brief"), HumanMessage("Which river runs through Paris and on to the sea? " * 4)]
    model.invoke(question, kvcomm={"tenant": "a", "agent": "x"})
    same = model.invoke([SystemMessage("long"), question[1]], kvcomm={"tenant": "a", "agent": "y"})
    other = model.invoke([SystemMessage("long"), question[1]], kvcomm={"tenant": "b", "agent": "y"})
    assert details(same)["loaded"] > 0
    assert details(other)["cache_read"] == 0


def test_rate_limiter_is_used(make):
    limiter = InMemoryRateLimiter(requests_per_second=20, check_every_n_seconds=0.01, max_bucket_size=1)
    model = make("ok", rate_limiter=limiter)
    start = time.monotonic()
    for _ in range(3):
        model.invoke("q")
    assert time.monotonic() - start > 0.08


def test_chat_template_kwargs_reach_the_template(make_tools):
    model = make_tools("ok", chat_template_kwargs={"enable_thinking": True})
    model.invoke("q")
    model.invoke("q", chat_template_kwargs={"enable_thinking": False})
    one, two = (request.prompt.text for request in fake(model).requests)
    assert one.endswith("<think>\n") and not two.endswith("<think>\n")


def test_outside_a_graph_identity_comes_from_the_config_or_is_default(make):
    model = make("ok")
    model.invoke("q")
    model.invoke("q", config={"configurable": {"thread_id": "t"}})
    model.invoke("q", config={"configurable": {"kvcomm_session": "s", "kvcomm_agent": "a"}})
    model.bind(kvcomm={"agent": "b", "session": "u"}).invoke("q", config={"configurable": {"thread_id": "t"}})
    list(model.stream("q", config={"configurable": {"thread_id": "t"}}))
    assert who(model) == [
        ("default", "default"), ("default", "thread:t"), ("a", "s"), ("b", "u"), ("default", "thread:t"),
    ]  # fmt: skip


def test_messages_can_be_anything_langchain_takes(make):
    model = make("ok")
    for given in ("hi", [("system", "s"), ("human", "hi")], [{"role": "user", "content": "hi"}], [AIMessage("a")]):
        assert model.invoke(given).content == "ok"
    with pytest.raises(ConfigurationError, match="at least one message"):
        model.invoke([])
