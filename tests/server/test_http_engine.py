"""The HTTP engine against a stub server: what it sends, what it makes of answers, and what it says when things fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.http.engine import HttpEngine, session_key
from kvcomm_integrations.engines.interface import Delta, GenerationRequest, SamplingOptions
from kvcomm_integrations.engines.registry import get_engine
from kvcomm_integrations.errors import (
    ConfigurationError,
    ContextOverflowError,
    EngineClosedError,
    EngineError,
    KVCommError,
    ServerError,
)
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.wire import SESSION_HEADER, WIRE_KEY, WIRE_VERSION, Segment, SegmentKind
from tests.server.stub import MODEL, Stub, well

Connect = Callable[..., HttpEngine]


def request(tokens: int = 12, **sampling: Any) -> GenerationRequest:
    segment = Segment(kind=SegmentKind.PLACEHOLDER, name="user_question", start=2, end=10)
    prompt = SegmentedPrompt(tuple(range(100, 100 + tokens)), (segment,) if tokens >= 10 else ())
    params = prompt.params(agent="solver", session="s1", response_name="agent:solver:response")
    return GenerationRequest(prompt, params, SamplingOptions(**sampling))


def run(engine: HttpEngine, **sampling: Any) -> list[Delta]:
    return list(engine.generate_sync(request(**sampling)))


# ---- what is sent and received ---------------------------------------------------------------------------------------


def test_an_answer_streams_and_ends_with_usage_and_report(connect: Connect, stub: Stub) -> None:
    deltas = run(connect())
    assert "".join(d.text for d in deltas) == stub.answer
    assert [t for d in deltas for t in d.token_ids] == stub.tokenizer.encode(stub.answer, allow_special=False)
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1]
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("stop", 12, len(deltas))
    assert last.report is not None
    assert (last.report.exact, last.report.loaded, last.cached_tokens) == (1, 2, 6)
    assert last.ttft_ms is not None


async def test_async_streams_give_the_same(connect: Connect) -> None:
    engine = connect()
    deltas = [delta async for delta in engine.generate(request())]
    assert [d.text for d in deltas] == [d.text for d in await asyncio.to_thread(run, engine)]


def test_what_is_sent(connect: Connect, stub: Stub) -> None:
    sampling = {
        "max_tokens": 3, "temperature": 0.5, "top_k": 4, "seed": 7, "stop": ("x",), "stop_token_ids": (9,),
        "logit_bias": {5: 1.5}, "structured_output": {"json": {"type": "object"}}, "min_tokens": 1,
    }  # fmt: skip
    run(connect(), **sampling)
    [seen] = stub.completions()
    body = seen.body
    assert body["prompt"] == list(range(100, 112))
    assert body["model"] == MODEL
    assert body["stop"] == ["x"]
    assert body["logit_bias"] == {"5": 1.5}
    assert body["structured_outputs"] == {"json": {"type": "object"}}
    assert {k: body[k] for k in ("max_tokens", "temperature", "top_k", "seed", "stop_token_ids", "min_tokens")} == {
        "max_tokens": 3, "temperature": 0.5, "top_k": 4, "seed": 7, "stop_token_ids": [9], "min_tokens": 1,
    }  # fmt: skip
    assert "top_p" not in body
    params = body["kv_transfer_params"][WIRE_KEY]
    assert (params["agent"], params["session"], params["response_name"]) == ("solver", "s1", "agent:solver:response")
    assert params["segments"] == [{"kind": "placeholder", "name": "user_question", "start": 2, "end": 10}]
    assert seen.headers[SESSION_HEADER.lower()] == session_key("default", "s1")


@pytest.mark.parametrize("salt", ["a/b::c@d", "x" * 2000, "é", "\0"])
def test_any_salt_reaches_the_server_in_a_form_it_takes(connect: Connect, stub: Stub, salt: str) -> None:
    engine = connect()
    for own in (salt, salt + "!"):
        list(engine.generate_sync(replace(request(), cache_salt=own)))
    one, other = (seen.body["cache_salt"] for seen in stub.completions())
    assert one != other
    assert len(one) <= 128
    assert one.isalnum()


def test_the_longest_answer_fits_into_the_context(connect: Connect, stub: Stub) -> None:
    run(connect())
    assert stub.completions()[0].body["max_tokens"] == 500


def test_log_probabilities_come_with_ids_and_texts(connect: Connect, stub: Stub) -> None:
    deltas = run(connect(), logprobs=1)
    assert stub.completions()[0].body["return_tokens_as_token_ids"] is True
    for delta in deltas:
        [entry] = delta.logprobs
        assert (entry.token_id, entry.logprob) == (delta.token_ids[0], -0.5)
        assert entry.token == delta.text
        assert [top[2] for top in entry.top] == [-0.2, -0.5]


def test_sessions_of_two_tenants_have_different_keys() -> None:
    assert session_key("a", "bc") != session_key("ab", "c")
    assert session_key("é", "x" * 500).isascii()


# ---- handshake -------------------------------------------------------------------------------------------------------


def test_nothing_is_sent_before_first_use(connect: Connect, stub: Stub) -> None:
    connect()
    assert stub.seen == []


def test_the_handshake_takes_place_once(connect: Connect, stub: Stub) -> None:
    engine = connect()
    run(engine)
    run(engine)
    assert [s.path for s in stub.seen].count("/v1/models") == 1


@pytest.mark.parametrize("end", ["/v1", "/v1/", "", "/"])
def test_the_address_may_end_in_v1_or_not(connect: Connect, stub: Stub, end: str) -> None:
    assert connect(base_url=stub.url.removesuffix("/v1") + end).max_model_len == 512


def test_a_model_may_be_named_by_its_folder(connect: Connect) -> None:
    assert connect(model="/m/").server.model == MODEL


def test_another_model_is_refused_by_name(connect: Connect) -> None:
    with pytest.raises(ServerError, match=r"serves 'served', not 'other'"):
        run(connect(model="other"))


def test_another_wire_version_is_refused_with_both(connect: Connect, stub: Stub) -> None:
    assert stub.info is not None
    stub.info |= {"wire": WIRE_VERSION + 1, "version": "9.9"}
    with pytest.raises(ServerError, match=rf"9\.9 \(wire version {WIRE_VERSION + 1}\).*wire version {WIRE_VERSION}\)"):
        run(connect())


def test_another_tokenizer_is_refused(connect: Connect, stub: Stub) -> None:
    class Other:
        def encode(self, text: str, *, allow_special: bool) -> list[int]:
            return [1, 2, 3]

    stub.tokenizer = Other()  # type: ignore[assignment]
    with pytest.raises(ServerError, match=r"tokenizer of the server .* gives \[1, 2, 3\] where this client gives \["):
        run(connect())


def test_a_longer_context_than_the_servers_is_refused(connect: Connect) -> None:
    with pytest.raises(ConfigurationError, match=r"max_model_len=600 is more than the 512"):
        run(connect(max_model_len=600))
    assert connect(max_model_len=100).max_model_len == 100


def test_a_prompt_that_does_not_fit_is_not_sent(connect: Connect, stub: Stub) -> None:
    with pytest.raises(ContextOverflowError, match="600 tokens"):
        list(connect().generate_sync(request(600)))
    assert stub.completions() == []


def test_a_server_without_our_connector_is_used_and_named_once(
    connect: Connect, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.info = None
    engine = connect()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert run(engine)[-1].report is None
    assert [r.message for r in caplog.records if "without the kvcomm connector" in r.message] == [caplog.messages[0]]
    assert "kv_transfer_params" not in stub.completions()[0].body


def test_our_connector_without_our_middleware_is_noticed(
    connect: Connect, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM started by hand, with the connector only: prompts are reused, streams bring no report."""
    stub.info, stub.connector = None, True
    engine = connect()
    with caplog.at_level(logging.WARNING):
        assert run(engine)[-1].report is None
    assert "sends no reports with streamed answers" in caplog.text
    assert WIRE_KEY in stub.completions()[0].body["kv_transfer_params"]


def test_a_failed_handshake_is_tried_again(connect: Connect, stub: Stub) -> None:
    engine = connect()
    models, stub.models = stub.models, []
    with pytest.raises(ServerError, match="serves nothing"):
        run(engine)
    stub.models = models
    assert run(engine)[-1].finish_reason == "stop"


# ---- what can go wrong -----------------------------------------------------------------------------------------------


def test_no_server_there(connect: Connect) -> None:
    with pytest.raises(ServerError, match=r"no answer from http://127.0.0.1:9/v1/models after 3 tries.*kvcomm serve"):
        run(connect(base_url="http://127.0.0.1:9/v1"))


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://x/v1", "http://", "nonsense"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigurationError, match="http://host:8000/v1"):
        get_engine(EngineConfig(model="m", base_url=address))


def test_a_wrong_path(connect: Connect, stub: Stub) -> None:
    with pytest.raises(ServerError, match=r"404 .*base_url should be the address"):
        run(connect(base_url=stub.url + "/api/v1"))


def test_keys(connect: Connect, stub: Stub) -> None:
    stub.key = "right"
    with pytest.raises(ServerError, match="refuses the API key"):
        run(connect())
    with pytest.raises(ServerError, match="401") as caught:
        run(connect(api_key="wrong-key"))
    assert "wrong-key" not in str(caught.value)
    assert run(connect(api_key="right"))[-1].finish_reason == "stop"


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    connect: Connect, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.key = "from-the-environment"
    monkeypatch.setenv("KVCOMM_API_KEY", stub.key)
    engine = connect()
    assert run(engine)[-1].finish_reason == "stop"
    assert stub.key not in repr(engine.config) + engine.config.key()


def test_engines_with_different_keys_are_not_shared() -> None:
    make = lambda key: EngineConfig(model="m", base_url="http://x/v1", api_key=key)  # noqa: E731
    assert make("a").key() == make("a").key() != make("b").key()


@pytest.mark.parametrize(
    ("status", "error", "pattern"),
    [
        (400, {"error": {"message": "top_p must be in (0, 1]"}}, r"status 400: top_p must be"),
        (404, {"error": {"message": "The model does not exist"}}, r"404 \(The model does not exist\)"),
        (500, "boom", r"failed with status 500 \(boom\)"),
        (503, {"error": "loading"}, r"failed with status 503 \(loading\)"),
    ],
)
def test_bad_statuses_are_told_and_not_tried_again(
    connect: Connect, stub: Stub, status: int, error: Any, pattern: str
) -> None:
    engine = connect()
    run(engine)
    stub.status, stub.error = status, error
    with pytest.raises(ServerError, match=pattern) as caught:
        run(engine)
    assert len(stub.completions()) == 2
    assert not caught.value.worth_retrying


def test_connections_that_break_before_an_answer_are_made_again(connect: Connect, stub: Stub) -> None:
    stub.reset_first = 2
    assert run(connect())[-1].finish_reason == "stop"
    stub.reset_first = 1
    with pytest.raises(ServerError, match="after 1 tries"):
        run(connect(http={"retries": 0}))


def _dies(stub: Stub, body: dict[str, Any]) -> Iterator[str]:
    events = list(well(stub, body))
    yield events[0]
    yield events[1]
    yield ""


def test_a_server_that_dies_in_the_middle(connect: Connect, stub: Stub) -> None:
    stub.events = _dies
    received: list[Delta] = []
    with pytest.raises(ServerError, match="broke off in the middle"):
        received.extend(connect().generate_sync(request()))
    assert len(stub.completions()) == 1


def test_a_server_that_dies_does_not_swallow_what_has_come(connect: Connect, stub: Stub) -> None:
    stub.events = _dies
    stream = connect().generate_sync(request())
    assert next(stream).text
    assert next(stream).text
    with pytest.raises(ServerError):
        next(stream)


@pytest.mark.parametrize(
    ("events", "pattern"),
    [
        (["[DONE]"], "without finishing"),
        ([json.dumps({"choices": [{"text": "", "finish_reason": "abort"}]}), "[DONE]"], "without finishing"),
        ([json.dumps({"error": {"message": "engine is dead", "code": 500}}), "[DONE]"], "engine is dead"),
        (["{"], "not JSON"),
    ],
)
def test_streams_that_end_badly(connect: Connect, stub: Stub, events: list[str], pattern: str) -> None:
    stub.events = lambda stub, body: iter(events)
    with pytest.raises(EngineError, match=pattern):
        run(connect())


def test_a_silent_server_is_given_up(connect: Connect, stub: Stub) -> None:
    engine = connect(http={"read_timeout": 0.2})
    engine.server  # noqa: B018
    stub.pause = 1.0
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"read_timeout=0.2"):
        run(engine)
    assert time.monotonic() - started < 5


def test_leaving_a_stream_closes_its_connection(connect: Connect, stub: Stub) -> None:
    stub.pause, stub.answer = 0.02, "word " * 100
    stream = connect().generate_sync(request())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert stub.left.wait(10)


async def test_cancelling_a_task_closes_its_connection(connect: Connect, stub: Stub) -> None:
    stub.pause, stub.answer = 0.02, "word " * 100
    engine = connect()
    await asyncio.to_thread(lambda: engine.server)

    async def read() -> None:
        async for _ in engine.generate(request()):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.5)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(stub.left.wait, 10)


def test_a_closed_engine_says_so(connect: Connect) -> None:
    engine = connect()
    run(engine)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError, match="make a new chat model"):
        run(engine)


def test_many_requests_share_a_pool(connect: Connect, stub: Stub) -> None:
    engine = connect()

    async def many() -> list[str]:
        async def one() -> str:
            return "".join([d.text async for d in engine.generate(request())])

        return await asyncio.gather(*(one() for _ in range(24)))

    assert set(asyncio.run(many())) == {stub.answer}


def test_a_certificate_file_that_is_none(connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("no certificate")
    with pytest.raises(KVCommError, match=r"ca_file .*ca\.pem"):
        run(connect(http={"ca_file": str(path)}))


def test_the_tokenizer_of_a_folder_is_read_here(stub: Stub, tiny_model: Path) -> None:
    engine = HttpEngine(EngineConfig(model=MODEL, base_url=stub.url, tokenizer=str(tiny_model)))
    assert engine.tokenizer.source == str(tiny_model)
    assert run(engine)[-1].finish_reason == "stop"
    engine.close()


# ---- in LangChain's own words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "bad", "kind"),
    [
        ({}, {"key": "k"}, "ModelAuthenticationError"),
        ({"model": "other"}, {}, "ModelNotFoundError"),
        ({}, {"status": 400}, "ModelInvalidRequestError"),
        ({}, {"status": 503}, "ModelAPIError"),
        ({"http": {"retries": 0}}, {"reset_first": 1}, "ModelConnectionError"),
        ({"http": {"read_timeout": 0.2}}, {"pause": 2.0}, "ModelTimeoutError"),
        (
            {},
            {"events": lambda stub, body: iter(['{"error": {"message": "engine dead", "code": 500}}'])},
            "ModelAPIError",
        ),
        ({}, {"events": lambda stub, body: iter([])}, "ModelAPIError"),
    ],
)
def test_a_chat_model_raises_langchains_types(
    connect: Connect, stub: Stub, fields: dict[str, Any], bad: dict[str, Any], kind: str
) -> None:
    from langchain_core import exceptions

    from kvcomm_integrations.langchain import ChatKVComm

    for name, value in bad.items():
        setattr(stub, name, value)
    model = ChatKVComm(model=fields.get("model", MODEL), engine=connect(**fields))
    with pytest.raises(getattr(exceptions, kind)) as caught:
        model.invoke("q")
    assert isinstance(caught.value, ServerError)


def test_the_profile_has_the_servers_context_length(stub: Stub, tmp_path: Path) -> None:
    """The server's number wins over that of files on this machine; nothing is sent before somebody asks."""
    from langchain.agents.middleware import SummarizationMiddleware

    from kvcomm_integrations.langchain import ChatKVComm

    (tmp_path / "config.json").write_text('{"max_position_embeddings": 131072}')
    stub.models = [{"id": "served", "root": str(tmp_path), "max_model_len": 640}]
    model = ChatKVComm(model=str(tmp_path), base_url=stub.url, max_tokens=100)
    assert stub.seen == []
    assert model.profile["max_input_tokens"] == 640 and model.profile["max_output_tokens"] == 100
    assert [seen.path for seen in stub.seen] == ["/v1/models"]
    SummarizationMiddleware(model, trigger=("fraction", 0.5))
    less = ChatKVComm(model=str(tmp_path), base_url=stub.url, max_model_len=320)
    assert less.profile["max_input_tokens"] == 320


async def test_the_profile_of_a_served_model_on_a_loop_comes_behind_the_scenes(stub: Stub) -> None:
    from kvcomm_integrations.langchain import ChatKVComm

    model = ChatKVComm(model=MODEL, base_url=stub.url)
    assert model.profile.get("max_input_tokens") is None
    async with asyncio.timeout(10):
        while "max_input_tokens" not in model.profile:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
    assert model.profile["max_input_tokens"] == 512


def test_the_profile_of_a_server_that_is_not_there(tmp_path: Path) -> None:
    from kvcomm_integrations.langchain import ChatKVComm

    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    model = ChatKVComm(model=str(tmp_path), base_url="http://127.0.0.1:9", http={"retries": 0})
    assert model.profile["max_input_tokens"] == 2048
