"""Errors are LangChain's own types as well as ours, so that middleware knows what to do about them."""

from __future__ import annotations

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware, SummarizationMiddleware
from langchain_core import exceptions as standard
from lc_helpers import fake

from kvcomm_integrations import errors

CASES = [
    (errors.EngineError("died"), standard.ModelAPIError, True),
    (errors.ServerUnreachableError("gone"), standard.ModelConnectionError, True),
    (errors.ServerTimeoutError("silent"), standard.ModelTimeoutError, True),
    (errors.ServerError("key", 401), standard.ModelAuthenticationError, False),
    (errors.ServerError("key", 403), standard.ModelPermissionDeniedError, False),
    (errors.ServerError("model", 404), standard.ModelNotFoundError, False),
    (errors.ServerError("refused", 400), standard.ModelInvalidRequestError, False),
    (errors.ServerError("busy", 429), standard.ModelRateLimitError, True),
    (errors.ServerError("boom", 503), standard.ModelAPIError, True),
    (errors.ServerError("another tokenizer"), standard.ModelInvalidRequestError, False),
    (errors.RequestRefusedError("refused"), standard.ModelInvalidRequestError, False),
    (errors.EngineClosedError("closed"), standard.ModelError, False),
    (errors.EngineForkedError("forked"), standard.ModelError, False),
    (errors.UnsupportedModelError("MLA"), standard.ModelError, False),
    (errors.ConfigurationError("value"), standard.ModelInvalidRequestError, False),
    (errors.MissingDependencyError("extra"), standard.ModelError, False),
]


@pytest.mark.parametrize(("raised", "kind", "again"), CASES, ids=lambda value: str(value))
async def test_every_error_has_both_types(make, raised, kind, again):
    model = make(raised, max_retries=0)
    for call in (lambda: model.invoke("q"), lambda: list(model.stream("q"))):
        with pytest.raises(kind) as caught:
            call()
    assert isinstance(caught.value, type(raised)) and str(caught.value) == str(raised)
    assert caught.value.is_retryable is again
    assert getattr(caught.value, "status", None) == getattr(raised, "status", None)
    with pytest.raises(kind):
        await model.ainvoke("q")
    with pytest.raises(kind):
        _ = [chunk async for chunk in model.astream("q")]


def test_a_prompt_that_does_not_fit(make):
    with pytest.raises(standard.ContextOverflowError, match="shorten the conversation") as caught:
        make("ok", engine={"max_model_len": 32}).invoke("too long " * 20)
    assert isinstance(caught.value, errors.ContextOverflowError) and isinstance(caught.value, ValueError)


def test_an_answer_that_takes_too_long(make):
    with pytest.raises(standard.ModelTimeoutError, match=r"timeout=0\.05") as caught:
        make("ok", engine={"latency": 5}, timeout=0.05).invoke("q")
    assert isinstance(caught.value, TimeoutError)


def test_a_bad_argument(make):
    with pytest.raises(standard.ModelInvalidRequestError) as caught:
        make("ok").invoke("q", temperature=-1)
    assert isinstance(caught.value, errors.ConfigurationError)


@pytest.mark.parametrize(
    ("raised", "tries"),
    [(errors.EngineError("died"), 3), (errors.RequestRefusedError("refused"), 1), (errors.ServerError("key", 401), 1)],
)
def test_middleware_tries_a_hopeless_request_once_and_a_dead_engine_again(make, raised, tries):
    model = make(raised, max_retries=0)
    again = ModelRetryMiddleware(max_retries=2, initial_delay=0, jitter=False, on_failure="error")
    with pytest.raises(type(raised)):
        create_agent(model, [], middleware=[again]).invoke({"messages": [("user", "q")]})
    assert len(fake(model).requests) == tries


def test_middleware_goes_on_where_even_the_summary_does_not_fit_at_first(make):
    model = make("A summary.", engine={"max_model_len": 5500})
    compact = SummarizationMiddleware(
        model, trigger=("messages", 3), keep=("messages", 1), trim_tokens_to_summarize=None
    )
    history = [("user", "what we said before " * 100), ("assistant", "and what I said " * 100), ("user", "q")]
    answer = create_agent(model, [], middleware=[compact]).invoke({"messages": history})["messages"]
    assert [message.type for message in answer] == ["human", "human", "ai"] and "A summary." in answer[0].text


def test_a_missing_standard_type_leaves_our_error_as_it_is(make, monkeypatch):
    monkeypatch.delattr(standard, "ModelAPIError")
    with pytest.raises(errors.EngineError) as caught:
        make(errors.EngineError("died"), max_retries=0).invoke("q")
    assert type(caught.value) is errors.EngineError
