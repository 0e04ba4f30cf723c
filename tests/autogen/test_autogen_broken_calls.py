"""What a model writes in place of a call: AutoGen's agents never see a call without a name."""

from __future__ import annotations

import pytest
from autogen_core.models import UserMessage

TOOL = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("payload", ['{"name": null, "arguments": {}}', '{"arguments": {}}', "nonsense", ""])
async def test_a_call_without_a_name_becomes_text(make, payload):
    client = make(f"<tool_call>\n{payload}\n</tool_call>")
    result = await client.create([UserMessage(content="q", source="user")], tools=[TOOL])
    assert isinstance(result.content, str)
    assert "A function without a name was not called" in result.content and "<tool_call>" not in result.content
    assert result.finish_reason == "stop"
