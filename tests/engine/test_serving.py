"""A server started by hand with our connector and middleware: plain clients, tenants, contents found by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langgraph.graph import START, MessagesState, StateGraph

from kvcomm_integrations.bench.roles import ROLES
from kvcomm_integrations.config import ReuseConfig, Tokenization
from kvcomm_integrations.langchain import ChatKVComm
from kvcomm_integrations.serve.supervisor import healthy
from kvcomm_integrations.wire import WIRE_KEY, Mode
from tests.engine.helpers import END, QUESTIONS, Answer, Client, system
from tests.engine.served import START_S, ServedEngine, connect, environment, free_port

pytestmark = pytest.mark.engine

KEYS = {"key-a": "alice", "key-b": "bob"}
SITE = "https://app.example"
REUSE = ReuseConfig(only_if_faster=False, policy="aligned", idle_budget=0, min_segment_tokens=1, discover_min_tokens=24)


@pytest.fixture(scope="module")
def url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own server, our connector and middleware by its own options, and no worker extension."""
    folder = tmp_path_factory.mktemp("by-hand")
    (folder / "keys.json").write_text(json.dumps(KEYS))
    port = free_port()
    transfer = {
        "kv_connector": "KVCommConnector",
        "kv_connector_module_path": "kvcomm_integrations.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": REUSE.model_dump(mode="json"),
    }
    options = {
        "model": str(tiny_model), "served-model-name": "tiny", "host": "127.0.0.1", "port": str(port),
        "dtype": "float32", "max-model-len": "2048", "kv-cache-memory-bytes": str(256 << 20),
        "kv-transfer-config": json.dumps(transfer),
        "middleware": "kvcomm_integrations.serve.middleware.KVCommMiddleware", "allowed-origins": f'["{SITE}"]',
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    with (folder / "log").open("w") as log:
        given = environment(KVCOMM_TENANT_KEYS=str(folder / "keys.json"), VLLM_ENABLE_RESPONSES_API_STORE="1")
        process = subprocess.Popen(command, env=given, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_S
            while not healthy(f"http://127.0.0.1:{port}"):
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.3)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def engines(url: str) -> Iterator[dict[str, ServedEngine]]:
    """One client per key. They know the model by its served name, and get the tokenizer from the server."""
    made = {key: connect("tiny", url, api_key=key) for key in KEYS}
    yield made
    for engine in made.values():
        engine.close()


def _ask(engine: ServedEngine, agent: str, question: str, **options: Any) -> Answer:
    client = Client(engine)
    prompt = client.prompt(system(agent), ("user_question", client.encode(question)), END)
    return client.ask(prompt, agent=agent, tokens=4, **options)


def test_the_tokenizer_comes_from_the_server(engines: dict[str, ServedEngine], tiny_model: Path) -> None:
    from kvcomm_integrations.prompts.tokenizer import ChatTokenizer

    assert engines["key-a"].tokenizer.fingerprint == ChatTokenizer.from_pretrained(tiny_model).fingerprint


def test_the_repair_pass_needs_no_worker_extension(engines: dict[str, ServedEngine]) -> None:
    question = QUESTIONS[0] + QUESTIONS[1]
    assert _ask(engines["key-a"], "planner", question, session="repair").report.loaded == 0
    report = _ask(engines["key-a"], "solver", question, session="repair").report
    assert report.loaded > 0
    assert report.repaired > 0


def test_a_tenant_is_who_the_key_says_not_who_the_body_says(engines: dict[str, ServedEngine]) -> None:
    """Same tenant hits and other tenants miss, told by the server's counts rather than by time."""
    question = QUESTIONS[1] + QUESTIONS[2]
    alice, bob = engines["key-a"], engines["key-b"]
    _ask(alice, "planner", question, session="s")
    same = _ask(alice, "solver", question, session="s").report
    assert same.loaded > 0
    for tenant in ("default", "alice"):
        intruder = _ask(bob, "critic", question, session="s", tenant=tenant).report
        assert (intruder.exact, intruder.loaded) == (0, 0)
    divided = _ask(alice, "critic", question, session="s", tenant="user-7").report
    assert (divided.exact, divided.loaded) == (0, 0)


def test_the_exact_cache_keeps_tenants_apart_for_plain_clients_too(url: str) -> None:
    def cached(key: str) -> int:
        body = {"model": "tiny", "prompt": "count " * 300, "max_tokens": 1}
        answer = httpx.post(f"{url}/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        report = answer.json()["kv_transfer_params"][WIRE_KEY]
        return int(report["exact"])

    assert cached("key-a") == 0
    assert cached("key-a") > 0
    assert cached("key-b") == 0


def test_contents_of_plain_clients_are_found_in_their_tokens(url: str) -> None:
    """Chat requests of a client that knows nothing of us: the second agent's prompt holds the first one's question."""

    def ask(role: str, key: str = "key-a") -> dict[str, Any]:
        messages = [{"role": "system", "content": role}, {"role": "user", "content": " ".join(QUESTIONS)}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60).json()
        found: dict[str, Any] = answer["kv_transfer_params"][WIRE_KEY]
        return found

    roles = list(ROLES.values())
    assert ask(roles[0])["loaded"] == 0
    assert ask(roles[1])["loaded"] > 100
    assert ask(roles[2], "key-b")["loaded"] == 0


@pytest.fixture
def keyed(url: str) -> Iterator[dict[str, httpx.Client]]:
    """One plain client per key, as a browser on another site has it. ``admin`` is the operator's."""
    keys = {**dict(zip(KEYS, KEYS, strict=True)), "admin": os.environ["KVCOMM_ADMIN_KEY"]}
    made = {
        name: httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}", "Origin": SITE}, timeout=60)
        for name, key in keys.items()
    }
    yield made
    for client in made.values():
        client.close()


def test_stored_responses_are_their_tenants(keyed: dict[str, httpx.Client]) -> None:
    alice, bob = keyed["key-a"], keyed["key-b"]

    def create(client: httpx.Client, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "input": "Name a colour.", "max_output_tokens": 4, "temperature": 0, **fields}
        return client.post("/responses", json=body)

    plain, chosen = create(alice), create(alice, request_id="mine")
    of_bob = create(bob, request_id="mine", input="Name a river.")
    assert [answer.status_code for answer in (plain, chosen, of_bob)] == [200] * 3
    for name, made in ((plain.json()["id"], plain), (chosen.json()["id"], chosen), ("mine", chosen)):
        assert alice.get(f"/responses/{name}").json()["output"] == made.json()["output"]
        assert create(alice, previous_response_id=name).status_code == 200
    assert bob.get("/responses/mine").json()["id"] == of_bob.json()["id"]
    for name in (plain.json()["id"], chosen.json()["id"], "nobody's"):
        assert bob.get(f"/responses/{name}").status_code == 404
        assert bob.get(f"/responses/{name}", params={"stream": True, "starting_after": 0}).status_code == 404
        assert bob.post(f"/responses/{name}/cancel").status_code == 404
        assert create(bob, previous_response_id=name).status_code == 404


def test_a_response_in_the_background_is_its_tenants(keyed: dict[str, httpx.Client]) -> None:
    alice, bob = keyed["key-a"], keyed["key-b"]
    body = {"model": "tiny", "input": "Count.", "max_output_tokens": 512, "background": True, "request_id": "long"}
    made = alice.post("/responses", json=body).json()
    assert made["status"] == "queued"
    assert bob.post(f"/responses/{made['id']}/cancel").status_code == 404
    assert alice.get("/responses/long").json()["status"] == "queued"
    assert alice.post("/responses/long/cancel").json()["status"] == "cancelled"


def test_the_operator_manages_and_tenants_do_not(keyed: dict[str, httpx.Client], url: str) -> None:
    root = url.removesuffix("/v1")
    for client in keyed.values():
        status = 200 if client is keyed["admin"] else 403
        assert client.post(f"{root}/reset_prefix_cache").status_code == status
        assert client.get(f"{root}/metrics").status_code == status
        assert client.get(f"{root}/is_sleeping").status_code == status
        assert client.get("/models").status_code == 200


def test_refusals_have_vllms_cors_headers(keyed: dict[str, httpx.Client], url: str) -> None:
    alice = keyed["key-a"]
    refused = alice.post("/completions", content=b"{"), alice.post("/newer"), alice.get("/kvcomm"), alice.get("/models")
    assert [answer.status_code for answer in refused] == [400, 403, 200, 200]
    stranger = httpx.get(f"{url}/models", headers={"Origin": SITE})
    assert stranger.status_code == 401
    for answer in (*refused, stranger):
        assert answer.headers["access-control-allow-origin"] == SITE
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = alice.options("/kvcomm", headers=preflight)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, SITE)


def _graph(model: BaseChatModel) -> list[BaseMessage]:
    def agent(role: str) -> Any:
        return lambda state: {"messages": [model.invoke([("system", role), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    names = list(ROLES)[:3]
    for before, name in zip([START, *names], names, strict=False):
        graph.add_node(name, agent(ROLES[name]))
        graph.add_edge(before, name)
    state = graph.compile().invoke({"messages": [("user", QUESTIONS[0])]})
    return list(state["messages"])


def test_in_dense_mode_a_graph_gets_what_the_openai_client_gets(served_engine: ServedEngine) -> None:
    """Invariant 1 through the frameworks: same server, greedy, message by message, token count by token count."""
    openai = pytest.importorskip("langchain_openai")
    fields: dict[str, Any] = {"model": served_engine.config.model, "base_url": served_engine.config.base_url}
    fields |= {"temperature": 0, "max_tokens": 24}
    theirs = openai.ChatOpenAI(**fields, api_key="none", extra_body={"cache_salt": "plain"})
    mine = ChatKVComm(**fields, mode=Mode.DENSE, tokenization=Tokenization.CANONICAL)
    ours, plain = _graph(mine), _graph(theirs)
    assert [m.type for m in ours] == [m.type for m in plain] == ["human", "ai", "ai", "ai"]
    for a, b in zip(ours[1:], plain[1:], strict=True):
        assert isinstance(a, AIMessage)
        assert isinstance(b, AIMessage)
        assert a.text == b.text
        assert a.response_metadata["finish_reason"] == b.response_metadata["finish_reason"]
        assert a.usage_metadata is not None
        assert b.usage_metadata is not None
        assert a.usage_metadata["input_tokens"] == b.usage_metadata["input_tokens"]
        assert a.usage_metadata["output_tokens"] == b.usage_metadata["output_tokens"]
