"""LangChain's public integration suite on the real engine, for all that a model of 135 million parameters can do."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.langchain import ChatKVComm

pytestmark = [pytest.mark.engine, pytest.mark.served]


class TestOnTheRealEngine(ChatModelIntegrationTests):
    _engine: ClassVar[InProcessEngine]

    @pytest.fixture(autouse=True)
    def _use_engine(self, engine: InProcessEngine) -> None:
        type(self)._engine = engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVComm

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self._engine.config.model, "engine": self._engine, "temperature": 0, "max_tokens": 48}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return False

    @property
    def supports_image_inputs(self) -> bool:
        return False

    @property
    def has_tool_calling(self) -> bool:
        """The suite expects tools to be chosen well; that is tried on the fake engine, a forced call below."""
        return False

    @property
    def has_structured_output(self) -> bool:
        """The suite's schemas are tried on the fake engine, a schema that the model cannot leave below."""
        return False

    def test_structured(self, engine: InProcessEngine) -> None:
        """What the suite would ask for, with a schema that cannot be left: the answer parses."""
        from pydantic import BaseModel

        class Choice(BaseModel):
            yes: bool

        model = ChatKVComm(model=engine.config.model, engine=engine, temperature=0, max_tokens=32)
        answer = model.with_structured_output(Choice, method="json_schema").invoke("Is the sky blue? Answer as JSON.")
        assert isinstance(answer, Choice)

    def test_forced_tool_call(self, engine: InProcessEngine) -> None:
        def switch(on: bool) -> str:
            """Switch the light on or off."""
            return str(on)

        model = ChatKVComm(model=engine.config.model, engine=engine, temperature=0, max_tokens=64)
        answer = model.bind_tools([switch], tool_choice="switch").invoke("Please switch the light on.")
        assert [call["name"] for call in answer.tool_calls] == ["switch"]
        assert isinstance(answer.tool_calls[0]["args"]["on"], bool)
