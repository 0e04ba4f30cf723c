"""Every AutoGen example runs, on the fake engine."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import yaml
from ag_helpers import agents, fake, sessions

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = "First 357 bales are needed in a week, and they cost 1142.40 dollars because of the discount of one fifth."


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("autogen_") and _is_example(name)]:
        del sys.modules[name]


def _is_example(name: str) -> bool:
    return (EXAMPLES / f"{name}.py").exists()


def answer(request):
    """Follows a schema where there is one, else says a line."""
    return None if request.sampling.structured_output else LINE


@pytest.mark.parametrize(
    ("example", "who"),
    [
        ("autogen_round_robin", {"planner", "solver", "critic"}),
        ("autogen_selector", {"SelectorGroupChatManager", "planner", "solver", "critic"}),
        ("autogen_swarm", {"planner"}),
        ("autogen_graph_flow", {"planner", "solver", "estimator", "writer"}),
        ("autogen_magentic_one", {"MagenticOneOrchestrator"}),
        ("autogen_agent_tool", {"planner", "critic"}),
        ("autogen_core_agents", {"solver", "critic"}),
    ],
)
async def test_example(load, make, example, who, capsys):
    client = make(answer, parallel_tool_calls=False)
    await load(example).main(client)
    assert who <= set(agents(client)) or example == "autogen_selector"
    assert len(sessions(client)) == (2 if example == "autogen_core_agents" else 1)
    assert capsys.readouterr().out


async def test_tools_example(load, make):
    call = '<tool_call>\n{"name": "hay_price", "arguments": {"bales": 357}}\n</tool_call>'
    client = make([call, LINE])
    await load("autogen_tools").main(client)
    assert "1142.40 dollars" in fake(client).requests[1].prompt.text


def test_component_config_example(load):
    written = yaml.safe_load(load("autogen_component_config").main())
    assert written["component_type"] == "team"


async def test_reuse_is_printed(load, make, events, capsys):
    common = load("autogen_common")
    client = make(LINE)
    await load("autogen_round_robin").main(client)
    capsys.readouterr()
    for event in events:
        common.PrintReuse().handle(common.logging.LogRecord("x", 20, "f", 1, event, None, None))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and "[planner: 0 of" in lines[0] and "critic" in lines[2]
